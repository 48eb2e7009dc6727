"""Rows of stored bytes to numbers and to codes; `quantised`, the way back, is in `encode`."""

from collections.abc import Set

import numpy as np
import torch
from torch import Tensor

from anyformer.errors import UserError
from anyformer.nn.packed import Codes
from anyformer.weights.gguf.encode import quantised
from anyformer.weights.gguf.layouts import LAYOUTS, Layout
from anyformer.weights.gguf.parts import codes_of, scales_of
from anyformer.weights.gguf.spans import over_blocks, steps
from anyformer.weights.gguf.types import KEPT, READ, Kind

__all__ = ["dequantised", "grouped", "quantised"]

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
"""Kinds that are stored as floats."""


def dequantised(data: Tensor, kind: Kind, out: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers that rows of stored bytes mean: [rows, n].

    In float32 they are, bit for bit, those of the `gguf` package (any NaN for a NaN); other types are rounded from
    that. A plain kind of the type asked for comes back as a view of `data` where its bytes lie straight. Needs a
    few megabytes for each of torch's threads beside the result.

    Args:
        data: uint8 [rows, bytes per row], any strides; never written to.
        kind: one of `READ`.
        out: [rows, n] to be filled; its type counts, not `dtype`.
        dtype: of the result.

    Raises `UserError` for a kind that is not read, and for bytes or an `out` of other sizes.
    """
    rows, blocks = _blocks(data, kind, READ, "read")
    n = blocks * kind.block
    if out is not None and out.shape != (rows, n):
        raise UserError("the result has another shape", where="out", got=tuple(out.shape), expected=(rows, n))
    if kind.name in PLAIN:
        plain = _straight(data, PLAIN[kind.name])
        return plain.to(dtype) if out is None else out.copy_(plain)
    layout = LAYOUTS[kind.name]
    result = torch.empty(rows, n, dtype=dtype, device=data.device) if out is None else out

    def work(stored: Tensor, numbers: Tensor) -> None:
        scale, zero = _scales(layout, stored)
        levels = torch.from_numpy(layout.levels(stored.numpy()))
        for part in steps(len(stored), kind.block):
            into = numbers[part]
            values = into if into.dtype == torch.float32 else torch.empty_like(into, dtype=torch.float32)
            values.copy_(levels[part])
            by_group = values.view(len(values), scale.shape[1], -1).mul_(scale[part, :, None])
            if zero is not None:
                by_group.add_(zero[part, :, None])
            if values is not into:
                into.copy_(values)

    over_blocks(data, blocks, kind.block, work, result.detach())
    return result


def grouped(data: Tensor, kind: Kind) -> Codes:
    """Rows of stored bytes as codes, with a scale and a zero for each 32 numbers, or 16 (`KEPT`).

    With finite scales and zeros `Codes.dequantised` gives the numbers of `dequantised` exactly, but for the sign of a
    zero: a scale has 11 bits and a code up to 8, or a scale 17 and a code up to 5, so that their product needs no
    rounding in float32, and both round the sum once. Of Q6_K a scale has 19 bits and a code 6: two roundings instead of
    one, each of at most 2⁻²⁴ of the largest number of the group.

    Args:
        data: uint8 [rows, bytes per row], any strides; never written to.
        kind: one of `KEPT`.

    Raises `UserError` for a kind that does not stay in codes, and for bytes of another size.
    """
    rows, blocks = _blocks(data, kind, KEPT.keys(), "kept in codes")
    layout = LAYOUTS[kind.name]
    n = blocks * kind.block
    codes = torch.empty(rows, n, dtype=torch.uint8, device=data.device)
    shape = rows, n // KEPT[kind.name]
    scales, zeros = (torch.empty(shape, dtype=torch.float32, device=data.device) for _ in range(2))

    def work(stored: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor) -> None:
        for into, made in zip((scales, zeros), scales_of(layout, stored.numpy()), strict=True):
            into.copy_(torch.from_numpy(made))
        codes_of(layout, stored.numpy(), codes.numpy())

    over_blocks(data, blocks, kind.block, work, codes, scales, zeros)
    return Codes(codes, scales, zeros, layout.bits)


def _blocks(data: Tensor, kind: Kind, kinds: Set[str], verb: str) -> tuple[int, int]:
    """Rows, and blocks in each. Raises `UserError`."""
    if kind.name not in kinds:
        raise UserError(f"{kind.name} is not {verb}", got=kind.name, expected=", ".join(sorted(kinds)))
    if data.dtype != torch.uint8 or data.dim() != 2 or data.shape[1] % kind.n_bytes:
        expected = f"uint8 [rows, a multiple of {kind.n_bytes}]"
        raise UserError(f"no rows of {kind.name}", got=f"{data.dtype} {tuple(data.shape)}", expected=expected)
    return data.shape[0], data.shape[1] // kind.n_bytes


def _scales(layout: Layout, stored: Tensor) -> tuple[Tensor, Tensor | None]:
    """Scales and zeros of blocks: float32 [N, groups per block]."""
    # What a broken file says, such as an infinite scale of scales of 0, is none of numpy's warnings.
    with np.errstate(all="ignore"):
        scale, zero = layout.scales(stored.numpy())
    return torch.from_numpy(scale), None if zero is None else torch.from_numpy(zero)


def _straight(data: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes as numbers of a plain type; copied where they are not aligned to its size."""
    size = dtype.itemsize
    if not data.numel():  # Without numbers a row has no stride that fits.
        return data.new_empty(len(data), data.shape[1] // size, dtype=dtype)
    places = (data.data_ptr(), data.storage_offset(), data.stride(0))
    if data.stride(1) != 1 or any(place % size for place in places):
        data = data.clone(memory_format=torch.contiguous_format)
    return data.view(dtype)
