"""Who chooses when a recipe is drawn: a seed, or hypothesis, which also shrinks what it chose."""

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Chooser(Protocol):
    """Picks one of several options, of which the first is the simplest."""

    def pick(self, options: Sequence[T]) -> T:
        """One of the options, which are one or more."""
        ...


class Seeded:
    """Equal chances by a seed; the same seed picks alike on every version of Python."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def pick(self, options: Sequence[T]) -> T:
        """One of the options."""
        # Of the random module, only the numbers of random() are promised to stay.
        return options[int(self._random.random() * len(options))]


class Drawn:
    """Picks by a hypothesis `draw`, which shrinks towards first options."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self._draw = draw

    def pick(self, options: Sequence[T]) -> T:
        """One of the options."""
        from hypothesis import strategies as st

        chosen: T = self._draw(st.sampled_from(list(options)))
        return chosen


def maybe(choose: Chooser, table: dict[str, Any], key: str, options: Sequence[Any]) -> None:
    """Sets a key of a table, or leaves it out for the default to hold."""
    if choose.pick((False, True)):
        table[key] = choose.pick(options)


def chance(choose: Chooser, one_in: int) -> bool:
    """True once in so many picks; False is the simpler."""
    return choose.pick((False,) * (one_in - 1) + (True,))
