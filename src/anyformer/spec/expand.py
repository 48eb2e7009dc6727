"""Recipe to specification: every number resolved, every layer written out, equal layers sharing one object."""

from collections.abc import Iterable, Mapping
from typing import Any

from anyformer.spec.parts import (
    BlockSpec,
    BranchNorms,
    Dense,
    Embed,
    Gated,
    Grouped,
    ModelSpec,
    NoNorm,
    Norm,
    Norms,
    StackSpec,
)
from anyformer.spec.problems import Problem, SpecError, neighbours, unknown_word
from anyformer.spec.recipe import (
    LAYER_KEYS,
    DenseRecipe,
    GatedRecipe,
    LayerRecipe,
    NoHead,
    Placement,
    Recipe,
    merged,
    normalise,
    partly,
)
from anyformer.spec.rules import BLOCK_RULES, MODEL_RULES, Reader, apply, divisors


def placed(norm: Norm, placement: Placement) -> Norms:
    """`norm` in the slots that a placement names, in both branches."""
    before = norm if placement in ("pre", "sandwich") else NoNorm()
    after = norm if placement in ("sandwich", "output") else NoNorm()
    residual = norm if placement == "post" else NoNorm()
    branch = BranchNorms(before=before, after=after, residual=residual)
    return Norms(attention=branch, ffn=branch)


