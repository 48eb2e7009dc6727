"""Matrices in quantised codes put into the order in which the product reads them. numpy's work: imports no torch.

Packing a model takes longer than torch's operations on pieces of it would; numpy starts no threads for each of many
small copies.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyformer.nn.blocked import layout

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Part:
    """Codes of some outputs of a matrix.

    Attributes:
        columns: uint8 [outputs, K]; of 4 bits, [⌈outputs/2⌉, K] with the code of the even output in the low half.
        scales: float32 [outputs, K/g].
        zeros: float32 [outputs, K/g], the value of code 0.
    """

    columns: Bytes
    scales: Floats
    zeros: Floats


@dataclass(frozen=True)
class Parts:
    """A weight […, N, K] whose codes are made for some outputs at a time, so that they are never there as a whole.

    Attributes:
        shape: of the weight.
        bits: of a code, 4 or 8.
        group: neighbouring inputs that share a scale.
        make: the codes of the outputs from one to before another, of all matrices as one [E · N, K].
    """

    shape: tuple[int, ...]
    bits: int
    group: int
    make: Callable[[int, int], Part]


@dataclass(frozen=True)
class Blocks:
    """What `nn.packed.Packed` describes, in numpy's arrays.

    Attributes:
        shape, bits, group: as in `Parts`.
        rows: uint8 [E · n_blocks · K, bytes].
        scales: float16 or float32 [E · n_blocks, K/g, width].
        zeros: like the scales; None where each is `offset` times its scale.
        offset: what the product adds to each code.
    """

    shape: tuple[int, ...]
    bits: int
    group: int
    rows: Bytes
    scales: NDArray[Any]
    zeros: NDArray[Any] | None
    offset: float


def halved(codes: Bytes) -> Bytes:
    """Codes of 4 bits [outputs, K], two neighbouring outputs to a byte."""
    even, odd = codes[0::2], codes[1::2]
    columns = even.copy()
    columns[: len(odd)] |= odd << 4
    return columns


def packed(parts: Parts) -> Blocks:
    """Packs a weight, one block of outputs after another."""
    *stacked, n, k = parts.shape
    n_blocks, width = layout(n, k)
    used, more = (width // 2, 4) if parts.bits == 4 else (width, 8)
    count = prod(stacked) * n_blocks
    rows = np.empty((count, k, used + more), np.uint8)
    scales, zeros = (np.zeros((count, k // parts.group, width), np.float32) for _ in range(2))
    for block in range(count):
        matrix, place = divmod(block, n_blocks)
        start = matrix * n + place * width
        part = parts.make(start, min(start + width, (matrix + 1) * n))
        into = rows[block, :, :used]
        into[:, : len(part.columns)] = part.columns.T
        into[:, len(part.columns) :] = 0
        scales[block, :, : len(part.scales)] = part.scales.T
        zeros[block, :, : len(part.zeros)] = part.zeros.T
    shared = _multiple(scales, zeros)
    offset = float(-(shared or 0))
    rows[..., used:] = np.array([1.0, offset], np.float16 if parts.bits == 4 else np.float32).view(np.uint8)
    numbers = _narrow([scales] if shared is not None else [scales, zeros])
    flat = rows.reshape(count * k, used + more)
    return Blocks(parts.shape, parts.bits, parts.group, flat, numbers[0], (*numbers, None)[1], offset)


def _narrow(numbers: list[Floats]) -> list[NDArray[Any]]:
    """In half precision where that holds all of them exactly."""
    with np.errstate(over="ignore"):
        halves = [each.astype(np.float16) for each in numbers]
    exact = all(np.array_equal(half.astype(np.float32), each) for half, each in zip(halves, numbers, strict=True))
    return list(halves) if exact else list(numbers)


def _multiple(scales: Floats, zeros: Floats) -> int | None:
    """The whole number m ≤ 255 with zero = −m · scale for every group, None where there is none."""
    at = int(np.abs(scales).argmax())
    scale, zero = float(scales.flat[at]), zeros.flat[at]
    if scale == 0 or not isfinite(scale):
        return 0 if scale == 0 and not zeros.any() else None
    with np.errstate(all="ignore"):
        ratio = float(-zero / scales.flat[at])
        m = round(ratio) if 0 <= ratio < 256 else -1
        return m if m >= 0 and np.array_equal(scales * np.float32(-m), zeros) else None
