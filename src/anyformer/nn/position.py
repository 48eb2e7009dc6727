"""Positions: rotations of queries and keys, and what is added to the embeddings. Tables are at least float32.

Nothing here is a buffer: angles follow from the specification and the positions at each call, so that a change of dtype
cannot touch them.
"""

from typing import Any

import torch
from torch import Tensor

from anyformer.nn.precision import exact
from anyformer.spec.parts import Rope, Sinusoidal

Rotation = tuple[Tensor, Tensor]
"""cos and signed sin, each [B or 1, T, 1, width] in at least float32."""


def angles_at(positions: Tensor, theta: float, width: int, dtype: torch.dtype) -> Tensor:
    """position · theta^(−2i / width) for i = 0 … width/2 − 1: [..., width / 2] in `dtype`, at least float32."""
    wide = exact(dtype)
    powers = torch.arange(0, width, 2, device=positions.device, dtype=wide) / width
    return positions[..., None].to(wide) * (1.0 / theta**powers)


def rotation(rope: Rope, d_head: int, positions: Tensor, dtype: torch.dtype) -> Rotation:
    """The tables that turn heads of width `d_head` at `positions` [B or 1, T] (Su et al. 2021, eq. 34).

    The sine carries the sign of the pair's first or second member, so that one multiply-add with the pair swapped is
    the whole rotation.
    """
    angles = angles_at(positions, rope.theta, rope.width(d_head), dtype)
    cos, sin = angles.cos(), angles.sin()
    if rope.layout == "half":
        cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    else:
        cos, sin = torch.stack([cos, cos], -1).flatten(-2), torch.stack([-sin, sin], -1).flatten(-2)
    return cos.unsqueeze(-2), sin.unsqueeze(-2)


def rotate(x: Tensor, tables: Rotation, layout: str) -> Tensor:
    """Turns the first channels of x [B, T, H, D] by the tables; the rest pass through."""
    cos, sin = tables
    width = cos.shape[-1]
    turning = x[..., :width] if width < x.shape[-1] else x
    turned = _turned(turning.to(exact(x.dtype)), cos, sin, layout).to(x.dtype)
    return turned if width == x.shape[-1] else torch.cat([turned, x[..., width:]], -1)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    if torch.compiler.is_compiling():
        # A compiler fuses single operations by itself and does not trace a Function.
        a, b = pairs(x, layout)
        swapped = torch.cat([b, a], -1) if layout == "half" else torch.stack([b, a], -1).flatten(-2)
        return x * cos + swapped * sin
    turned: Tensor = _Rotate.apply(x, cos, sin, layout)  # type: ignore[no-untyped-call]
    return turned


def pairs(x: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """The first and the second members of all pairs, as views."""
    if layout == "half":
        return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return x[..., 0::2], x[..., 1::2]


class _Rotate(torch.autograd.Function):
    """A rotation, whose gradient is the rotation back: it keeps the tables and nothing of x."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, str], output: Tensor) -> None:
        _, cos, sin, ctx.layout = inputs
        ctx.save_for_backward(cos, sin)

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
        turned = x * cos
        (first, second), (a, b), (to_a, to_b) = pairs(turned, layout), pairs(x, layout), pairs(sin, layout)
        first.addcmul_(b, to_a)
        second.addcmul_(a, to_b)
        return turned

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        turned: Tensor = _Rotate.apply(grad, cos, -sin, ctx.layout)  # type: ignore[no-untyped-call]
        return turned, None, None, None


def sinusoids(spec: Sinusoidal, d_model: int, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the embeddings at `positions` [B or 1, T]: [B or 1, T, d_model] in `dtype`."""
    angles = angles_at(positions, spec.theta, d_model, dtype)
    if spec.layout == "halves":
        return torch.cat([angles.sin(), angles.cos()], -1).to(dtype)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2).to(dtype)
