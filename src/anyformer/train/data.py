"""Batches as a pure function of the seed and the step, so that resuming needs the step number alone.

Of n tokens an epoch reads ⌊(n − 1) / T⌋ windows of T + 1 tokens that overlap by one, in a fresh order and from a
fresh phase in 0 … T − 1, so that rows begin elsewhere every time. Where the phase leaves no room for the last window,
that one begins at 0 and covers what the phase left out. Rows are numbered through all epochs: update s takes rows
s·B … s·B + B − 1, and what an epoch has left goes into the next batch.
"""

import hashlib
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from anyformer.errors import UserError
from anyformer.train.loss import Batch, shifted

Ids = NDArray[np.int64]
_IN_MEMORY = 1 << 23
"""Splits of up to so many tokens are held in memory as int64; larger ones are read row by row."""


class Tokens(Protocol):
    """A long sequence of token ids."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: slice, /) -> Ids: ...


class Windows:
    """Rows of T + 1 tokens cut from a split at given places.

    Args:
        tokens: the split.
        documents: int64 [D], where documents start, to keep them apart; None reads one stream.
        context: T.
    """

    def __init__(self, tokens: Tokens, documents: Ids | None, context: int) -> None:
        self.tokens, self.documents, self.context = tokens, documents, context
        self.n_tokens = len(tokens)
        self._flat = np.ascontiguousarray(tokens[0 : self.n_tokens]) if self.n_tokens <= _IN_MEMORY else None

    def rows(self, starts: Ids) -> Batch:
        """The windows that begin at `starts`; beyond the end of the split comes padding that is no target."""
        width = self.context + 1
        stops = np.minimum(starts + width, self.n_tokens)
        whole = bool((stops - starts == width).all())
        if whole and self._flat is not None:
            rows = np.lib.stride_tricks.sliding_window_view(self._flat, width)[starts]
        else:
            rows = np.zeros((len(starts), width), dtype=np.int64)
            for row, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
                source = self.tokens if self._flat is None else self._flat
                rows[row, : stop - start] = source[start:stop]
        supervised = None if whole else torch.from_numpy(np.arange(width) < (stops - starts)[:, None])
        return shifted(torch.from_numpy(rows), None, supervised, self._segments(starts))

    def _segments(self, starts: Ids) -> torch.Tensor | None:
        """The document of each token, counted within its row; None where no row holds a boundary."""
        if self.documents is None:
            return None
        places = starts[:, None] + np.arange(self.context + 1)
        found = np.searchsorted(self.documents, places, side="right")
        found -= found[:, :1]
        return torch.from_numpy(found) if found.any() else None


def _raw(seed: int, epoch: int, count: int) -> NDArray[np.uint64]:
    """`count` random words for one epoch, by a generator whose output is fixed for all versions of numpy."""
    bits: Any = np.random.PCG64(np.random.SeedSequence([seed, epoch]))
    words: NDArray[np.uint64] = bits.random_raw(count)
    return words


class TrainingData:
    """The batches of a run.

    Args:
        tokens: the training split.
        documents: where documents start, for packing "documents"; None for a stream.
        context: T.
        batch: rows of an update.
        seed: of the order.

    Raises:
        UserError: the split is shorter than one window.
    """

    def __init__(self, tokens: Tokens, documents: Ids | None, *, context: int, batch: int, seed: int) -> None:
        self.batch_rows, self.seed, self.context = batch, seed, context
        n_tokens = len(tokens)
        if n_tokens < context + 1:
            raise UserError(
                "the training text is shorter than one row",
                where="data",
                got=f"{n_tokens:,} tokens",
                expected=f"at least {context + 1:,}, the context and one",
                remedy="give more text, or a smaller data.context",
            )
        self.windows = Windows(tokens, documents, context)
        self.rows_per_epoch = (n_tokens - 1) // context
        self._last_start = n_tokens - 1 - context
        self._epochs: dict[int, Ids] = {}

    def order(self, epoch: int) -> Ids:
        """Where the windows of an epoch begin, in the order they are read: int64 [rows_per_epoch]."""
        if epoch not in self._epochs:
            words = _raw(self.seed, epoch, self.rows_per_epoch + 1)
            phase = int(words[0] % np.uint64(self.context))
            order = np.argsort(words[1:], kind="stable").astype(np.int64)
            # A step may join the end of one epoch and the beginning of the next; older ones never come back.
            self._epochs = {e: o for e, o in self._epochs.items() if e >= epoch - 1}
            starts = phase + order * self.context
            self._epochs[epoch] = np.where(starts > self._last_start, 0, starts)
        return self._epochs[epoch]

    def starts(self, step: int) -> Ids:
        """Where the rows of an update begin in the split: int64 [batch]."""
        rows = np.arange(step * self.batch_rows, (step + 1) * self.batch_rows, dtype=np.int64)
        epochs, places = np.divmod(rows, self.rows_per_epoch)
        return np.concatenate([self.order(int(epoch))[places[epochs == epoch]] for epoch in np.unique(epochs)])

    def batch(self, step: int, share: slice = slice(None)) -> Batch:
        """The rows of update `step`, or a share of them."""
        return self.windows.rows(self.starts(step)[share])


def fingerprint(batch: Batch) -> str:
    """16 hexadecimal digits that tell one batch, on the host, from another."""
    return hashlib.blake2b(np.ascontiguousarray(batch.tokens.numpy()).tobytes(), digest_size=8).hexdigest()


def whole_split(windows: Windows, rows: int) -> Iterator[Batch]:
    """Disjoint windows over a whole split in batches of `rows`, the last and partial one included."""
    starts = np.arange(0, max(0, windows.n_tokens - 1), windows.context, dtype=np.int64)
    for first in range(0, len(starts), rows):
        yield windows.rows(starts[first : first + rows])
