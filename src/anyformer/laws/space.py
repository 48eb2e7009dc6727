"""The space of Transformers: legal recipes drawn over every axis of a specification, at sizes that hide nothing.

Widths that are no powers of two and often odd, heads in threes and fives, key/value heads of every divisor, heads that
are not d_model / n_heads wide, values of another width than keys, windows and original lengths shorter than the
sequences of the laws. Every branch has a norm somewhere, so that activations stay of a size that can be compared.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from anyformer.laws.choose import Chooser, Drawn, Seeded, chance, maybe
from anyformer.laws.space_attention import attention, cross, mask, position, qk_norm
from anyformer.laws.space_ffn import feed_forward
from anyformer.laws.space_norms import WIRINGS, layer_norms, norm, placement
from anyformer.spec.idle import without_idle

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

Table = dict[str, Any]

ARCHITECTURES = ("decoder", "encoder", "encoder-decoder")
MAX_POSITIONS = 64
"""The length of learned tables, enough for every sequence of the laws."""
WIDTHS = (6, 9, 10, 15, 20)
MAX_LAYERS = 3
VOCABULARIES = (19, 23)


def _embed(choose: Chooser, d_model: int, *, types: bool, factor: Any = None) -> Table:
    """The embedding; `factor`: its factorisation where that is settled, else drawn."""
    table: Table = {}
    if factor is None and chance(choose, 4):
        factor = choose.pick((8, 5, {"width": 7, "bias": True}))
    if factor is not None:
        table["factor"] = factor
    width = _width(d_model, factor)
    kind = choose.pick(("none", "learned", *(("sinusoidal",) if width % 2 == 0 else ())))
    table["position"] = {"kind": kind}
    if kind == "sinusoidal":
        table["position"]["layout"] = choose.pick(("interleaved", "halves"))
        maybe(choose, table["position"], "theta", (50.0,))
    if kind != "none":
        maybe(choose, table["position"], "offset", (2, 1))
    maybe(choose, table, "scale", ("sqrt_width", 2.0))
    maybe(choose, table, "norm", (norm(choose),))
    if types:
        maybe(choose, table, "types", (2, 3))
    if chance(choose, 4):
        table["dropout"] = 0.1
    return table


def _width(d_model: int, factor: Any) -> int:
    """The width of a token table."""
    return d_model if factor is None else int(factor["width"] if isinstance(factor, dict) else factor)


def _embed_width(stack: Table) -> int:
    return _width(stack["d_model"], stack["embed"].get("factor"))


def _mask_difference(choose: Chooser, base: Table, stack: str) -> Table:
    """Another mask that the base's position allows."""
    place = base["attention"]["position"]
    one_sided = place.get("symmetric") is False or place.get("bidirectional") is False
    kinds = ("causal",) if one_sided else ("causal", "prefix")
    return {"attention": {"mask": mask(choose, stack, kinds)}}


def _attention_difference(choose: Chooser, stack: str, d_model: int, *, crossed: bool) -> Table:
    """An attention of its own. Tables of relative positions are the layer's: those of a stack would have to agree."""
    table = attention(choose, stack, d_model, shared=False)
    entry: Table = {"attention": table}
    if crossed:
        reads = cross(choose, table, d_model)
        if reads is not None:
            entry["cross"] = reads
    return entry


def _norm_difference(choose: Chooser, base: Table) -> Table:
    """Another placement, or other wiring, where the base says a placement."""
    serial = base["wiring"] == "serial"
    return {"norm": norm(choose), "placement": placement(choose, "serial" if serial else "shared")}


