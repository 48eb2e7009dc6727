"""Attention: what a token sees, how scores are made of queries and keys, grouped and latent heads."""

from typing import Annotated, Any, Literal

from pydantic import Field

from anyformer.spec.norms import Norm, QKNorm, RMSNorm
from anyformer.spec.part import Heads, Length, Part, Positive, Rate, Width
from anyformer.spec.positions import Position


class _Windowed(Part):
    window: Length | None = None
    sinks: Annotated[int, Field(ge=0, le=1 << 20)] = 0


class Causal(_Windowed):
    """A token sees itself and what came before: with a `window` W the W − 1 tokens before it and the first `sinks`."""

    kind: Literal["causal"] = "causal"


class Bidirectional(_Windowed):
    """A token sees all: with a `window` W those less than W positions away on either side, and the first `sinks`."""

    kind: Literal["bidirectional"] = "bidirectional"


class Prefix(_Windowed):
    """Causal, and a call's `prefix` is seen by all (Raffel et al. 2020, figure 3); a `window` limits both."""

    kind: Literal["prefix"] = "prefix"


Mask = Annotated[Causal | Bidirectional | Prefix, Field(discriminator="kind")]


class ScoreFields(Part):
    """What every kind of attention may do with its scores.

    Scores are softcap · tanh(scale·q·k / softcap) with a `softcap`, scale·q·k without. `sink_logit`: a trained logit
    for each head joins the softmax and has no value (gpt-oss 2025).
    """

    position: Position
    mask: Mask = Causal()
    softcap: Positive | None = None
    sink_logit: bool = False


class GroupedFields(ScoreFields):
    """What a recipe and a specification say of grouped attention in the same words.

    `clip` limits the elements of q, k and v, as projected, to [−clip, clip] (MPT, OLMo).
    """

    kind: Literal["grouped"] = "grouped"
    n_heads: Heads
    qk_norm: QKNorm | None = None
    clip: Positive | None = None


def _grouped_scale(data: dict[str, Any]) -> float:
    return float(data.get("d_head", 1) ** -0.5)


class Grouped(GroupedFields):
    """Grouped-query attention (Ainslie et al. 2023): G = n_kv_heads of n_heads; G = H is MHA, G = 1 is MQA.

    `d_head` is free of d_model / n_heads; `d_value` is the width of a value; `scale` is 1/√d_head where not given.
    `dropout` falls on the attention weights, `out_dropout` on the output of the last projection.
    """

    n_kv_heads: Heads
    d_head: Width
    d_value: Width
    scale: Positive = Field(default_factory=_grouped_scale)
    qkv_bias: bool = False
    out_bias: bool = False
    dropout: Rate = 0.0
    out_dropout: Rate = 0.0


class LatentFields(ScoreFields):
    """What a recipe and a specification say of latent attention in the same words."""

    kind: Literal["latent"] = "latent"
    n_heads: Heads
    q_rank: Width | None = None
    kv_rank: Width
    norm: Norm = RMSNorm()


def _latent_scale(data: dict[str, Any]) -> float:
    return float(max(1, data.get("d_nope", 1) + data.get("d_rope", 0)) ** -0.5)


class Latent(LatentFields):
    """Multi-head latent attention (DeepSeek-V2 2024, section 2.1): keys and values come from one latent of `kv_rank`.

    A head's query and key have `d_nope` channels without position, then `d_rope` that turn; the key's turning part is
    one for all heads. `norm` is on both latents; without `q_rank` queries are projected directly. `bias` is that of
    the two projections down to the latents (of the query's projection where there is no q_rank: none). `scale` is
    1/√(d_nope + d_rope) where not given. A cache holds the latent after its norm, and the turning key.
    """

    d_nope: Width
    d_rope: Annotated[int, Field(ge=0, le=1 << 20)]
    d_value: Width
    scale: Positive = Field(default_factory=_latent_scale)
    bias: bool = False
    out_bias: bool = False
    dropout: Rate = 0.0
    out_dropout: Rate = 0.0

    @property
    def d_head(self) -> int:
        """The width of a head's query and key."""
        return self.d_nope + self.d_rope

    @property
    def n_kv_heads(self) -> int:
        """Every query head has keys and values of its own once they are unfolded."""
        return self.n_heads


Attention = Annotated[Grouped | Latent, Field(discriminator="kind")]
