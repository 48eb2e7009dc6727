"""Layers that repeat, as a reader would write them."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from anyformer.weights.eject.constants import literal


def runs(items: Sequence[Any]) -> list[tuple[int, Any]]:
    """Equal neighbours, counted."""
    return [(len(list(group)), item) for item, group in groupby(items)]


def period(items: Sequence[Any]) -> int:
    """The length of the shortest stretch that repeats, a rest being its beginning; 0 where none does."""
    for size in range(2, len(items) // 2 + 1):
        if all(items[i] == items[i % size] for i in range(len(items))):
            return size
    return 0


def tuple_text(values: Sequence[Any]) -> str:
    """A tuple, by sums and products of shorter ones."""

    def plain(items: Sequence[Any]) -> str:
        parts = []
        for count, item in runs(items):
            parts.append(f"{count} * ({literal(item)},)" if count > 1 else f"({literal(item)},)")
        return " + ".join(parts)

    counted, size = runs(values), period(values)
    if all(count == 1 for count, _ in counted) and len(counted) <= 3:
        return literal(tuple(values))
    if len(counted) <= 3 or not size:
        return plain(values) if len(counted) <= 3 else literal(tuple(values))
    times, rest = divmod(len(values), size)
    inner = plain(values[:size]) if len(runs(values[:size])) < size else literal(tuple(values[:size]))[1:-1]
    body = f"{times} * ({inner})"
    return f"{body} + {plain(values[:rest])}" if rest else body


def layers_text(layers: Sequence[str], count: str) -> str:
    """A module list of layers that are made by calls."""
    counted = runs(layers)
    if len(counted) == 1:
        return f"nn.ModuleList({layers[0]} for _ in range({count}))"

    def item(n: int, made: str) -> str:
        return f"*({made} for _ in range({n}))" if n > 1 else made

    size = period(layers)
    lines = [item(n, made) for n, made in counted]
    if size and len(counted) > 4:
        times, rest = divmod(len(layers), size)
        inner = [item(n, made) for n, made in runs(layers[:size])]
        lines = [f"*(block for _ in range({times}) for block in ({', '.join(inner)}))"]
        lines += [item(n, made) for n, made in runs(layers[len(layers) - rest :])] if rest else []
    return module_list(lines)


def module_list(lines: Sequence[str]) -> str:
    """A module list with an element, or a stretch of them, on each line."""
    body = "".join(f"                {line},\n" for line in lines)
    return f"nn.ModuleList(\n            [\n{body}            ]\n        )"
