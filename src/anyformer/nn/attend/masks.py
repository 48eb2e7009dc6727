"""Masks as descriptions: which key a query may see, said over positions and never stored as a T×S tensor.

Descriptions combine with `&`. Without `.at(...)` the keys stand at positions 0 … S−1 and the queries are the last T of
them, so that the same description serves training, chunked prefill and decoding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


class Visible:
    """A description of visibility. `mask(T, S)` writes it out; backends prefer not to."""

    def __and__(self, other: "Visible") -> "Visible":
        return All.of(self, other)

    def at(self, *, queries: Tensor | None = None, keys: Tensor | None = None) -> "Visible":
        """The same description with queries [T] or [B, T] and keys [S] or [B, S] (int64) at given positions."""
        return All.of(self, All((), queries, keys))

    def mask(self, n_queries: int, n_keys: int, device: torch.device | str = "cpu") -> Tensor:
        """Writes the description out as bool [B or 1, H or 1, T, S], True where a query sees a key."""
        whole = All.of(self)
        queries = whole.queries
        if queries is None:
            queries = torch.arange(n_keys - n_queries, n_keys, device=device)
        keys = whole.keys if whole.keys is not None else torch.arange(n_keys, device=device)
        q = queries.reshape(-1, 1, queries.shape[-1], 1)
        k = keys.reshape(-1, 1, 1, keys.shape[-1])
        mask = torch.ones(1, 1, n_queries, n_keys, dtype=torch.bool, device=device)
        for term in whole.terms:
            mask = mask & term.sees(q, k)
        return mask


def _check(name: str, value: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    if value.dtype != dtype or tuple(value.shape) != tuple(shape):
        raise ValueError(f"{name} is {dtype} {list(shape)} here; got {value.dtype} {list(value.shape)}")


def _check_broadcast(name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    """`value` [T, S], [B, T, S] or [B, H, T, S], each size the whole one or 1."""
    whole = (*shape[:1], *shape[2:]) if value.dim() == 3 else shape[4 - min(value.dim(), 4) :]
    if not 2 <= value.dim() <= 4 or any(x not in (1, y) for x, y in zip(value.shape, whole, strict=True)):
        got = f"got {list(value.shape)}"
        raise ValueError(f"{name} is broadcast to [B, H, T, S], here {list(shape)}, from [T, S] or more; {got}")


class Term(Visible):
    """One condition on a query and a key."""

    def sees(self, q: Tensor, k: Tensor) -> Tensor:
        """The condition for query positions q [B|1, 1, T, 1] and key positions k [B|1, 1, 1, S], as bool."""
        raise NotImplementedError

    def check(self, shape: tuple[int, int, int, int]) -> None:
        """Raises `ValueError` where the condition is not one for scores of a shape [B, H, T, S]."""


@dataclass(frozen=True)
class All(Visible):
    """Several terms at once, and the positions at which they are read."""

    terms: tuple[Term, ...] = ()
    queries: Tensor | None = field(default=None, compare=False)
    keys: Tensor | None = field(default=None, compare=False)

    @staticmethod
    def of(*descriptions: Visible) -> "All":
        """Every description joined into one."""
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

    def check(self, shape: tuple[int, int, int, int]) -> None:
        """Raises `ValueError` where a term or a position is not one for scores of a shape [B, H, T, S]."""
        b, _, t, s = shape
        for name, positions, n in (("queries", self.queries, t), ("keys", self.keys, s)):
            if positions is not None:
                rows = (positions.shape[0],) if positions.dim() == 2 and positions.shape[0] in (1, b) else ()
                _check(f"at({name}=…)", positions, torch.int64, (*rows, n))
        for term in self.terms:
            term.check(shape)


@dataclass(frozen=True)
class Everything(Term):
    """Every query sees every key."""

    def sees(self, q: Tensor, k: Tensor) -> Tensor:  # noqa: D102
        return torch.ones((), dtype=torch.bool, device=q.device)


@dataclass(frozen=True)
class Causal(Term):
    """A query sees the keys at its own position and before."""

    def sees(self, q: Tensor, k: Tensor) -> Tensor:  # noqa: D102
        return k <= q


@dataclass(frozen=True)
class Window(Term):
    """A query sees the keys less than `size` positions away, and always the first `first` positions.

    With `Causal` a window of W is the query itself and the W − 1 keys before it; alone it reaches to both sides.
    `first` are the sinks of Xiao et al. (2023).
    """

    size: int
    first: int = 0

    def __post_init__(self) -> None:
        if self.size < 1 or self.first < 0:
            raise ValueError(f"a window needs size ≥ 1 and first ≥ 0; got size={self.size}, first={self.first}")

    def sees(self, q: Tensor, k: Tensor) -> Tensor:  # noqa: D102
        near = (q - k).abs() < self.size
        return near | (k < self.first) if self.first else near


@dataclass(frozen=True)
class Prefix(Term):
    """A query sees what is causal and all keys before position `length` (an int, or int64 [B])."""

    length: int | Tensor

    def sees(self, q: Tensor, k: Tensor) -> Tensor:  # noqa: D102
        length = self.length.reshape(-1, 1, 1, 1) if isinstance(self.length, Tensor) else self.length
        return (k <= q) | (k < length)

    def check(self, shape: tuple[int, int, int, int]) -> None:  # noqa: D102
        if isinstance(self.length, Tensor):
            _check("a prefix's length", self.length, torch.int64, shape[:1])


@dataclass(frozen=True, eq=False)
class Segments(Term):
    """A query sees the keys of its own document: ids of queries [B, T] and of keys [B, S] (the same where left out)."""

    queries: Tensor
    keys: Tensor | None = None

    def sees(self, q: Tensor, k: Tensor) -> Tensor:  # noqa: D102
        keys = self.queries if self.keys is None else self.keys
        return self.queries[:, None, :, None] == keys[:, None, None, :]

    def check(self, shape: tuple[int, int, int, int]) -> None:  # noqa: D102
        b, _, t, s = shape
        _check("segments of queries", self.queries, torch.int64, (b, t))
        _check("segments of keys", self.queries if self.keys is None else self.keys, torch.int64, (b, s))


@dataclass(frozen=True, eq=False)
class Padding(Term):
    """A query sees only real keys: `real` bool [B, S], True = real."""

    real: Tensor

    def sees(self, q: Tensor, k: Tensor) -> Tensor:  # noqa: D102
        return self.real[:, None, None, :]

    def check(self, shape: tuple[int, int, int, int]) -> None:  # noqa: D102
        _check("padding", self.real, torch.bool, (shape[0], shape[3]))


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
        return self.values[:, None] if self.values.dim() == 3 else self.values

    def check(self, shape: tuple[int, int, int, int]) -> None:  # noqa: D102
        _check_broadcast("a dense mask", self.values, shape)


@dataclass(frozen=True, eq=False)
class DenseBias:
    """What is added to the scores: float, broadcastable to [B, H, T, S]."""

    values: Tensor

    def check(self, shape: tuple[int, int, int, int]) -> None:
        """Raises `ValueError` where the values are not floats for scores of a shape [B, H, T, S]."""
        if not self.values.is_floating_point():
            raise ValueError(f"a dense bias is float; got {self.values.dtype}: a mask is a Dense")
        _check_broadcast("a dense bias", self.values, shape)

    def added(self) -> Tensor:
        """The values as [B|1, H|1, T, S]."""
        values = self.values
        return values[:, None] if values.dim() == 3 else values.reshape((1,) * (4 - values.dim()) + values.shape)
