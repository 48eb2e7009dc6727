"""The bytes of weights that stay in quantised codes, as `nn.packed` lays them out. Imports no torch."""

from math import prod

_BLOCK = 2**20
"""Weights in a block: its floats take 4 MB."""


def layout(n: int, k: int) -> tuple[int, int]:
    """Blocks of the N outputs of a matrix and their width, a multiple of 16."""
    most = min(512, max(64, _BLOCK // k // 16 * 16))
    n_blocks = -(-n // most)
    width = -(-n // n_blocks // 16) * 16
    return -(-n // width), width


def kept_bytes(shape: tuple[int, ...], bits: int, group: int, *, zeros: bool) -> int:
    """Bytes of matrices […, N, K] in codes of `bits` with float32 scales, and zeros unless these are multiples of them.

    The codes of one input for a block of outputs are followed by two numbers of 2 or 4 bytes.
    """
    n, k = shape[-2:]
    n_blocks, width = layout(n, k)
    codes = n_blocks * k * (width * bits // 8 + (4 if bits == 4 else 8))
    scales = n_blocks * width * (k // group) * 4
    return prod(shape[:-2]) * (codes + (2 if zeros else 1) * scales)
