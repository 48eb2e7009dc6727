"""What a Transformer is made of: frozen, validated, serialisable parts, each choice a tagged union.

Every number is resolved here. The short form with defaults that depend on each other is the recipe (`recipe.py`).
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from anyformer.spec.attention import (
    Attention,
    Bidirectional,
    Causal,
    Grouped,
    GroupedFields,
    Latent,
    LatentFields,
    Mask,
    Prefix,
)
from anyformer.spec.ffn import Dense, FeedForward, Gated, Groups, MoE, MoEFields, SingleFeedForward
from anyformer.spec.norms import LayerNorm, NoNorm, Norm, QKNorm, RMSNorm
from anyformer.spec.part import (
    MAX_LAYERS,
    Activation,
    Count,
    Heads,
    InnerWidth,
    Length,
    Part,
    Positive,
    Rate,
    Vocabulary,
    Width,
    plain,
)
from anyformer.spec.positions import (
    Alibi,
    EmbedPosition,
    Learned,
    LongRopeScaling,
    NoPosition,
    Position,
    RelativeBias,
    Rope,
    Sinusoidal,
)
from anyformer.spec.rules import BLOCK_RULES, MODEL_RULES, Reader, check


class BranchNorms(Part):
    """Around a branch f: x = residual(alpha·x + beta·after(f(before(x)))): three norms, two multipliers."""

    before: Norm = NoNorm()
    after: Norm = NoNorm()
    residual: Norm = NoNorm()
    alpha: Positive = 1.0
    beta: Positive = 1.0


class Norms(Part):
    """The norms of a block's branches; `cross` is for a block with cross-attention."""

    attention: BranchNorms = BranchNorms()
    cross: BranchNorms = BranchNorms()
    ffn: BranchNorms = BranchNorms()


class Serial(Part):
    """Attention first, cross-attention if there is any, then the feed-forward, each on the result so far."""

    kind: Literal["serial"] = "serial"


class Parallel(Part):
    """Attention and feed-forward side by side on the same input (Wang & Komatsuzaki 2021), with one norm or two."""

    kind: Literal["parallel"] = "parallel"
    shared_norm: bool = True


Wiring = Annotated[Serial | Parallel, Field(discriminator="kind")]


class BlockSpec(Part):
    """One layer. `cross` attends over the encoder's output."""

    attention: Attention
    cross: Grouped | None = None
    ffn: FeedForward
    norms: Norms = Norms()
    wiring: Wiring = Serial()

    @model_validator(mode="after")
    def _check(self) -> Self:
        check(BLOCK_RULES, Reader(self))
        return self


class Factor(Part):
    """The whole embedding at its own `width`, then projected to d_model (ALBERT, Lan et al. 2020)."""

    width: Width
    bias: bool = False


class Embed(Part):
    """norm(scale · token + position + token type), dropout, then the projection of a factorised embedding.

    `types` is the number of token types (2 in BERT), 0 for none.
    """

    scale: Positive = 1.0
    position: EmbedPosition = NoPosition()
    types: Annotated[int, Field(ge=0, le=1 << 16)] = 0
    norm: Norm = NoNorm()
    dropout: Rate = 0.0
    factor: Factor | None = None


class StackSpec(Part):
    """A stack of blocks of one width. `max_positions` is the context that the model is made for.

    `owners`: for each layer the number of the layer whose parameters it uses, its own or an earlier one (ALBERT, the
    Universal Transformer); None where every layer has its own.
    """

    d_model: Width
    max_positions: Length | None = None
    embed: Embed = Embed()
    blocks: Annotated[tuple[BlockSpec, ...], Field(strict=False, min_length=1)]
    owners: Annotated[tuple[int, ...], Field(strict=False)] | None = None
    final_norm: Norm = NoNorm()

    @property
    def n_layers(self) -> int:
        """The number of blocks, shared ones counted each time they are used."""
        return len(self.blocks)

    @property
    def d_embed(self) -> int:
        """The width of the token table."""
        return self.d_model if self.embed.factor is None else self.embed.factor.width

    @property
    def shared_bias(self) -> tuple[RelativeBias, int] | None:
        """The relative table that layers share and its number of heads, where there is one."""
        for block in self.blocks:
            position = block.attention.position
            if isinstance(position, RelativeBias) and position.shared:
                return position, block.attention.n_heads
        return None

    @property
    def turning_lengths(self) -> tuple[int, ...]:
        """Lengths past which all tokens of a row turn by other divisors (LongRoPE), those before it too, ascending.

        What was computed of them holds no more, so that a row that grows past one of these is read anew.
        """
        positions = [block.attention.position for block in self.blocks]
        scalings = [position.scaling for position in positions if isinstance(position, Rope)]
        return tuple(sorted({scaling.original for scaling in scalings if isinstance(scaling, LongRopeScaling)}))

    def owner(self, layer: int) -> int:
        """The layer whose parameters a layer uses."""
        return layer if self.owners is None else self.owners[layer]


