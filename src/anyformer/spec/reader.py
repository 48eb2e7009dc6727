"""How rules read a specification in which some values may be unknown, and how they are applied."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from math import isqrt
from typing import Any

from anyformer.spec.problems import Problem


class Unknown(Exception):
    """A value that a rule asked for is itself broken, so that the rule has nothing to say."""


class Reader:
    """Reads dotted paths of a part; paths in `unknown`, and all below and above them, raise `Unknown`."""

    def __init__(self, part: Any, unknown: Collection[str] = (), place: str = "") -> None:
        self.part = part
        self.unknown = unknown
        self.place = place

    def __call__(self, path: str) -> Any:
        """The value at `path`."""
        path = f"{self.place}{path}"
        for bad in self.unknown:
            if f"{path}.".startswith(f"{bad}.") or f"{bad}.".startswith(f"{path}."):
                raise Unknown(path)
        return self._value(path)

    def _value(self, path: str) -> Any:
        value = self.part
        for name in path.split("."):
            value = value[int(name)] if isinstance(value, tuple) else getattr(value, name)
        return value

    def under(self, path: str) -> "Reader":
        """A reader of what is under `path`, by paths that begin there."""
        return Reader(self.part, self.unknown, f"{self.place}{path}.")

    def blocks(self, stack: str) -> Iterator[tuple[str, "Reader"]]:
        """The place and a reader of each block of a stack, of those that are one object once."""
        seen: set[int] = set()
        for index, block in enumerate(self._value(f"{self.place}{stack}.blocks")):
            if id(block) not in seen:
                seen.add(id(block))
                place = f"{stack}.blocks.{index}"
                yield place, self.under(place)


Rule = Callable[[Reader], Iterable[Problem]]
"""Yields the problems that it finds, at paths from where its reader stands."""


def moved(problem: Problem, place: str) -> Problem:
    """The same problem, seen from above `place`."""
    return replace(problem, path=f"{place}.{problem.path}")


def apply(rules: Iterable[Rule], read: Reader) -> Iterator[Problem]:
    """Every problem that the rules find; a rule that meets an unknown value stays silent."""
    for rule in rules:
        try:
            yield from list(rule(read))
        except Unknown:
            continue


def within(rule: Rule, read: Reader, place: str) -> Iterator[Problem]:
    """What a rule finds under `place`."""
    for problem in apply((rule,), read.under(place)):
        yield moved(problem, place)


def check(rules: Iterable[Rule], read: Reader) -> None:
    """Raises `ValueError` with every problem, for use in a part's own validation."""
    problems = list(dict.fromkeys(str(problem) for problem in apply(rules, read)))
    if problems:
        raise ValueError("; ".join(problems))


def divisors(number: int) -> list[int]:
    """Every divisor of `number`, ascending."""
    small = [x for x in range(1, isqrt(number) + 1) if number % x == 0]
    return sorted({*small, *(number // x for x in small)})
