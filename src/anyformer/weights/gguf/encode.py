"""Numbers to rows of stored bytes."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from anyformer.errors import UserError
from anyformer.weights.gguf.layouts import items
from anyformer.weights.gguf.spans import over_blocks, steps
from anyformer.weights.gguf.types import WRITTEN, Kind

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BELOW_HALF = 0.5 - 2.0**-25
"""The largest float32 below 0.5: added before truncation it rounds halves away from zero and 0.49999997 to 0."""
_HALF_LIMIT = 65520.0
"""The smallest magnitude that becomes infinite in half precision."""


def quantised(values: Tensor, kind: Kind) -> Tensor:
    """Rows of numbers in a kind's bytes: uint8 [rows, bytes per row].

    The bytes are those of the `gguf` package. NaN and infinities stay what they are in plain kinds.

    Args:
        values: [rows, n] of any floating-point type; taken in float32.
        kind: one of `WRITTEN`; n is a multiple of its block.

    Raises `UserError` for a kind that is not written, for an n of no whole blocks, for numbers that become infinite in
    F16 or BF16, and in quantised kinds for numbers that are not finite or whose scale passes half precision's 65504.
    """
    if kind.name not in WRITTEN:
        raise UserError(f"numbers are not written in {kind.name}", got=kind.name, expected=", ".join(WRITTEN))
    if values.dim() != 2 or not values.is_floating_point():
        raise UserError("no rows of floating-point numbers", got=f"{values.dtype} {tuple(values.shape)}")
    rows, n = values.shape
    if n % kind.block:
        expected = f"a multiple of {kind.block}"
        raise UserError(f"rows do not fill blocks of {kind.name}", got=n, expected=expected, remedy="use F16 or F32")
    blocks = n // kind.block
    result = torch.empty(rows, kind.row_bytes(n), dtype=torch.uint8, device=values.device)
    encode = _ENCODERS[kind.name]

    def work(numbers: Tensor, stored: Tensor) -> None:
        for part in steps(len(numbers), kind.block):
            given = numbers[part]
            single = given.to(torch.float32)
            if given.dtype == torch.float64 and (single.isinf() & given.isfinite()).any():
                raise OverflowError
            encode(single, stored[part])

    try:
        over_blocks(values, blocks, kind.block, work, result)
    except OverflowError:
        raise _refusal(values, kind) from None
    return result


def _refusal(values: Tensor, kind: Kind) -> UserError:
    """Names the first number that is not finite, or the largest."""
    largest = 0.0
    for row, numbers in enumerate(values):
        odd = (~numbers.isfinite()).nonzero()
        if len(odd) and kind.name not in _PLAIN:
            got = f"{numbers[odd[0, 0]].item()} at row {row}, column {odd[0, 0].item()}"
            remedy = "find out where they came from, or store them as F32, F16 or BF16"
            return UserError(f"{kind.name} stores finite numbers", got=got, expected="finite numbers", remedy=remedy)
        largest = max(largest, numbers.nan_to_num(0.0, 0.0, 0.0).abs().amax().item())
    larger = "store them as F32" if kind.name != "F32" else None
    return UserError(f"numbers are too large for {kind.name}", got=f"a magnitude of {largest:g}", remedy=larger)


def _plain(kind: str) -> Callable[[Tensor, Tensor], None]:
    def encode(values: Tensor, stored: Tensor) -> None:
        into = stored.view(_PLAIN[kind]).copy_(values)
        if (into.isinf() & values.isfinite()).any():
            raise OverflowError

    return encode


def _inverse(scale: Tensor) -> Tensor:
    """1/scale, 0 where that is infinite: the scale is then 0 in half precision too, and the levels mean nothing."""
    inverse = scale.reciprocal()
    return inverse.masked_fill_(inverse.isinf(), 0.0)


def _store_half(numbers: Tensor, stored: Tensor, at: int) -> None:
    """Writes [N, 1] in half precision at a byte of each block. Raises `OverflowError` where one is not finite there."""
    if not numbers.abs().amax() < _HALF_LIMIT:  # NaN is not below it either.
        raise OverflowError
    stored[:, at : at + 2].view(torch.float16).copy_(numbers)


def _store_levels(numbers: Tensor, stored: Tensor, at: int, bits: int) -> None:
    """Truncates [N, 32] to levels of 4 or 5 bits and packs them: fifth bits first, then the low halves of bytes."""
    levels = numbers.clamp_(0, 2**bits - 1).to(torch.uint8).numpy()
    blocks = stored.numpy()
    if bits == 5:
        items(blocks, "V4", at)[:] = np.packbits(levels >> 4, axis=1, bitorder="little").view("V4")
        levels &= 15
        at += 4
    low, high = (np.ascontiguousarray(half).view("<u8") for half in levels.view("V16").T)
    items(blocks, "V16", at)[:] = (low | high << np.uint64(4)).view("V16")[:, None]


def _furthest(values: Tensor) -> Tensor:
    """Of each block the number furthest from zero, the first of equals, with its sign: [N, 1]."""
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    furthest = torch.where(high > -low, high, low)
    tied = (high == -low).nonzero()[:, 0]
    if len(tied):
        blocks = values[tied]
        furthest[tied] = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    return furthest


def _around_zero(bits: int) -> Callable[[Tensor, Tensor], None]:
    """Q4_0, Q5_0: level 2^(bits−1) is zero, and level 0 the number furthest from it."""

    def encode(values: Tensor, stored: Tensor) -> None:
        scale = _furthest(values) / -(2 ** (bits - 1))
        _store_half(scale, stored, 0)
        _store_levels((values * _inverse(scale)).add_(2 ** (bits - 1) + 0.5), stored, 2, bits)

    return encode


def _from_lowest(bits: int) -> Callable[[Tensor, Tensor], None]:
    """Q4_1, Q5_1: level 0 is the lowest number, and the last level the highest."""

    def encode(values: Tensor, stored: Tensor) -> None:
        low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
        scale = (high - low) / (2**bits - 1)
        _store_half(scale, stored, 0)
        _store_half(low, stored, 2)
        _store_levels((values - low).mul_(_inverse(scale)).add_(0.5), stored, 4, bits)

    return encode


def _eight(values: Tensor, stored: Tensor) -> None:
    """Q8_0: levels −127 … 127, the nearest to each number."""
    scale = values.abs().amax(1, keepdim=True) / 127
    _store_half(scale, stored, 0)
    levels = values * _inverse(scale)
    stored[:, 2:].view(torch.int8).copy_(levels.add_(levels.sign(), alpha=_BELOW_HALF))


_ENCODERS: Mapping[str, Callable[[Tensor, Tensor], None]] = MappingProxyType(
    {
        **{kind: _plain(kind) for kind in _PLAIN},
        "Q8_0": _eight,
        "Q4_0": _around_zero(4),
        "Q4_1": _from_lowest(4),
        "Q5_0": _around_zero(5),
        "Q5_1": _from_lowest(5),
    }
)
