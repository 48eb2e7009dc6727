"""Token shards on disk: little-endian arrays, mapped into memory, read as one long sequence.

A split's folder holds `tokens-00000.bin`, `tokens-00001.bin`, … (uint16, or uint32 for vocabularies above
65,536) and `documents.bin`: for each document two little-endian int64, the index of its first token and its
bytes of UTF-8.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np
from numpy.typing import NDArray

from anyformer.errors import UserError

Ids = NDArray[np.int64]
INDEX_FILE = "documents.bin"


def shard_name(index: int) -> str:
    """The file name of shard number `index`."""
    return f"tokens-{index:05d}.bin"


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest type that holds every id of a vocabulary."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class ShardWriter:
    """Writes one split: documents one after another, in shards of at most `shard_tokens` tokens."""

    def __init__(self, folder: Path, dtype: np.dtype[Any], shard_tokens: int) -> None:
        folder.mkdir()
        self._folder, self._dtype, self._limit = folder, dtype, shard_tokens
        self._index: list[tuple[int, int]] = []
        self._file: BinaryIO | None = None
        self.shards: list[int] = []
        self.n_tokens = 0
        self.n_bytes = 0

    def begin(self, n_bytes: int) -> None:
        """Starts a document of `n_bytes` bytes of text."""
        self._index.append((self.n_tokens, n_bytes))
        self.n_bytes += n_bytes

    def add(self, ids: Sequence[int]) -> None:
        """Appends tokens to the document begun last."""
        rest = np.asarray(ids, dtype=self._dtype)
        self.n_tokens += len(rest)
        while len(rest):
            if not self.shards or self.shards[-1] == self._limit:
                self._turn()
            now = rest[: self._limit - self.shards[-1]]
            assert self._file is not None
            self._file.write(now.tobytes())
            self.shards[-1] += len(now)
            rest = rest[len(now) :]

    def _turn(self) -> None:
        self.release()
        self._file = open(self._folder / shard_name(len(self.shards)), "wb")  # noqa: SIM115
        self.shards.append(0)

    def release(self) -> None:
        """Closes the shard being written."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def close(self) -> dict[str, Any]:
        """Writes the index of documents; returns the counts that `corpus.json` records."""
        self.release()
        index = np.array(self._index, dtype="<i8").reshape(-1, 2)
        (self._folder / INDEX_FILE).write_bytes(index.tobytes())
        return {
            "n_tokens": self.n_tokens,
            "n_bytes": self.n_bytes,
            "n_documents": len(index),
            "shards": self.shards,
        }


class Tokens:
    """All tokens of a split as one read-only sequence, however many shards hold them.

    `len(tokens)`; `tokens[i]` is an int; `tokens[a:b]` and `tokens[array of indices]` are new int64 arrays,
    read from the mapped files without touching the rest.
    """

    def __init__(self, shards: Sequence[NDArray[Any]]) -> None:
        self._shards = tuple(shards)
        self._starts = np.cumsum([0, *map(len, self._shards)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @overload
    def __getitem__(self, key: int) -> int: ...

    @overload
    def __getitem__(self, key: slice | NDArray[Any]) -> Ids: ...

    def __getitem__(self, key: int | slice | NDArray[Any]) -> int | Ids:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step < 0:
                return self[np.arange(start, stop, step)]
            return self.read(start, max(start, stop))[::step].astype(np.int64)
        if isinstance(key, np.ndarray) and key.ndim:
            return self._gather(key)
        at = int(key) + (len(self) if key < 0 else 0)
        if not 0 <= at < len(self):
            raise IndexError(f"token {key} of {len(self)}")
        return int(self.read(at, at + 1)[0])

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens [start, stop) in the type they are stored in; a view of the file where one shard holds them all."""
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        parts = []
        for index in range(first, len(self._shards)):
            base = int(self._starts[index])
            if base >= stop:
                break
            parts.append(self._shards[index][max(0, start - base) : stop - base])
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _gather(self, indices: NDArray[Any]) -> Ids:
        if indices.dtype.kind not in "iu":
            raise IndexError(f"indices must be whole numbers, not {indices.dtype}")
        at = np.where(indices < 0, indices + len(self), indices).astype(np.int64)
        if at.size and (at.min() < 0 or at.max() >= len(self)):
            raise IndexError(f"an index is outside the {len(self)} tokens")
        found = np.empty(at.shape, dtype=np.int64)
        shard = np.searchsorted(self._starts, at, side="right") - 1
        for index in np.unique(shard):
            here = shard == index
            found[here] = self._shards[index][at[here] - self._starts[index]]
        return found


def open_shards(folder: Path, dtype: np.dtype[Any], counts: dict[str, Any]) -> tuple[Tokens, Ids]:
    """The tokens in `folder` and its index [D, 2] of document starts and bytes, held against the recorded `counts`."""
    shards = []
    for index, length in enumerate(counts["shards"]):
        path = folder / shard_name(index)
        _require_size(path, length * dtype.itemsize)
        shards.append(np.memmap(path, dtype=dtype, mode="r", shape=(length,)))
    path = folder / INDEX_FILE
    _require_size(path, counts["n_documents"] * 16)
    documents = np.frombuffer(path.read_bytes(), dtype="<i8").astype(np.int64).reshape(-1, 2)
    starts, sizes = documents[:, 0], documents[:, 1]
    fits = (
        sum(counts["shards"]) == counts["n_tokens"]
        and int(sizes.sum()) == counts["n_bytes"]
        and (len(starts) == 0 or (starts[0] == 0 and starts[-1] <= counts["n_tokens"]))
        and bool((np.diff(starts) >= 0).all())
    )
    if not fits:
        raise UserError(
            "the counts of this corpus contradict each other", where=path, remedy="prepare the corpus again"
        )
    return Tokens(shards), documents


def _require_size(path: Path, size: int) -> None:
    found = path.stat().st_size if path.is_file() else None
    if found != size:
        raise UserError(
            "a file of this corpus is missing" if found is None else "a file of this corpus is not whole",
            where=path,
            got=None if found is None else f"{found} bytes",
            expected=f"{size} bytes",
            remedy="prepare the corpus again",
        )
