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

FEED_FORWARDS = (("ffn",), ("ffn", "expert"), ("ffn", "shared"))
"""Where a feed-forward stands."""

_HEADS = ("softcap", "clip", "scale", "n_kv_heads", "d_head", "d_value")
OPTIONAL = (
    *_SWITCHES,
    *((name, key) for name in ("attention", "cross") for key in _HEADS),
    ("attention", "q_rank"),
    ("attention", "d_nope"),
    ("attention", "mask", "window"),
    ("cross", "mask", "window"),
    *((*place, key) for place in FEED_FORWARDS for key in ("d_ff", "limit")),
    ("ffn", "groups"),
    ("ffn", "shared"),
    ("embed", "factor"),
    ("head", "softcap"),
    ("max_positions",),
    ("share",),
)
"""Where false takes away what the root has, so that nothing is there, or what follows from the rest."""

_NOUGHTS = (
    ("dropout",),
    ("attention", "mask", "sinks"),
    ("cross", "mask", "sinks"),
    ("attention", "d_rope"),
    *((name, key) for name in ("attention", "cross") for key in ("dropout", "out_dropout")),
    *((*place, key) for place in FEED_FORWARDS for key in ("dropout", "out_dropout", "up_offset")),
    *(("ffn", key) for key in ("balance_loss", "z_loss", "bias_rate")),
    ("embed", "types"),
    ("embed", "dropout"),
    ("head", "dropout"),
)
"""Where false is the number 0, which is how these are taken away."""

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


def _write_out_false(table: dict[str, Any]) -> None:
    """Switches, and what false takes away."""
    for path in (*OPTIONAL, *_NOUGHTS):
        parent = look_up(table, path[:-1])
        if not isinstance(parent, dict):
            continue
        if parent.get(path[-1]) is False:
            parent[path[-1]] = 0 if path in _NOUGHTS else None
        elif parent.get(path[-1]) is True and path in _SWITCHES:
            parent[path[-1]] = {}
    for name in ("attention", "cross"):
        mask = look_up(table, (name, "mask"))
        if isinstance(mask, dict) and "window" in mask and mask["window"] is None:
            # Sinks are the keys that a window leaves out: they go with it.
            mask.setdefault("sinks", 0)


def _write_out(table: dict[str, Any]) -> None:
    _write_out_false(table)
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


def default_mask(place: str, side: str) -> str:
    """The mask of a stack's "attention" or "cross" that names none."""
    return "causal" if (place, side) == ("attention", "decoder") else "bidirectional"


def beneath(base: Mapping[str, Any], over: Mapping[str, Any], side: str) -> dict[str, Any]:
    """What of a layer's or a stack's table differences are laid on.

    A placement and `norms` say the same thing, so that one laid on the other takes its place. A kind that is left out
    is written in, so that a table means the same with it and without.
    """
    base = dict(base)
    if isinstance(base.get("attention"), dict):
        base["attention"] = {"kind": "grouped", **base["attention"]}
    for name in ("attention", "cross"):
        if isinstance(look_up(base, (name, "mask")), dict):
            mask = {"kind": default_mask(name, side), **base[name]["mask"]}
            base[name] = {**base[name], "mask": mask}
    if "norms" in over:
        for key in ("placement", "alpha", "beta"):
            base.pop(key, None)
    elif "placement" in over:
        base.pop("norms", None)
    return base


def laid(base: Mapping[str, Any], over: Mapping[str, Any], side: str) -> dict[str, Any]:
    """A layer's or a stack's table with differences laid on it.

    Args:
        base: the table, its words written out.
        over: the differences.
        side: "encoder" or "decoder", whose the layer is.
    """
    return merged(beneath(base, over, side), over)
