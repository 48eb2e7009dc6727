"""How a matrix in codes is cut into blocks of outputs, and the bytes that it takes. Imports no torch."""

from math import prod

BLOCK = 2**20
"""Numbers in a scratch block, 4 MB in float32."""


def layout(n: int, k: int) -> tuple[int, int]:
    """The number of blocks of a matrix [N, K], and the outputs of each, a multiple of 16."""
    most = min(2048, max(64, BLOCK // k // 16 * 16))
    width = -(-n // -(-n // most) // 16) * 16
    return -(-n // width), width


def packed_bytes(shape: tuple[int, ...], bits: int, group: int, *, symmetric: bool, half: bool) -> int:
    """Bytes in memory of matrices […, N, K] in codes.

    Args:
        shape: of the weight.
        bits: of a code, 4 or 8.
        group: neighbouring inputs that share a scale.
        symmetric: whether every zero is the same multiple of its scale, and takes no memory.
        half: whether scales and zeros are numbers of half precision.
    """
    *stacked, n, k = shape
    n_blocks, width = layout(n, k)
    row = width // 2 + 4 if bits == 4 else width + 8
    numbers = k // group * width * (1 if symmetric else 2)
    return prod(stacked) * n_blocks * (k * row + (2 if half else 4) * numbers)
