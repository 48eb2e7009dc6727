"""The textbook: softmax(Q Kᵀ · scale + mask) V with every option, in float32 or float64. The oracle for the others.

Vaswani et al. 2017, eq. 1; grouped heads after Ainslie et al. 2023; soft-cap after Gemma 2 (2024); the sink logit after
Xiao et al. 2023 and gpt-oss (2025).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from anyformer.nn.attend.call import Call
from anyformer.nn.precision import exact


def attend(call: Call) -> Tensor:
    """The output [B, T, H, Dv] in q's dtype."""
    return mixed(call, weights(call))


def weights(call: Call) -> Tensor:
    """The attention weights [B, H, T, S] in at least float32, before dropout. Rows that see nothing are zero."""
    with torch.autocast(call.q.device.type, enabled=False):
        return _weights(call)


def _weights(call: Call) -> Tensor:
    wide = exact(call.q.dtype)
    q, k = call.q.to(wide), call.k.to(wide)
    b, t, h, d = q.shape
    s, g = k.shape[1:3]
    scores = torch.einsum("btgrd,bsgd->bgrts", q.reshape(b, t, g, h // g, d), k).reshape(b, h, t, s) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    mask = call.visible.mask(t, s, q.device)
    if call.bias is not None:
        bias = call.bias.added(t, s).to(wide)
        hidden = bias == float("-inf")
        mask = mask & ~hidden
        scores = scores + bias.masked_fill(hidden, 0.0)
    # The lowest finite number instead of −inf: exp still gives an exact 0, and a row without any key has no NaN.
    scores = scores.masked_fill(~mask, torch.finfo(wide).min)
    if call.sinks is not None:
        sink = call.sinks.to(wide).reshape(1, h, 1, 1).expand(b, h, t, 1)
        shares = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        shares = scores.softmax(dim=-1)
    return shares.masked_fill(~mask, 0.0)


def mixed(call: Call, shares: Tensor) -> Tensor:
    """The values mixed by weights [B, H, T, S], with the call's dropout on them: [B, T, H, Dv] in q's dtype."""
    b, h, t, s = shares.shape
    g, dv = call.v.shape[2:]
    with torch.autocast(call.q.device.type, enabled=False):
        kept = F.dropout(shares, call.dropout) if call.dropout else shares
        out = torch.einsum("bgrts,bsgd->btgrd", kept.reshape(b, g, h // g, t, s), call.v.to(shares.dtype))
    return out.reshape(b, t, h, dv).to(call.q.dtype)
