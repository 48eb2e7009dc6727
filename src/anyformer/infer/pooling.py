"""States of tokens to one vector a text, by the pooling modes of sentence-transformers (Reimers & Gurevych 2019)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from anyformer.errors import UserError
from anyformer.nn.heads import pooled
from anyformer.nn.layers import ACTIVATIONS
from anyformer.nn.precision import exact

MODES = ("cls", "max", "mean", "mean_sqrt_len", "weighted_mean", "last")
"""In the order in which sentence-transformers concatenates several."""
_PICKED = {"cls": "first", "last": "last", "mean": "mean"}


def pool(hidden: Tensor, real: Tensor, modes: Sequence[str], skip: int = 0) -> Tensor:
    """One vector a row, [B, C · len(modes)], what each mode makes of it side by side; float32, or float64 for float64.

    cls and last are the first and last counted token's state, max is the largest of each channel, mean the sum S over
    their number n, mean_sqrt_len S/√n, weighted_mean Σ i·hᵢ / Σ i with i = 1, 2, … along the row. A row without counted
    tokens gives zeros, whatever its states hold.

    Args:
        hidden: states [B, T, C].
        real: bool [B, T], padded on either side. A padded state has no influence.
        modes: some of `MODES`.
        skip: the first so many real tokens of each row do not count; the weights of weighted_mean count them.
    """
    wide = hidden.to(exact(hidden.dtype))
    places = real.cumsum(1)
    counted = real & (places > skip)
    found = [pooled(wide, counted, _PICKED[m]) if m in _PICKED else _reduced(wide, counted, places, m) for m in modes]
    return torch.where(counted.any(1, keepdim=True), torch.cat(found, -1), 0.0)


def _reduced(hidden: Tensor, counted: Tensor, places: Tensor, mode: str) -> Tensor:
    within = counted[..., None]
    if mode == "max":
        return torch.where(within, hidden, -torch.inf).amax(1)
    weights = (places * counted).to(hidden.dtype) if mode == "weighted_mean" else counted.to(hidden.dtype)
    total = (torch.where(within, hidden, 0.0) * weights[..., None]).sum(1)
    scale = weights.sum(1, keepdim=True).clamp(min=1)
    return total / (scale.sqrt() if mode == "mean_sqrt_len" else scale)


@dataclass(frozen=True, eq=False)
class Dense:
    """activation(W·x + b) of a pooled vector.

    Attributes:
        weight: [out, in], floating-point.
        bias: [out], or None.
        activation: one of "tanh", "identity", "relu", "gelu", "silu", "sigmoid".

    Raises `UserError` for shapes that do not fit and for an unknown activation.
    """

    weight: Tensor
    bias: Tensor | None = None
    activation: str = "tanh"

    def __post_init__(self) -> None:
        given = [list(part.shape) for part in (self.weight, self.bias) if part is not None]
        if self.weight.dim() != 2 or (self.bias is not None and self.bias.shape != self.weight.shape[:1]):
            raise UserError("a dense layer's weights do not fit", got=given, expected="weight [out, in], bias [out]")
        if self.activation not in DENSE_ACTIVATIONS:
            expected = ", ".join(DENSE_ACTIVATIONS)
            raise UserError("unknown activation of a dense layer", got=self.activation, expected=expected)

    @property
    def widths(self) -> tuple[int, int]:
        """In and out."""
        return self.weight.shape[1], self.weight.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        """Vectors [B, in] -> [B, out], in the dtype and on the device of `x`."""
        bias = None if self.bias is None else self.bias.to(x)
        return ACTIVATIONS[self.activation](F.linear(x, self.weight.to(x), bias))


DENSE_ACTIVATIONS = {
    "tanh": "torch.nn.modules.activation.Tanh",
    "identity": "torch.nn.modules.linear.Identity",
    "relu": "torch.nn.modules.activation.ReLU",
    "gelu": "torch.nn.modules.activation.GELU",
    "silu": "torch.nn.modules.activation.SiLU",
    "sigmoid": "torch.nn.modules.activation.Sigmoid",
}
"""What a dense layer may end with, and the name of it that sentence-transformers writes."""
