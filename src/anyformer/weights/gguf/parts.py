"""Rows of stored bytes as codes to be packed, in numpy alone: imports no torch.

Codes and scales are those of `blocks.grouped`; what is packed in 4 bits comes two neighbouring rows to a byte.
"""

from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from anyformer.families.family import Interleaved, Joined, Rotated
from anyformer.nn.packing import Bytes, Floats, Part, halved
from anyformer.weights.gguf.layouts import LAYOUTS, NIBBLES, Layout, items
from anyformer.weights.gguf.types import KEPT, Kind
from anyformer.weights.shapes import Shape, Step

_LOW = np.uint64(0x0F0F0F0F0F0F0F0F)


def part(data: Bytes, kind: Kind) -> Part:
    """Rows of bytes of a kind in `KEPT`, uint8 [rows, bytes per row], as codes with their scales and zeros."""
    layout, rows = LAYOUTS[kind.name], len(data)
    stored = data.reshape(-1, kind.n_bytes)
    scales, zeros = scales_of(layout, stored)
    groups = rows, len(stored) * kind.block // KEPT[kind.name] // rows
    if kind.name in NIBBLES and rows % 2 == 0:
        columns = _paired(stored, rows, *NIBBLES[kind.name])
    else:
        codes = codes_of(layout, stored).reshape(rows, -1)
        columns = halved(codes) if layout.bits == 4 else codes
    return Part(columns, scales.reshape(groups), zeros.reshape(groups))


def codes_of(layout: Layout, stored: Bytes, out: Bytes | None = None) -> Bytes:
    """Blocks of bytes as codes from 0 on: [N, numbers per block]."""
    return np.subtract(layout.levels(stored).view(np.uint8), np.uint8(layout.lowest % 256), out=out)


def scales_of(layout: Layout, stored: Bytes) -> tuple[Floats, Floats]:
    """The scales of blocks of bytes, and the values of code 0: [N, groups per block]."""
    # What a broken file says, such as an infinite scale of scales of 0, is none of numpy's warnings.
    with np.errstate(all="ignore"):
        scales, zeros = layout.scales(stored)
        return scales, scales * np.float32(layout.lowest) if zeros is None else zeros


def _paired(stored: Bytes, rows: int, at: int, run: int) -> Bytes:
    """Blocks of an even number of rows, of a kind in `NIBBLES`, as pairs of codes: uint8 [rows/2, K].

    The halves of stored bytes go where they are packed without an array of a byte for each code between.
    """
    nibbles = items(stored, f"V{stored.shape[1] - at}", at)
    words = np.ascontiguousarray(nibbles).view("<u8").reshape(rows // 2, 2, -1)
    even, odd = words[:, 0], words[:, 1]
    pairs = np.empty((rows // 2, 2 * words.shape[2] * 8), np.uint8)
    halves = pairs.reshape(len(pairs), -1, 2, run).view(f"V{run}")[..., 0]
    halves[..., 0] = ((even & _LOW) | ((odd & _LOW) << np.uint64(4))).view(f"V{run}")
    halves[..., 1] = (((even >> np.uint64(4)) & _LOW) | (odd & ~_LOW)).view(f"V{run}")
    return pairs


def rows_of(step: Step, shapes: Sequence[Shape]) -> list[slice | NDArray[np.intp]]:
    """Which of their rows are the rows of each of ours, of `shapes`, for a step `by_rows` (as `forms.to_ours`)."""
    lead = step.shapes[0][:-1]
    n = prod(lead)
    match step.form:
        case Rotated():
            return [np.arange(n).reshape(step.groups, -1, 2).swapaxes(1, 2).reshape(-1)]
        case Interleaved():
            whole = np.arange(n).reshape(step.groups, -1, *lead[1:])
            ends = np.cumsum([shape[0] // step.groups for shape in shapes])
            return [each.reshape(-1) for each in np.split(whole, ends[:-1].tolist(), 1)]
        case Joined():
            ends = np.cumsum([prod(shape[:-1]) for shape in shapes]).tolist()
            return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    return [slice(0, n)]