def _difference(choose: Chooser, base: Table, stack: str, *, crossed: bool, first: bool) -> Table:
    """What an entry of a pattern may change; the first keeps its cross-attention."""
    heads = base["attention"]["kind"] == "grouped"
    placed = "placement" in base
    wired = placed and base["placement"] != "post"
    kinds = ["mask", "attention", "ffn"]
    kinds += ["position", "heads", "qk_norm"] if heads else []
    kinds += ["norms"] if placed else []
    kinds += ["wiring"] if wired and not crossed else []
    kinds += ["cross", *(["apart"] if not first and placed else [])] if crossed else []
    match choose.pick(kinds):
        case "mask":
            return _mask_difference(choose, base, stack)
        case "attention":
            return _attention_difference(choose, stack, base["d_model"], crossed=crossed)
        case "ffn":
            single = isinstance(base["ffn"], dict) and base["ffn"]["kind"] == "moe"
            return {"ffn": feed_forward(choose, experts=not single)}
        case "position":
            table = base["attention"]
            return {"attention": {"position": position(choose, table["d_head"], table["mask"], shared=False)}}
        case "heads":
            return {"attention": {"n_kv_heads": 1}}
        case "qk_norm":
            return {"attention": {"qk_norm": choose.pick((False, qk_norm(choose)))}}
        case "wiring":
            return {"wiring": WIRINGS[choose.pick(tuple(WIRINGS))]}
        case "cross":
            return {"cross": {"n_kv_heads": 1}}
        case "apart":
            return {"cross": False, **({"wiring": WIRINGS[choose.pick(tuple(WIRINGS))]} if wired else {})}
        case _:
            return _norm_difference(choose, base)


def _pattern(choose: Chooser, base: Table, stack: str, *, crossed: bool) -> None:
    """Layers that differ, or layers that share parameters, or both."""
    n_layers = base["n_layers"]
    varied = n_layers > 1 and choose.pick((False, True))
    if varied:
        first = choose.pick(range(1, n_layers))
        start = _difference(choose, base, stack, crossed=crossed, first=True) if chance(choose, 3) else {}
        other = _difference(choose, base, stack, crossed=crossed, first=False)
        base["pattern"] = [{"repeat": first, **start}, other]
    if n_layers > 1 and chance(choose, 3):
        if not varied:
            distinct = choose.pick(range(1, n_layers))
            uneven = [[0, 0, 2], [0, 1, 0], [0, 1, 1]] if n_layers == 3 else []
            order = choose.pick(("cycle", "runs"))
            base["share"] = choose.pick(("all", {"distinct": distinct, "order": order}, *uneven))
        elif n_layers == 3 and first == 1:
            base["share"] = {"distinct": 2, "order": "cycle"}
        elif n_layers == 3:
            base["share"] = [0, 0, 2]


def _stack(
    choose: Chooser,
    stack: str,
    *,
    crossed: bool = False,
    types: bool = True,
    max_layers: int,
    like: Table | None = None,
) -> Table:
    """A stack's keys. `like`: another stack whose embedding's width this one takes."""
    d_model = choose.pick(WIDTHS) if like is None else like["d_model"]
    factor = None if like is None else like["embed"].get("factor")
    wiring = "serial" if crossed or not chance(choose, 3) else choose.pick(("shared", "two"))
    table: Table = {
        "d_model": d_model,
        "n_layers": choose.pick(range(1, max_layers + 1)),
        "attention": attention(choose, stack, d_model),
        "ffn": feed_forward(choose),
        "wiring": WIRINGS[wiring],
        **layer_norms(choose, wiring, crossed=crossed),
        "embed": _embed(choose, d_model, types=types, factor=factor),
    }
    if crossed:
        reads = cross(choose, table["attention"], d_model)
        if reads is not None:
            table["cross"] = reads
    if table["embed"]["position"]["kind"] == "learned" or choose.pick((False, True)):
        table["max_positions"] = MAX_POSITIONS
    maybe(choose, table, "final_norm", (norm(choose, none=True),))
    maybe(choose, table, "bias", (True, False))
    if chance(choose, 4):
        table["dropout"] = 0.1
    _pattern(choose, table, stack, crossed=crossed)
    return table


def _language(choose: Chooser, d_model: int, d_embed: int) -> Table:
    """A head over the vocabulary."""
    table: Table = {"kind": "language"}
    maybe(choose, table, "bias", (True, False))
    if choose.pick((False, True)):
        table["transform"] = {"width": choose.pick((d_embed, d_embed, d_model, 7))}
        maybe(choose, table["transform"], "activation", ("relu", "gelu_tanh"))
        maybe(choose, table["transform"], "bias", (True, False))
        maybe(choose, table["transform"], "norm", (norm(choose, none=True),))
    maybe(choose, table, "scale", (0.5, 2.0))
    maybe(choose, table, "softcap", (3.0,))
    return table


