"""Specification to recipe: the shortest tables that expand to the same specification."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, get_args

from anyformer.spec.expand import placed
from anyformer.spec.parts import BlockSpec, ModelSpec, NoNorm, Norms, Part, plain
from anyformer.spec.recipe import Placement


def _placement(norms: Norms) -> dict[str, Any] | None:
    """`norm` and `placement` that say the same as `norms`, where there are any."""
    branch = norms.attention
    norm = next((x for x in (branch.before, branch.after, branch.residual) if not isinstance(x, NoNorm)), NoNorm())
    for placement in get_args(Placement):
        if placed(norm, placement) == norms:
            return {"norm": plain(norm), "placement": placement}
    return None


def _period(blocks: Sequence[BlockSpec]) -> int:
    """The length of the shortest pattern that, repeated, gives the blocks."""
    return next(p for p in range(1, len(blocks) + 1) if all(b == blocks[i % p] for i, b in enumerate(blocks)))


def _difference(base: Part, other: Part) -> dict[str, Any]:
    """What to lay on `base` to have `other`."""
    changes: dict[str, Any] = {}
    for name in type(other).model_fields:
        old, new = getattr(base, name), getattr(other, name)
        if old == new:
            continue
        if new is None:
            changes[name] = False
        elif isinstance(new, Part) and type(old) is type(new):
            changes[name] = _difference(old, new)
        else:
            changes[name] = plain(new) if isinstance(new, Part) else new
    return changes


def _layer(block: BlockSpec, d_model: int, *, shorten: bool) -> dict[str, Any]:
    table = plain(block)
    table.pop("norms", None)
    attention = table["attention"]
    if shorten:
        if attention["d_value"] == attention["d_head"]:
            del attention["d_value"]
        if attention["d_head"] * attention["n_heads"] == d_model:
            del attention["d_head"]
        if attention["n_kv_heads"] == attention["n_heads"]:
            del attention["n_kv_heads"]
    return table


def condense(spec: ModelSpec) -> dict[str, Any]:
    """A recipe, as nested tables, for which `expand` gives `spec` back exactly."""
    stack = spec.decoder
    period = _period(stack.blocks)
    base, cycle = stack.blocks[0], stack.blocks[:period]
    table: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "d_model": stack.d_model,
        "n_layers": stack.n_layers,
        "max_positions": stack.max_positions,
        "tie": "head" in spec.ties,
        **_layer(base, stack.d_model, shorten=period == 1),
        **(_placement(base.norms) or {"norms": plain(base.norms)}),
        "final_norm": plain(stack.final_norm),
        "head": {"kind": "none"} if spec.head is None else plain(spec.head),
        "embed": plain(stack.embed),
    }
    if stack.max_positions is None:
        del table["max_positions"]
    if period > 1:
        if any(block.norms != base.norms for block in cycle):
            table.pop("norm", None)
            table.pop("placement", None)
            table["norms"] = base.norms.model_dump()
        entries = [(_difference(base, block), len(list(run))) for block, run in groupby(cycle)]
        table["pattern"] = [{"repeat": count, **changes} for changes, count in entries]
    return table
