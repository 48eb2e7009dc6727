"""A recipe's tables with everything written in that follows from where a table stands, before they are validated.

Which stacks there are, what a layer sees, what cross-attention and a shared expert take over. Nothing is judged here
but words that no field could judge.
"""

from collections.abc import Iterator, Mapping
from math import sqrt
from typing import Any, TypeGuard, get_args

from anyformer.spec.hints import misplaced
from anyformer.spec.part import MAX_WIDTH
from anyformer.spec.problems import Problem, did_you_mean, look_up, unknown_word
from anyformer.spec.recipe import STACK_KEYS, Architecture
from anyformer.spec.words import FEED_FORWARDS, FFN_WORDS, default_mask, laid, laid_on, merged, tables_of

_STACKS = ("encoder", "decoder")
_TAKEN_OVER = {
    "grouped": (
        "n_heads", "n_kv_heads", "d_head", "d_value", "scale", "qk_norm", "clip",
        "qkv_bias", "out_bias", "dropout", "out_dropout",
    ),
    "latent": ("out_bias", "dropout", "out_dropout"),
}  # fmt: skip


def contradicted_words(recipe: Mapping[str, Any]) -> Iterator[Problem]:
    """What is wrong with a word such as swiglu beside another activation, in a recipe as it was written."""
    for place, table in tables_of(recipe):
        for path in FEED_FORWARDS:
            ffn = look_up(table, path)
            word, given = (ffn.get("kind"), ffn.get("activation")) if isinstance(ffn, dict) else (None, None)
            own = FFN_WORDS[word]["activation"] if isinstance(word, str) and word in FFN_WORDS else None
            if own is not None and given is not None and given != own:
                remedy = 'leaving it out, or kind = "gated", would do'
                yield Problem(".".join((*place, *path, "activation")), f'kind = "{word}" means {own}', given, remedy)


def stack_tables(raw: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], list[Problem]]:
    """Each stack's table as if it stood alone, root keys of the whole model in each, and what is wrong with the split.

    Args:
        raw: a recipe whose words are written out.
    """
    architecture = raw.get("architecture", "decoder")
    root = {key: value for key, value in raw.items() if key not in _STACKS}
    if architecture != "encoder-decoder":
        side = architecture if architecture in _STACKS else "decoder"
        remedy = 'architecture = "encoder-decoder", or its keys at the root, would do'
        why = f'is a table of an encoder-decoder, and architecture = "{side}"'
        known = architecture in get_args(Architecture)
        return {side: root}, [Problem(name, why, remedy=remedy) for name in _STACKS if name in raw and known]
    problems: list[Problem] = []
    tables: dict[str, dict[str, Any]] = {}
    for name in _STACKS:
        own = raw.get(name, {})
        if not isinstance(own, dict):
            problems.append(Problem(name, "should be a table", own))
            own = {}
        for key in own.keys() - STACK_KEYS:
            why, remedy = misplaced((name, key), own) or unknown_word(key, STACK_KEYS)
            problems.append(Problem(f"{name}.{key}", why, remedy=remedy))
        shared = root if name == "decoder" else _without_cross(root)
        tables[name] = laid(shared, {key: value for key, value in own.items() if key in STACK_KEYS}, name)
    return tables, sorted(problems, key=lambda problem: problem.path)


def _without_cross(root: Mapping[str, Any]) -> dict[str, Any]:
    """What the root says of both stacks, for an encoder: what it says of cross-attention is the decoder's."""
    shared = {key: value for key, value in root.items() if key != "cross"}
    if isinstance(shared.get("norms"), dict):
        shared["norms"] = {key: value for key, value in shared["norms"].items() if key != "cross"}
    return shared


