"""Linear maps, norms and activations as the blocks use them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anyformer.nn.precision import exact
from anyformer.nn.quantised import product
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
    if not torch.is_grad_enabled():
        return _ReLU2.forward(x)
    squared: Tensor = _ReLU2.apply(x)  # type: ignore[no-untyped-call]
    return squared


def quick_gelu(x: Tensor) -> Tensor:
    """x · σ(1.702·x) (Hendrycks & Gimpel 2016, section 2)."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu2": relu2,
    "quick_gelu": quick_gelu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "identity": lambda x: x,
}
"""relu2 is ReLU² (So et al. 2021); gelu is exact, gelu_tanh and quick_gelu approximate it (Hendrycks & Gimpel 2016)."""


class Linear(nn.Linear):
    """x Wᵀ + b, with the role of its weight. Values come from the model's initialisation, not from here.

    `keepable` says whether the weight may be kept in codes (`nn.quantised`), which leave nothing but the product.
    """

    def __init__(self, n_in: int, n_out: int, *, bias: bool, role: Role, keepable: bool = True) -> None:
        super().__init__(n_in, n_out, bias=bias)
        self.keepable = keepable
        self.roles: dict[str, Role] = {"weight": role, "bias": "bias"}

    def reset_parameters(self) -> None:
        """Nothing: the model is initialised as a whole."""

    def forward(self, x: Tensor) -> Tensor:
        """[…, n_in] -> […, n_out]."""
        return product(x, self.weight, self.bias)


class NormLayer(nn.Module):
    """LayerNorm or RMSNorm over the last dimension, with statistics in at least float32.

    Args:
        spec: the kind and its numbers.
        width: the size of the last dimension.
        heads: with it the input is [..., heads, width] and each head has a weight (and a bias) of its own.

    `starts` holds what initialisation fills each parameter with: a weight that is added to an offset of 1 begins at 0.
    """

    def __init__(self, spec: LayerNorm | RMSNorm, width: int, heads: int | None = None) -> None:
        super().__init__()
        self.roles: dict[str, Role] = {"weight": "norm", "bias": "bias"}
        self.starts = {"weight": 1.0 - spec.offset, "bias": 0.0}
        self.width, self.heads, self.eps = width, heads, spec.eps
        self.centred, self.offset = isinstance(spec, LayerNorm), spec.offset
        shape = (width,) if heads is None else (heads, width)
        self.weight = nn.Parameter(torch.empty(shape)) if spec.weight else None
        self.bias = nn.Parameter(torch.empty(shape)) if spec.bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[…, width] -> the same."""
        wide = exact(x.dtype)
        weight = None if self.weight is None else self.weight.to(wide)
        bias = None if self.bias is None else self.bias.to(wide)
        if weight is not None and self.offset:
            weight = weight + self.offset
        if self.heads is None:
            return self._normed(x.to(wide), weight, bias).to(x.dtype)
        # The kernels take one weight for all rows, so those of heads come after.
        normed = self._normed(x.to(wide), None, None)
        normed = normed if weight is None else normed * weight
        return (normed if bias is None else normed + bias).to(x.dtype)

    def _normed(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if self.centred:
            return F.layer_norm(x, (self.width,), weight, bias, self.eps)
        normed = rms_norm(x, weight, self.eps)
        return normed if bias is None else normed + bias

    def extra_repr(self) -> str:
        """The kind and its numbers."""
        kind = "layer" if self.centred else "rms"
        heads = "" if self.heads is None else f"{self.heads} heads of "
        return f"{kind}, {heads}{self.width}, eps={self.eps}" + (", offset=1" if self.offset else "")


def norm_layer(spec: Norm, width: int, heads: int | None = None) -> nn.Module:
    """The module of a norm, with weights of its own for each head where `heads` is given; the identity for none."""
    return nn.Identity() if isinstance(spec, NoNorm) else NormLayer(spec, width, heads)
