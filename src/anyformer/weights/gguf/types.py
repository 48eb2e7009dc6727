"""The types of numbers that GGUF files store, with their sizes. Imports no torch.

A type stores numbers in blocks: `block` consecutive numbers of a row take `n_bytes` bytes. A plain type (F32, I8 …) has
one number per block. Source: ggml's `ggml.h` and `ggml-common.h`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Kind:
    """One type of stored numbers.

    Attributes:
        name: ggml's name, in capitals.
        number: what a file calls it.
        block: numbers per block.
        n_bytes: bytes per block.
    """

    name: str
    number: int
    block: int
    n_bytes: int

    @property
    def quantised(self) -> bool:
        """Whether numbers share what they are made of."""
        return self.block > 1

    def row_bytes(self, n: int) -> int:
        """Bytes of a row of `n` numbers; `n` is a multiple of `block`."""
        return n // self.block * self.n_bytes


_ALL = (
    Kind("F32", 0, 1, 4),
    Kind("F16", 1, 1, 2),
    Kind("Q4_0", 2, 32, 18),
    Kind("Q4_1", 3, 32, 20),
    Kind("Q5_0", 6, 32, 22),
    Kind("Q5_1", 7, 32, 24),
    Kind("Q8_0", 8, 32, 34),
    Kind("Q8_1", 9, 32, 40),
    Kind("Q2_K", 10, 256, 84),
    Kind("Q3_K", 11, 256, 110),
    Kind("Q4_K", 12, 256, 144),
    Kind("Q5_K", 13, 256, 176),
    Kind("Q6_K", 14, 256, 210),
    Kind("Q8_K", 15, 256, 292),
    Kind("IQ2_XXS", 16, 256, 66),
    Kind("IQ2_XS", 17, 256, 74),
    Kind("IQ3_XXS", 18, 256, 98),
    Kind("IQ1_S", 19, 256, 50),
    Kind("IQ4_NL", 20, 32, 18),
    Kind("IQ3_S", 21, 256, 110),
    Kind("IQ2_S", 22, 256, 82),
    Kind("IQ4_XS", 23, 256, 136),
    Kind("I8", 24, 1, 1),
    Kind("I16", 25, 1, 2),
    Kind("I32", 26, 1, 4),
    Kind("I64", 27, 1, 8),
    Kind("F64", 28, 1, 8),
    Kind("IQ1_M", 29, 256, 56),
    Kind("BF16", 30, 1, 2),
    # Rows of Q4_0 and IQ4_NL interleaved for one processor: gone from ggml, still in published files.
    Kind("Q4_0_4_4", 31, 32, 18),
    Kind("Q4_0_4_8", 32, 32, 18),
    Kind("Q4_0_8_8", 33, 32, 18),
    Kind("TQ1_0", 34, 256, 54),
    Kind("TQ2_0", 35, 256, 66),
    Kind("IQ4_NL_4_4", 36, 32, 18),
    Kind("IQ4_NL_4_8", 37, 32, 18),
    Kind("IQ4_NL_8_8", 38, 32, 18),
    Kind("MXFP4", 39, 32, 17),
    Kind("NVFP4", 40, 64, 36),
    Kind("Q1_0", 41, 128, 18),
    Kind("Q2_0", 42, 64, 18),
)

KINDS: Mapping[int, Kind] = MappingProxyType({kind.number: kind for kind in _ALL})
"""By the number in a file."""
KIND: Mapping[str, Kind] = MappingProxyType({kind.name: kind for kind in _ALL})
"""By name."""

READ: frozenset[str] = frozenset(
    {"F64", "F32", "F16", "BF16"}
    | {"Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}
    | {"IQ4_NL", "IQ4_XS", "MXFP4", "TQ1_0", "TQ2_0"}
)
"""Kinds that become numbers."""
HALVES: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
        **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
        "Q2_K": (80, 82),
        "Q3_K": (108,),
        "Q6_K": (208,),
        "TQ1_0": (52,),
        "TQ2_0": (64,),
    }
)
"""Where the half-precision scales (and zeros) lie in a block of the kinds that are read and have any."""
KEPT: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "IQ4_NL", "MXFP4"), 32),
        **dict.fromkeys(("Q2_K", "Q3_K", "Q6_K"), 16),
    }
)
"""Kinds that can stay in codes, and how many numbers share a scale and a zero."""
WRITTEN: tuple[str, ...] = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
"""Kinds that numbers are written in."""
FILE_TYPES: Mapping[str, int] = MappingProxyType(
    {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "BF16": 32}
)
"""What `general.file_type` says of a file whose matrices are mostly of a kind."""
