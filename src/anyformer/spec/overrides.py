"""Overrides from the command line, `a.b=c`, applied to nested tables before they are validated."""

import copy
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from anyformer.errors import UserError

_NUMBERS_FOR_TABLES = ("shared", "factor")
"""Keys of tables for which a number may stand; what the number says is then not in the table."""


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """`"attention.n_kv_heads=2"` as `(("attention", "n_kv_heads"), 2)`; the value is TOML, or else a plain word."""
    path, equals, value = text.partition("=")
    keys = tuple(part.strip() for part in path.split("."))
    if not equals or not all(keys):
        raise UserError("an override reads KEY.KEY=VALUE", where="--set", got=text, expected="attention.n_heads=4")
    try:
        return keys, tomllib.loads(f"value = {value}")["value"]
    except RecursionError:
        raise UserError("the value is nested too deeply", where=f"--set {'.'.join(keys)}") from None
    except tomllib.TOMLDecodeError:
        return keys, value.strip()


def apply_overrides(table: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of `table` with every `a.b=c` set, in order; tables on the way are made, lists take an index.

    An empty value (`a.b=`) takes the key away.

    A plain word on the way stands for the table of that kind: setting `position.theta` on `position = "rope"` keeps
    the rope; true and false stand for the empty table, so that `qk_norm.over` may be set on `qk_norm = true`.
    """
    result: dict[str, Any] = copy.deepcopy(dict(table))
    for text in overrides:
        keys, value = parse_override(text)
        here: Any = result
        for depth, key in enumerate(keys):
            last = depth == len(keys) - 1
            if isinstance(here, list):
                if not key.isdigit() or int(key) >= len(here):
                    raise UserError(f"`{key}` does not name an entry of a list of {len(here)}", where=f"--set {text}")
                slot: Any = int(key)
            else:
                slot = key
            if last:
                if value == "" and text.endswith("=") and isinstance(here, dict):
                    here.pop(slot, None)
                else:
                    here[slot] = value
                continue
            child = here[slot] if isinstance(here, list) else here.get(slot, {})
            if isinstance(child, str):
                child = {"kind": child}
            elif isinstance(child, bool):
                child = {}
            if not isinstance(child, dict | list):
                place, rest = ".".join(keys[: depth + 1]), ".".join(keys[depth + 1 :])
                whole = f"--set {place}='{{ {rest} = … }}' gives a whole table"
                remedy = whole if key in _NUMBERS_FOR_TABLES else None
                raise UserError(f"`{place}` is a value, not a table", where=f"--set {text}", got=child, remedy=remedy)
            here[slot] = child
            here = child
    return result
