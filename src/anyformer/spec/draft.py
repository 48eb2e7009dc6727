"""A recipe judged: each stack and layer as far as it is sound, and every problem at the place where it was written."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from anyformer.spec.hints import misshapen
from anyformer.spec.keys import partly
from anyformer.spec.parts import BlockSpec, ModelSpec, StackSpec
from anyformer.spec.problems import MISSING, Problem, look_up, neighbours, unknown_word
from anyformer.spec.reader import moved
from anyformer.spec.recipe import LAYER_KEYS, STACK_KEYS, LatentRecipe, LayerRecipe, Recipe, ShareSome
from anyformer.spec.resolve import block_parts, model_parts, stack_parts
from anyformer.spec.rules import BLOCK_RULES, MODEL_RULES, Reader, apply, divisors
from anyformer.spec.settle import settled_layer, settled_stack
from anyformer.spec.words import laid


@dataclass
class LayerDraft:
    """A kind of layer, how many times it stands in the pattern, and which of its values are unknown."""

    recipe: LayerRecipe
    repeat: int
    unknown: set[str]
    entry: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Draft:
    """A stack as far as it is sound, and its problems at paths from its own table."""

    side: str
    root: Recipe
    unknown: set[str]
    layers: list[LayerDraft]
    problems: list[Problem]

    def parts(self) -> dict[str, Any]:
        """The stack's parts, unchecked, with one block for each kind of layer."""
        blocks = tuple(BlockSpec.model_construct(**block_parts(layer.recipe, self.root)) for layer in self.layers)
        return {**stack_parts(self.root), "blocks": blocks, "owners": None}


def draft(side: str, table: Mapping[str, Any], *, beside: bool) -> Draft:
    """Judges one stack.

    Args:
        side: "encoder" or "decoder".
        table: the stack's, with the whole model's keys.
        beside: whether there is another stack.
    """
    settled, problems = settled_stack(table, side, beside=beside)
    root, broken, unknown = partly(Recipe, settled)
    problems += _of_fields(broken, settled)
    problems += _judged(root, root, unknown)
    layers: list[LayerDraft] = []
    said = {(problem.path, problem.why) for problem in problems}
    for index, entry in enumerate(root.pattern):
        layer, own = _variant(entry, table, root, unknown, side=side, beside=beside)
        problems += [moved(p, f"pattern.{index}") for p in own if (p.path, p.why) not in said]
        layers.append(layer)
    if "n_layers" not in unknown:
        problems += _length_problems(root, sum(layer.repeat for layer in layers))
    return Draft(side, root, unknown, layers or [LayerDraft(root, root.n_layers, unknown)], problems)


def _length_problems(root: Recipe, total: int) -> Iterator[Problem]:
    if total > root.n_layers:
        why = f"is {total} layers long and the stack has {root.n_layers}, so that its end is never used"
        yield Problem("pattern", why, remedy=f"n_layers = {total} or a shorter pattern would do")
    share = root.share
    if isinstance(share, ShareSome) and share.distinct > root.n_layers:
        why = f"the stack has n_layers={root.n_layers}"
        yield Problem("share.distinct", why, share.distinct, f"{root.n_layers} or fewer would do")


def _variant(
    entry: Mapping[str, Any], table: Mapping[str, Any], root: Recipe, of_root: set[str], *, side: str, beside: bool
) -> tuple[LayerDraft, list[Problem]]:
    """The layer of one entry of a pattern, and its problems at paths from the entry."""
    problems: list[Problem] = []
    repeat = entry.get("repeat", 1)
    if not isinstance(repeat, int) or isinstance(repeat, bool) or repeat < 1:
        problems.append(Problem("repeat", "is a number of layers, at least 1", repeat))
        repeat = 1
    for key in sorted(entry.keys() - LAYER_KEYS - {"repeat"}):
        why, remedy = unknown_word(key, [*LAYER_KEYS, "repeat"])
        if key in STACK_KEYS:
            why, remedy = f"`{key}` is the whole stack's", f"{key} beside the pattern would do"
        problems.append(Problem(key, why, remedy=remedy))
    base = {key: value for key, value in table.items() if key in LAYER_KEYS}
    whole = laid(base, {key: value for key, value in entry.items() if key in LAYER_KEYS}, side)
    settled = settled_layer(whole, side, beside=beside, d_model=table.get("d_model"))
    layer, broken, unknown = partly(LayerRecipe, settled)
    unknown |= of_root & {"d_model"}
    problems += _of_fields(broken, settled)
    problems += _judged(layer, root, unknown)
    return LayerDraft(layer, repeat, unknown, entry), problems


def _of_fields(problems: Iterable[Problem], table: Mapping[str, Any]) -> list[Problem]:
    """Problems of fields at the places of a recipe, without those that cross-attention has only taken over."""
    kept = _once_for_both([misshapen(replace(p, path=p.path.replace("share.owners.", "share."))) for p in problems])
    if look_up(table, ("attention", "kind")) != "latent":
        return kept
    why = "latent attention has no grouped heads for cross-attention to take over"
    remedy = "cross = { n_heads = 8 }, say, would do"
    return [Problem("cross", why, remedy=remedy) if p.path == "cross.n_heads" and p.got is MISSING else p for p in kept]


