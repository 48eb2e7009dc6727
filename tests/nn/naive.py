"""Attention by its equation: a loop over batch, head, query and key, in float64 numbers."""

import math

import numpy as np


def attend(q, k, v, sees, *, bias=None, scale=None, softcap=None, sinks=None):
    """softmax over visible keys, joined by the sink logit, of softcap(scale·q·k) + bias, times v.

    Args:
        q, k, v: arrays [B, T, H, D], [B, S, G, D], [B, S, G, Dv].
        sees: whether (row, head, query, key) is visible.
        bias: what is added for (row, head, query, key).
    """
    (n_rows, n_queries, n_heads, width), (_, n_keys, n_groups, _) = q.shape, k.shape
    scale = 1 / math.sqrt(width) if scale is None else scale
    out = np.zeros((n_rows, n_queries, n_heads, v.shape[-1]))
    for b in range(n_rows):
        for h in range(n_heads):
            g = h // (n_heads // n_groups)
            for i in range(n_queries):
                logits = {}
                for j in range(n_keys):
                    if not sees(b, h, i, j):
                        continue
                    score = scale * sum(q[b, i, h, c] * k[b, j, g, c] for c in range(width))
                    if softcap is not None:
                        score = softcap * math.tanh(score / softcap)
                    logits[j] = score + (bias(b, h, i, j) if bias is not None else 0.0)
                if not logits:
                    continue
                top = max([*logits.values(), *([sinks[h]] if sinks is not None else [])])
                total = sum(math.exp(x - top) for x in logits.values())
                if sinks is not None:
                    total += math.exp(sinks[h] - top)
                for j, x in logits.items():
                    out[b, i, h] += math.exp(x - top) / total * v[b, j, g]
    return out
