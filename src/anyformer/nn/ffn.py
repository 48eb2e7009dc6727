"""Feed-forward networks: dense (Vaswani et al. 2017, eq. 2) and gated (Shazeer 2020)."""

from typing import TYPE_CHECKING, overload

import torch.nn.functional as F
from torch import Tensor, nn

from anyformer.nn.layers import ACTIVATIONS, Linear
from anyformer.spec.ffn import Dense, FeedForward, Gated, MoE, SingleFeedForward

if TYPE_CHECKING:
    from anyformer.nn.moe import MoELayer


def inner(spec: SingleFeedForward, up: Tensor, gate: Tensor | None = None, *, training: bool = False) -> Tensor:
    """What `down` reads, [..., F], from the projections up(x) and, of a gated network, gate(x).

    act(up), or act(min(gate, limit)) · (clamp(up, ±limit) + up_offset), and dropout in training.
    """
    act = ACTIVATIONS[spec.activation]
    if isinstance(spec, Dense):
        x = act(up)
    else:
        assert gate is not None
        if spec.limit is not None:
            gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
        x = act(gate) * (up + spec.up_offset if spec.up_offset else up)
    return F.dropout(x, spec.dropout) if training and spec.dropout else x


class DenseFeedForward(nn.Module):
    """down(act(up(x)))."""

    def __init__(self, spec: Dense, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.up = Linear(d_model, spec.d_ff, bias=spec.bias, role="hidden")
        self.down = Linear(spec.d_ff, d_model, bias=spec.bias, role="residual")

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        return _dropped(self, self.down(inner(self.spec, self.up(x), training=self.training)))


class GatedFeedForward(nn.Module):
    """down(act(gate(x)) · (up(x) + up_offset)), gate(x) and up(x) limited where the specification says so."""

    def __init__(self, spec: Gated, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.gate = Linear(d_model, spec.d_ff, bias=spec.bias, role="hidden")
        self.up = Linear(d_model, spec.d_ff, bias=spec.bias, role="hidden")
        self.down = Linear(spec.d_ff, d_model, bias=spec.bias, role="residual")

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        return _dropped(self, self.down(inner(self.spec, gate=self.gate(x), up=self.up(x), training=self.training)))


def _dropped(ffn: DenseFeedForward | GatedFeedForward, x: Tensor) -> Tensor:
    return F.dropout(x, ffn.spec.out_dropout) if ffn.training and ffn.spec.out_dropout else x


@overload
def feed_forward(spec: SingleFeedForward, d_model: int) -> DenseFeedForward | GatedFeedForward: ...


@overload
def feed_forward(spec: FeedForward, d_model: int) -> "DenseFeedForward | GatedFeedForward | MoELayer": ...


def feed_forward(spec: FeedForward, d_model: int) -> "DenseFeedForward | GatedFeedForward | MoELayer":
    """The module of a feed-forward specification."""
    if isinstance(spec, MoE):
        from anyformer.nn.moe import MoELayer

        return MoELayer(spec, d_model)
    return DenseFeedForward(spec, d_model) if isinstance(spec, Dense) else GatedFeedForward(spec, d_model)
