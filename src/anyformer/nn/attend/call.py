"""One attention call as the backends receive it, checked."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from anyformer.nn.attend.bias import Bias
from anyformer.nn.attend.masks import All, Visible
from anyformer.nn.attend.shapes import said


class Unsupported(ValueError):
    """A backend cannot compute this call; the message says why."""


@dataclass(frozen=True)
class Call:
    """softmax over visible keys, joined by the sink logit, of softcap(scale·q·k) + bias, times v.

    q: [B, T, H, D], k: [B, S, G, D], v: [B, S, G, Dv] with H a multiple of G: query head h reads key head h // (H / G).
    `sinks` is a logit per head [H]. `dropout` is the rate in force now, zero in evaluation.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    visible: Visible
    bias: Bias | None
    scale: float
    softcap: float | None
    sinks: Tensor | None
    dropout: float
    memo: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What a backend worked out for this call."""


def checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Visible,
    bias: Bias | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
) -> Call:
    """A `Call` from the arguments of `attend`. Raises `ValueError` with the shapes or the value at fault."""
    _check_tensors(q, k, v)
    (b, t, h, d), (kb, s, g, kd) = q.shape, k.shape
    if (kb, kd) != (b, d) or tuple(v.shape[:3]) != (b, s, g):
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} disagree: "
            "q and k share B and D, k and v share B, S and G"
        )
    if h % g:
        raise ValueError(f"{h} query heads are not a multiple of {g} key/value heads")
    if not isinstance(visible, Visible):
        raise ValueError(f"visible is a description from af.masks; got {said(visible)}: wrap a tensor in Dense")
    All.of(visible).check((b, h, t, s))
    if bias is not None:
        if not isinstance(bias, Bias):
            raise ValueError(f"bias is a description, AlibiBias, BucketBias or DenseBias; got {said(bias)}")
        bias.check((b, h, t, s))
    if softcap is not None and not (_number(softcap) and softcap > 0):
        raise ValueError(f"softcap is a finite number above 0, or None; got {softcap!r}")
    if scale is not None and not _number(scale):
        raise ValueError(f"scale is a finite number, or None for 1/√D; got {scale!r}")
    if not (_number(dropout) and 0 <= dropout < 1):
        raise ValueError(f"dropout is a rate in [0, 1); got {dropout!r}")
    if sinks is not None and not (
        isinstance(sinks, Tensor) and sinks.is_floating_point() and tuple(sinks.shape) == (h,)
    ):
        raise ValueError(f"sinks holds one float logit a head, [{h}]; got {said(sinks)}")
    return Call(q, k, v, visible, bias, d**-0.5 if scale is None else scale, softcap, sinks, dropout)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises `ValueError` for what is not three tensors of floats of four dimensions, none of them empty."""
    if not all(isinstance(x, Tensor) and x.dim() == 4 for x in (q, k, v)):
        shapes = f"q {said(q)}, k {said(k)}, v {said(v)}"
        raise ValueError(f"attend takes q [B, T, H, D], k [B, S, G, D], v [B, S, G, Dv]; got {shapes}")
    if min(min(x.shape) for x in (q, k, v)) < 1:
        raise ValueError(
            f"nothing to attend to: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; sizes are ≥ 1"
        )
    if not all(x.is_floating_point() for x in (q, k, v)):
        raise ValueError(f"attend takes floating-point numbers; got q {q.dtype}, k {k.dtype}, v {v.dtype}")
    if not q.dtype == k.dtype == v.dtype and (q.is_meta or not torch.is_autocast_enabled(q.device.type)):
        got = f"q {q.dtype}, k {k.dtype}, v {v.dtype}"
        raise ValueError(f"q, k and v are of one dtype outside torch.autocast; got {got}; k.to(q.dtype), say")
