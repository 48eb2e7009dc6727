"""`F.scaled_dot_product_attention`: FlashAttention-2 (Dao 2023) and its kin, with grouped heads taken as they are.

A T×S mask is written out only where it is small or the user gave one. Otherwise the description is lowered to calls
that need none: a causal call, a row per decoded token, a causal square per document, or, without gradient, blocks of
queries.
"""

from itertools import pairwise
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from anyformer.nn.attend.bias import Bias, DenseBias
from anyformer.nn.attend.call import Call, Unsupported
from anyformer.nn.attend.masks import All, Causal, Dense, Everything, Padding, Segments
from anyformer.nn.attend.shapes import Cut, Scores, many, placed

MASK_ELEMENTS = 1 << 22
"""The most elements that are written out as a mask or bias: 16 MB once the kernel has them in float32."""

QUERY_BLOCK = 256
"""Queries per call where a large mask is written out block by block."""


class Square(NamedTuple):
    """A stretch of a row: queries begin … end of a document whose real keys are first … last."""

    begin: int
    first: int
    last: int
    end: int


class Lowering(NamedTuple):
    """How a call becomes calls of the kernels: "whole" (nothing hidden), "causal", "mask", "squares", "blocks"."""

    kind: Literal["whole", "causal", "mask", "squares", "blocks"]
    squares: list[tuple[Square, ...]] | None = None


def attend(call: Call) -> Tensor:
    """The output [B, T, H, Dv] in q's dtype. Raises `Unsupported` with the reason."""
    kind, squares = lowering(call)
    q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
    if kind in ("whole", "causal"):
        return _sdpa(call, q, k, v, is_causal=kind == "causal")
    if kind == "mask":
        return _sdpa(call, q, k, v, mask=_mask(call, q, 0, q.shape[2]))
    if squares is not None:
        return _by_squares(call, q, k, v, squares)
    blocks = [
        _sdpa(call, q[:, :, i : i + QUERY_BLOCK], k, v, mask=_mask(call, q, i, QUERY_BLOCK))
        for i in range(0, q.shape[2], QUERY_BLOCK)
    ]
    return torch.cat(blocks, dim=1)


def lowering(call: Call) -> Lowering:
    """How the kernels compute a call, without computing anything. Raises `Unsupported` for what they cannot."""
    # Choosing a backend asks, and then the backend: a decoded token would pay twice.
    key = ("fused", torch.is_grad_enabled())
    if key not in call.memo:
        call.memo[key] = _lowering(call)
    found: Lowering = call.memo[key]
    return found


def _lowering(call: Call) -> Lowering:
    if call.softcap is not None:
        raise Unsupported("fused kernels have no soft-cap on the scores")
    if call.sinks is not None:
        raise Unsupported("fused kernels have no sink logit")
    whole = All.of(call.visible)
    b, t, h = call.q.shape[:3]
    s = call.k.shape[1]
    _check_kernel(call, b * h * t * s)
    plain = whole.queries is None and whole.keys is None
    terms = tuple(term for term in whole.terms if not isinstance(term, Everything))
    if call.bias is None:
        if not terms:
            return Lowering("whole")
        if plain and terms == (Causal(),) and t in (1, s):
            return Lowering("causal" if t == s else "whole")
    elements = b * t * s if call.bias is None else _elements(call.bias, (b, h, t, s))
    if t == 1 or elements <= MASK_ELEMENTS or is_given(call):
        return Lowering("mask")
    if call.bias is None:
        squares = _squares_of(call, terms, t, s, plain)
        if squares is not None:
            return Lowering("squares", squares)
    inputs = (call.q, call.k, call.v) if call.bias is None else (call.q, call.k, call.v, call.bias.tensor)
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        raise Unsupported(f"the mask would take {many(elements)} elements in memory for the backward pass")
    return Lowering("blocks")


def _check_kernel(call: Call, scores: int) -> None:
    """Raises where torch has no kernel for the CPU and would quietly hold all scores."""
    if call.q.device.type not in ("cpu", "meta") or scores <= MASK_ELEMENTS:
        return
    trained = call.bias is not None and call.bias.tensor.requires_grad and torch.is_grad_enabled()
    if call.dropout or trained:
        what = "dropout" if call.dropout else "a gradient into the bias"
        raise Unsupported(f"{what} has no fused kernel on the CPU: all {many(scores)} scores would stay in memory")


def is_given(call: Call) -> bool:
    """Whether the caller brought a T×S tensor, so that another of its size is no surprise."""
    if call.bias is not None:
        return isinstance(call.bias, DenseBias)
    return any(isinstance(term, Dense) for term in All.of(call.visible).terms)


def _elements(bias: Bias, shape: Scores) -> int:
    """The elements of the largest mask that a bias needs."""
    b, h, t, s = shape
    if isinstance(bias, DenseBias):
        return max(b * t * s, bias.values.numel())
    rows = max([1, *(x.shape[0] for x in (bias.queries, bias.keys) if x is not None and x.dim() == 2)])
    return max(rows * h * t * s, b * t * s)


def _mask(call: Call, q: Tensor, start: int, count: int) -> Tensor:
    """The mask of `count` queries from `start`, or bias with the hidden keys at −inf."""
    t, s = q.shape[2], call.k.shape[1]
    cut = Cut(rows=slice(start, min(start + count, t)))
    whole = All.of(call.visible)
    queries, keys = placed(whole.queries, whole.keys, t, s, q.device)
    mask = whole.part(cut).seen(cut.of_rows(queries)[:, None, :, None], keys[:, None, None, :])
    if call.bias is None:
        return mask
    queries, keys = placed(call.bias.queries, call.bias.keys, t, s, q.device)
    bias = call.bias.part(cut).between(cut.of_rows(queries)[:, None, :, None], keys[:, None, None, :])
    return torch.where(mask, bias.to(q.dtype), float("-inf"))


def _sdpa(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    width = v.shape[-1]
    if q.device.type == "cpu" and width != q.shape[-1]:
        # The CPU's kernel wants values as wide as keys; channels of zeros change neither scores nor values.
        wide = max(width, q.shape[-1])
        q, k, v = (F.pad(x, (0, wide - x.shape[-1])) for x in (q, k, v))
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
    return out[..., :width].transpose(1, 2)


def _squares_of(call: Call, terms: tuple[object, ...], t: int, s: int, plain: bool) -> list[tuple[Square, ...]] | None:
    """`_squares`, worked out once for all layers that share the description."""
    used = [x for term in terms for x in vars(term).values() if isinstance(x, Tensor)]
    if torch.compiler.is_compiling() or any(x.is_meta for x in used):
        return None
    # An inference tensor does not say whether it was changed since: its squares live as long as the call.
    tracked = not any(x.is_inference() for x in used)
    memo = All.of(call.visible).memo if tracked else call.memo
    key = ("squares", t, s, tuple(x._version for x in used) if tracked else None)
    if key not in memo:
        memo[key] = _squares(terms, t, s, plain)
    found: list[tuple[Square, ...]] | None = memo[key]
    return found


def _squares(terms: tuple[object, ...], t: int, s: int, plain: bool) -> list[tuple[Square, ...]] | None:
    """Causal documents and padding as stretches of each row, or None where the description is something else."""
    if not plain or t != s or Causal() not in terms:
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
