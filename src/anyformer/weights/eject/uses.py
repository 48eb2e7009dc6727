"""What of a specification a file has to say: one use for each place, and uses that one class or function can serve.

A use names a piece (the hand-written text of one idea, beside the module that it mirrors), its flags (what decides
which lines of the piece are there) and its numbers. Uses of one piece with equal flags are one kind, which the file
writes once; a number that differs between them becomes an argument of it, and every other number a named constant.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Call:
    """What a placeholder that is called in a piece, `PLACE(inner)`, becomes: text before and after what is inner.

    `empty`: the inner text is dropped, for what has no parameter to shape.
    """

    before: str
    after: str
    empty: bool = False

    def of(self, inner: str) -> str:
        """The call's text."""
        text = "" if self.empty else inner
        after = self.after.removeprefix(", ") if not text else self.after
        return f"{self.before}{text}{after}"


SAME = Call("", "")
"""The identity."""


@dataclass
class Use:
    """One place of the model at which a piece is used.

    Attributes:
        piece: the file of its text, relative to the package.
        title: the name of its class or function, unless two kinds would share it.
        flags: by name, what decides which lines are there and what they say.
        numbers: by the name of their constant.
        parts: what the text calls, by placeholder; each with the names under which this use has the part's numbers.
        hints: words that tell it from other kinds of the same title, the best first.
        builtin: where torch has the class, its name and how a call of it ends; there is no piece then.
        kind: what serves it, once kinds are made.
    """

    piece: str
    title: str
    flags: dict[str, Hashable] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, tuple["Use", dict[str, str]]] = field(default_factory=dict)
    hints: tuple[str, ...] = ()
    builtin: tuple[str, str] | None = None
    kind: "Kind | None" = None

    def key(self) -> Hashable:
        """What two uses share that are one kind."""
        parts = tuple((place, part.key(), tuple(names.items())) for place, (part, names) in sorted(self.parts.items()))
        return (self.piece, self.builtin, tuple(sorted(self.flags.items(), key=lambda each: each[0])), parts)

    def give(self, place: str, part: "Use", **names: str) -> None:
        """Lets the text call `part` at a placeholder: its number K is this use's number `names.get(K, K)`."""
        chosen = {key: names.get(key, key) for key in part.numbers}
        for key, own in chosen.items():
            self.numbers.setdefault(own, part.numbers[key])
        self.parts[place] = (part, chosen)


class Number:
    """The values of one number over the uses of a kind, as pieces ask for them."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.values = list(values)

    @property
    def varies(self) -> bool:
        """Whether uses differ in it."""
        return any(value != self.values[0] for value in self.values)

    @property
    def any(self) -> bool:
        """Whether a use has it: neither None nor False nor 0."""
        return any(bool(value) for value in self.values)

    @property
    def some(self) -> bool:
        """Whether uses differ in having it."""
        return self.any and any(value is None for value in self.values)

    @property
    def type(self) -> str:
        """The type of an argument for it."""
        found: list[str] = []
        for value in self.values:
            name = "tuple[float, ...]" if isinstance(value, tuple) else type(value).__name__
            name = "None" if value is None else name
            if name not in found:
                found.append(name)
        if "float" in found and "int" in found:
            found.remove("int")
        return " | ".join(sorted(found, key=lambda name: name == "None"))


@dataclass
class Kind:
    """A class or function of the file, and the uses that it serves.

    `fields` are the numbers that it is given; `given` the modules that a block is given, by their placeholders.
    """

    uses: list[Use]
    name: str = ""
    fields: tuple[str, ...] = ()
    given: tuple[str, ...] = ()

    @property
    def first(self) -> Use:
        """One of them."""
        return self.uses[0]

    def number(self, name: str) -> Number:
        """The values of a number."""
        return Number(use.numbers[name] for use in self.uses)


def kinds_of(uses: Iterable[Use]) -> list[Kind]:
    """The kinds of some uses, in the order of their first, each with a name of its own; each use learns its kind."""
    kinds: dict[Hashable, Kind] = {}
    for use in {id(use): use for use in uses}.values():
        kind = kinds.setdefault(use.key(), Kind([]))
        kind.uses.append(use)
        use.kind = kind
    _name(list(kinds.values()))
    return list(kinds.values())


def _name(kinds: list[Kind]) -> None:
    """A kind's name is its title, with the first hint that tells it from the others of that title."""
    titles: dict[str, list[Kind]] = {}
    for kind in kinds:
        titles.setdefault(kind.first.title, []).append(kind)
    for title, same in titles.items():
        if len(same) == 1:
            same[0].name = title
            continue
        for i, (kind, word) in enumerate(zip(same, _words(same), strict=True)):
            if not word:
                kind.name = f"{title}_{i + 1}" if title[0].islower() else f"{title}{i + 1}"
            else:
                kind.name = f"{title}_{word.lower()}" if title[0].islower() else f"{word}{title}"


def _words(kinds: list[Kind]) -> list[str]:
    """A word for each kind that no other has, made of one hint or two; empty ones where that cannot be."""
    hints = [kind.first.hints for kind in kinds]
    places = range(min(map(len, hints)))
    for chosen in [*((i,) for i in places), *((i, j) for i in places for j in places if i < j)]:
        words = ["_".join(each[i] for i in chosen if each[i]) for each in hints]
        if kinds[0].first.title[0].isupper():
            words = [word.replace("_", "") for word in words]
        if len(set(words)) == len(words) and all(words):
            return words
    return [""] * len(kinds)
