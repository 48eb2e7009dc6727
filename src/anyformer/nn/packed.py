"""Matrices in quantised codes as they lie in memory, and the product with them.

With a code c, and a scale s and a zero z for each group g of inputs,

    y_n = Σ_g (s_ng · Σ_k∈g c_nk x_k + z_ng · Σ_k∈g x_k).

The inner sums over codes are what torch's quantised embedding bags compute: a bag is a group, its rows are the codes of
one input for neighbouring outputs, weighted by that input. Codes of at most 8 bits are exact there, sums are float32.
For one vector that took a tenth of the time of torch's product with packed 4-bit weights in float32.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from anyformer.errors import UserError
from anyformer.nn.blocked import layout
from anyformer.nn.packing import Blocks, Part, Parts, halved, packed

GROUP = 32
"""Neighbouring inputs of a row that share a scale and a zero, as stored formats have it."""

FEW_ROWS = 8
"""Up to so many vectors meet the codes themselves; for more, floats of the matrix are made block by block.

On one core of an AVX-512 machine, for 4096×4096 in 4 bits, the two took 2.5 and 30 ms for 1 vector, 20 and 30 ms for 8,
60 and 38 ms for 16; a product with float32 weights took 5, 17 and 17 ms.
"""

SUMS = 2**16
"""So many sums of groups at a time are as fast as four times as many, with 2 MB less at a head of 49,152 words."""

_Blocks = tuple[Tensor, Tensor, Tensor | None]
"""Rows, scales and zeros of some blocks of outputs."""


@dataclass(frozen=True)
class Codes:
    """Matrices […, N, K] in quantised codes: value = code · scale + zero, scale and zero shared by a group of inputs.

    Attributes:
        codes: uint8 […, N, K], 0 … 2^bits − 1.
        scales: float32 […, N, K/g]; g divides K, and is 32 in most formats.
        zeros: float32 […, N, K/g], the value of code 0.
        bits: 4 or 8.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int

    @property
    def shape(self) -> tuple[int, ...]:
        """[…, N, K]."""
        return tuple(self.codes.shape)

    @property
    def group(self) -> int:
        """The neighbouring inputs that share a scale."""
        return self.codes.shape[-1] // self.scales.shape[-1]

    def dequantised(self) -> Tensor:
        """The numbers themselves, float32 […, N, K]."""
        grouped = self.codes.reshape(*self.scales.shape, self.group).to(torch.float32)
        grouped.mul_(self.scales[..., None]).add_(self.zeros[..., None])
        return grouped.view(self.codes.shape)

    def shaped(self, shape: torch.Size) -> "Codes":
        """The same rows in another stack, […, N, K]; itself where they cannot be."""
        if self.codes.numel() != shape.numel() or self.codes.shape[-1] != shape[-1]:
            return self
        groups = (*shape[:-1], self.scales.shape[-1])
        return Codes(self.codes.view(shape), self.scales.view(groups), self.zeros.view(groups), self.bits)

    def check(self, where: object = None) -> None:
        """Raises `UserError` for parts that do not go together, but for codes outside their bits."""
        *_, n, k = shape = self.codes.shape if self.codes.dim() > 1 else (0, 0)
        groups = self.scales.shape[-1] if self.scales.dim() else 0
        fits = (
            self.codes.dtype == torch.uint8
            and self.scales.dtype == self.zeros.dtype == torch.float32
            and self.scales.shape == self.zeros.shape == (*shape[:-1], groups)
            and n > 0
            and groups > 0
            and k % groups == 0
        )
        if not fits or self.bits not in (4, 8):
            parts = (self.codes, self.scales, self.zeros)
            got = f"{self.bits} bits, " + ", ".join(f"{part.dtype} {list(part.shape)}" for part in parts)
            expected = "4 or 8 bits, codes uint8 […, N, K], scales and zeros float32 […, N, K / a size that divides K]"
            raise UserError("codes, scales and zeros do not go together", where=where, got=got, expected=expected)


def can_keep(shape: tuple[int, ...], device: str | torch.device = "cpu", group: int = GROUP) -> str | None:
    """Why a matrix of this shape […, N, K] cannot stay in codes on a device; None where it can."""
    kind = torch.device(device).type
    if kind != "cpu":
        return f"no product with codes on {kind}"
    if len(shape) < 2 or not all(shape):
        return "not a matrix"
    if shape[-1] % group:
        return f"rows of {shape[-1]} are not whole groups of {group}"
    return None if _has_ops() else "this torch has no quantised embedding bags"


