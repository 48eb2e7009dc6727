"""Checks that masks and biases share: what a tensor must look like for scores [B, H, T, S]."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Scores = tuple[int, int, int, int]
"""B, H, T, S."""


def said(value: object) -> str:
    """What an argument is, for a message."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def many(count: int) -> str:
    """A number for a message. A compiler knows only that it is one."""
    return "many" if torch.compiler.is_compiling() else f"{count:,}"


def whole_number(value: object) -> bool:
    """Whether `value` is an int, True and False aside; a compiler's sizes are."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_exact(name: str, value: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """Raises `ValueError` where `value` is no tensor or has another dtype or shape."""
    if not isinstance(value, Tensor) or value.dtype != dtype or tuple(value.shape) != tuple(shape):
        raise ValueError(f"{name} is {dtype} {list(shape)} here; got {said(value)}")


def check_broadcast(name: str, value: Tensor, shape: Scores) -> None:
    """`value` [T, S], [B, T, S] or [B, H, T, S], each size the whole one or 1."""
    whole = (*shape[:1], *shape[2:]) if value.dim() == 3 else shape[4 - min(value.dim(), 4) :]
    if not 2 <= value.dim() <= 4 or any(x not in (1, y) for x, y in zip(value.shape, whole, strict=True)):
        got = f"got {list(value.shape)}"
        raise ValueError(f"{name} is broadcast to [B, H, T, S], here {list(shape)}, from [T, S] or more; {got}")


def check_positions(queries: Tensor | None, keys: Tensor | None, shape: Scores) -> None:
    """Raises `ValueError` where positions are not int64 [T] or [B or 1, T], and so for S keys."""
    b, _, t, s = shape
    for name, positions, n in (("queries", queries, t), ("keys", keys, s)):
        if positions is not None:
            rows = (positions.shape[0],) if positions.dim() == 2 and positions.shape[0] in (1, b) else ()
            check_exact(f"at({name}=…)", positions, torch.int64, (*rows, n))


def placed(
    queries: Tensor | None, keys: Tensor | None, n_queries: int, n_keys: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Positions of queries [B or 1, T] and keys [B or 1, S]: keys at 0 … S−1 and queries the last T, where None."""
    if queries is None:
        queries = torch.arange(n_keys - n_queries, n_keys, device=device)
    if keys is None:
        keys = torch.arange(n_keys, device=device)
    return queries.reshape(-1, n_queries), keys.reshape(-1, n_keys)


def four(values: Tensor) -> Tensor:
    """[T, S], [B, T, S] or [B, H, T, S] as [B or 1, H or 1, T or 1, S or 1]."""
    return values[:, None] if values.dim() == 3 else values.reshape((1,) * (4 - values.dim()) + values.shape)


class Cut(NamedTuple):
    """A part of the scores [B, H, T, S]: some rows of the batch, some heads, queries and keys."""

    batch: slice = slice(None)
    heads: slice = slice(None)
    rows: slice = slice(None)
    columns: slice = slice(None)

    def of(self, values: Tensor) -> Tensor:
        """The part of values that broadcast to [B, H, T, S], as a view of four dimensions."""
        values = four(values)
        slices = zip(self, values.shape, strict=True)
        return values[tuple(at if size > 1 else slice(None) for at, size in slices)]

    def of_rows(self, values: Tensor) -> Tensor:
        """The part of values [B or 1, T]."""
        return values[self.batch if values.shape[0] > 1 else slice(None), self.rows]

    def of_columns(self, values: Tensor) -> Tensor:
        """The part of values [B or 1, S]."""
        return values[self.batch if values.shape[0] > 1 else slice(None), self.columns]
