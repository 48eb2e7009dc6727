"""Memory: which values still lie in a mapped file, how its pages are let go, and what was freed given back."""

import ctypes
import sys
from collections.abc import Sequence
from mmap import PAGESIZE

import torch
from torch import Tensor

_MADV_DONTNEED = 4


def lies_in(value: Tensor, mapped: Sequence[Tensor]) -> bool:
    """Whether a value is a view of one of the mapped tensors."""
    return value.untyped_storage().data_ptr() in {each.untyped_storage().data_ptr() for each in mapped}


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape hold the same bits; NaN equals itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(each.contiguous().view(torch.uint8) for each in (one, other)))


def release(mapped: Sequence[Tensor]) -> None:
    """Lets go of the pages of mapped tensors that nothing lies in any more; they come back from the file when read.

    Without it a conversion holds the whole file in resident memory beside its result. It does something on Linux alone,
    and never to tensors that were written to.
    """
    if sys.platform != "linux":
        return
    for each in mapped:
        start = -(-each.data_ptr() // PAGESIZE) * PAGESIZE
        stop = (each.data_ptr() + each.numel() * each.element_size()) // PAGESIZE * PAGESIZE
        if stop > start:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_DONTNEED)


def trim() -> None:
    """Gives freed memory back to the system, which glibc keeps for itself; elsewhere it does nothing."""
    if sys.platform == "linux":
        give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if give_back is not None:
            give_back(0)