def width_of(ffn: DenseRecipe | GatedRecipe, d_model: int) -> int:
    """d_ff where a recipe leaves it out: 4·C, or 8/3·C for a gated kind, rounded up to `multiple_of`."""
    if isinstance(ffn, DenseRecipe):
        return 4 * d_model
    return -(-(8 * d_model // 3) // ffn.multiple_of) * ffn.multiple_of


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _block(layer: LayerRecipe, recipe: Recipe) -> dict[str, Any]:
    """The parts of one block; whether they go together is judged by the rules."""
    heads = layer.attention
    d_head = _first(heads.d_head, max(1, recipe.d_model // heads.n_heads))
    attention = Grouped(
        n_heads=heads.n_heads,
        n_kv_heads=_first(heads.n_kv_heads, heads.n_heads),
        d_head=d_head,
        d_value=_first(heads.d_value, d_head),
        position=heads.position,
        mask=heads.mask,
        qk_norm=heads.qk_norm,
        qkv_bias=_first(heads.qkv_bias, recipe.bias),
        out_bias=_first(heads.out_bias, recipe.bias),
        dropout=_first(heads.dropout, recipe.dropout),
        out_dropout=_first(heads.out_dropout, recipe.dropout),
    )
    kind = Dense if isinstance(layer.ffn, DenseRecipe) else Gated
    ffn = kind(
        activation=layer.ffn.activation,
        d_ff=_first(layer.ffn.d_ff, width_of(layer.ffn, recipe.d_model)),
        bias=_first(layer.ffn.bias, recipe.bias),
        dropout=layer.ffn.dropout,
        out_dropout=_first(layer.ffn.out_dropout, recipe.dropout),
    )
    norms = layer.norms if layer.norms is not None else placed(layer.norm, layer.placement)
    return {"attention": attention, "ffn": ffn, "norms": norms, "wiring": layer.wiring}


def _head_width_problem(layer: LayerRecipe, recipe: Recipe, unknown: set[str]) -> Problem | None:
    """d_head left out must follow from d_model / n_heads; an unknown number makes it unknown too."""
    n_heads, d_model = layer.attention.n_heads, recipe.d_model
    if layer.attention.d_head is not None or "attention.d_head" in unknown:
        return None
    if {"d_model", "attention", "attention.n_heads"} & unknown:
        unknown.add("attention.d_head")
        return None
    if d_model % n_heads == 0:
        return None
    unknown.add("attention.d_head")
    return Problem(
        "attention.n_heads",
        f"d_model={d_model} is not a multiple of n_heads={n_heads} and attention.d_head is not given",
        n_heads,
        f"{neighbours(n_heads, divisors(d_model))}, or give attention.d_head",
    )


def _layer_problems(layer: LayerRecipe, recipe: Recipe, unknown: set[str]) -> list[Problem]:
    unknown = set(unknown)
    if (layer.norms is None) and {"norm", "placement"} & {path.split(".")[0] for path in unknown}:
        unknown.add("norms")
    found = _head_width_problem(layer, recipe, unknown)
    block = BlockSpec.model_construct(**_block(layer, recipe))
    return [*([found] if found else []), *apply(BLOCK_RULES, Reader(block, unknown))]


def _variants(raw: dict[str, Any], recipe: Recipe) -> tuple[list[tuple[LayerRecipe, int]], list[Problem]]:
    """The layers of the pattern with their repeats, and the problems that each entry adds to the root's."""
    base = {key: value for key, value in raw.items() if key in LAYER_KEYS}
    layers: list[tuple[LayerRecipe, int]] = []
    problems: list[Problem] = []
    for index, entry in enumerate(recipe.pattern):
        over = {key: value for key, value in entry.items() if key != "repeat"}
        repeat = entry.get("repeat", 1)
        if not isinstance(repeat, int) or isinstance(repeat, bool) or repeat < 1:
            problems.append(Problem(f"pattern.{index}.repeat", "is a number of layers, at least 1", repeat))
            repeat = 1
        for key in over.keys() - LAYER_KEYS:
            why, remedy = unknown_word(key, [*LAYER_KEYS, "repeat"])
            problems.append(Problem(f"pattern.{index}.{key}", why, remedy=remedy))
        layer, own, unknown = partly(LayerRecipe, merged(base, {k: v for k, v in over.items() if k in LAYER_KEYS}))
        own += _layer_problems(layer, recipe, unknown)
        problems += [Problem(f"pattern.{index}.{p.path}", p.why, p.got, p.remedy) for p in own]
        layers.append((layer, repeat))
    total = sum(repeat for _, repeat in layers)
    if total > recipe.n_layers:
        why = f"is {total} layers long and the stack has {recipe.n_layers}, so that its end is never used"
        problems.append(Problem("pattern", why, remedy=f"n_layers = {total} or a shorter pattern would do"))
    return layers, problems


def _stack_parts(recipe: Recipe) -> dict[str, Any]:
    embed = Embed(
        position=recipe.embed.position,
        norm=_first(recipe.embed.norm, NoNorm()),
        dropout=_first(recipe.embed.dropout, recipe.dropout),
    )
    implied = NoNorm() if recipe.placement == "post" or recipe.norms is not None else recipe.norm
    final_norm = _first(recipe.final_norm, implied)
    return {
        "d_model": recipe.d_model,
        "max_positions": recipe.max_positions,
        "embed": embed,
        "final_norm": final_norm,
    }


def _model_parts(recipe: Recipe) -> dict[str, Any]:
    return {
        "vocab_size": recipe.vocab_size,
        "head": None if isinstance(recipe.head, NoHead) else recipe.head,
        "ties": frozenset({"decoder.embed", "head"}) if recipe.tie else frozenset(),
    }


def _rooted(problems: Iterable[Problem]) -> list[Problem]:
    """Model rules speak of the expanded form; in a recipe the decoder is the root."""
    return [Problem(p.path.removeprefix("decoder."), p.why, p.got, p.remedy) for p in problems]


def expand(recipe: Mapping[str, Any], *, where: object = None) -> ModelSpec:
    """Builds the specification that a recipe describes. Raises `SpecError` with every problem found.

    Args:
        recipe: nested tables as TOML gives them.
        where: the file's name for messages.
    """
    raw = normalise(recipe)
    root, problems, unknown = partly(Recipe, raw)
    base_problems = _layer_problems(root, root, unknown)
    variants, more = _variants(raw, root)
    said = {(p.path, p.why) for p in [*problems, *base_problems]}
    more = [p for p in more if (p.path.split(".", 2)[-1], p.why) not in said]
    draft = ModelSpec.model_construct(decoder=StackSpec.model_construct(**_stack_parts(root)), **_model_parts(root))
    roots = {path if path in _ROOT_KEYS else f"decoder.{path}" for path in unknown}
    problems = [*problems, *base_problems, *more, *_rooted(apply(MODEL_RULES, Reader(draft, roots)))]
    if problems:
        raise SpecError(problems, where=where)
    cycle = [layer for layer, repeat in variants for _ in range(repeat)] or [root]
    made = {id(layer): BlockSpec(**_block(layer, root)) for layer in cycle}
    shared: dict[BlockSpec, BlockSpec] = {}
    blocks = tuple(
        shared.setdefault(block, block) for block in (made[id(cycle[i % len(cycle)])] for i in range(root.n_layers))
    )
    return ModelSpec(decoder=StackSpec(blocks=blocks, **_stack_parts(root)), **_model_parts(root))


_ROOT_KEYS = frozenset({"vocab_size", "head", "tie"})