def settled_layer(table: Mapping[str, Any], side: str, *, beside: bool, d_model: Any) -> dict[str, Any]:
    """A layer's table, or a stack's, with its mask, its buckets' sides, its cross-attention and its shared expert.

    Args:
        table: the layer's.
        side: "encoder" or "decoder".
        beside: whether there is another stack.
        d_model: the stack's width, if it is a number.
    """
    result = dict(table)
    attention = table.get("attention")
    if isinstance(attention, dict):
        result["attention"] = attention = _seeing({"kind": "grouped", **attention}, side)
    cross = table.get("cross", {} if beside and side == "decoder" else None)
    if cross is not None:
        keys = _TAKEN_OVER.get(str(attention.get("kind")), ()) if isinstance(attention, dict) else ()
        inherited = {key: attention[key] for key in keys if attention.get(key) is not None} if attention else {}
        base = {**inherited, "position": {"kind": "none"}, "mask": {"kind": "bidirectional"}}
        result["cross"] = _seeing(merged(base, cross), "encoder") if isinstance(cross, dict) else cross
    ffn = table.get("ffn")
    if isinstance(ffn, dict) and ffn.get("kind") == "moe":
        result["ffn"] = _with_shared(ffn, d_model)
    return result


def _seeing(attention: dict[str, Any], side: str) -> dict[str, Any]:
    """The stack's mask where no kind is given, and buckets on the sides that the mask shows."""
    mask = attention.get("mask", {})
    if isinstance(mask, dict):
        mask = {"kind": default_mask("attention", side), **mask}
    position = attention.get("position")
    if isinstance(position, dict) and position.get("kind") == "relative" and isinstance(mask, dict):
        position = {"bidirectional": mask["kind"] != "causal", **position}
    return {**attention, "mask": mask, **({} if position is None else {"position": position})}


def default_width(kind: str, d_model: int, multiple_of: int) -> int:
    """d_ff where a recipe leaves it out: 4·C, or for a gated kind 8/3·C rounded up to `multiple_of`."""
    if kind == "dense":
        return 4 * d_model
    return -(-(8 * d_model // 3) // multiple_of) * multiple_of


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _with_shared(ffn: dict[str, Any], d_model: Any) -> dict[str, Any]:
    """A mixture whose shared expert says everything by itself."""
    expert, shared = ffn.get("expert"), ffn.get("shared")
    if not isinstance(expert, dict):
        return {key: value for key, value in ffn.items() if key != "shared" or isinstance(value, dict | int)}
    if _is_count(shared):
        multiple_of = expert.get("multiple_of", 64)
        width = expert.get("d_ff")
        if width is None and _is_count(d_model) and d_model <= MAX_WIDTH and _is_count(multiple_of):
            width = default_width(str(expert.get("kind")), d_model, multiple_of)
        shared = {"d_ff": shared * width} if isinstance(width, int) and _is_count(width) else {}
    return {**ffn, "shared": laid_on(expert, shared) if isinstance(shared, dict) else shared}


def settled_stack(table: Mapping[str, Any], side: str, *, beside: bool) -> tuple[dict[str, Any], list[Problem]]:
    """A stack's table as `settled_layer` makes it, with √width and ties written out."""
    result = settled_layer(table, side, beside=beside, d_model=table.get("d_model"))
    problems: list[Problem] = []
    scale = look_up(table, ("embed", "scale"))
    if isinstance(scale, str):
        d_model = table.get("d_model")
        if scale != "sqrt_width":
            near = (
                "did you mean `sqrt_width`?"
                if did_you_mean(scale, ["sqrt_width"])
                else 'a number or "sqrt_width" would do'
            )
            problems.append(Problem("embed.scale", f"unknown word `{scale}`", remedy=near))
        known = sqrt(d_model) if scale == "sqrt_width" and _is_count(d_model) else 1.0
        result["embed"] = {**table["embed"], "scale": known}
    tie = table.get("tie", False)
    if isinstance(tie, bool):
        stacks = _STACKS if beside else (side,)
        result["tie"] = [*(f"{name}.embed" for name in stacks), "head"] if tie else []
    elif not isinstance(tie, list | tuple):
        problems.append(Problem("tie", "should be true, false or a list of tables", tie))
        result["tie"] = []
    return result, problems
