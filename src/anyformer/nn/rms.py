"""RMSNorm on the CPU with a backward pass of two kernels (Zhang & Sennrich 2019, eq. 4)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / √(mean(x²) + eps) · weight over the last dimension, in x's dtype.

    Torch's own function is a chain of single operations on the CPU, whose gradient made it 2 to 3 times as slow
    (benchmarks/kernels.py); elsewhere, and under a compiler, it is the better one.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    if not torch.is_grad_enabled():  # A Function costs more than it computes for the one token of a step.
        return _RMSNorm.forward(x, weight, eps)[0]
    normed: Tensor = _RMSNorm.apply(x, weight, eps)[0]  # type: ignore[no-untyped-call]
    return normed


class _RMSNorm(torch.autograd.Function):
    """Keeps x and one number per row.

    With r = 1/√(mean(x²) + eps) and g = dy·w, dx = r·(g − x̂·mean(g·x̂)). LayerNorm's kernel with mean 0 and the same r
    gives r·(g − mean(g) − x̂·mean(g·x̂)) and the weight's gradient at once; what it subtracts too much is added again.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        r = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        y = x * r
        return (y if weight is None else y.mul_(weight)), r

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None, float], output: tuple[Tensor, Tensor]) -> None:
        x, weight, ctx.eps = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, output[1], weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, r, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiable(dy, x, weight, ctx.eps)
        c = x.shape[-1]
        wants = [True, weight is not None, False]
        dx, dw, _ = torch.ops.aten.native_layer_norm_backward(
            dy.contiguous(), x, [c], torch.zeros_like(r), r, weight, None, wants
        )
        total = dy.sum(-1, keepdim=True) if weight is None else (dy @ weight).unsqueeze(-1)
        return dx.addcmul_(r, total, value=1 / c), dw, None


def _differentiable(
    dy: Tensor, x: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor | None, Tensor | None, None]:
    """The same gradients from single operations, for those who differentiate again."""
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    normed = x * r
    g = dy if weight is None else dy * weight
    dx = r * (g - normed * (g * normed).mean(-1, keepdim=True))
    dw = None if weight is None else (dy * normed).flatten(0, -2).sum(0)
    return dx, dw, None
