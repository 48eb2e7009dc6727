"""Drawing norms: their kinds, the slots of a layer's branches, the multipliers of the residual."""

from typing import Any

from anyformer.laws.choose import Chooser, chance, maybe

Table = dict[str, Any]

WIRINGS: dict[str, Any] = {
    "serial": "serial",
    "shared": {"kind": "parallel", "shared_norm": True},
    "two": {"kind": "parallel", "shared_norm": False},
}


def norm(choose: Chooser, *, none: bool = False) -> str | Table:
    """A norm, or with `none` perhaps no norm: a word, or a table in full."""
    kind: str = choose.pick(("rms", "layer", *(("none",) if none else ())))
    if kind == "none" or choose.pick((True, False)):
        return kind
    weight = choose.pick((True, False, True))
    return {
        "kind": kind,
        "weight": weight,
        "bias": choose.pick((False, True)),
        "offset": choose.pick((0, 1)) if weight else 0,
        "eps": choose.pick((1e-5, 1e-3)),
    }


def _branch(choose: Chooser, *, residual: bool) -> Table:
    """The slots of a branch, of which one at least holds a norm, so that activations stay of a size."""
    names = ["before", "after", *(["residual"] if residual else [])]
    must = choose.pick(names)
    table: Table = {}
    for name in names:
        if name == must:
            table[name] = norm(choose)
        elif choose.pick((False, True)):
            table[name] = norm(choose, none=True)
    return table


def slots(choose: Chooser, wiring: str, *, crossed: bool) -> Table:
    """Every slot by itself, in a way that the wiring allows."""
    branches = ["attention", *(["cross"] if crossed else []), "ffn"]
    table = {name: _branch(choose, residual=wiring == "serial") for name in branches}
    for name in branches:
        maybe(choose, table[name], "beta", (0.7, 1.5))
    if chance(choose, 3):
        if wiring == "serial":
            for name in branches:
                table[name]["alpha"] = choose.pick((1.3, 0.6, 1.0))
        else:
            alpha = choose.pick((1.3, 0.6))
            table = {name: {**branch, "alpha": alpha} for name, branch in table.items()}
    if wiring == "shared":
        # One norm for both: the attention's before is the feed-forward's.
        table["ffn"]["before"] = table["attention"].get("before", "none")
        if table["ffn"]["before"] == table["ffn"].get("after", "none") == "none":
            table["ffn"]["after"] = norm(choose)
    return table


def placement(choose: Chooser, wiring: str) -> str:
    """Where a layer's one norm is."""
    where: str = choose.pick(("pre", "sandwich", "output", *(("post",) if wiring == "serial" else ())))
    return where


def layer_norms(choose: Chooser, wiring: str, *, crossed: bool) -> Table:
    """The keys of a layer that say its norms: a placement with multipliers, or every slot."""
    if chance(choose, 3):
        return {"norms": slots(choose, wiring, crossed=crossed)}
    table: Table = {"norm": norm(choose), "placement": placement(choose, wiring)}
    if chance(choose, 3):
        table["alpha"] = choose.pick((1.3, 0.6))
    if chance(choose, 3):
        table["beta"] = choose.pick((0.7, 1.5))
    return table
