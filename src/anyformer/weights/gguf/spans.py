"""Work over the blocks of a matrix, a span at a time, so that little memory is in use beside the result."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

STEP = 2**15
"""Numbers in one operation: they stay in a core's cache, and torch does not split an operation of this size over
threads. Waking its threads for each of many small operations takes longer than the work, and up to 4 ms where another
process has the core; so the threads here take whole spans."""
_SPAN = 16 * STEP


def steps(blocks: int, block: int) -> Iterator[slice]:
    """Slices of so many blocks of `block` numbers, each of at most `STEP` numbers."""
    size = STEP // block
    return (slice(i, i + size) for i in range(0, blocks, size))


def over_blocks(source: Tensor, blocks: int, block: int, work: Callable[..., None], *results: Tensor) -> None:
    """Calls `work(part, *parts)` for spans of blocks: what is in `part` of `source`, to be written to the `parts`.

    Args:
        source: [rows, blocks · what a block takes]; copied a span at a time where it is not contiguous.
        blocks: in each row.
        block: numbers in each of them.
        work: gets matrices with one block in each row, from torch's count of threads, and no gradients.
        results: [rows, blocks · what a block gives], any strides.
    """
    rows = len(source)
    if rows * blocks == 0:
        return
    if source.is_contiguous() and all(result.is_contiguous() for result in results):
        source = source.view(rows * blocks, -1)
        results = tuple(result.view(rows * blocks, -1) for result in results)
        blocks = 1
    size = max(1, _SPAN // (blocks * block))
    inference = torch.is_inference_mode_enabled()

    def span(start: int) -> None:
        with torch.inference_mode(inference), torch.no_grad():
            part = source[start : start + size].contiguous()
            wanted = [result[start : start + size] for result in results]
            parts = [
                want if want.is_contiguous() else torch.empty_like(want, memory_format=torch.contiguous_format)
                for want in wanted
            ]
            count = len(part) * blocks
            work(part.view(count, -1), *(given.view(count, -1) for given in parts))
            for want, given in zip(wanted, parts, strict=True):
                if want is not given:
                    want.copy_(given)

    starts = range(0, len(source), size)
    threads = min(torch.get_num_threads(), len(starts))
    if threads == 1:
        for start in starts:
            span(start)
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(span, starts):
            pass
