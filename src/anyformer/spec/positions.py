"""Position encodings: in attention (rotary with its scalings, ALiBi, T5's buckets) and on the embeddings."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field

from anyformer.spec.part import Length, Part, Positive


class NoScaling(Part):
    """Frequencies as trained."""

    kind: Literal["none"] = "none"


class LinearScaling(Part):
    """Every frequency divided by `factor`: position interpolation (Chen et al. 2023)."""

    kind: Literal["linear"] = "linear"
    factor: Positive


class NTKScaling(Part):
    """theta · factor^(d/(d − 2)) for the d channels that turn: NTK-aware interpolation (bloc97 2023)."""

    kind: Literal["ntk"] = "ntk"
    factor: Positive


class DynamicNTKScaling(Part):
    """theta · (factor·L/original − (factor − 1))^(d/(d − 2)) where a row's length L is past `original` (emozilla 2023).

    L is each row's own, stored tokens included; keys stay unrotated in the cache.
    """

    kind: Literal["dynamic"] = "dynamic"
    factor: Positive
    original: Length


def _yarn_attention_factor(data: dict[str, Any]) -> float:
    factor = data.get("factor", 1.0)
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


class YarnScaling(Part):
    """Slow frequencies interpolated by `factor`, fast ones kept, a ramp between (Peng et al. 2023, section 3.4).

    A pair that turns more than `beta_fast` times within `original` positions keeps its frequency, one that turns less
    than `beta_slow` times is divided by `factor`; `truncate` rounds the ends of the ramp outwards to whole pairs.
    cos and sin are multiplied by `attention_factor`, 0.1·ln(factor) + 1 where not given (their eq. 22).
    """

    kind: Literal["yarn"] = "yarn"
    factor: Positive
    original: Length
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    truncate: bool = True
    attention_factor: Positive = Field(default_factory=_yarn_attention_factor)


class Llama3Scaling(Part):
    """Wavelengths above original/low divided by `factor`, below original/high kept, between blended (Llama 3.1)."""

    kind: Literal["llama3"] = "llama3"
    factor: Positive
    original: Length
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0


class LongRopeScaling(Part):
    """A divisor for each pair: `short` up to `original` tokens in a row, `long` past it (Ding et al. 2024).

    cos and sin are multiplied by `attention_factor` at every length. A row's length is its own, stored tokens included;
    keys stay unrotated in the cache.
    """

    kind: Literal["longrope"] = "longrope"
    original: Length
    short: Annotated[tuple[Positive, ...], Field(strict=False, min_length=1)]
    long: Annotated[tuple[Positive, ...], Field(strict=False, min_length=1)]
    attention_factor: Positive = 1.0


Scaling = Annotated[
    NoScaling | LinearScaling | NTKScaling | DynamicNTKScaling | YarnScaling | Llama3Scaling | LongRopeScaling,
    Field(discriminator="kind"),
]


class Rope(Part):
    """Rotary positions: pair i of the first `fraction` of each head turns by position · theta^(−2i/d) (Su et al. 2021).

    `layout` says which channels make a pair: i and i + d/2 ("half"), or 2i and 2i + 1 ("interleaved").
    """

    kind: Literal["rope"] = "rope"
    theta: Positive = 10000.0
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    layout: Literal["half", "interleaved"] = "half"
    scaling: Scaling = NoScaling()

    def width(self, d_head: int) -> int:
        """The number of channels of a head that turn."""
        exact = self.fraction * d_head
        return round(exact) if abs(exact - round(exact)) < 1e-6 else int(exact)

    @property
    def by_length(self) -> bool:
        """Whether frequencies depend on the length of the row, so that stored keys must be turned anew."""
        return isinstance(self.scaling, DynamicNTKScaling | LongRopeScaling)


class Alibi(Part):
    """−slope · distance on the scores, a slope for each head (Press et al. 2022, section 3).

    Slopes of H heads are 2^(−max_bias·i/H) for i = 1 … H where H is a power of two, and otherwise those of the power
    below, followed by every other one of the power above. `symmetric` lowers keys on both sides of the query; without
    it only keys before the query are lowered. Every slope is multiplied by `scale` (1/√d_head in Falcon).
    """

    kind: Literal["alibi"] = "alibi"
    max_bias: Positive = 8.0
    scale: Positive = 1.0
    symmetric: bool = True


class RelativeBias(Part):
    """A trained bias for each head and bucket of key − query positions (Raffel et al. 2020, section 2.1).

    Half of a side's buckets stand for one distance each, the rest grow logarithmically up to `max_distance`.
    `bidirectional` gives each side half of the buckets; otherwise keys after the query share bucket 0. `shared`: one
    table for all layers of the stack that say so; otherwise the layer has its own.
    """

    kind: Literal["relative"] = "relative"
    n_buckets: Annotated[int, Field(ge=2, le=1 << 20)] = 32
    max_distance: Length = 128
    bidirectional: bool = False
    shared: bool = True


class NoPosition(Part):
    """No position here; a causal mask alone still tells order (Kazemnejad et al. 2023)."""

    kind: Literal["none"] = "none"


Position = Annotated[Rope | Alibi | RelativeBias | NoPosition, Field(discriminator="kind")]


class Sinusoidal(Part):
    """Sines and cosines of (position + offset) · theta^(−2i/C) added to the embeddings (Vaswani et al. 2017, 3.5).

    `layout`: sine and cosine of a frequency side by side ("interleaved"), or all sines first ("halves").
    """

    kind: Literal["sinusoidal"] = "sinusoidal"
    theta: Positive = 10000.0
    layout: Literal["interleaved", "halves"] = "interleaved"
    offset: Annotated[int, Field(ge=0, le=1 << 20)] = 0


class Learned(Part):
    """A trained vector for each of the stack's `max_positions` positions, added to the embeddings.

    The table has `offset` rows before them, so that position t reads row t + offset (2 in BART and RoBERTa).
    """

    kind: Literal["learned"] = "learned"
    offset: Annotated[int, Field(ge=0, le=1 << 20)] = 0


EmbedPosition = Annotated[Sinusoidal | Learned | NoPosition, Field(discriminator="kind")]

__all__ = [
    "Alibi",
    "DynamicNTKScaling",
    "EmbedPosition",
    "Learned",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "NTKScaling",
    "NoPosition",
    "NoScaling",
    "Position",
    "RelativeBias",
    "Rope",
    "Scaling",
    "Sinusoidal",
    "YarnScaling",
]
