"""The textbook: softmax(Q Kᵀ · scale + mask) V with every option, in float32 or float64. The oracle for the others.

Vaswani et al. 2017, eq. 1; grouped heads after Ainslie et al. 2023; soft-cap after Gemma 2 (2024); the sink logit after
Xiao et al. 2023 and gpt-oss (2025).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from anyformer.nn.attend.call import Call


def attend(call: Call) -> Tensor:
    """The output [B, T, H, Dv] in q's dtype."""
    return attend_with_weights(call)[0]


def attend_with_weights(call: Call) -> tuple[Tensor, Tensor]:
    """The output [B, T, H, Dv] and the weights [B, H, T, S] in at least float32. Rows that see nothing are zero."""
    exact = torch.promote_types(call.q.dtype, torch.float32)
    q, k, v = call.q.to(exact), call.k.to(exact), call.v.to(exact)
    b, t, h, d = q.shape
    s, g = k.shape[1:3]
    q = q.reshape(b, t, g, h // g, d)
    scores = torch.einsum("btgrd,bsgd->bgrts", q, k).reshape(b, h, t, s) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.bias is not None:
        scores = scores + call.bias.added().to(exact)
    mask = call.visible.mask(t, s, q.device)
    # The lowest finite number instead of −inf: exp still gives an exact 0, and a row without any key has no NaN.
    scores = scores.masked_fill(~mask, torch.finfo(exact).min)
    if call.sinks is not None:
        sink = call.sinks.to(exact).reshape(1, h, 1, 1).expand(b, h, t, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    weights = weights.masked_fill(~mask, 0.0)
    mixed = F.dropout(weights, call.dropout) if call.dropout else weights
    out = torch.einsum("bgrts,bsgd->btgrd", mixed.reshape(b, g, h // g, t, s), v)
    return out.reshape(b, t, h, v.shape[-1]).to(call.q.dtype), weights
