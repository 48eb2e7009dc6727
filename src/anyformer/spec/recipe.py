"""The recipe: the short form that people write, in which every number that follows from others may be left out.

A recipe is a TOML file or nested tables. A table whose only content is its kind may be written as that word
(`position = "rope"`), and `ffn = "swiglu"`, "geglu", "reglu" name the gated kinds of Shazeer (2020); see `words.py`.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from anyformer.spec.keys import known_keys
from anyformer.spec.norms import LayerNorm
from anyformer.spec.part import Number
from anyformer.spec.parts import (
    MAX_LAYERS,
    Activation,
    EmbedPosition,
    Factor,
    GroupedFields,
    Heads,
    InnerWidth,
    LatentFields,
    Length,
    MoEFields,
    NoPosition,
    Norm,
    Norms,
    Part,
    Pooler,
    Positive,
    Rate,
    RMSNorm,
    SequenceHead,
    Serial,
    SpanHead,
    Tie,
    TokenHead,
    Vocabulary,
    Width,
    Wiring,
)
from anyformer.spec.words import normalise

Placement = Literal["pre", "post", "sandwich", "output"]
Architecture = Literal["decoder", "encoder", "encoder-decoder"]


class GroupedRecipe(GroupedFields):
    """Grouped attention: n_kv_heads is n_heads, d_head is d_model / n_heads, d_value is d_head, where not given.

    `mask` is bidirectional in an encoder and causal in a decoder; biases and dropouts are the recipe's.
    """

    n_kv_heads: Heads | None = None
    d_head: Width | None = None
    d_value: Width | None = None
    scale: Positive | None = None
    qkv_bias: bool | None = None
    out_bias: bool | None = None
    dropout: Rate | None = None
    out_dropout: Rate | None = None


class LatentRecipe(LatentFields):
    """Latent attention: d_nope is d_model / n_heads, d_value is d_nope, d_rope is 0, where not given."""

    d_nope: Width | None = None
    d_rope: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    d_value: Width | None = None
    scale: Positive | None = None
    bias: bool | None = None
    out_bias: bool | None = None
    dropout: Rate | None = None
    out_dropout: Rate | None = None


class _FeedForwardRecipe(Part):
    activation: Activation
    d_ff: InnerWidth | None = None
    bias: bool | None = None
    dropout: Rate = 0.0
    out_dropout: Rate | None = None


class DenseRecipe(_FeedForwardRecipe):
    """A dense feed-forward: d_ff is 4 · d_model where not given."""

    kind: Literal["dense"] = "dense"


class GatedRecipe(_FeedForwardRecipe):
    """A gated feed-forward: d_ff is 8/3 · d_model rounded up to `multiple_of` where not given (Touvron et al. 2023)."""

    kind: Literal["gated"] = "gated"
    multiple_of: Width = 64
    limit: Positive | None = None
    up_offset: Number = 0.0


SingleRecipe = Annotated[DenseRecipe | GatedRecipe, Field(discriminator="kind")]


class MoERecipe(MoEFields):
    """A mixture: `shared` lays its keys on `expert`'s; the number n stands for one of n times the expert's width."""

    expert: SingleRecipe
    shared: SingleRecipe | None = None


class LayerRecipe(Part):
    """What may differ from layer to layer.

    `placement` puts `norm` into the slots of every branch: pre = before, post = residual, sandwich = before and after,
    output = after; `alpha` and `beta` multiply the residual and every branch. `norms` says each branch by itself
    instead. `cross`, in a decoder beside an encoder, gives differences from the layer's attention (heads, widths,
    biases, dropouts, scale, norms of queries and keys, clip); false is none.
    """

    attention: Annotated[GroupedRecipe | LatentRecipe, Field(discriminator="kind")]
    cross: GroupedRecipe | None = None
    ffn: Annotated[DenseRecipe | GatedRecipe | MoERecipe, Field(discriminator="kind")]
    norm: Norm = RMSNorm()
    placement: Placement | None = None
    alpha: Positive | None = None
    beta: Positive | None = None
    norms: Norms | None = None
    wiring: Wiring = Serial()


class EmbedRecipe(Part):
    """The embedding: `dropout` is the recipe's where not given; `scale` may be the word "sqrt_width", √d_model."""

    scale: Positive = 1.0
    position: EmbedPosition = NoPosition()
    types: Annotated[int, Field(ge=0, le=1 << 16)] = 0
    norm: Norm | None = None
    dropout: Rate | None = None
    factor: Factor | None = None


