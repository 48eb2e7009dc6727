"""Things of many modules as one sequence, in which each module is imported when its turn comes."""

from collections.abc import Sequence
from importlib import import_module
from typing import Generic, TypeVar, overload

T = TypeVar("T")


class Shelf(Sequence[T], Generic[T]):
    """A sequence of what modules of a package hold; one that knows its family imports no other.

    Args:
        package: whose modules they are.
        places: "module.NAME" of each.
    """

    def __init__(self, package: str, *places: str) -> None:
        self._package, self._places = package, places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...

    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        """An item, or some."""
        if isinstance(index, slice):
            return Shelf(self._package, *self._places[index])
        module, name = self._places[index].split(".")
        found: T = getattr(import_module(f"{self._package}.{module}"), name)
        return found
