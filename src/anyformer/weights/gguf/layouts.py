"""How each quantised GGML type lays a block of numbers out in bytes, and what the bytes mean.

A number is level · scale, or level · scale + zero. The level is a small integer; a scale and a zero belong to a group
of neighbouring numbers. Levels are packed in fields of 1, 2 or 4 bits: the low fields of a run of bytes hold the first
numbers, the next fields the numbers after those. Sources: ggml's `ggml-common.h` and `ggml-quants.c`, and the `gguf`
package, with which `dequantised` agrees bit for bit: hence the order of products here.

Every function takes blocks: contiguous uint8 [N, bytes per block]. They are numpy's, which copies the short runs of
bytes within blocks as single items, several times as fast as torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Levels = NDArray[np.uint8] | NDArray[np.int8]
Floats = NDArray[np.float32]
Scales = tuple[Floats, Floats | None]
"""The scales and, where a layout has them, the zeros: [N, groups per block]."""


@dataclass(frozen=True)
class Layout:
    """One quantised type.

    Attributes:
        levels: blocks -> integers [N, numbers per block], uint8 or int8.
        scales: blocks -> `Scales`.
        lowest: the smallest level.
        bits: 4 if level − lowest is below 16, otherwise 8.
    """

    levels: Callable[[Bytes], Levels]
    scales: Callable[[Bytes], Scales]
    lowest: int = 0
    bits: int = 8


def items(blocks: Bytes, dtype: str, at: int, count: int = 1) -> NDArray[Any]:
    """The `count` items of a type at a byte of each block, as a view: [N, count]."""
    item = np.dtype(dtype).itemsize
    return np.ndarray((len(blocks), count), dtype, blocks.data, at, (blocks.shape[1], item))


def _fields(blocks: Bytes, start: int, stop: int, width: int, bits: int) -> Bytes:
    """Fields of `bits` bits in the bytes from `start` to `stop`, which are runs of `width` bytes: [N, fields]."""
    shape = len(blocks), (stop - start) // width, 8 // bits
    words = np.ascontiguousarray(items(blocks, f"V{stop - start}", start)).view("<u4")
    fields = np.empty((*shape, width), np.uint8)
    runs = fields.view(f"V{width}")[..., 0]
    for i in range(shape[2]):
        # A shift of whole words moves bits from one byte into the next, where the mask removes them.
        runs[:, :, i] = (words >> np.uint32(bits * i)).view(f"V{width}")
    mask = fields.view("<u4")
    mask &= np.uint32(((1 << bits) - 1) * 0x01010101)
    return fields.reshape(len(blocks), -1)


def _plus(low: Bytes, high: Bytes, bits: int) -> Bytes:
    """The fields with `high` above their `bits` low bits, in place."""
    # Whole words: fields are so small that nothing leaves its byte.
    words = low.view("<u4")
    words |= high.view("<u4") << np.uint32(bits)
    return low


def _signed(levels: Bytes, lowest: int) -> NDArray[np.int8]:
    """Fields as levels that start at `lowest`, in place."""
    signed = levels.view(np.int8)
    signed += np.int8(lowest)
    return signed


def _half(blocks: Bytes, at: int, count: int = 1) -> Floats:
    """The half-precision numbers at a byte: [N, count]."""
    return items(blocks, "<f2", at, count).astype(np.float32)


# Blocks of 32.


def _nibbles(at: int, lowest: int = 0) -> Callable[[Bytes], Levels]:
    return lambda blocks: _signed(_fields(blocks, at, at + 16, 16, 4), lowest)


def _five(at: int, lowest: int = 0) -> Callable[[Bytes], Levels]:
    def levels(blocks: Bytes) -> Levels:
        fifth = np.unpackbits(items(blocks, "u1", at, 4), axis=1, bitorder="little")
        return _signed(_plus(_fields(blocks, at + 4, at + 20, 16, 4), fifth, 4), lowest)

    return levels


def _scale(at: int) -> Callable[[Bytes], Scales]:
    return lambda blocks: (_half(blocks, at), None)


def _scale_zero(blocks: Bytes) -> Scales:
    both = _half(blocks, 0, 2)
    return both[:, :1], both[:, 1:]


# Blocks of 256: a half-precision scale of scales.


def _two_k(blocks: Bytes) -> Levels:
    return _fields(blocks, 16, 80, 32, 2)


def _two_k_scales(blocks: Bytes) -> Scales:
    packed, outer = blocks[:, :16], _half(blocks, 80, 2)
    return outer[:, :1] * (packed & 15).astype(np.float32), -(outer[:, 1:] * (packed >> 4).astype(np.float32))


def _three_k(blocks: Bytes) -> Levels:
    return _signed(_plus(_fields(blocks, 32, 96, 32, 2), _fields(blocks, 0, 32, 32, 1), 2), -4)


def _three_k_scales(blocks: Bytes) -> Scales:
    inner = _plus(_fields(blocks, 96, 104, 8, 4), _fields(blocks, 104, 108, 4, 2), 4)
    return _half(blocks, 108) * _signed(inner, -32).astype(np.float32), None


def _four_k(blocks: Bytes) -> Levels:
    return _fields(blocks, 16, 144, 32, 4)


def _five_k(blocks: Bytes) -> Levels:
    return _plus(_fields(blocks, 48, 176, 32, 4), _fields(blocks, 16, 48, 32, 1), 4)


def _six_bit_scales(blocks: Bytes) -> Scales:
    """Of Q4_K and Q5_K: 8 scales and 8 zeros of 6 bits in 12 bytes, four bytes at a time.

    The first word holds scales 0–3 and the second zeros 0–3, in the low six bits of each byte. The third holds the low
    halves of scales 4–7 and of zeros 4–7; their upper two bits are the top bits of the first word and of the second.
    """
    words, outer = items(blocks, "<u4", 4, 3), _half(blocks, 0, 2)
    made = []
    for i in (0, 1):
        pair = np.empty((len(blocks), 2), "<u4")
        pair[:, 0] = words[:, i] & 0x3F3F3F3F
        pair[:, 1] = words[:, 2] >> np.uint32(4 * i) & 0x0F0F0F0F | words[:, i] >> np.uint32(2) & 0x30303030
        made.append(outer[:, i, None] * pair.view(np.uint8).astype(np.float32))
    return made[0], np.negative(made[1], out=made[1])


def _six_k(blocks: Bytes) -> Levels:
    return _signed(_plus(_fields(blocks, 0, 128, 64, 4), _fields(blocks, 128, 192, 32, 2), 4), -32)


def _six_k_scales(blocks: Bytes) -> Scales:
    return _half(blocks, 208) * items(blocks, "i1", 192, 16).astype(np.float32), None


def _ternary(blocks: Bytes) -> Levels:
    """TQ1_0: five digits of base 3 in a byte, as a fraction of 256; multiplying by 3 brings the next to the top."""
    parts = []
    for start, stop, width, digits in ((0, 32, 32, 5), (32, 48, 16, 5), (48, 52, 4, 4)):
        powers = np.array([3**i for i in range(digits)], np.uint8)
        runs = blocks[:, start:stop].reshape(len(blocks), -1, 1, width)
        parts.append((runs * powers[:, None]).reshape(len(blocks), -1))
    return _signed((np.concatenate(parts, 1).astype(np.uint16) * 3 >> 8).astype(np.uint8), -1)


def _ternary_fields(blocks: Bytes) -> Levels:
    return _signed(_fields(blocks, 0, 64, 32, 2), -1)


# Levels from a table.

_BENT = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Of IQ4: denser near zero, as weights are."""
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Of MXFP4: twice the numbers of four bits with two of exponent and one of mantissa (OCP MX 1.0, table 5)."""


def _looked_up(start: int, stop: int, table: tuple[int, ...]) -> Callable[[Bytes], Levels]:
    values = np.array(table, np.int8)
    return lambda blocks: values.take(_fields(blocks, start, stop, 16, 4))


def _iq4_xs_scales(blocks: Bytes) -> Scales:
    low = blocks[:, 4:8, None] >> np.array([0, 4], np.uint8) & np.uint8(15)
    high = blocks[:, 2:4, None] >> np.array([0, 2, 4, 6], np.uint8) & np.uint8(3)
    inner = _plus(low.reshape(-1, 8), high.reshape(-1, 8), 4)
    return _half(blocks, 0) * _signed(inner, -32).astype(np.float32), None


def _power_scales(blocks: Bytes) -> Scales:
    """MXFP4: a power of two, halved because the levels are doubled; the lowest two exponents give denormal numbers."""
    exponent = blocks[:, :1].astype(np.uint32)
    bits = np.where(exponent < 2, np.uint32(0x00200000) << np.minimum(exponent, 1), exponent - 1 << 23)
    return bits.astype(np.uint32).view(np.float32), None


LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "Q4_0": Layout(_nibbles(2, -8), _scale(0), -8, bits=4),
        "Q4_1": Layout(_nibbles(4), _scale_zero, bits=4),
        "Q5_0": Layout(_five(2, -16), _scale(0), -16),
        "Q5_1": Layout(_five(4), _scale_zero),
        "Q8_0": Layout(lambda blocks: blocks[:, 2:].view(np.int8), _scale(0), -128),
        "Q2_K": Layout(_two_k, _two_k_scales, bits=4),
        "Q3_K": Layout(_three_k, _three_k_scales, -4, bits=4),
        "Q4_K": Layout(_four_k, _six_bit_scales, bits=4),
        "Q5_K": Layout(_five_k, _six_bit_scales),
        "Q6_K": Layout(_six_k, _six_k_scales, -32),
        "IQ4_NL": Layout(_looked_up(2, 18, _BENT), _scale(0), -127),
        "IQ4_XS": Layout(_looked_up(8, 136, _BENT), _iq4_xs_scales, -127),
        "MXFP4": Layout(_looked_up(1, 17, _E2M1), _power_scales, -12),
        "TQ1_0": Layout(_ternary, _scale(52), -1),
        "TQ2_0": Layout(_ternary_fields, _scale(64), -1),
    }
)
"""By the name of the type."""
NIBBLES: Mapping[str, tuple[int, int]] = MappingProxyType({"Q4_0": (2, 16), "Q4_1": (4, 16), "Q4_K": (16, 32)})
"""Of types whose levels are halves of bytes: the first byte of them, and how many bytes hold numbers side by side."""
