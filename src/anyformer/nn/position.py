"""Positions: rotations of queries and keys, and what is added to the embeddings. Tables are at least float32.

Nothing here is a buffer: angles follow from the specification and the positions at each call, so that a change of dtype
cannot touch them.
"""

import math
from typing import Any

import torch
from torch import Tensor

from anyformer.nn.precision import exact
from anyformer.spec.positions import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NTKScaling,
    Rope,
    Sinusoidal,
    YarnScaling,
)

Rotation = tuple[Tensor, Tensor]
"""cos and signed sin, each [B or 1, T, 1, width] in at least float32."""


def angles_at(positions: Tensor, theta: float, width: int, dtype: torch.dtype) -> Tensor:
    """position · theta^(−2i / width) for i = 0 … width/2 − 1: [..., width / 2] in `dtype`, at least float32."""
    frequencies = 1.0 / theta ** _powers(width, positions.device, dtype)
    return positions[..., None].to(frequencies.dtype) * frequencies


def _powers(width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """2i / width for each pair i."""
    return torch.arange(0, width, 2, device=device, dtype=exact(dtype)) / width


def inverse_frequencies(
    rope: Rope, width: int, lengths: Tensor | None, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """What each of the `width` / 2 pairs turns by from one position to the next, in radians, after scaling.

    Args:
        rope: the encoding; each scaling's equation and paper stand in its docstring in `spec/positions.py`.
        width: the channels of a head that turn.
        lengths: int64 [B] or [B, T], how long each token's row (or document) is, stored tokens included. Read only
            where `rope.by_length`.
        device: where the result is.
        dtype: the model's; the result is in float32 at least.

    Returns:
        [width / 2], [B, width / 2] or [B, T, width / 2], as `lengths`.

    Raises:
        ValueError: no lengths where frequencies depend on them.
    """
    scaling = rope.scaling
    powers = _powers(width, device, dtype)
    plain = 1.0 / rope.theta**powers
    match scaling:
        case LinearScaling():
            return plain / scaling.factor
        case NTKScaling():
            return plain * scaling.factor ** (-powers * (width / (width - 2)))
        case DynamicNTKScaling():
            past = (_given(lengths, rope)[..., None].to(plain.dtype) / scaling.original - 1.0).clamp(min=0.0)
            # 1 + factor·(L/original − 1) is exactly 1 up to `original`, and so are its powers.
            return plain * (1.0 + scaling.factor * past) ** (-powers * (width / (width - 2)))
        case YarnScaling():
            ramp = _yarn_ramp(scaling, rope.theta, width, plain)
            return plain / scaling.factor * ramp + plain * (1.0 - ramp)
        case Llama3Scaling():
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            turns = scaling.original / (2 * math.pi) * plain
            kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
            return plain / scaling.factor * (1.0 - kept) + plain * kept
        case LongRopeScaling():
            short, long = (torch.tensor(x, device=device, dtype=plain.dtype) for x in (scaling.short, scaling.long))
            return plain / torch.where(_given(lengths, rope)[..., None] > scaling.original, long, short)
    return plain


def _given(lengths: Tensor | None, rope: Rope) -> Tensor:
    if lengths is None:
        raise ValueError(
            f"{rope.scaling.kind} scaling turns by the length of each row; got no lengths: pass int64 [B] or [B, T]"
        )
    return lengths


def _yarn_ramp(scaling: YarnScaling, theta: float, width: int, like: Tensor) -> Tensor:
    """0 for pairs that keep their frequency, 1 for those that are interpolated (Peng et al. 2023, eq. 18–20).

    The ramp is over the number of the pair, between the pairs that turn `beta_fast` and `beta_slow` times within
    `original` positions, and clamped to the head, as in the paper's published code.
    """

    def pair(turns: float) -> float:
        return width * math.log(scaling.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high = max(high, low + 0.001)
    pairs_in_order = torch.arange(width // 2, device=like.device, dtype=like.dtype)
    return ((pairs_in_order - low) / (high - low)).clamp(0.0, 1.0)


def rotation(rope: Rope, d_head: int, positions: Tensor, dtype: torch.dtype, lengths: Tensor | None = None) -> Rotation:
    """The tables that turn heads of width `d_head` at `positions` [B or 1, T] (Su et al. 2021, eq. 34).

    The sine carries the sign of the pair's first or second member, so that one multiply-add with the pair swapped is
    the whole rotation. An attention factor of the scaling is in both tables.

    Args:
        rope: the encoding.
        d_head: the width of a head.
        positions: int64 [B or 1, T].
        dtype: of what will be turned; the tables are in float32 at least.
        lengths: int64 [B] or [B, T], how long each token's row (or document) is; needed where `rope.by_length`.

    Raises:
        ValueError: no lengths where frequencies depend on them.
    """
    frequencies = inverse_frequencies(rope, rope.width(d_head), lengths, positions.device, dtype)
    if frequencies.dim() == 2:
        frequencies = frequencies[:, None]
    angles = positions[..., None].to(frequencies.dtype) * frequencies
    cos, sin = angles.cos(), angles.sin()
    if isinstance(rope.scaling, YarnScaling | LongRopeScaling) and rope.scaling.attention_factor != 1.0:
        cos, sin = cos * rope.scaling.attention_factor, sin * rope.scaling.attention_factor
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
    if not torch.is_grad_enabled():  # A Function costs more than it computes for the one token of a step.
        return _Rotate.forward(x, cos, sin, layout)
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
    """What is added to the embeddings at `positions` [B or 1, T]: [B or 1, T, d_model] in `dtype`.

    Vaswani et al. 2017, section 3.5, at position + `spec.offset`.
    """
    angles = angles_at(positions + spec.offset, spec.theta, d_model, dtype)
    if spec.layout == "halves":
        return torch.cat([angles.sin(), angles.cos()], -1).to(dtype)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2).to(dtype)
