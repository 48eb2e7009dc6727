"""One attention call as the backends receive it, checked."""

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from anyformer.nn.attend.bias import Bias
from anyformer.nn.attend.masks import All, Visible


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
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        raise ValueError(f"attend takes q [B, T, H, D], k [B, S, G, D], v [B, S, G, Dv]; got {shapes}")
    (b, t, h, d), (kb, s, g, kd) = q.shape, k.shape
    if (kb, kd) != (b, d) or tuple(v.shape[:3]) != (b, s, g):
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} disagree: "
            "q and k share B and D, k and v share B, S and G"
        )
    if h % g:
        raise ValueError(f"{h} query heads are not a multiple of {g} key/value heads")
    if not isinstance(visible, Visible):
        raise ValueError(
            f"visible is a description from af.masks; got {type(visible).__name__}: wrap a tensor in Dense"
        )
    All.of(visible).check((b, h, t, s))
    if bias is not None:
        bias.check((b, h, t, s))
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap is a finite number above 0, or None; got {softcap}")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale is a finite number, or None for 1/√D; got {scale}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is a rate in [0, 1); got {dropout}")
    if sinks is not None and tuple(sinks.shape) != (h,):
        raise ValueError(f"sinks holds one logit a head, [{h}]; got {list(sinks.shape)}")
    return Call(q, k, v, visible, bias, d**-0.5 if scale is None else scale, softcap, sinks, dropout)