def _judged(layer: LayerRecipe, root: Recipe, unknown: set[str]) -> list[Problem]:
    """What is wrong with a layer between its fields; adds to `unknown` what follows from unknown values."""
    problems = list(_widths_that_follow(layer, root, unknown))
    if layer.norms is None:
        if {"norm", "placement", "alpha", "beta"} & {path.partition(".")[0] for path in unknown}:
            unknown.add("norms")
    else:
        for key in ("placement", "alpha", "beta"):
            if getattr(layer, key) is not None:
                why = "`norms` says every branch by itself"
                remedy = (
                    "leave one of the two out" if key == "placement" else f"norms.attention.{key} and the like would do"
                )
                problems.append(Problem(key, why, getattr(layer, key), remedy))
    block = BlockSpec.model_construct(**block_parts(layer, root))
    found = list(apply(BLOCK_RULES, Reader(block, unknown)))
    if layer.norms is None:
        # A placement has put one norm into every slot.
        found = [
            replace(p, path="norm.offset") if p.path.startswith("norms.") and p.path.endswith(".offset") else p
            for p in found
        ]
    return _once_for_both([*problems, *found])


def _once_for_both(problems: list[Problem]) -> list[Problem]:
    """What is wrong with a layer's attention is not said again of the cross-attention that takes it over."""
    said = {(p.path, p.why, repr(p.got)) for p in problems}
    return [
        p
        for p in problems
        if not p.path.startswith("cross.")
        or (p.path.replace("cross.", "attention.", 1), p.why, repr(p.got)) not in said
    ]


def _widths_that_follow(layer: LayerRecipe, root: Recipe, unknown: set[str]) -> Iterator[Problem]:
    """A width left out must follow from d_model / n_heads; an unknown number makes it unknown too."""
    for place, heads in (("attention", layer.attention), ("cross", layer.cross)):
        if heads is None:
            continue
        key = "d_nope" if isinstance(heads, LatentRecipe) else "d_head"
        path = f"{place}.{key}"
        if getattr(heads, key) is not None or path in unknown:
            continue
        if {"d_model", place, f"{place}.n_heads"} & unknown:
            unknown.add(path)
        elif root.d_model % heads.n_heads:
            unknown.add(path)
            if place == "cross" and "attention.d_head" in unknown and heads.n_heads == layer.attention.n_heads:
                continue
            yield Problem(
                f"{place}.n_heads",
                f"d_model={root.d_model} is not a multiple of n_heads={heads.n_heads} and {path} is not given",
                heads.n_heads,
                f"{neighbours(heads.n_heads, divisors(root.d_model))}, or give {path}",
            )


_OF_THE_MODEL = frozenset({"vocab_size", "architecture", "head", "pooler", "tie"})


def model_problems(drafts: Mapping[str, Draft]) -> tuple[list[Problem], dict[str, list[Problem]]]:
    """What is wrong between the parts of a model: of the whole, and of each stack at paths from its table."""
    last = list(drafts.values())[-1]
    unknown: set[str] = set()
    for name, each in drafts.items():
        for path in each.unknown:
            unknown.add(path if path.partition(".")[0] in _OF_THE_MODEL else f"{name}.{path}")
        for index, layer in enumerate(each.layers):
            unknown |= {f"{name}.blocks.{index}.{path}" for path in layer.unknown}
    if "tie" in {path.partition(".")[0] for path in unknown}:
        unknown.add("ties")
    stacks: dict[str, Any] = {name: StackSpec.model_construct(**each.parts()) for name, each in drafts.items()}
    model = ModelSpec.model_construct(**{"encoder": None, "decoder": None, **stacks, **model_parts(last.root)})
    whole: list[Problem] = []
    of_stacks: dict[str, list[Problem]] = {name: [] for name in drafts}
    for problem in apply(MODEL_RULES, Reader(model, unknown)):
        name, _, path = problem.path.partition(".")
        if name in drafts:
            of_stacks[name].append(replace(problem, path=_written(path, drafts[name])))
        else:
            whole.append(replace(problem, path="tie" if problem.path == "ties" else problem.path))
    return whole, of_stacks


def _written(path: str, stack: Draft) -> str:
    """Where a recipe says what a finished stack has at `path`."""
    parts = path.split(".")
    if parts[0] == "final_norm" and stack.root.final_norm is None:
        return ".".join(["norm", *parts[1:]])
    if parts[0] != "blocks":
        return path
    index, rest = int(parts[1]), parts[2:]
    entry = stack.layers[index].entry
    return ".".join(["pattern", str(index), *rest] if rest[0] in entry else rest)


def combined(found: Mapping[str, list[Problem]], raw: Mapping[str, Any], prefixed: bool) -> Iterator[Problem]:
    """The problems of stacks at paths from the recipe's root; what both take from the root is said once.

    Args:
        found: the problems of each stack, at paths from its own table.
        raw: the recipe.
        prefixed: whether stacks have tables of their own.
    """
    if not prefixed:
        for problems in found.values():
            yield from problems
        return
    both = [{(p.path, p.why, repr(p.got)) for p in problems} for problems in found.values()]
    common = set.intersection(*both)
    for name, problems in found.items():
        for p in problems:
            key = (p.path, p.why, repr(p.got))
            of_root = p.path.partition(".")[0] in _OF_THE_MODEL
            touched = any(look_up(raw, (each, *p.path.split("."))) is not MISSING for each in found)
            yield p if of_root or (key in common and not touched) else moved(p, name)
