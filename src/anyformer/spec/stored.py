"""The stored form of a specification: JSON with a format version, equal neighbouring blocks written once."""

import json
from collections.abc import Callable
from itertools import groupby
from typing import Any

from pydantic import ValidationError

from anyformer.spec.parts import MAX_LAYERS, ModelSpec
from anyformer.spec.problems import Problem, SpecError, from_pydantic
from anyformer.spec.recipe import known_keys

FORMAT_VERSION = 2


def _from_1(table: dict[str, Any]) -> dict[str, Any]:
    """Version 1 knew decoders alone; all that 2 adds has version 1's meaning where it is not given."""
    return table


_STACKS = ("encoder", "decoder")
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _from_1}
"""For each old format version, what turns its tables into those of the next."""


def to_json(spec: ModelSpec) -> str:
    """`spec` as JSON text."""
    table = spec.model_dump(mode="json")
    table["ties"] = sorted(table["ties"])
    for name in spec.stacks:
        blocks = table[name]["blocks"]
        table[name]["blocks"] = [{"repeat": len(list(run)), "block": block} for block, run in groupby(blocks)]
    return json.dumps({"format_version": FORMAT_VERSION, **table}, indent=1) + "\n"


def _spread(table: dict[str, Any], *, once: bool = False) -> dict[str, Any]:
    """Runs of blocks written out, or each block `once`."""
    stacks = {name: table[name] for name in _STACKS if isinstance(table.get(name), dict)}
    return {**table, **{name: _spread_stack(name, stack, once=once) for name, stack in stacks.items()}}


def _spread_stack(name: str, stack: dict[str, Any], *, once: bool) -> dict[str, Any]:
    runs = stack.get("blocks")
    if not isinstance(runs, list):
        return stack
    blocks: list[Any] = []
    total = 0
    for index, run in enumerate(runs):
        repeat = run.get("repeat") if isinstance(run, dict) else None
        if (
            not isinstance(repeat, int)
            or isinstance(repeat, bool)
            or not 1 <= repeat <= MAX_LAYERS
            or "block" not in run
        ):
            problem = Problem(f"{name}.blocks.{index}", 'is not a run {"repeat": 1 or more, "block": {…}}')
            raise SpecError([problem])
        total += repeat
        if total > MAX_LAYERS:
            raise SpecError([Problem(f"{name}.blocks", f"has more than {MAX_LAYERS:,} layers")])
        blocks += [run["block"]] * (1 if once else repeat)
    return {**stack, "blocks": blocks}


def _problems(table: dict[str, Any]) -> list[Problem]:
    """What is wrong with tables that do not validate."""
    try:
        ModelSpec.model_validate(table)
    except ValidationError as error:
        return from_pydantic(error, table, known_keys(ModelSpec, table))
    raise AssertionError("blocks that are sound once are sound repeated")


def from_json(text: str, *, where: object = None) -> ModelSpec:
    """The specification in JSON `text`; older formats are migrated. Raises `SpecError`."""
    try:
        table = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError([Problem("(the whole)", f"is not JSON: {error}")], where=where) from None
    if not isinstance(table, dict):
        raise SpecError([Problem("(the whole)", "is not a JSON object")], where=where)
    version = table.pop("format_version", None)
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise SpecError([Problem("format_version", "is not a format version", version)], where=where)
    if version > FORMAT_VERSION:
        remedy = "a newer release of anyformer reads it"
        why = f"is newer than {FORMAT_VERSION}, the newest that this release knows"
        raise SpecError([Problem("format_version", why, version, remedy)], where=where)
    for old in range(version, FORMAT_VERSION):
        table = MIGRATIONS[old](table)
    return from_table(table, where=where)


def from_table(table: dict[str, Any], *, where: object = None) -> ModelSpec:
    """The specification in tables of this release's stored form, their version taken off. Raises `SpecError`."""
    spread = _spread(table)
    try:
        spec = ModelSpec.model_validate(spread)
    except ValidationError:
        raise SpecError(_problems(_spread(table, once=True)), where=where) from None
    stacks: dict[str, Any] = {}
    for name, stack in spec.stacks.items():
        shared: dict[Any, Any] = {}
        blocks = tuple(shared.setdefault(block, block) for block in stack.blocks)
        stacks[name] = stack.model_copy(update={"blocks": blocks})
    return spec.model_copy(update=stacks)
