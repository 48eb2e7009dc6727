"""Scaled dot-product attention: one operation, masks as descriptions, several backends."""

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from anyformer.nn.attend import flex, fused, masks, reference, tiled
from anyformer.nn.attend.bias import AlibiBias, Bias, BucketBias, DenseBias, alibi_slopes
from anyformer.nn.attend.call import Call, Unsupported, checked
from anyformer.nn.attend.masks import Visible
from anyformer.nn.attend.shapes import many

Backend = Literal["auto", "reference", "tiled", "fused", "flex"]

BACKENDS: dict[str, Callable[[Call], Tensor]] = {
    "reference": reference.attend,
    "tiled": tiled.attend,
    "fused": fused.attend,
    "flex": flex.attend,
}


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visible: Visible,
    bias: Bias | None = None,
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
        backend: "reference", "tiled", "fused", "flex", or "auto" for the fastest that supports the call.

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


# Measured with benchmarks/attention_speed.py: one core of a 2.8 GHz Xeon, 8 heads × 64, one row, forward + backward;
# the time of the first named as a multiple of the second's.
#
#                                       T = 256    512    1,024    2,048
#   tiled / reference, softcap              1.2    0.65      0.32
#   tiled / reference, sinks                1.4    0.64      0.34
#   tiled / fused, window of 128            2.6    1.9       1.0      0.7 (forward)
#   tiled / fused, prefix                   1.9    1.2       1.0
#   tiled / fused, ALiBi, buckets           2.5    1.3       (fused would keep H·T·S)
#   tiled / fused, causal without a mask                     1.0–1.4 (T = 4,096)
#
# A decoded token (T = 1) is fastest fused, and as the reference where fused cannot. ALiBi without a mask, slope · j
# carried by a channel of q and k, is too far off: the sum of a score and slope · j in float32 moves the output by 2e-5
# at T = 1,024 and by 5e-5 at 2,048, where the tiles err by 1e-6.

MASKED = 1 << 20
"""Beyond this T·S a call with a mask that fused must write out is faster tiled."""

SCORES = 1 << 20
"""Beyond this B·H·T·S a call that fused cannot compute is faster tiled than as the reference."""


def choose(call: Call) -> tuple[str, str]:
    """The backend that "auto" takes for a call, and why. It takes none that keeps a large T×S tensor unasked."""
    (b, t, h), s = call.q.shape[:3], call.k.shape[1]
    try:
        kind = fused.lowering(call).kind
    except Unsupported as reason:
        if b * h * t * s <= SCORES:
            return "reference", f"the fastest for few scores, {many(b * h * t * s)}; {reason}"
        return "tiled", f"the fastest for many scores, {many(b * h * t * s)}; {reason}"
    written = kind == "blocks" or (kind == "mask" and not fused.is_given(call))
    if written and t > 1 and t * s > MASKED:
        return "tiled", f"the fastest for a mask that hides keys of {many(t)} queries by {many(s)} keys"
    return "fused", "the fastest that supports the call"


def refusal(call: Call, backend: str) -> str | None:
    """Why a named backend cannot compute a call, or None where it can. Nothing is computed."""
    try:
        if backend == "fused":
            fused.lowering(call)
        elif backend == "flex":
            flex.refuse(call)
    except Unsupported as reason:
        return f"asked for, but a call raises Unsupported: {reason}"
    return None


__all__ = [
    "BACKENDS",
    "AlibiBias",
    "Backend",
    "Bias",
    "BucketBias",
    "Call",
    "DenseBias",
    "Unsupported",
    "Visible",
    "alibi_slopes",
    "attend",
    "choose",
    "masks",
    "refusal",
]
