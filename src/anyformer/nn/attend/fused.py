"""`F.scaled_dot_product_attention`: FlashAttention-2 (Dao 2023) and its kin, with grouped heads taken as they are.

A T×S mask is written out only where it is small or the user gave one. Otherwise the description is lowered to calls
that need none: a causal call, a row per decoded token, a causal square per document, or, without gradient, blocks of
queries.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from anyformer.nn.attend.call import Call, Unsupported
from anyformer.nn.attend.masks import All, Causal, Dense, Everything, Padding, Segments

MASK_ELEMENTS = 1 << 22
"""The largest B·T·S that is written out as a mask: 16 MB once the kernel has it in float32."""

QUERY_BLOCK = 256
"""Queries per call where a large mask is written out block by block."""


class Square(NamedTuple):
    """A stretch of a row: queries begin … end of a document whose real keys are first … last."""

    begin: int
    first: int
    last: int
    end: int


def attend(call: Call) -> Tensor:
    """The output [B, T, H, Dv] in q's dtype. Raises `Unsupported` with the reason."""
    refuse(call)
    q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
    whole = All.of(call.visible)
    t, s = call.q.shape[1], call.k.shape[1]
    terms = tuple(term for term in whole.terms if not isinstance(term, Everything))
    plain = whole.queries is None and whole.keys is None
    if call.bias is None and not terms:
        return _sdpa(call, q, k, v)
    if call.bias is None and plain and terms == (Causal(),) and t in (1, s):
        return _sdpa(call, q, k, v, is_causal=t == s)
    if _mask_is_given(call, terms) or t == 1 or call.q.shape[0] * t * s <= MASK_ELEMENTS:
        return _sdpa(call, q, k, v, mask=_mask(call, q, 0, t))
    squares = _squares(terms, t, s, plain)
    if squares is not None:
        return _by_squares(call, q, k, v, squares)
    blocks = [
        _sdpa(call, q[:, :, i : i + QUERY_BLOCK], k, v, mask=_mask(call, q, i, QUERY_BLOCK))
        for i in range(0, t, QUERY_BLOCK)
    ]
    return torch.cat(blocks, dim=1)


def refuse(call: Call) -> None:
    """Raises `Unsupported` for what the kernels cannot compute, without computing anything."""
    if call.softcap is not None:
        raise Unsupported("fused kernels have no soft-cap on the scores")
    if call.sinks is not None:
        raise Unsupported("fused kernels have no sink logit")
    whole = All.of(call.visible)
    t, s = call.q.shape[1], call.k.shape[1]
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (call.q, call.k, call.v))
    if not needs_grad or t == 1 or call.q.shape[0] * t * s <= MASK_ELEMENTS or _mask_is_given(call, whole.terms):
        return
    plain = whole.queries is None and whole.keys is None
    terms = tuple(term for term in whole.terms if not isinstance(term, Everything))
    if not terms or (plain and terms == (Causal(),) and t == s) or _squares(terms, t, s, plain) is not None:
        return
    raise Unsupported(f"this mask would take {call.q.shape[0]}×{t}×{s} elements in memory for the backward pass")


def _mask_is_given(call: Call, terms: tuple[object, ...]) -> bool:
    return call.bias is not None or any(isinstance(term, Dense) for term in terms)


def _mask(call: Call, q: Tensor, start: int, count: int) -> Tensor:
    """The mask of `count` queries from `start`, or bias with the hidden keys at −inf."""
    t, s = q.shape[2], call.k.shape[1]
    whole = All.of(call.visible)
    if count >= t:
        mask = whole.mask(t, s, q.device)
    else:
        stop = min(start + count, t)
        queries = torch.arange(s - t, s, device=q.device) if whole.queries is None else whole.queries
        terms = tuple(
            Segments(x.queries[:, start:stop], x.queries if x.keys is None else x.keys)
            if isinstance(x, Segments)
            else x
            for x in whole.terms
        )
        mask = All(terms, queries[..., start:stop], whole.keys).mask(stop - start, s, q.device)
    if call.bias is None:
        return mask
    bias = call.bias.added().to(q.dtype)
    return torch.where(mask, bias, float("-inf"))


def _sdpa(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=call.dropout,
        is_causal=is_causal,
        scale=call.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2)


def _squares(terms: tuple[object, ...], t: int, s: int, plain: bool) -> list[tuple[Square, ...]] | None:
    """Causal documents and padding as stretches of each row, or None where the description is something else."""
    if not plain or t != s or Causal() not in terms or torch.compiler.is_compiling():
        return None
    segments = [x for x in terms if isinstance(x, Segments) and x.keys is None]
    paddings = [x for x in terms if isinstance(x, Padding)]
    if len(segments) > 1 or len(paddings) > 1 or 1 + len(segments) + len(paddings) != len(terms):
        return None
    ids = segments[0].queries if segments else torch.zeros_like(paddings[0].real, dtype=torch.int64)
    real = paddings[0].real if paddings else torch.ones_like(ids, dtype=torch.bool)
    rows: list[tuple[Square, ...]] = []
    for row_ids, row_real in zip(ids, real, strict=True):
        cuts = [0, *(torch.nonzero(row_ids[1:] != row_ids[:-1]).flatten() + 1).tolist(), t]
        if len(set(row_ids[cuts[:-1]].tolist())) != len(cuts) - 1:
            return None
        row: list[Square] = []
        for begin, end in pairwise(cuts):
            at = torch.nonzero(row_real[begin:end]).flatten() + begin
            first, last = (int(at[0]), int(at[-1]) + 1) if len(at) else (end, end)
            if last - first != len(at):
                return None
            row.append(Square(begin, first, last, end))
        rows.append(tuple(row))
    return rows


def _by_squares(call: Call, q: Tensor, k: Tensor, v: Tensor, rows: list[tuple[Square, ...]]) -> Tensor:
    """Each document by itself; rows that are cut alike share their calls."""
    alike: dict[tuple[Square, ...], list[int]] = {}
    for index, squares in enumerate(rows):
        alike.setdefault(squares, []).append(index)
    pieces: list[Tensor] = []
    for squares, members in alike.items():
        at = torch.tensor(members, device=q.device)
        pieces.append(_row(call, q[at], k[at], v[at], squares))
    order = torch.tensor([i for members in alike.values() for i in members], device=q.device)
    return torch.cat(pieces)[order.argsort()]


def _row(call: Call, q: Tensor, k: Tensor, v: Tensor, squares: tuple[Square, ...]) -> Tensor:
    parts: list[Tensor] = []
    for begin, first, last, end in squares:
        if first > begin:
            parts.append(q.new_zeros(q.shape[0], first - begin, q.shape[1], v.shape[-1]))
        keys, values = k[:, :, first:last], v[:, :, first:last]
        if last > first:
            parts.append(_sdpa(call, q[:, :, first:last], keys, values, is_causal=True))
        if end > last > first:
            parts.append(_sdpa(call, q[:, :, last:end], keys, values))
    return torch.cat(parts, dim=1)
