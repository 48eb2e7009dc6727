"""Shrinking a recipe: the smallest one that is legal and still fails the same way (Zeller & Hildebrandt 2002)."""

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Table = dict[str, Any]
Path = tuple[str | int, ...]

SIMPLEST: dict[str, tuple[Any, ...]] = {
    "attention": ({"n_heads": 1, "position": "none"}, {"n_heads": 2, "d_head": 4, "position": "none"}),
    "ffn": ({"kind": "dense", "activation": "relu", "d_ff": 5},),
    "expert": ({"kind": "dense", "activation": "relu", "d_ff": 5},),
    "position": ("none", "rope"),
    "scaling": ("none",),
    "wiring": ("serial",),
    "placement": ("pre",),
    "activation": ("relu", "silu"),
    "head": ("language",),
    "qk_norm": (True,),
    "transform": (True,),
    "pooler": (True,),
    "share": ("all",),
}
"""What stands for a key's value in its simplest form."""
FLOORS = {"d_model": 4, "d_ff": 3, "d_head": 3, "d_value": 2, "d_nope": 3, "kv_rank": 3, "q_rank": 3, "width": 4}
"""Below these a number is no simpler: a norm over two channels leaves little to compare, whatever else is wrong."""
_NORMS = ("norm", "before", "after", "residual", "final_norm")
_TOP = ("vocab_size", "head", "pooler", "tie")


def places(table: Any, path: Path = ()) -> Iterator[Path]:
    """Where a table, or a list in it, has something, the outer first."""
    items = table.items() if isinstance(table, Mapping) else enumerate(table) if isinstance(table, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def at(table: Any, path: Path) -> Any:
    """What is there."""
    for key in path:
        table = table[key]
    return table


def without(table: Table, path: Path) -> Table:
    """A copy without what is there."""
    copied = copy.deepcopy(table)
    del at(copied, path[:-1])[path[-1]]
    return copied


def replaced(table: Table, path: Path, value: Any) -> Table:
    """A copy with something else there."""
    copied = copy.deepcopy(table)
    at(copied, path[:-1])[path[-1]] = value
    return copied


def _simpler(key: str | int, value: Any) -> Iterator[Any]:
    """Values that are simpler than a value, the simplest first."""
    if key == "vocab_size":
        return
    options = SIMPLEST.get(str(key), ("rms", "layer") if key in _NORMS else ())
    stop = options.index(value) if value in options else len(options)
    yield from options[:stop]
    if key in ("attention", "cross") and isinstance(value, Mapping) and "position" in value:
        yield {"n_heads": 1, "position": copy.deepcopy(value["position"])}
    if isinstance(value, Mapping) and "kind" in value and len(value) > 1:
        yield value["kind"]
    if isinstance(value, bool):
        return
    if isinstance(value, int):
        floor = FLOORS.get(str(key), 1)
        yield from sorted({x for x in (floor, floor + 1, value // 2, value - 1) if floor <= x < value})
    elif isinstance(value, float) and value != 1.0:
        yield 1.0


def _of_one_stack(table: Table) -> Iterator[Table]:
    """An encoder-decoder as one of its stacks."""
    if table.get("architecture") != "encoder-decoder":
        return
    top = {key: table[key] for key in _TOP if key in table and key != "tie"}
    root = {key: value for key, value in table.items() if key not in (*_TOP, "architecture", "encoder", "decoder")}
    for name in ("decoder", "encoder"):
        stack = {key: value for key, value in {**root, **table.get(name, {})}.items() if key != "cross"}
        stack["pattern"] = [{k: v for k, v in x.items() if k != "cross"} for x in stack.get("pattern", [])]
        yield {"architecture": name, **top, **copy.deepcopy(stack)}


def _of_one_entry(table: Table) -> Iterator[Table]:
    """A pattern's entry as the whole stack."""
    for path in [path for path in places(table) if path[-1] == "pattern"]:
        for entry in at(table, path):
            copied = without(table, path)
            at(copied, path[:-1]).update({key: value for key, value in entry.items() if key != "repeat"})
            yield copied


def candidates(table: Table) -> Iterator[Table]:
    """Recipes a step smaller, those first that leave out most. Not all of them are legal."""
    yield from _of_one_stack(table)
    yield from _of_one_entry(table)
    found = sorted(places(table), key=len)
    for path in found:
        if path[-1] not in ("kind", "vocab_size"):
            yield without(table, path)
    for path in found:
        for value in _simpler(path[-1], at(table, path)):
            yield replaced(table, path, value)


def shrink(table: Table, fails: Callable[[Table], bool], *, tries: int = 2000, seconds: float = 120.0) -> Table:
    """The smallest recipe found that still fails: no single step makes it smaller, unless tries or time ran out.

    Args:
        table: one that fails.
        fails: whether a recipe is legal and fails in the same way.
        tries: how many recipes to ask about.
        seconds: how long to go on.
    """
    until = time.monotonic() + seconds
    asked = {_name(table)}
    start = 0
    while True:
        options = list(candidates(table))
        # Going on from where the last step was found asks far less often again what was just refused.
        for index in (*range(start, len(options)), *range(min(start, len(options)))):
            if len(asked) >= tries or time.monotonic() > until:
                return table
            option = options[index]
            if _name(option) in asked:
                continue
            asked.add(_name(option))
            if fails(option):
                table, start = option, index
                break
        else:
            return table


def _name(table: Table) -> str:
    return repr(table)
