"""Specification to recipe: the shortest tables that expand to the same specification."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, get_args

from anyformer.spec.attention import Bidirectional, Causal, Grouped, Latent
from anyformer.spec.ffn import Dense, Gated, MoE
from anyformer.spec.parts import BlockSpec, ModelSpec, NoNorm, NoPosition, Norms, Part, RelativeBias, StackSpec, plain
from anyformer.spec.recipe import Placement, ShareAll, ShareSome
from anyformer.spec.resolve import owners_of, placed


def condense(spec: ModelSpec) -> dict[str, Any]:
    """A recipe, as nested tables, for which `expand` gives `spec` back exactly."""
    tables = {name: _stack(stack, name, spec) for name, stack in spec.stacks.items()}
    both = len(tables) == 2
    table: dict[str, Any] = {"architecture": "encoder-decoder" if both else next(iter(tables))}
    if table["architecture"] == "decoder":
        del table["architecture"]
    table |= {"vocab_size": spec.vocab_size, "tie": _tie(spec)}
    if both:
        encoder, decoder = tables["encoder"], tables["decoder"]
        shared = {key: value for key, value in encoder.items() if key in decoder and decoder[key] == value}
        own = {name: {k: v for k, v in stack.items() if k not in shared} for name, stack in tables.items()}
        tables = {"": shared, **{name: stack for name, stack in own.items() if stack}}
    for name, stack in tables.items():
        table |= {name: stack} if both and name else stack
    table["head"] = {"kind": "none"} if spec.head is None else plain(spec.head)
    if spec.pooler is not None:
        table["pooler"] = plain(spec.pooler) or True
    return table


def _tie(spec: ModelSpec) -> bool | list[str]:
    if not spec.ties:
        return False
    every = {*(f"{name}.embed" for name in spec.stacks), "head"}
    return True if spec.ties == every else sorted(spec.ties)


def _stack(stack: StackSpec, side: str, spec: ModelSpec) -> dict[str, Any]:
    """The table of one stack."""
    period = _period(stack.blocks)
    cycle = stack.blocks[:period]
    kinds = [next(run) for _, run in groupby(cycle)]
    layers = _layers(kinds, stack, side, crosses=side == "decoder" and len(spec.stacks) == 2)
    table: dict[str, Any] = {
        "d_model": stack.d_model,
        "n_layers": stack.n_layers,
        "max_positions": stack.max_positions,
        **layers[0],
        "final_norm": plain(stack.final_norm),
        "embed": plain(stack.embed),
    }
    if stack.max_positions is None:
        del table["max_positions"]
    if stack.owners is not None:
        table["share"] = _share(stack.owners)
    if period > 1:
        lengths = [len(list(run)) for _, run in groupby(cycle)]
        table["pattern"] = [
            {"repeat": count, **changes} for changes, count in zip([{}, *layers[1:]], lengths, strict=True)
        ]
    return table


def _period(blocks: Sequence[BlockSpec]) -> int:
    """The length of the shortest pattern that, repeated, gives the blocks."""
    return next(p for p in range(1, len(blocks) + 1) if all(b == blocks[i % p] for i, b in enumerate(blocks)))


def _share(owners: tuple[int, ...]) -> Any:
    """The shortest way to say who owns what."""
    n_layers, distinct = len(owners), len(set(owners))
    if owners_of(ShareAll(), n_layers) == owners:
        return "all"
    for order in ("cycle", "runs"):
        share = ShareSome(distinct=distinct, order=order)
        if owners_of(share, n_layers) == owners:
            return {"distinct": distinct, "order": order}
    return list(owners)


def _layers(kinds: Sequence[BlockSpec], stack: StackSpec, side: str, *, crosses: bool) -> list[dict[str, Any]]:
    """The table of the first kind of layer, and for each other what it lays on it."""
    base = kinds[0]
    tables = [_block(base)]
    for block in kinds[1:]:
        changes = {
            name: value
            for name in ("attention", "ffn", "wiring")
            if (value := _change(getattr(base, name), getattr(block, name)))
        }
        tables.append(changes)
    for path in _FOLLOWING:
        if all(_follows(path, block, stack.d_model, side) for block in kinds):
            for table in tables:
                _drop(table, ("attention", *path))
    for table, cross, norms in zip(tables, _crosses(kinds, expected=crosses), _norms(kinds), strict=True):
        table |= {**cross, **norms}
    return tables


def _block(block: BlockSpec) -> dict[str, Any]:
    table = {"attention": plain(block.attention), "ffn": _plain(block.ffn), "wiring": plain(block.wiring)}
    return {name: value for name, value in table.items() if value != {"kind": "serial"}}


def _plain(part: Any) -> Any:
    """A part as its table; a mixture's shared expert by what it lays on the expert."""
    if not isinstance(part, Part):
        return part
    table = plain(part)
    if isinstance(part, MoE) and part.shared is not None:
        table["shared"] = _shared(part.expert, part.shared)
    return table


def _shared(expert: Dense | Gated, shared: Dense | Gated) -> Any:
    if shared.d_ff % expert.d_ff == 0 and expert.model_copy(update={"d_ff": shared.d_ff}) == shared:
        return shared.d_ff // expert.d_ff
    return _difference(expert, shared) if type(expert) is type(shared) else plain(shared)


def _change(old: Any, new: Any) -> Any:
    """What to lay on `old` to have `new`; false takes it away, and nothing is an empty table."""
    if old == new:
        return {}
    if new is None:
        return False
    return _difference(old, new) if isinstance(new, Part) and type(old) is type(new) else _plain(new)


