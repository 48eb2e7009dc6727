"""Keys that decide what a whole part of a specification is, and tables of keys inside a configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anyformer.families.common import FIXED, IGNORED
from anyformer.families.config import REQUIRED, Config
from anyformer.families.fields import Field, put
from anyformer.families.tables import Tables, View, copied
from anyformer.spec.part import Part
from anyformer.spec.problems import MISSING


@dataclass(frozen=True)
class Way:
    """What one value of a key means.

    Attributes:
        spec: what it puts where, by paths.
        config: the fields that are read then.
        ignored: keys that mean nothing then.
        fixed: keys that may be left out and then otherwise have one of these values.
    """

    spec: Mapping[str, Any] = field(default_factory=dict)
    config: tuple[Field, ...] = ()
    ignored: tuple[str, ...] = ()
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def read(self, key: str, config: Config, tables: Tables) -> None:
        """Reads as a field does; `key` is the one that chose this way."""
        for path, table in self.spec.items():
            tables.set(path, copied(table), key)
        for each in self.config:
            each.read(config, tables)
        for name in self.ignored:
            config.get(name, None)
        for name, allowed in self.fixed.items():
            value = config.get(name, None)
            if value is not None and value not in allowed:
                config.refuse(name, value, " or ".join(map(repr, allowed)))

    def fits(self, view: View) -> bool:
        """Whether the specification has what this way puts."""
        return all(_says(view.first(path), table) for path, table in self.spec.items())


def _says(value: Any, table: Any) -> bool:
    if isinstance(table, Mapping):
        return isinstance(value, Part) and all(_says(getattr(value, key, MISSING), x) for key, x in table.items())
    return bool(value == table)


@dataclass(frozen=True)
class Choice:
    """A key each of whose values is a way of its own; the first that fits is written."""

    key: str
    ways: Mapping[Any, Way]
    default: Any = REQUIRED

    def read(self, config: Config, tables: Tables) -> None:
        value = config.get(self.key, self.default)
        for one, way in self.ways.items():
            if one == value and isinstance(one, bool) == isinstance(value, bool):
                way.read(self.key, config, tables)
                return
        config.refuse(self.key, value, " or ".join(map(repr, self.ways)))

    def write(self, view: View, config: dict[str, Any]) -> None:
        for value, way in self.ways.items():
            if way.fits(view):
                put(config, self.key, value)
                for each in way.config:
                    each.write(view, config)
                return


@dataclass(frozen=True)
class Inner:
    """A table in the configuration with fields, and known and meaningless keys, of its own."""

    key: str
    config: tuple[Field, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def read(self, config: Config, tables: Tables) -> None:
        inner = config.table(self.key)
        for each in self.config:
            each.read(inner, tables)
        inner.finish({**FIXED, **self.fixed}, (*IGNORED, *self.ignored))

    def write(self, view: View, config: dict[str, Any]) -> None:
        inner: dict[str, Any] = {}
        for each in self.config:
            each.write(view, inner)
        put(config, self.key, inner)


@dataclass(frozen=True)
class Unwritten:
    """A field that is read alone: `transformers` keeps the key, and computes as if it had its default."""

    field: Field

    def read(self, config: Config, tables: Tables) -> None:
        self.field.read(config, tables)

    def write(self, view: View, config: dict[str, Any]) -> None:
        """Nothing: a specification that needs another value than the default is not one that they open."""