class Transform(Part):
    """norm(act(x Wᵀ + b)) before the scores of a masked language model (BERT)."""

    width: Width
    activation: Activation = "gelu"
    bias: bool = True
    norm: Norm = LayerNorm()


class LanguageHead(Part):
    """Scores over the vocabulary: softcap · tanh(scale·(h Wᵀ + b) / softcap), h after the `transform`."""

    kind: Literal["language"] = "language"
    bias: bool = False
    transform: Transform | None = None
    scale: Positive = 1.0
    softcap: Positive | None = None


class SequenceHead(Part):
    """[B, n_labels] from one vector a row: the first or last real token, the mean of real tokens, or the pooler's."""

    kind: Literal["sequence"] = "sequence"
    n_labels: Width
    pool: Literal["first", "last", "mean", "pooler"] = "pooler"
    bias: bool = True
    dropout: Rate = 0.0


class TokenHead(Part):
    """[B, T, n_labels], a classification of every token."""

    kind: Literal["token"] = "token"
    n_labels: Width
    bias: bool = True
    dropout: Rate = 0.0


class SpanHead(Part):
    """[B, T, 2], scores of every token as the first and the last of an answer (Devlin et al. 2018, section 4.2)."""

    kind: Literal["span"] = "span"
    bias: bool = True


Head = Annotated[LanguageHead | SequenceHead | TokenHead | SpanHead, Field(discriminator="kind")]


class Pooler(Part):
    """act(W·h + b) of each row's first real token (Devlin et al. 2018), [B, C]."""

    activation: Activation = "tanh"
    bias: bool = True


Tie = Literal["encoder.embed", "decoder.embed", "head"]


class ModelSpec(Part):
    """A whole model: a decoder, an encoder, or both. `ties` names the token tables that are one parameter.

    The head (and the pooler) read the decoder where there is one, else the encoder.
    """

    vocab_size: Vocabulary
    encoder: StackSpec | None = None
    decoder: StackSpec | None = None
    pooler: Pooler | None = None
    head: Head | None = LanguageHead()
    ties: Annotated[frozenset[Tie], Field(strict=False)] = frozenset()

    @model_validator(mode="after")
    def _check(self) -> Self:
        check(MODEL_RULES, Reader(self))
        return self

    @property
    def stacks(self) -> dict[str, StackSpec]:
        """The stacks there are, by name, the encoder first."""
        both = {"encoder": self.encoder, "decoder": self.decoder}
        return {name: stack for name, stack in both.items() if stack is not None}

    @property
    def last(self) -> StackSpec:
        """The stack whose output the head reads."""
        return list(self.stacks.values())[-1]

    @property
    def generates(self) -> bool:
        """Whether the model predicts a next token: a decoder with a language head."""
        return self.decoder is not None and isinstance(self.head, LanguageHead)

    def to_json(self) -> str:
        """The expanded form as checkpoints carry it; equal neighbouring blocks are written once with a count."""
        from anyformer.spec.stored import to_json

        return to_json(self)

    @staticmethod
    def from_json(text: str) -> "ModelSpec":
        """What `to_json` wrote, of this or an earlier format version. Raises `SpecError`."""
        from anyformer.spec.stored import from_json

        return from_json(text)


__all__ = [
    "MAX_LAYERS",
    "Activation",
    "Alibi",
    "Attention",
    "Bidirectional",
    "BlockSpec",
    "BranchNorms",
    "Causal",
    "Count",
    "Dense",
    "Embed",
    "EmbedPosition",
    "Factor",
    "FeedForward",
    "Gated",
    "Grouped",
    "GroupedFields",
    "Groups",
    "Head",
    "Heads",
    "InnerWidth",
    "LanguageHead",
    "Latent",
    "LatentFields",
    "LayerNorm",
    "Learned",
    "Length",
    "Mask",
    "MoE",
    "MoEFields",
    "ModelSpec",
    "NoNorm",
    "NoPosition",
    "Norm",
    "Norms",
    "Parallel",
    "Part",
    "Pooler",
    "Position",
    "Positive",
    "Prefix",
    "QKNorm",
    "RMSNorm",
    "Rate",
    "RelativeBias",
    "Rope",
    "SequenceHead",
    "Serial",
    "SingleFeedForward",
    "Sinusoidal",
    "SpanHead",
    "StackSpec",
    "Tie",
    "TokenHead",
    "Transform",
    "Vocabulary",
    "Width",
    "Wiring",
    "plain",
]
