"""Feed-forward networks: dense (Vaswani et al. 2017, eq. 2) and gated (Shazeer 2020)."""

import torch.nn.functional as F
from torch import Tensor, nn

from anyformer.nn.layers import ACTIVATIONS, Linear
from anyformer.spec.parts import Dense, FeedForward, Gated


class DenseFeedForward(nn.Module):
    """down(act(up(x)))."""

    def __init__(self, spec: Dense, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.act = ACTIVATIONS[spec.activation]
        self.up = Linear(d_model, spec.d_ff, bias=spec.bias, role="hidden")
        self.down = Linear(spec.d_ff, d_model, bias=spec.bias, role="residual")

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        return _dropped(self, self.down(_inner(self, self.act(self.up(x)))))


class GatedFeedForward(nn.Module):
    """down(act(gate(x)) · up(x))."""

    def __init__(self, spec: Gated, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.act = ACTIVATIONS[spec.activation]
        self.gate = Linear(d_model, spec.d_ff, bias=spec.bias, role="hidden")
        self.up = Linear(d_model, spec.d_ff, bias=spec.bias, role="hidden")
        self.down = Linear(spec.d_ff, d_model, bias=spec.bias, role="residual")

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        return _dropped(self, self.down(_inner(self, self.act(self.gate(x)) * self.up(x))))


def _inner(ffn: DenseFeedForward | GatedFeedForward, x: Tensor) -> Tensor:
    return F.dropout(x, ffn.spec.dropout) if ffn.training and ffn.spec.dropout else x


def _dropped(ffn: DenseFeedForward | GatedFeedForward, x: Tensor) -> Tensor:
    return F.dropout(x, ffn.spec.out_dropout) if ffn.training and ffn.spec.out_dropout else x


def feed_forward(spec: FeedForward, d_model: int) -> DenseFeedForward | GatedFeedForward:
    """The module of a feed-forward specification."""
    return DenseFeedForward(spec, d_model) if isinstance(spec, Dense) else GatedFeedForward(spec, d_model)