class ShareAll(Part):
    """Every layer uses the first's parameters (Dehghani et al. 2018)."""

    kind: Literal["all"] = "all"


class ShareSome(Part):
    """The parameters of n = `distinct` layers for all L.

    Layer i uses number i mod n ("cycle"), or ⌊i·n/L⌋ ("runs"; ALBERT's groups, Lan et al. 2020).
    """

    kind: Literal["some"] = "some"
    distinct: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    order: Literal["cycle", "runs"] = "cycle"


class ShareListed(Part):
    """For each layer the number of the layer whose parameters it uses."""

    kind: Literal["listed"] = "listed"
    owners: Annotated[tuple[Annotated[int, Field(ge=0, le=MAX_LAYERS)], ...], Field(strict=False)]


Share = Annotated[ShareAll | ShareSome | ShareListed, Field(discriminator="kind")]


class StackRecipe(LayerRecipe):
    """A stack: the layer that its layers are, and what it is itself.

    `dropout` and `bias` are the defaults of every part (`ffn.dropout`, inside a feed-forward, aside). `final_norm` is
    `norm` unless the placement is post or `norms` says each branch by itself. `pattern` lists differences from the
    stack's layer, entry by entry, each for `repeat` layers, and starts again after the last.
    """

    d_model: Width
    n_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    max_positions: Length | None = None
    dropout: Rate = 0.0
    bias: bool = False
    embed: EmbedRecipe = EmbedRecipe()
    final_norm: Norm | None = None
    pattern: Annotated[tuple[dict[str, Any], ...], Field(strict=False)] = ()
    share: Share | None = None


class TransformRecipe(Part):
    """A language head's transform: as wide as the token table where not given."""

    width: Width | None = None
    activation: Activation = "gelu"
    bias: bool = True
    norm: Norm = LayerNorm()


class LanguageHeadRecipe(Part):
    """Scores over the vocabulary."""

    kind: Literal["language"] = "language"
    bias: bool = False
    transform: TransformRecipe | None = None
    scale: Positive = 1.0
    softcap: Positive | None = None


class NoHead(Part):
    """A model that ends with its hidden states."""

    kind: Literal["none"] = "none"


HeadRecipe = Annotated[LanguageHeadRecipe | SequenceHead | TokenHead | SpanHead | NoHead, Field(discriminator="kind")]


class Recipe(StackRecipe):
    """A model in short form.

    With one stack the root describes it. An encoder-decoder's root describes what both stacks share, and the tables
    `encoder` and `decoder` lay their differences on it. `tie`: true is every token table and the head; a list names
    those that are one.
    """

    architecture: Architecture = "decoder"
    vocab_size: Vocabulary
    tie: Annotated[tuple[Tie, ...], Field(strict=False)] = ()
    head: HeadRecipe = LanguageHeadRecipe()
    pooler: Pooler | None = None
    encoder: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


LAYER_KEYS = frozenset(LayerRecipe.model_fields)
STACK_KEYS = frozenset(StackRecipe.model_fields)

__all__ = [
    "LAYER_KEYS",
    "STACK_KEYS",
    "Architecture",
    "DenseRecipe",
    "GatedRecipe",
    "GroupedRecipe",
    "LanguageHeadRecipe",
    "LatentRecipe",
    "LayerRecipe",
    "MoERecipe",
    "NoHead",
    "Placement",
    "Recipe",
    "Share",
    "ShareAll",
    "ShareListed",
    "ShareSome",
    "StackRecipe",
    "known_keys",
    "normalise",
]
