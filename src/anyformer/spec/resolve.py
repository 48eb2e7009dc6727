"""The numbers of a validated recipe: what was left out, from what was given. Judges nothing."""

from typing import Any

from anyformer.spec.attention import Grouped, Latent
from anyformer.spec.ffn import Dense, Gated, MoE
from anyformer.spec.parts import BranchNorms, Embed, LanguageHead, NoNorm, Norm, Norms, Transform
from anyformer.spec.recipe import (
    DenseRecipe,
    GatedRecipe,
    GroupedRecipe,
    LanguageHeadRecipe,
    LatentRecipe,
    LayerRecipe,
    MoERecipe,
    NoHead,
    Placement,
    Recipe,
    Share,
    ShareAll,
    ShareListed,
    StackRecipe,
)
from anyformer.spec.settle import default_width


def first(*values: Any) -> Any:
    """The first that is given."""
    return next(value for value in values if value is not None)


def placed(norm: Norm, placement: Placement, *, alpha: float = 1.0, beta: float = 1.0, cross: bool = False) -> Norms:
    """`norm` in the slots that a placement names, in every branch that a block has."""
    before = norm if placement in ("pre", "sandwich") else NoNorm()
    after = norm if placement in ("sandwich", "output") else NoNorm()
    residual = norm if placement == "post" else NoNorm()
    branch = BranchNorms(before=before, after=after, residual=residual, alpha=alpha, beta=beta)
    return Norms(attention=branch, cross=branch if cross else BranchNorms(), ffn=branch)


def _taken(part: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(part, name) for name in names}


def _scores(recipe: GroupedRecipe | LatentRecipe, stack: StackRecipe) -> dict[str, Any]:
    """What every kind of attention says of its scores and of its output."""
    return {
        **_taken(recipe, "n_heads", "position", "mask", "softcap", "sink_logit"),
        **({} if recipe.scale is None else {"scale": recipe.scale}),
        "out_bias": first(recipe.out_bias, stack.bias),
        "dropout": first(recipe.dropout, stack.dropout),
        "out_dropout": first(recipe.out_dropout, stack.dropout),
    }


def grouped(recipe: GroupedRecipe, stack: StackRecipe) -> Grouped:
    """Grouped attention with every number."""
    d_head = first(recipe.d_head, max(1, stack.d_model // recipe.n_heads))
    return Grouped(
        **_scores(recipe, stack),
        **_taken(recipe, "qk_norm", "clip"),
        n_kv_heads=first(recipe.n_kv_heads, recipe.n_heads),
        d_head=d_head,
        d_value=first(recipe.d_value, d_head),
        qkv_bias=first(recipe.qkv_bias, stack.bias),
    )


def latent(recipe: LatentRecipe, stack: StackRecipe) -> Latent:
    """Latent attention with every number."""
    d_nope = first(recipe.d_nope, max(1, stack.d_model // recipe.n_heads))
    return Latent(
        **_scores(recipe, stack),
        **_taken(recipe, "q_rank", "kv_rank", "norm", "d_rope"),
        d_nope=d_nope,
        d_value=first(recipe.d_value, d_nope),
        bias=first(recipe.bias, stack.bias),
    )


def _single(recipe: DenseRecipe | GatedRecipe, stack: StackRecipe) -> Dense | Gated:
    kind = Dense if isinstance(recipe, DenseRecipe) else Gated
    multiple_of = recipe.multiple_of if isinstance(recipe, GatedRecipe) else 1
    return kind(
        activation=recipe.activation,
        d_ff=first(recipe.d_ff, default_width(recipe.kind, stack.d_model, multiple_of)),
        bias=first(recipe.bias, stack.bias),
        dropout=recipe.dropout,
        out_dropout=first(recipe.out_dropout, stack.dropout),
        **(_taken(recipe, "limit", "up_offset") if isinstance(recipe, GatedRecipe) else {}),
    )


def _feed_forward(recipe: DenseRecipe | GatedRecipe | MoERecipe, stack: StackRecipe) -> Dense | Gated | MoE:
    if not isinstance(recipe, MoERecipe):
        return _single(recipe, stack)
    own = {name: getattr(recipe, name) for name in type(recipe).model_fields if name not in ("expert", "shared")}
    shared = None if recipe.shared is None else _single(recipe.shared, stack)
    return MoE(**own, expert=_single(recipe.expert, stack), shared=shared)


def block_parts(layer: LayerRecipe, stack: StackRecipe) -> dict[str, Any]:
    """The parts of one block; whether they go together is judged by the rules."""
    attention = layer.attention
    norms = layer.norms
    if norms is None:
        alpha, beta = first(layer.alpha, 1.0), first(layer.beta, 1.0)
        norms = placed(layer.norm, layer.placement or "pre", alpha=alpha, beta=beta, cross=layer.cross is not None)
    return {
        "attention": latent(attention, stack) if isinstance(attention, LatentRecipe) else grouped(attention, stack),
        "cross": None if layer.cross is None else grouped(layer.cross, stack),
        "ffn": _feed_forward(layer.ffn, stack),
        "norms": norms,
        "wiring": layer.wiring,
    }


def owners_of(share: Share | None, n_layers: int) -> tuple[int, ...] | None:
    """For each layer the layer whose parameters it uses; None where every layer has its own."""
    if share is None:
        return None
    if isinstance(share, ShareListed):
        owners = share.owners
    else:
        n = 1 if isinstance(share, ShareAll) else share.distinct
        runs = not isinstance(share, ShareAll) and share.order == "runs"
        groups = [i * n // n_layers if runs else i % n for i in range(n_layers)]
        owners = tuple(groups.index(group) for group in groups)
    return None if owners == tuple(range(n_layers)) else owners


def stack_parts(recipe: StackRecipe) -> dict[str, Any]:
    """The parts of a stack beside its blocks and their owners."""
    embed = Embed(
        **_taken(recipe.embed, "scale", "position", "types", "factor"),
        norm=first(recipe.embed.norm, NoNorm()),
        dropout=first(recipe.embed.dropout, recipe.dropout),
    )
    implied = NoNorm() if recipe.placement == "post" or recipe.norms is not None else recipe.norm
    return {
        "d_model": recipe.d_model,
        "max_positions": recipe.max_positions,
        "embed": embed,
        "final_norm": first(recipe.final_norm, implied),
    }


def _transform(head: LanguageHeadRecipe, stack: StackRecipe) -> Transform | None:
    transform, factor = head.transform, stack.embed.factor
    if transform is None:
        return None
    width = first(transform.width, stack.d_model if factor is None else factor.width)
    return Transform(**_taken(transform, "activation", "bias", "norm"), width=width)


def model_parts(recipe: Recipe) -> dict[str, Any]:
    """The parts of a model beside its stacks; `recipe` is that of the stack that the head reads."""
    head: Any = recipe.head
    if isinstance(head, NoHead):
        head = None
    elif isinstance(head, LanguageHeadRecipe):
        head = LanguageHead(**_taken(head, "bias", "scale", "softcap"), transform=_transform(head, recipe))
    return {
        "vocab_size": recipe.vocab_size,
        "pooler": recipe.pooler,
        "head": head,
        "ties": frozenset(recipe.tie),
    }
