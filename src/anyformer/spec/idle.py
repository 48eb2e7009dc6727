"""Words that change nothing: what names a kind, is laid on a table of it, and says nothing that is not so there.

`mask = "causal"` over a causal mask with a window reads as a mask without one, and keeps it. Tables that name no kind
are differences, and may say again what is so.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anyformer.spec.keys import part_at
from anyformer.spec.part import Part, plain
from anyformer.spec.problems import MISSING, Problem, look_up
from anyformer.spec.recipe import LAYER_KEYS, STACK_KEYS, StackRecipe
from anyformer.spec.settle import stack_tables
from anyformer.spec.words import OPTIONAL, beneath, default_mask, merged, normalise

_STACKS = ("encoder", "decoder")


@dataclass(frozen=True)
class Idle:
    """A word, or a table that names its kind, that leaves what it is laid on as it was.

    Attributes:
        path: where it is written.
        word: what is written, where that is a word.
        kept: options of the table below that it says nothing of: key, value, and the value that takes it away.
        owner: whose the table below is.
    """

    path: tuple[str, ...]
    word: str | None
    kept: tuple[tuple[str, Any, Any], ...]
    owner: str

    def problem(self) -> Problem:
        """The same in words."""
        name = self.path[-1]
        options = _listed(f"{key} = {_toml(value)}" for key, value, _ in self.kept)
        taken = _listed(f"{name}.{key} = {_toml(value)}" for key, _, value in self.kept)
        pronoun = "it" if len(self.kept) == 1 else "them"
        remedy = f"{taken} would take {pronoun} away, and leaving {name} out keeps {pronoun}"
        got = MISSING if self.word is None else self.word
        return Problem(".".join(self.path), f"changes nothing: it keeps the {self.owner}'s {options}", got, remedy)


def _listed(words: Iterable[str]) -> str:
    """One, two and three."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def _toml(value: Any) -> str:
    """A value as a recipe says it."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, dict):
        return f'"{value}"' if isinstance(value, str) else str(value)
    if set(value) == {"kind"}:
        return _toml(value["kind"])
    inner = ", ".join(f"{key} = {_toml(each)}" for key, each in value.items() if each is not None)
    return f"{{ {inner} }}" if inner else "true"


@dataclass(frozen=True)
class _Layer:
    """A layer's or stack's table, on which others are laid, and the stack's side."""

    table: Mapping[str, Any]
    side: str

    def default(self, path: tuple[str, ...]) -> Any:
        """What is there where the table at the end of `path` leaves its key out; `MISSING` where it must be given."""
        part = part_at(StackRecipe, self.table, path[:-1])
        field = None if part is None else part.model_fields.get(path[-1])
        if field is None or field.is_required() or field.default_factory is not None:
            return MISSING
        if path[-1] == "mask":
            return {"kind": default_mask(path[0], self.side)}
        if path[-1] == "bidirectional":
            return self.side == "encoder"
        return plain(field.default) if isinstance(field.default, Part) else field.default

    def kept(self, path: tuple[str, ...], over: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
        """The options of the table at `path` that `over` says nothing of: key, value, and what takes it away."""
        for key, value in look_up(self.table, path).items():
            here, without = (*path, key), self.default((*path, key))
            if key in over or value is None or without is MISSING or value == without:
                continue
            if isinstance(value, dict) and isinstance(without, dict) and value.get("kind") == without.get("kind"):
                yield from ((f"{key}.{inner}", x, y) for inner, x, y in self.kept(here, {}))
            elif without is not None or here in OPTIONAL:
                yield key, value, False if without is None else without
            elif value:
                # What follows from the stack where it is left out: a bias, a dropout.
                yield key, value, False if isinstance(value, bool) else 0

    def idle(
        self, over: Mapping[str, Any], owner: str, place: tuple[str, ...], path: tuple[str, ...] = ()
    ) -> Iterator[Idle]:
        """What of the tables in `over`, laid on the table at `path`, changes nothing."""
        for key, value in over.items():
            here = (*path, key)
            base = look_up(self.table, here)
            if not (isinstance(value, dict) and isinstance(base, dict)):
                continue
            if value.get("kind", base.get("kind")) != base.get("kind"):
                continue
            inner = list(self.idle(value, owner, place, here))
            yield from inner
            if not inner and _names_a_kind(here, value) and merged(base, value) == base:
                kept = tuple(self.kept(here, value))
                word = value["kind"] if set(value) == {"kind"} else None
                if kept:
                    yield Idle((*place, *here), word, kept, owner)


def _names_a_kind(path: Sequence[str], table: Mapping[str, Any]) -> bool:
    """Whether a table reads as all there is; an attention may leave its kind out."""
    return "kind" in table or (tuple(path) == ("attention",) and {"n_heads", "position"} <= table.keys())


def idle_words(raw: Mapping[str, Any]) -> list[Idle]:
    """What changes nothing in the patterns, and in the stacks' own tables, of a recipe whose words are written out."""
    tables, _ = stack_tables(raw)
    both = len(tables) > 1
    found: dict[tuple[str, ...], Idle] = {}
    for side, table in tables.items():
        own = raw.get(side) if both else None
        own = own if isinstance(own, dict) else {}
        root = {key: value for key, value in raw.items() if key not in _STACKS}
        laid_on = [(root, own, STACK_KEYS - {"pattern"}, (side,), "root")] if both else []
        pattern, place = table.get("pattern"), (side,) if "pattern" in own else ()
        for index, entry in enumerate(pattern if isinstance(pattern, list) else ()):
            if isinstance(entry, dict):
                laid_on.append((table, entry, LAYER_KEYS, (*place, "pattern", str(index)), "stack"))
        for base, over, keys, where, owner in laid_on:
            said = {key: value for key, value in over.items() if key in keys}
            for each in _Layer(beneath(base, said, side), side).idle(said, owner, where):
                found.setdefault(each.path, each)
    return list(found.values())


def without_idle(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The same recipe without words that change nothing."""
    table: dict[str, Any] = copy.deepcopy(dict(recipe))
    while found := idle_words(normalise(table)):
        for each in found:
            del look_up(table, each.path[:-1])[each.path[-1]]
    return table
