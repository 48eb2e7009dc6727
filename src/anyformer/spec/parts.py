"""What a Transformer is made of: frozen, validated, serialisable parts, each choice a tagged union.

Every number is resolved here. The short form with defaults that depend on each other is the recipe (`recipe.py`).
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from anyformer.spec.rules import BLOCK_RULES, MODEL_RULES, Reader, check


class Part(BaseModel):
    """A frozen table that knows all of its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


Count = Annotated[int, Field(ge=1)]
MAX_LAYERS = 100_000
MAX_WIDTH = 1 << 20
MAX_HEADS = 1 << 16
MAX_VOCABULARY = 1 << 24
MAX_POSITIONS = 1 << 31
"""Far beyond any model; a slip of the keyboard does not fill the memory."""
Width = Annotated[int, Field(ge=1, le=MAX_WIDTH)]
InnerWidth = Annotated[int, Field(ge=1, le=4 * MAX_WIDTH)]
Heads = Annotated[int, Field(ge=1, le=MAX_HEADS)]
Vocabulary = Annotated[int, Field(ge=1, le=MAX_VOCABULARY)]
Length = Annotated[int, Field(ge=1, le=MAX_POSITIONS)]
Positive = Annotated[float, Field(gt=0)]
Rate = Annotated[float, Field(ge=0, lt=1)]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "relu2"]


class NoNorm(Part):
    """The identity."""

    kind: Literal["none"] = "none"


class LayerNorm(Part):
    """(x − mean) / √(variance + eps) · weight + bias, over the last dimension (Ba et al. 2016, eq. 4)."""

    kind: Literal["layer"] = "layer"
    eps: Positive = 1e-5
    weight: bool = True
    bias: bool = True


class RMSNorm(Part):
    """x / √(mean(x²) + eps) · weight, over the last dimension (Zhang & Sennrich 2019, eq. 4)."""

    kind: Literal["rms"] = "rms"
    eps: Positive = 1e-6
    weight: bool = True


Norm = Annotated[NoNorm | LayerNorm | RMSNorm, Field(discriminator="kind")]


class Rope(Part):
    """Rotary positions: pair i of the first `fraction` of each head turns by position · theta^(−2i/d) (Su et al. 2021).

    `layout` says which channels make a pair: i and i + d/2 ("half"), or 2i and 2i + 1 ("interleaved").
    """

    kind: Literal["rope"] = "rope"
    theta: Positive = 10000.0
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    layout: Literal["half", "interleaved"] = "half"

    def width(self, d_head: int) -> int:
        """The number of channels of a head that turn."""
        exact = self.fraction * d_head
        return round(exact) if abs(exact - round(exact)) < 1e-6 else int(exact)


class NoPosition(Part):
    """No position here; a causal mask alone still tells order (Kazemnejad et al. 2023)."""

    kind: Literal["none"] = "none"


Position = Annotated[Rope | NoPosition, Field(discriminator="kind")]


class Sinusoidal(Part):
    """Sines and cosines of position · theta^(−2i/C) added to the embeddings (Vaswani et al. 2017, section 3.5).

    `layout`: sine and cosine of a frequency side by side ("interleaved"), or all sines first ("halves").
    """

    kind: Literal["sinusoidal"] = "sinusoidal"
    theta: Positive = 10000.0
    layout: Literal["interleaved", "halves"] = "interleaved"


class Learned(Part):
    """A trained vector for each of the stack's `max_positions` positions, added to the embeddings."""

    kind: Literal["learned"] = "learned"


EmbedPosition = Annotated[Sinusoidal | Learned | NoPosition, Field(discriminator="kind")]


class QKNorm(Part):
    """A norm on queries and keys (Henry et al. 2020), over each head or the whole projection, around rotation."""

    over: Literal["head", "projection"] = "head"
    order: Literal["before", "after"] = "before"
    norm: Norm = RMSNorm()


class Causal(Part):
    """A token sees itself and what came before."""

    kind: Literal["causal"] = "causal"


Mask = Causal


class GroupedFields(Part):
    """What a recipe and a specification say of grouped attention in the same words."""

    kind: Literal["grouped"] = "grouped"
    n_heads: Heads
    position: Position
    mask: Mask = Causal()
    qk_norm: QKNorm | None = None