def _labels(choose: Chooser, kind: str, *, encoder: bool) -> Table:
    """A head of labels."""
    table: Table = {"kind": kind}
    maybe(choose, table, "bias", (True, False))
    if kind == "span":
        return table
    table["n_labels"] = choose.pick((3, 1))
    if kind == "sequence":
        table["pool"] = choose.pick(("mean", "last", *(("first", "pooler") * 2 if encoder else ())))
    if chance(choose, 4):
        table["dropout"] = 0.1
    return table


def _head(choose: Chooser, stack: Table, kinds: Sequence[str], *, encoder: bool) -> Table:
    """The keys of what reads the last stack: a head, a pooler."""
    kind = choose.pick(kinds)
    if kind == "language":
        table: Table = {"head": _language(choose, stack["d_model"], _embed_width(stack))}
    elif kind == "none":
        table = {"head": "none"}
    else:
        table = {"head": _labels(choose, kind, encoder=encoder)}
    needed = kind == "sequence" and table["head"]["pool"] == "pooler"
    if needed or (encoder and chance(choose, 3)):
        table["pooler"] = choose.pick((True, {"activation": "gelu"}, {"bias": False}))
    return table


def _head_width(root: Table, stack: Table) -> int | None:
    """The width of a language head's table."""
    head = root["head"]
    if not isinstance(head, dict) or head["kind"] != "language":
        return None
    transform = head.get("transform")
    return int(stack["d_model"] if transform is None else transform["width"])


def _alone(choose: Chooser, architecture: str, *, max_layers: int, heads: Sequence[str] | None) -> Table:
    """A model of one stack."""
    encoder = architecture == "encoder"
    stack = _stack(choose, architecture, max_layers=max_layers)
    kinds = heads or ("language", "language", "none", "sequence", "sequence", "token", "span")
    root = {**stack, **_head(choose, stack, kinds, encoder=encoder)}
    if _head_width(root, stack) == _embed_width(stack):
        maybe(choose, root, "tie", (True,))
    return root


def _both(choose: Chooser, *, max_layers: int, heads: Sequence[str] | None) -> Table:
    """An encoder and a decoder that reads it, with tables that are one where their widths allow."""
    first = _stack(choose, "encoder", types=False, max_layers=max_layers)
    alike = choose.pick((False, True))
    second = _stack(choose, "decoder", crossed=True, types=False, max_layers=max_layers, like=first if alike else None)
    kinds = heads or ("language", "language", "none")
    root = {"encoder": first, "decoder": second, **_head(choose, second, kinds, encoder=False)}
    width = _head_width(root, second)
    same = _embed_width(first) == _embed_width(second)
    ties: list[Any] = [["encoder.embed", "decoder.embed"]] if same else []
    ties += [["encoder.embed", "head"]] if width == _embed_width(first) else []
    ties += [["decoder.embed", "head"]] if width == _embed_width(second) else []
    ties += [True] * 2 if same and width == _embed_width(first) else []
    if choose.pick((False, True)) and ties:
        root["tie"] = choose.pick(ties)
    return root


def recipe(
    choose: Chooser,
    *,
    architectures: Sequence[str] = ARCHITECTURES,
    max_layers: int = MAX_LAYERS,
    heads: Sequence[str] | None = None,
) -> Table:
    """A legal recipe.

    Args:
        choose: who chooses.
        architectures: which there may be, of `ARCHITECTURES`.
        max_layers: the most layers of a stack.
        heads: which kinds of head there may be, of "language", "none", "sequence", "token" and "span"; a model with two
            stacks has the first two alone. All where left out.
    """
    architecture = choose.pick(architectures)
    root: Table = {"architecture": architecture, "vocab_size": choose.pick(VOCABULARIES)}
    if architecture == "encoder-decoder":
        root |= _both(choose, max_layers=max_layers, heads=heads)
    else:
        root |= _alone(choose, architecture, max_layers=max_layers, heads=heads)
    # A difference may be drawn that is none: the base's own mask without its window, say.
    return without_idle(root)


def sample(seed: int, **limits: Any) -> Table:
    """The recipe that a seed draws; `limits` as of `recipe`."""
    return recipe(Seeded(seed), **limits)


def strategy(**limits: Any) -> "SearchStrategy[Table]":
    """Recipes for hypothesis to draw and shrink; `limits` as of `recipe`. Needs the test extra."""
    from hypothesis import strategies as st

    @st.composite
    def drawn(draw: Any) -> Table:
        return recipe(Drawn(draw), **limits)

    made: SearchStrategy[Table] = drawn()
    return made
