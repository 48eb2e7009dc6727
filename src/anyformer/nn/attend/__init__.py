"""Scaled dot-product attention: one operation, masks as descriptions, several backends."""

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from anyformer.nn.attend import fused, masks, reference
from anyformer.nn.attend.call import Call, Unsupported, checked
from anyformer.nn.attend.masks import DenseBias, Visible

Backend = Literal["auto", "reference", "fused"]

BACKENDS: dict[str, Callable[[Call], Tensor]] = {"reference": reference.attend, "fused": fused.attend}


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visible: Visible,
    bias: DenseBias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    backend: Backend = "auto",
) -> Tensor:
    """softmax over visible keys, joined by the sink logit, of softcap(scale·q·k) + bias, times v.

    Args:
        q: queries [B, T, H, D].
        k: keys [B, S, G, D], G a divisor of H; query head h reads key head h // (H / G).
        v: values [B, S, G, Dv].
        visible: which keys a query sees, a description from `masks`.
        bias: what is added to the scores.
        scale: the factor of q·k; 1/√D where None (Vaswani et al. 2017, eq. 1).
        softcap: c in c·tanh(score / c), before bias and mask; None for none.
        sinks: a logit per head [H] that takes part in the softmax and has no value.
        dropout: the rate on the weights, applied whenever it is above 0.
        backend: "reference", "fused", or "auto" for the fastest that supports the call.

    Returns:
        [B, T, H, Dv] in q's dtype. A query that sees nothing gives zeros, with finite gradients.

    Raises:
        ValueError: shapes or numbers that cannot be.
        Unsupported: the named backend cannot compute this call; nothing falls back silently.
    """
    call = checked(q, k, v, visible, bias, scale, softcap, sinks, dropout)
    name = choose(call)[0] if backend == "auto" else backend
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; known: auto, {', '.join(BACKENDS)}")
    return BACKENDS[name](call)


def choose(call: Call) -> tuple[str, str]:
    """The backend that "auto" takes for a call, and why."""
    try:
        fused.refuse(call)
    except Unsupported as reason:
        return "reference", str(reason)
    return "fused", "the fastest that supports the call"


__all__ = ["BACKENDS", "Backend", "Call", "DenseBias", "Unsupported", "Visible", "attend", "choose", "masks"]