@lru_cache
def _has_ops() -> bool:
    names = ("4bit_rowwise_offsets", "byte_rowwise_offsets", "4bit_unpack", "byte_unpack")
    return all(hasattr(torch.ops.quantized, f"embedding_bag_{name}") for name in names)


@lru_cache(maxsize=64)
def _bags(n_rows: int, group: int, repeats: int) -> tuple[Tensor, Tensor]:
    """All rows of a table in order, `repeats` times, int32, and where their bags begin."""
    index = torch.arange(n_rows, dtype=torch.int32, device="cpu").repeat(repeats)
    return index, torch.arange(0, n_rows * repeats, group, dtype=torch.int32, device="cpu")


def codes_of(codes: Tensor, scales: Tensor, zeros: Tensor, where: object) -> Codes:
    """A weight as it is stored: 4 bits where all codes fit into them. Raises `UserError` for parts that do not fit."""
    small = codes.dtype == torch.uint8 and codes.numel() > 0 and int(codes.max()) < 16
    found = Codes(codes, scales, zeros, 4 if small else 8)
    found.check(where)
    return found


class Packed:
    """Codes of one matrix [N, K], or of E stacked ones [E, N, K], as the product reads them.

    Outputs lie in blocks of `width`. A row of `rows`, uint8 [E · n_blocks · K, bytes], holds the codes of one input for
    the outputs of a block, two to a byte where they have 4 bits, then a scale of 1 and the offset that the operation
    adds to each code. `scales` and `zeros` are [E · n_blocks, K/g, width], in half precision where that holds them
    exactly, as in most formats, otherwise float32. Zeros that are one whole multiple of every scale, as in symmetric
    formats, are that offset instead.
    """

    def __init__(self, codes: Codes | Blocks) -> None:
        blocks = packed(_parts(codes)) if isinstance(codes, Codes) else codes
        self.shape, self.bits, self.group = torch.Size(blocks.shape), blocks.bits, blocks.group
        self.offset = blocks.offset
        *_, self.n, self.k = self.shape
        self.n_blocks, self.width = layout(self.n, self.k)
        self.rows, self.scales = torch.from_numpy(blocks.rows), torch.from_numpy(blocks.scales)
        self.zeros = None if blocks.zeros is None else torch.from_numpy(blocks.zeros)

    @property
    def nbytes(self) -> int:
        """In memory."""
        return sum(
            part.numel() * part.element_size() for part in (self.rows, self.scales, self.zeros) if part is not None
        )

    def _unblocked(self, numbers: Tensor) -> Tensor:
        """The way back."""
        flat = numbers.transpose(1, 2).reshape(-1, self.n_blocks * self.width, numbers.shape[1])
        return flat[:, : self.n].reshape(*self.shape[:-1], numbers.shape[1])

    def codes(self) -> Codes:
        """What was packed."""
        rows = self.rows.view(-1, self.k, self.rows.shape[1])[..., : self.width * self.bits // 8]
        parts = []
        for block in rows:
            columns = block.t()
            parts.append(torch.stack([columns & 15, columns >> 4], 1).flatten(0, 1) if self.bits == 4 else columns)
        whole = torch.stack(parts).view(-1, self.n_blocks * self.width, self.k)
        codes = whole[:, : self.n].reshape(self.shape)
        scales = self._unblocked(self.scales.float())
        zeros = scales * self.offset if self.zeros is None else self._unblocked(self.zeros.float())
        return Codes(codes.contiguous(), scales, zeros, self.bits)

    def looked_up(self, ids: Tensor) -> Tensor:
        """Rows of the matrix, int64 [n] -> float32 [n, K]."""
        block, column = ids // self.width, ids % self.width
        stored = self.rows.view(-1, self.k, self.rows.shape[1])
        if self.bits == 4:
            codes = stored[block, :, column // 2] >> (column % 2 * 4).to(torch.uint8)[:, None] & 15
        else:
            codes = stored[block, :, column]
        scales = self.scales[block, :, column].float()
        zeros = scales * self.offset if self.zeros is None else self.zeros[block, :, column].float()
        return Codes(codes, scales, zeros, self.bits).dequantised()

    def of(self, index: int) -> "Packed":
        """One matrix of a stack, in the same memory."""
        one = object.__new__(Packed)
        one.__dict__.update(self.__dict__)
        start, stop = index * self.n_blocks, (index + 1) * self.n_blocks
        one.shape = self.shape[1:]
        one.rows = self.rows[start * self.k : stop * self.k]
        one.scales = self.scales[start:stop]
        one.zeros = None if self.zeros is None else self.zeros[start:stop]
        return one


def _parts(codes: Codes) -> Parts:
    """Codes that are there, to be packed."""
    values = codes.codes.flatten(0, -2).numpy()
    scales, zeros = (numbers.flatten(0, -2).numpy() for numbers in (codes.scales, codes.zeros))
    if codes.bits == 4 and values.size and values.max() > 15:
        raise UserError("a code does not fit 4 bits", got=int(values.max()), expected="at most 15")

    def make(start: int, stop: int) -> Part:
        some = values[start:stop]
        return Part(halved(some) if codes.bits == 4 else some, scales[start:stop], zeros[start:stop])

    return Parts(tuple(codes.shape), codes.bits, codes.group, make)


def _slices(rows: Tensor, scales: Tensor, zeros: Tensor | None, step: int) -> Iterator[_Blocks]:
    """A packed matrix, `step` blocks of outputs at a time."""
    n_blocks = scales.shape[0]
    k = rows.shape[0] // n_blocks
    for start in range(0, n_blocks, step):
        stop = start + step
        yield rows[start * k : stop * k], scales[start:stop], None if zeros is None else zeros[start:stop]


def _by_codes(x: Tensor, rows: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> Tensor:
    """x Wᵀ for blocks of outputs, from sums over each group of codes times inputs. [M, K] -> [M, n_blocks · width].

    The operation that sums runs on one thread.
    """
    m, k = x.shape
    n_blocks, groups, width = scales.shape
    index, starts = _bags(rows.shape[0], k // groups, m)
    ops = torch.ops.quantized
    op = ops.embedding_bag_4bit_rowwise_offsets if bits == 4 else ops.embedding_bag_byte_rowwise_offsets
    weights = x[:, None].expand(m, n_blocks, k).reshape(-1)
    sums: Tensor = op.default(rows, index, starts, per_sample_weights=weights).view(m, n_blocks, groups, width)
    sums.mul_(scales.float())
    if zeros is not None:
        sums.addcmul_(x.reshape(m, 1, groups, -1).sum(-1, keepdim=True), zeros.float())
    return sums.sum(2).view(m, n_blocks * width)


def _floats(rows: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> Tensor:
    """One block of the matrix itself, its transpose, float32 [K, width]."""
    ops = torch.ops.quantized
    unpack = ops.embedding_bag_4bit_unpack if bits == 4 else ops.embedding_bag_byte_unpack
    grouped: Tensor = unpack(rows).view(scales.shape[1], -1, scales.shape[2])
    grouped.mul_(scales[0, :, None].float())
    if zeros is not None:
        grouped.add_(zeros[0, :, None].float())
    return grouped.flatten(0, 1)


def multiplied(x: Tensor, rows: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> Tensor:
    """x Wᵀ, float32 [M, K] -> [M, n_blocks · width]."""
    n_blocks, groups, width = scales.shape
    m = x.shape[0]
    if m <= FEW_ROWS:
        step = max(1, SUMS // (m * groups * width))
        if step >= n_blocks:
            return _by_codes(x, rows, scales, zeros, bits)
        return torch.cat([_by_codes(x, *part, bits) for part in _slices(rows, scales, zeros, step)], 1)
    out = x.new_empty(m, n_blocks * width)
    for i, block in enumerate(_slices(rows, scales, zeros, 1)):
        torch.mm(x, _floats(*block, bits), out=out[:, i * width : (i + 1) * width])
    return out


def multiplied_back(grad: Tensor, rows: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> Tensor:
    """grad W, float32 [M, n_blocks · width] -> [M, K]."""
    width = scales.shape[2]
    out = grad.new_zeros(grad.shape[0], rows.shape[0] // scales.shape[0])
    for i, block in enumerate(_slices(rows, scales, zeros, 1)):
        out.addmm_(grad[:, i * width : (i + 1) * width], _floats(*block, bits).t())
    return out


@torch.library.custom_op("anyformer::quantised_product", mutates_args=())
def compiled(x: Tensor, rows: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> Tensor:
    """`multiplied` as one operation, which `torch.compile` does not look into."""
    return multiplied(x, rows, scales, zeros, bits)


@compiled.register_fake
def _(x: Tensor, rows: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> Tensor:
    return x.new_empty(x.shape[0], scales.shape[0] * scales.shape[2])
