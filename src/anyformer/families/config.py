"""A config.json being read: typed look-ups, every key used or refused by name."""

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from anyformer.errors import UserError
from anyformer.spec.problems import did_you_mean

REQUIRED: Any = object()
"""The default of a key that must be there."""


_SHOWN = 200


def shown(value: object) -> str:
    """A value for a message, its beginning where it is long."""
    text = repr(value[:_SHOWN] if isinstance(value, str | list) else value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …"


class Config:
    """The tables of a configuration; `parent.key` names a key inside a table.

    Args:
        table: the JSON object.
        where: its file, for messages.
        noun: what has the keys, for messages.
    """

    def __init__(self, table: Mapping[str, Any], where: object, noun: str = "configuration") -> None:
        self.where, self._noun = where, noun
        self._table = dict(table)
        self._used: set[str] = set()

    def get(self, key: str, default: Any = REQUIRED, *, nullable: bool = False) -> Any:
        """The value of a key; an absent key (and null, unless `nullable`) is its default. Raises `UserError`."""
        self._used.add(key)
        here: Any = self._table
        for part in key.split("."):
            if not isinstance(here, dict) or part not in here:
                return self._default(key, default)
            here = here[part]
        return self._default(key, default) if here is None and not nullable else here

    def _default(self, key: str, default: Any) -> Any:
        if default is REQUIRED:
            raise UserError(f"the {self._noun} lacks `{key}`", where=self.where, expected=f"a value for {key}")
        return default

    def __contains__(self, key: str) -> bool:
        return self.get(key, None) is not None

    def rename(self, other: str, key: str) -> None:
        """Reads `key` where the table has it under another name. Raises `UserError` for two values that differ."""
        value = self.get(other, None)
        if value is None:
            return
        if self.get(key, value) != value:
            self.refuse(other, value, f"{self.get(key)!r}, like {key}")
        self._table[key] = value

    def whole(self, key: str, default: Any = REQUIRED) -> int:
        """A whole number, 1 or more."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 63:
            self.refuse(key, value, "a whole number, 1 or more")
        return value

    def number(self, key: str, default: Any = REQUIRED) -> float:
        """A finite number."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= 1e300:
            self.refuse(key, value, "a number")
        return value

    def flag(self, key: str, default: Any = REQUIRED) -> bool:
        """True or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, value, "true or false")
        return value

    def word(self, key: str, words: Iterable[str], default: Any = REQUIRED) -> str:
        """One of some words."""
        value, words = self.get(key, default), list(words)
        if value not in words:
            near = did_you_mean(value, words) if isinstance(value, str) else None
            self.refuse(key, value, ", ".join(words), remedy=f"did you mean `{near}`?" if near else None)
        return str(value)

    def table(self, key: str) -> "Config":
        """The table at a key as a configuration of its own, empty where there is none."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            self.refuse(key, value, "a table")
        return Config(value, f"{self.where}, {key}", self._noun)

    def refuse(self, key: str, got: object, expected: str, remedy: str | None = None) -> NoReturn:
        """Raises the `UserError` of a value that no specification has."""
        what = f"the {self._noun}'s `{key}` cannot be used"
        raise UserError(what, where=self.where, got=f"{key} = {shown(got)}", expected=expected, remedy=remedy)

    def finish(self, fixed: Mapping[str, Any], ignored: Iterable[str]) -> None:
        """Raises `UserError` for keys that nothing has read, unless their value is the known one or does not matter.

        Args:
            fixed: keys whose one value (or values, in a tuple) the family's models have, and which may be left out.
            ignored: keys that do not change what a model computes.
        """
        unread: dict[str, Any] = {}
        _collect(self._table, "", self._used, unread)
        for key, value in unread.items():
            if key.split(".")[0] in ignored or key in ignored or value is None:
                continue
            if key not in fixed:
                what = f"the {self._noun}'s `{key}` is not known, and may change what the model computes"
                remedy = "remove the key if it does not; if it does, no specification of this family says it yet"
                raise UserError(what, where=self.where, got=f"{key} = {shown(value)}", remedy=remedy)
            allowed = fixed[key] if isinstance(fixed[key], tuple) else (fixed[key],)
            if value not in allowed or (isinstance(value, bool) != isinstance(allowed[0], bool)):
                self.refuse(key, value, " or ".join(repr(x) for x in allowed))


def _collect(table: Mapping[str, Any], prefix: str, used: set[str], unread: dict[str, Any]) -> None:
    """The keys that nobody read; a table of which something was read is looked into."""
    for name, value in table.items():
        key = f"{prefix}{name}"
        if key in used:
            continue
        if isinstance(value, dict) and any(each.startswith(f"{key}.") for each in used):
            _collect(value, f"{key}.", used, unread)
        else:
            unread[key] = value