def _difference(base: Part, other: Part) -> dict[str, Any]:
    """What to lay on `base` to have the `other` of its kind."""
    fields = type(other).model_fields
    changes = {
        name: _change(getattr(base, name), getattr(other, name))
        for name in fields
        if getattr(base, name) != getattr(other, name)
    }
    for name, change in changes.items():
        new = getattr(other, name)
        if isinstance(change, dict) and getattr(base, name) == fields[name].default and hasattr(new, "kind"):
            # A default is left out, kind and all, so that there is nothing to lay the change on.
            changes[name] = {"kind": new.kind, **change}
    if changes:
        # What follows from other numbers where it is left out would follow from the changed ones.
        changes |= {name: getattr(other, name) for name, field in fields.items() if field.default_factory is not None}
    if isinstance(base, MoE) and isinstance(other, MoE) and {"expert", "shared"} & changes.keys():
        changes["shared"] = _whole(other.shared)
    return changes


def _whole(part: Part | None) -> Any:
    """A part with every key said, so that nothing of what it is laid on remains."""
    if part is None:
        return False
    values = {name: getattr(part, name) for name in type(part).model_fields}
    return {
        name: _whole(value) if isinstance(value, Part) or value is None else value for name, value in values.items()
    }


_FOLLOWING = (
    ("d_value",),
    ("d_head",),
    ("d_nope",),
    ("n_kv_heads",),
    ("scale",),
    ("mask",),
    ("position", "bidirectional"),
)
"""What may be left out of an attention."""


def _follows(path: tuple[str, ...], block: BlockSpec, d_model: int, side: str) -> bool:
    """Whether a block has at `path` of its attention what it would have if that were left out."""
    attention = block.attention
    match path[-1]:
        case "d_value":
            return attention.d_value == (attention.d_nope if isinstance(attention, Latent) else attention.d_head)
        case "d_head":
            return isinstance(attention, Latent) or attention.d_head * attention.n_heads == d_model
        case "d_nope":
            return isinstance(attention, Grouped) or attention.d_nope * attention.n_heads == d_model
        case "n_kv_heads":
            return attention.n_kv_heads == attention.n_heads
        case "scale":
            return attention.scale == float(attention.d_head**-0.5)
        case "mask":
            return attention.mask == (Bidirectional() if side == "encoder" else Causal())
    position = attention.position
    return not isinstance(position, RelativeBias) or position.bidirectional == (attention.mask.kind != "causal")


def _drop(table: dict[str, Any], path: tuple[str, ...]) -> None:
    """Takes a value out, and the tables that are empty without it."""
    inner = table.get(path[0])
    if len(path) == 1:
        table.pop(path[0], None)
    elif isinstance(inner, dict):
        _drop(inner, path[1:])
        if not inner:
            del table[path[0]]


def _taken_over(block: BlockSpec) -> Grouped | None:
    """The cross-attention that a recipe makes of a layer's attention where it says nothing else."""
    attention = block.attention
    if isinstance(attention, Latent):
        return None
    unlike = {"position": NoPosition(), "mask": Bidirectional(), "softcap": None, "sink_logit": False}
    return attention.model_copy(update=unlike)


def _crosses(kinds: Sequence[BlockSpec], *, expected: bool) -> list[dict[str, Any]]:
    """What each kind of layer says of its cross-attention."""
    if all(block.cross == _taken_over(block) for block in kinds if block.cross is not None):
        # Nothing but whether it is there.
        default = kinds[0].cross is not None
        first: list[dict[str, Any]] = [{"cross": False} if expected and not default else {}]
        return first + [{} if (b.cross is not None) == default else {"cross": not default} for b in kinds[1:]]
    fixed = ("kind", "position", "mask")
    tables = [
        block.cross is not None and {key: x for key, x in _whole(block.cross).items() if key not in fixed}
        for block in kinds
    ]
    return [{"cross": table} if index == 0 or table != tables[0] else {} for index, table in enumerate(tables)]


def _norms(kinds: Sequence[BlockSpec]) -> list[dict[str, Any]]:
    """What each kind of layer says of its norms: placements where they say it, else every slot."""
    found = [_placement(block.norms, cross=block.cross is not None) for block in kinds]
    base = kinds[0].norms
    if any(each is None for each in found):
        first = _whole(base) if len(kinds) > 1 else plain(base)
        changes = [_change(base, block.norms) for block in kinds[1:]]
        return [{"norms": first}, *({"norms": change} if change else {} for change in changes)]
    placements = [each for each in found if each is not None]
    kept = [key for key in ("alpha", "beta") if any(each[key] != 1.0 for each in placements)]
    tables = [{key: value for key, value in each.items() if key in ("norm", "placement", *kept)} for each in placements]
    rest = [
        {key: _change(tables[0][key], value) for key, value in each.items() if value != tables[0][key]}
        for each in tables[1:]
    ]
    return [{key: _plain(value) for key, value in tables[0].items()}, *rest]


def _placement(norms: Norms, *, cross: bool) -> dict[str, Any] | None:
    """The norm, placement, alpha and beta that say the same as `norms`, where there are any."""
    branch = norms.attention
    norm = next((x for x in (branch.before, branch.after, branch.residual) if not isinstance(x, NoNorm)), NoNorm())
    for placement in get_args(Placement):
        if placed(norm, placement, alpha=branch.alpha, beta=branch.beta, cross=cross) == norms:
            return {"norm": norm, "placement": placement, "alpha": branch.alpha, "beta": branch.beta}
    return None
