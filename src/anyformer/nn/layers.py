"""Linear maps, norms and activations as the blocks use them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anyformer.nn.precision import exact
from anyformer.nn.rms import rms_norm
from anyformer.nn.roles import Role
from anyformer.spec.parts import LayerNorm, NoNorm, Norm, RMSNorm


class _ReLU2(torch.autograd.Function):
    """Keeps x alone, in few kernels each way."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        r = F.relu(x)
        return r * r

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * (F.relu(x) * grad)


def relu2(x: Tensor) -> Tensor:
    """max(x, 0)² (So et al. 2021)."""
    if torch.compiler.is_compiling():
        return F.relu(x).square()
    squared: Tensor = _ReLU2.apply(x)  # type: ignore[no-untyped-call]
    return squared


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu2": relu2,
}
"""relu2 is ReLU² (So et al. 2021); gelu is exact, gelu_tanh its approximation (Hendrycks & Gimpel 2016)."""


class Linear(nn.Linear):
    """x Wᵀ + b, with the role of its weight. Values come from the model's initialisation, not from here."""

    def __init__(self, n_in: int, n_out: int, *, bias: bool, role: Role) -> None:
        super().__init__(n_in, n_out, bias=bias)
        self.roles: dict[str, Role] = {"weight": role, "bias": "bias"}

    def reset_parameters(self) -> None:
        """Nothing: the model is initialised as a whole."""


class NormLayer(nn.Module):
    """LayerNorm or RMSNorm over the last dimension, with statistics in at least float32."""

    def __init__(self, spec: LayerNorm | RMSNorm, width: int) -> None:
        super().__init__()
        self.roles: dict[str, Role] = {"weight": "norm", "bias": "bias"}
        self.width, self.eps, self.centred = width, spec.eps, isinstance(spec, LayerNorm)
        self.weight = nn.Parameter(torch.empty(width)) if spec.weight else None
        self.bias = nn.Parameter(torch.empty(width)) if isinstance(spec, LayerNorm) and spec.bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[…, width] -> the same."""
        wide = exact(x.dtype)
        weight = None if self.weight is None else self.weight.to(wide)
        if self.centred:
            bias = None if self.bias is None else self.bias.to(wide)
            return F.layer_norm(x.to(wide), (self.width,), weight, bias, self.eps).to(x.dtype)
        return rms_norm(x.to(wide), weight, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        """The kind and its numbers."""
        return f"{'layer' if self.centred else 'rms'}, {self.width}, eps={self.eps}"


def norm_layer(spec: Norm, width: int) -> nn.Module:
    """The module of a norm; the identity for none."""
    return nn.Identity() if isinstance(spec, NoNorm) else NormLayer(spec, width)
