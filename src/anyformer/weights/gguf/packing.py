"""The matrices of a file that stay quantised, packed from its mapped bytes. Imports no torch."""

import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from anyformer.errors import UserError
from anyformer.nn.packing import Blocks, Bytes, Part, Parts, packed
from anyformer.weights.gguf.format import Entry
from anyformer.weights.gguf.layouts import LAYOUTS
from anyformer.weights.gguf.parts import part, rows_of
from anyformer.weights.gguf.placement import Placed
from anyformer.weights.gguf.reading import Understood
from anyformer.weights.gguf.types import HALVES, KEPT
from anyformer.weights.shapes import Shape, Step


def packed_matrices(model: Understood, placed: Sequence[Placed], threads: int) -> dict[str, Blocks]:
    """Every matrix that is to be in memory in codes, by our names; as `each_packed`."""
    return dict(each_packed(model, placed, threads))


def each_packed(model: Understood, placed: Sequence[Placed], threads: int) -> Iterator[tuple[str, Blocks]]:
    """Every matrix that is to be in memory in codes, with its name, one after another as they are made.

    Args:
        model: the file as it was understood.
        placed: what becomes of its tensors.
        threads: how many matrices are packed side by side; numpy works on each on one thread.

    Raises:
        UserError: a scale that is not finite.
    """
    shapes = {each.name: each.shape for each in placed}
    names = {each.name for each in placed if each.packed}
    taken = [step for step in model.taken if not names.isdisjoint(step.ours)]
    files = {path: _mapped(path) for path in {model.file.tensors[step.theirs[0]].file for step in taken}}

    def work(step: Step) -> dict[str, Blocks]:
        (theirs,) = step.theirs
        entry = model.file.tensors[theirs]
        data = np.frombuffer(files[entry.file], np.uint8, entry.n_bytes, entry.offset)
        data = data.reshape(-1, entry.kind.row_bytes(entry.shape[-1]))
        rows = rows_of(step, [shapes[name] for name in step.ours])
        made = {
            name: packed(_parts(theirs, entry, shapes[name], data[some]))
            for name, some in zip(step.ours, rows, strict=True)
            if name in names
        }
        _release(files[entry.file], entry)
        return made

    with ThreadPoolExecutor(threads) as pool:
        for made in pool.map(work, taken):
            yield from made.items()


def _parts(name: str, entry: Entry, shape: Shape, rows: Bytes) -> Parts:
    kind = entry.kind

    def make(start: int, stop: int) -> Part:
        made = part(rows[start:stop], kind)
        if kind.name in HALVES and not (np.isfinite(made.scales).all() and np.isfinite(made.zeros).all()):
            raise not_finite(name, entry)
        return made

    return Parts(shape, LAYOUTS[kind.name].bits, KEPT[kind.name], make)


def not_finite(name: str, entry: Entry) -> UserError:
    """The refusal of scales that are no numbers: scores of NaN count as hidden, and the model would go on talking."""
    got, remedy = f"NaN or infinity in {name}, of type {entry.kind.name}", "the file is damaged: fetch it again"
    return UserError("a scale of quantised weights is not finite", where=entry.file, got=got, remedy=remedy)


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _release(mapped: mmap.mmap, entry: Entry) -> None:
    """Lets go of a tensor's pages, which would count as the process's own, where the system can."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = -(-entry.offset // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (entry.offset + entry.n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if stop > start:
        mapped.madvise(mmap.MADV_DONTNEED, start, stop - start)
