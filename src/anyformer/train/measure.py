"""Measurements around a run: how many updates fit into some minutes, and the most memory that training took."""

import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from anyformer.train.evaluate import evaluating
from anyformer.train.loss import Batch
from anyformer.train.parallel import Alone
from anyformer.train.state import random_state, set_random_state
from anyformer.train.step import accumulate, precision_context, tally_of

_TRIALS = 5
_OVERHEAD = 1.1
"""The update itself, and reading and writing, come on top of the two passes."""


def now(device: torch.device) -> float:
    """Seconds on a clock, once the device has done everything asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def step_seconds(
    model: nn.Module, batches: Sequence[Batch], clear: Callable[[], None], *, precision: str, device: torch.device
) -> float:
    """How long an update takes, timed without effect on parameters or random state.

    Args:
        model: in training mode.
        batches: an update's micro-batches.
        clear: frees the gradients.
        precision: of the run.
        device: of the model.
    """
    state = random_state(device)
    times = []
    for _ in range(_TRIALS):
        begin = now(device)
        accumulate(model, batches, 1, precision=precision, tally=tally_of(model, batches, Alone()))
        clear()
        times.append(now(device) - begin)
    set_random_state(state, device)
    return sorted(times[1:])[1] * _OVERHEAD


def forward_seconds(model: nn.Module, batch: Batch, *, precision: str, device: torch.device) -> float:
    """How long a forward pass of evaluation takes."""
    begin = now(device)
    with evaluating(model), precision_context(precision, device):
        model(batch.tokens)
    return now(device) - begin


class PeakMemory:
    """The most memory taken since construction: by tensors on CUDA, by the process beyond what it held on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held, self._most = _resident(), _high_water()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def read(self) -> int | None:
        """Bytes; None where the process held more at some time before construction, which hides the answer."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        most = _high_water()
        return most - self._held if self._held and most > self._most else None


def _high_water() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _resident() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * resource.getpagesize()
