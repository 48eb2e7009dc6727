"""The words of a recipe: shorthands written out as tables, and tables laid on tables. Nothing is judged here."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from anyformer.spec.problems import look_up

_BRANCHES = ("attention", "cross", "ffn")
_KINDS = (
    ("attention",),
    ("attention", "position"),
    ("attention", "position", "scaling"),
    ("attention", "mask"),
    ("attention", "qk_norm", "norm"),
    ("attention", "norm"),
    ("cross", "position"),
    ("cross", "mask"),
    ("cross", "qk_norm", "norm"),
    ("embed", "position"),
    ("embed", "norm"),
    ("ffn",),
    ("ffn", "expert"),
    ("ffn", "shared"),
    ("norm",),
    ("final_norm",),
    ("wiring",),
    ("share",),
    ("head",),
    ("head", "transform", "norm"),
    *(("norms", branch, slot) for branch in _BRANCHES for slot in ("before", "after", "residual")),
)
"""Where a word stands for the table of that kind."""

_SWITCHES = (
    ("attention", "qk_norm"),
    ("cross",),
    ("cross", "qk_norm"),
    ("head", "transform"),
    ("pooler",),
)
"""Where true is a table of defaults, and false is none."""

_OPTIONAL = (
    *_SWITCHES,
    *((name, key) for name in ("attention", "cross") for key in ("softcap", "clip", "scale")),
    ("attention", "q_rank"),
    ("attention", "mask", "window"),
    ("cross", "mask", "window"),
    ("ffn", "limit"),
    ("ffn", "expert", "limit"),
    ("ffn", "groups"),
    ("ffn", "shared"),
    ("ffn", "shared", "limit"),
    ("embed", "factor"),
    ("head", "softcap"),
    ("share",),
)
"""Where false takes away what the root has."""

FEED_FORWARDS = (("ffn",), ("ffn", "expert"), ("ffn", "shared"))
"""Where a feed-forward stands."""

FFN_WORDS = {
    "swiglu": {"kind": "gated", "activation": "silu"},
    "geglu": {"kind": "gated", "activation": "gelu"},
    "reglu": {"kind": "gated", "activation": "relu"},
}
WORDS = dict.fromkeys(("ffn", "expert", "shared"), FFN_WORDS)
"""For a key, the words that stand for one of its kinds, beside the kinds themselves."""


def normalise(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The same recipe with every shorthand word written out as a table."""
    table: dict[str, Any] = copy.deepcopy(dict(raw))
    for _, each in tables_of(table):
        if isinstance(each.get("pattern"), tuple):
            each["pattern"] = list(each["pattern"])
        _write_out(each)
    return table


def tables_of(recipe: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Where each table of a layer or a stack is in a recipe, and the table."""
    for name in ("", "encoder", "decoder"):
        table = recipe.get(name) if name else recipe
        if not isinstance(table, dict):
            continue
        place = (name,) if name else ()
        yield place, table
        pattern = table.get("pattern")
        for index, entry in enumerate(pattern if isinstance(pattern, list | tuple) else ()):
            if isinstance(entry, dict):
                yield (*place, "pattern", str(index)), entry


def _write_out(table: dict[str, Any]) -> None:
    for path in _OPTIONAL:
        parent = look_up(table, path[:-1])
        if isinstance(parent, dict) and isinstance(parent.get(path[-1]), bool):
            if not parent[path[-1]]:
                parent[path[-1]] = None
            elif path in _SWITCHES:
                parent[path[-1]] = {}
    share = table.get("share")
    if isinstance(share, list | tuple):
        table["share"] = {"kind": "listed", "owners": list(share)}
    elif isinstance(share, dict) and "kind" not in share:
        table["share"] = {"kind": "listed" if "owners" in share else "some", **share}
    factor = look_up(table, ("embed", "factor"))
    if isinstance(factor, int) and not isinstance(factor, bool):
        table["embed"]["factor"] = {"width": factor}
    for path in _KINDS:
        parent = look_up(table, path[:-1])
        if isinstance(parent, dict) and isinstance(parent.get(path[-1]), str):
            parent[path[-1]] = {"kind": parent[path[-1]]}
    for path in FEED_FORWARDS:
        parent = look_up(table, path[:-1])
        ffn = parent.get(path[-1]) if isinstance(parent, dict) else None
        if isinstance(ffn, dict) and isinstance(ffn.get("kind"), str) and ffn["kind"] in FFN_WORDS:
            parent[path[-1]] = {**ffn, **FFN_WORDS[ffn["kind"]]}


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the tables of `over` laid on its own."""
    result = dict(base)
    for key, value in over.items():
        result[key] = laid_on(result.get(key), value)
    return result


def laid_on(base: Any, over: Any) -> Any:
    """`over` laid on `base`: a table on one of its kind, key by key; anything else takes the place of the whole."""
    if isinstance(base, dict) and isinstance(over, dict) and over.get("kind", base.get("kind")) == base.get("kind"):
        return merged(base, over)
    return over


def laid(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A layer's or a stack's table with differences laid on it.

    A placement and `norms` say the same thing, so that one laid on the other takes its place.
    """
    base = dict(base)
    if isinstance(base.get("attention"), dict):
        base["attention"] = {"kind": "grouped", **base["attention"]}
    if "norms" in over:
        for key in ("placement", "alpha", "beta"):
            base.pop(key, None)
    elif "placement" in over:
        base.pop("norms", None)
    return merged(base, over)
