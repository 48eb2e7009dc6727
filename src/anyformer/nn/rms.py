"""RMSNorm on the CPU with a backward pass of two kernels (Zhang & Sennrich 2019, eq. 4)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / √(mean(x²) + eps) · weight over the last dimension, in x's dtype.

    Torch's own function is a chain of single operations on the CPU, whose gradient took 4 to 6 times as long
    (benchmarks/kernels.py); elsewhere, and under a compiler, it is the better one.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    normed: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return normed


class _RMSNorm(torch.autograd.Function):
    """Keeps x and one number per row.

    With r = 1/√(mean(x²) + eps) and g = dy·w, dx = r·(g − x̂·mean(g·x̂)). LayerNorm's kernel with mean 0 and the same r
    gives r·(g − mean(g) − x̂·mean(g·x̂)) and the weight's gradient at once; what it subtracts too much is added again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        r = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, r, weight)
        y: Tensor = x * r
        return y if weight is None else y.mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, r, weight = ctx.saved_tensors
        c = x.shape[-1]
        wants = [True, weight is not None, False]
        dx, dw, _ = torch.ops.aten.native_layer_norm_backward(
            dy.contiguous(), x, [c], torch.zeros_like(r), r, weight, None, wants
        )
        total = dy.sum(-1, keepdim=True) if weight is None else (dy @ weight).unsqueeze(-1)
        return dx.addcmul_(r, total, value=1 / c), dw, None
