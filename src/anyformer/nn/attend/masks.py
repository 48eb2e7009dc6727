"""Masks as descriptions: which key a query may see, said over positions and never stored as a T×S tensor.

Descriptions combine with `&`. Without `.at(...)` the keys stand at positions 0 … S−1 and the queries are the last T of
them, so that the same description serves training, chunked prefill and decoding.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyformer.nn.attend.bias import DenseBias
from anyformer.nn.attend.shapes import (
    Cut,
    Scores,
    check_broadcast,
    check_exact,
    check_positions,
    four,
    placed,
    said,
    whole_number,
)


class Tiles(NamedTuple):
    """The scores cut into tiles of `rows` × `columns`, with the positions that each stretch of them spans."""

    q_low: Tensor
    """[B or 1, n, 1] int64, the first position of each stretch of queries."""
    q_high: Tensor
    k_low: Tensor
    """[B or 1, 1, m] int64, the first position of each stretch of keys."""
    k_high: Tensor
    rows: int
    columns: int


class Reach(NamedTuple):
    """What a tile may show, as bool broadcastable to [B, n, m]."""

    some: Tensor
    """False where no query of the tile sees a key of it."""
    whole: Tensor
    """True where every query of the tile sees every key of it."""


class Visible:
    """A description of visibility. `mask(T, S)` writes it out; backends prefer not to."""

    def __and__(self, other: "Visible") -> "Visible":
        if not isinstance(other, Visible):
            raise ValueError(f"`&` joins descriptions from af.masks; got {said(other)}: wrap a tensor in Dense")
        return All.of(self, other)

    def at(self, *, queries: Tensor | None = None, keys: Tensor | None = None) -> "Visible":
        """The same description with queries [T] or [B, T] and keys [S] or [B, S] (int64) at given positions."""
        return All.of(self, All((), queries, keys))

    def mask(self, n_queries: int, n_keys: int, device: torch.device | str = "cpu") -> Tensor:
        """Writes the description out as bool [B or 1, H or 1, T, S], True where a query sees a key."""
        whole = All.of(self)
        queries, keys = placed(whole.queries, whole.keys, n_queries, n_keys, device)
        return whole.seen(queries[:, None, :, None], keys[:, None, None, :])


def stretches(values: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The least and the largest of each `size` values in a row: [B, N] -> two of [B, ⌈N / size⌉]."""
    missing = -values.shape[1] % size
    if missing:
        values = torch.cat([values, values[:, -1:].expand(-1, missing)], 1)
    return torch.aminmax(values.reshape(values.shape[0], -1, size), dim=-1)


def tiles(queries: Tensor, keys: Tensor, rows: int, columns: int) -> Tiles:
    """The tiles of queries at positions [B or 1, T] and keys at positions [B or 1, S]."""
    (q_low, q_high), (k_low, k_high) = stretches(queries, rows), stretches(keys, columns)
    return Tiles(q_low[:, :, None], q_high[:, :, None], k_low[:, None], k_high[:, None], rows, columns)


class Term(Visible):
    """One condition on a query and a key."""

    def sees(self, q: Tensor, k: Tensor) -> Tensor:
        """The condition for query positions q [B|1, 1, T, 1] and key positions k [B|1, 1, 1, S], as bool."""
        raise NotImplementedError

    def part(self, cut: Cut) -> "Term":
        """The condition for a part of the scores, whose positions the caller knows."""
        return self

    def reach(self, tiles: Tiles) -> Reach:
        """What each tile may show, from the ends of its stretches alone."""
        device = tiles.q_low.device
        return Reach(torch.ones((), dtype=torch.bool, device=device), torch.zeros((), dtype=torch.bool, device=device))

    def check(self, shape: Scores) -> None:
        """Raises `ValueError` where the condition is not one for scores of a shape [B, H, T, S]."""


