"""Norms: LayerNorm, RMSNorm, and what is normed of queries and keys."""

from typing import Annotated, Literal

from pydantic import Field

from anyformer.spec.part import Part, Positive


class NoNorm(Part):
    """The identity."""

    kind: Literal["none"] = "none"


class LayerNorm(Part):
    """(x − mean) / √(variance + eps) · (offset + weight) + bias, over the last dimension (Ba et al. 2016, eq. 4)."""

    kind: Literal["layer"] = "layer"
    eps: Positive = 1e-5
    weight: bool = True
    bias: bool = True
    offset: Literal[0, 1] = 0


class RMSNorm(Part):
    """x / √(mean(x²) + eps) · (offset + weight) + bias, over the last dimension (Zhang & Sennrich 2019, eq. 4).

    An offset of 1 keeps the weight near 0 (Gemma).
    """

    kind: Literal["rms"] = "rms"
    eps: Positive = 1e-6
    weight: bool = True
    bias: bool = False
    offset: Literal[0, 1] = 0


Norm = Annotated[NoNorm | LayerNorm | RMSNorm, Field(discriminator="kind")]


class QKNorm(Part):
    """A norm on queries and keys (Henry et al. 2020), over each head or the whole projection, around rotation.

    `weights`: one weight [d_head] for all heads, or one for each head ("per_head", [n_heads, d_head]).
    """

    over: Literal["head", "projection"] = "head"
    weights: Literal["shared", "per_head"] = "shared"
    order: Literal["before", "after"] = "before"
    norm: Norm = RMSNorm()