class Grouped(GroupedFields):
    """Grouped-query attention (Ainslie et al. 2023): G = n_kv_heads of n_heads; G = H is MHA, G = 1 is MQA.

    `d_head` is free of d_model / n_heads; `d_value` is the width of a value. `dropout` falls on the attention weights,
    `out_dropout` on the output of the last projection.
    """

    n_kv_heads: Heads
    d_head: Width
    d_value: Width
    qkv_bias: bool = False
    out_bias: bool = False
    dropout: Rate = 0.0
    out_dropout: Rate = 0.0


Attention = Grouped


class Dense(Part):
    """down(act(up(x))) (Vaswani et al. 2017, eq. 2). `dropout` is after the activation, `out_dropout` after `down`."""

    kind: Literal["dense"] = "dense"
    activation: Activation
    d_ff: InnerWidth
    bias: bool = False
    dropout: Rate = 0.0
    out_dropout: Rate = 0.0


class Gated(Part):
    """down(act(gate(x)) · up(x)): SwiGLU with silu, GeGLU with gelu, ReGLU with relu (Shazeer 2020, eqs. 5 and 6)."""

    kind: Literal["gated"] = "gated"
    activation: Activation
    d_ff: InnerWidth
    bias: bool = False
    dropout: Rate = 0.0
    out_dropout: Rate = 0.0


FeedForward = Annotated[Dense | Gated, Field(discriminator="kind")]


class BranchNorms(Part):
    """Three places for a norm around a branch f: x = residual(x + after(f(before(x))))."""

    before: Norm = NoNorm()
    after: Norm = NoNorm()
    residual: Norm = NoNorm()


class Norms(Part):
    """The norms of a block's branches."""

    attention: BranchNorms = BranchNorms()
    ffn: BranchNorms = BranchNorms()


class Serial(Part):
    """Attention first, then the feed-forward on its result."""

    kind: Literal["serial"] = "serial"


class Parallel(Part):
    """Attention and feed-forward side by side on the same input (Wang & Komatsuzaki 2021), with one norm or two."""

    kind: Literal["parallel"] = "parallel"
    shared_norm: bool = True


Wiring = Annotated[Serial | Parallel, Field(discriminator="kind")]


class BlockSpec(Part):
    """One layer."""

    attention: Attention
    ffn: FeedForward
    norms: Norms = Norms()
    wiring: Wiring = Serial()

    @model_validator(mode="after")
    def _check(self) -> Self:
        check(BLOCK_RULES, Reader(self))
        return self


class Embed(Part):
    """Tokens to vectors: the token table, what is added for the position, a norm, dropout."""

    position: EmbedPosition = NoPosition()
    norm: Norm = NoNorm()
    dropout: Rate = 0.0


class StackSpec(Part):
    """A stack of blocks of one width. `max_positions` is the context that the model is made for."""

    d_model: Width
    max_positions: Length | None = None
    embed: Embed = Embed()
    blocks: Annotated[tuple[BlockSpec, ...], Field(strict=False, min_length=1)]
    final_norm: Norm = NoNorm()

    @property
    def n_layers(self) -> int:
        """The number of blocks."""
        return len(self.blocks)


class LanguageHead(Part):
    """Scores over the vocabulary."""

    kind: Literal["language"] = "language"
    bias: bool = False


Tie = Literal["decoder.embed", "head"]


class ModelSpec(Part):
    """A whole model. `ties` names the tables that are one parameter."""

    vocab_size: Vocabulary
    decoder: StackSpec
    head: LanguageHead | None = LanguageHead()
    ties: Annotated[frozenset[Tie], Field(strict=False)] = frozenset()

    @model_validator(mode="after")
    def _check(self) -> Self:
        check(MODEL_RULES, Reader(self))
        return self

    def to_json(self) -> str:
        """The expanded form as checkpoints carry it; equal neighbouring blocks are written once with a count."""
        from anyformer.spec.stored import to_json

        return to_json(self)

    @staticmethod
    def from_json(text: str) -> "ModelSpec":
        """What `to_json` wrote, of this or an earlier format version. Raises `SpecError`."""
        from anyformer.spec.stored import from_json

        return from_json(text)


def plain(part: Part) -> dict[str, Any]:
    """A part as plain tables, without what equals its default, except the tags of unions."""
    values: dict[str, Any] = {}
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)
        if name != "kind" and not field.is_required() and value == field.default:
            continue
        values[name] = plain(value) if isinstance(value, Part) else value
    return values