@dataclass(frozen=True)
class All(Visible):
    """Several terms at once, and the positions at which they are read."""

    terms: tuple[Term, ...] = ()
    queries: Tensor | None = field(default=None, compare=False)
    keys: Tensor | None = field(default=None, compare=False)
    memo: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What a backend worked out of this description and need not work out again in the next layer."""

    @staticmethod
    def of(*descriptions: Visible) -> "All":
        """Every description joined into one; one that is joined already stays itself."""
        if len(descriptions) == 1 and isinstance(descriptions[0], All):
            return descriptions[0]
        terms: list[Term] = []
        queries = keys = None
        for each in descriptions:
            if isinstance(each, Term):
                terms.append(each)
                continue
            assert isinstance(each, All)
            terms += each.terms
            if (each.queries is not None and queries is not None) or (each.keys is not None and keys is not None):
                raise ValueError("two descriptions that both say where queries or keys are cannot be joined")
            queries = queries if each.queries is None else each.queries
            keys = keys if each.keys is None else each.keys
        return All(tuple(terms), queries, keys)

    def check(self, shape: Scores) -> None:
        """Raises `ValueError` where a term or a position is not one for scores of a shape [B, H, T, S]."""
        check_positions(self.queries, self.keys, shape)
        for term in self.terms:
            term.check(shape)

    def seen(self, q: Tensor, k: Tensor) -> Tensor:
        """All conditions for query positions q [B|1, 1, T, 1] and key positions k [B|1, 1, 1, S], as bool."""
        mask = torch.ones(1, 1, q.shape[2], k.shape[3], dtype=torch.bool, device=q.device)
        for term in self.terms:
            mask = mask & term.sees(q, k)
        return mask

    def part(self, cut: Cut) -> "All":
        """The conditions for a part of the scores, without positions."""
        return All(tuple(term.part(cut) for term in self.terms))

    def reach(self, tiles: Tiles) -> Reach:
        """What each tile may show: [B or 1, n, m]."""
        shape = (1, tiles.q_low.shape[1], tiles.k_low.shape[2])
        some = torch.ones(shape, dtype=torch.bool, device=tiles.q_low.device)
        whole = some
        for term in self.terms:
            reach = term.reach(tiles)
            some, whole = some & reach.some, whole & reach.whole
        return Reach(some, whole)


@dataclass(frozen=True)
class Everything(Term):
    """Every query sees every key."""

    def sees(self, q: Tensor, k: Tensor) -> Tensor:  # noqa: D102
        return torch.ones((), dtype=torch.bool, device=q.device)

    def reach(self, tiles: Tiles) -> Reach:  # noqa: D102
        yes = torch.ones((), dtype=torch.bool, device=tiles.q_low.device)
        return Reach(yes, yes)


@dataclass(frozen=True)
class Causal(Term):
    """A query sees the keys at its own position and before."""

    def sees(self, q: Tensor, k: Tensor) -> Tensor:  # noqa: D102
        return k <= q

    def reach(self, tiles: Tiles) -> Reach:  # noqa: D102
        return Reach(tiles.k_low <= tiles.q_high, tiles.k_high <= tiles.q_low)


@dataclass(frozen=True)
class Window(Term):
    """A query sees the keys less than `size` positions away, and always the first `first` positions.

    With `Causal` a window of W is the query itself and the W − 1 keys before it; alone it reaches to both sides.
    `first` are the sinks of Xiao et al. (2023).
    """

    size: int
    first: int = 0

    def __post_init__(self) -> None:
        whole = whole_number(self.size) and whole_number(self.first)
        if not whole or self.size < 1 or self.first < 0:
            got = f"size={self.size!r}, first={self.first!r}"
            raise ValueError(f"a window needs whole numbers, size ≥ 1 and first ≥ 0; got {got}")

    def sees(self, q: Tensor, k: Tensor) -> Tensor:  # noqa: D102
        near = (q - k).abs() < self.size
        return near | (k < self.first) if self.first else near

    def reach(self, tiles: Tiles) -> Reach:  # noqa: D102
        nearest, farthest = tiles.q_low - tiles.k_high, tiles.q_high - tiles.k_low
        some = (nearest < self.size) & (farthest > -self.size)
        whole = (farthest < self.size) & (nearest > -self.size)
        return Reach(some | (tiles.k_low < self.first), whole | (tiles.k_high < self.first))


@dataclass(frozen=True)
class Prefix(Term):
    """A query sees what is causal and all keys before position `length` (an int, or int64 [B])."""

    length: int | Tensor

    def __post_init__(self) -> None:
        counts = isinstance(self.length, Tensor) or (whole_number(self.length) and self.length >= 0)
        if not counts:
            raise ValueError(f"a prefix's length is a whole number ≥ 0, or int64 [B]; got {self.length!r}")

    def sees(self, q: Tensor, k: Tensor) -> Tensor:  # noqa: D102
        length = self.length.reshape(-1, 1, 1, 1) if isinstance(self.length, Tensor) else self.length
        return (k <= q) | (k < length)

    def part(self, cut: Cut) -> "Prefix":  # noqa: D102
        return Prefix(self.length[cut.batch]) if isinstance(self.length, Tensor) else self

    def reach(self, tiles: Tiles) -> Reach:  # noqa: D102
        length = self.length.reshape(-1, 1, 1) if isinstance(self.length, Tensor) else self.length
        causal = Causal().reach(tiles)
        return Reach(causal.some | (tiles.k_low < length), causal.whole | (tiles.k_high < length))

    def check(self, shape: Scores) -> None:  # noqa: D102
        if isinstance(self.length, Tensor):
            check_exact("a prefix's length", self.length, torch.int64, shape[:1])


@dataclass(frozen=True, eq=False)
class PrefixKeys(Term):
    """A query sees what is causal and all marked keys, wherever they stand: `real` bool [B, S], True = marked.

    With `Segments` or `Window` both must hold, so that a mark counts within its document or window alone.
    """

    real: Tensor

    def sees(self, q: Tensor, k: Tensor) -> Tensor:  # noqa: D102
        return (k <= q) | self.real[:, None, None, :]

    def part(self, cut: Cut) -> "PrefixKeys":  # noqa: D102
        return PrefixKeys(cut.of_columns(self.real))

    def reach(self, tiles: Tiles) -> Reach:  # noqa: D102
        low, high = stretches(self.real, tiles.columns)
        causal = Causal().reach(tiles)
        return Reach(causal.some | high[:, None], causal.whole | low[:, None])

    def check(self, shape: Scores) -> None:  # noqa: D102
        check_exact("a prefix's keys", self.real, torch.bool, (shape[0], shape[3]))


@dataclass(frozen=True, eq=False)
class Segments(Term):
    """A query sees the keys of its own document: ids of queries [B, T] and of keys [B, S] (the same where left out)."""

    queries: Tensor
    keys: Tensor | None = None

    def sees(self, q: Tensor, k: Tensor) -> Tensor:  # noqa: D102
        keys = self.queries if self.keys is None else self.keys
        return self.queries[:, None, :, None] == keys[:, None, None, :]

    def part(self, cut: Cut) -> "Segments":  # noqa: D102
        keys = self.queries if self.keys is None else self.keys
        return Segments(cut.of_rows(self.queries), cut.of_columns(keys))

    def reach(self, tiles: Tiles) -> Reach:  # noqa: D102
        keys = self.queries if self.keys is None else self.keys
        (q_low, q_high), (k_low, k_high) = stretches(self.queries, tiles.rows), stretches(keys, tiles.columns)
        q_low, q_high, k_low, k_high = q_low[:, :, None], q_high[:, :, None], k_low[:, None], k_high[:, None]
        one = (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
        return Reach((q_low <= k_high) & (k_low <= q_high), one)

    def check(self, shape: Scores) -> None:  # noqa: D102
        b, _, t, s = shape
        check_exact("segments of queries", self.queries, torch.int64, (b, t))
        check_exact("segments of keys", self.queries if self.keys is None else self.keys, torch.int64, (b, s))


@dataclass(frozen=True, eq=False)
class Padding(Term):
    """A query sees only real keys: `real` bool [B, S], True = real."""

    real: Tensor

    def sees(self, q: Tensor, k: Tensor) -> Tensor:  # noqa: D102
        return self.real[:, None, None, :]

    def part(self, cut: Cut) -> "Padding":  # noqa: D102
        return Padding(cut.of_columns(self.real))

    def reach(self, tiles: Tiles) -> Reach:  # noqa: D102
        low, high = stretches(self.real, tiles.columns)
        return Reach(high[:, None], low[:, None])

    def check(self, shape: Scores) -> None:  # noqa: D102
        check_exact("padding", self.real, torch.bool, (shape[0], shape[3]))


@dataclass(frozen=True, eq=False)
class Dense(Term):
    """An arbitrary mask, bool, broadcastable to [B, H, T, S] ([T, S] and [B, T, S] too), True = visible."""

    values: Tensor

    def __post_init__(self) -> None:
        if self.values.dtype != torch.bool:
            raise ValueError(
                f"a dense mask is bool with True = visible; got {self.values.dtype}: an additive mask is a DenseBias"
            )
        if not 2 <= self.values.dim() <= 4:
            raise ValueError(f"a dense mask is [T, S], [B, T, S] or [B, H, T, S]; got {list(self.values.shape)}")

    def sees(self, q: Tensor, k: Tensor) -> Tensor:  # noqa: D102
        return four(self.values)

    def part(self, cut: Cut) -> "Dense":  # noqa: D102
        return Dense(cut.of(self.values))

    def check(self, shape: Scores) -> None:  # noqa: D102
        check_broadcast("a dense mask", self.values, shape)


__all__ = [
    "All",
    "Causal",
    "Dense",
    "DenseBias",
    "Everything",
    "Padding",
    "Prefix",
    "PrefixKeys",
    "Segments",
    "Term",
    "Visible",
    "Window",
]
