"""Matrices packed in a second process, while the first imports torch. Imports no torch.

Packing needs nothing of torch and takes up to a fifth of the time that importing it does. A thread would not do, since
both want Python's lock most of the time. What is packed lies in memory that the two processes share.
"""

import mmap
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from anyformer.nn.packing import Blocks
from anyformer.weights.gguf.packing import each_packed
from anyformer.weights.gguf.placement import Placed, placements
from anyformer.weights.gguf.reading import Understood

_ALIGNED = 64
_LARGE = 2**31
"""Bytes of memory that take longer to pack than torch to import: then no processor is left to it alone."""
_ARRAYS = ("rows", "scales", "zeros")
_Place = tuple[int, tuple[int, ...], str]
"""Where an array begins, its shape and its type."""


class Ahead:
    """A second process at work.

    Args:
        child: its number.
        told: the end of a pipe from which comes where everything lies, once it is packed.
        shared: the memory.
        names: of the matrices.
    """

    def __init__(self, child: int, told: int, shared: mmap.mmap, names: frozenset[str]) -> None:
        self._child: int | None = child
        self._told, self._shared, self._names = told, shared, names

    def blocks(self, placed: Sequence[Placed]) -> dict[str, Blocks] | None:
        """What was packed, once; waits for it. None where it is not what `placed` asks for, or could not be packed.

        Whatever went wrong goes wrong again where it is packed by the one who asked, and is said there.
        """
        if self._child is None:
            return None
        wanted = {each.name for each in placed if each.packed} == self._names
        if not wanted:
            with suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGKILL)
        with os.fdopen(self._told, "rb") as told:
            said = told.read()
        status = 1
        with suppress(ChildProcessError):  # Someone else may have waited for it.
            status = os.waitpid(self._child, 0)[1]
        self._child = None
        if not wanted or status:
            return None
        return {name: replace(blocks, **self._arrays(places)) for name, blocks, places in pickle.loads(said)}

    def _arrays(self, places: dict[str, _Place | None]) -> dict[str, NDArray[Any] | None]:
        return {name: None if place is None else _array(self._shared, place) for name, place in places.items()}


def begin(model: Understood) -> Ahead | None:
    """Starts to pack what can stay in codes on a CPU; None where a second process would be no help.

    It is none once torch is there, whose threads a second process would not have, without a second processor, and where
    no process can be made of another.
    """
    if sys.platform != "linux" or "torch" in sys.modules or threading.active_count() > 1:
        return None
    processors = len(os.sched_getaffinity(0))
    if processors < 2:
        return None
    placed = placements(model, quantize="keep", dtype="float32")
    names = frozenset(each.name for each in placed if each.packed)
    size = sum(2 * each.n_bytes + len(_ARRAYS) * _ALIGNED for each in placed if each.packed)
    threads = processors - (size < _LARGE)
    if not names:
        return None
    try:
        shared = mmap.mmap(-1, size)
        told, tell = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # The threads are those of a library that is not used.
            child = os.fork()
    except OSError:  # There is no memory, or no room for another process.
        return None
    if child == 0:
        _work(model, placed, shared, threads, tell)
    os.close(tell)
    return Ahead(child, told, shared, names)


def _work(model: Understood, placed: Sequence[Placed], shared: mmap.mmap, threads: int, tell: int) -> NoReturn:
    """The second process: packs, says where everything lies, and ends; at once where the first one has ended."""
    code = 1
    try:
        first = os.getppid()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in {0, 1, 2} - {tell}:  # A reader of the first one's output does not wait for this one.
            os.dup2(nowhere, stream)
        end, found = 0, []
        for name, blocks in each_packed(model, placed, threads):
            if os.getppid() != first:
                os._exit(code)
            places: dict[str, _Place | None] = {}
            for which in _ARRAYS:
                made: NDArray[Any] | None = getattr(blocks, which)
                places[which] = place = None if made is None else (end, made.shape, made.dtype.str)
                if made is not None and place is not None:
                    _array(shared, place)[...] = made
                    end += -(-made.nbytes // _ALIGNED) * _ALIGNED
            bare = replace(blocks, rows=None, scales=None, zeros=None)  # type: ignore[arg-type]
            found.append((name, bare, places))
        with os.fdopen(tell, "wb") as told:
            told.write(pickle.dumps(found))
        code = 0
    finally:
        os._exit(code)


def _array(shared: mmap.mmap, place: _Place) -> NDArray[Any]:
    begin, shape, kind = place
    return np.ndarray(shape, np.dtype(kind), shared, begin)
