"""A specification as tables in which all blocks of a stack are one, and the paths that name places in it.

A path is a specification's own: `vocab_size`, `decoder.d_model`, `decoder.attention.n_heads` (of every block), the
stack left out where a model has one. A value that differs from layer to layer is a `PerLayer`.
"""

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from anyformer.spec.parts import MAX_LAYERS, BlockSpec, ModelSpec, Part
from anyformer.spec.problems import MISSING, Problem, SpecError
from anyformer.spec.stored import from_table

STACKS = ("encoder", "decoder")
_BLOCK = frozenset(BlockSpec.model_fields)
_ROOT = frozenset(ModelSpec.model_fields) - set(STACKS)


class PerLayer(tuple[Any, ...]):
    """One value for each layer of a stack."""


class Either(dict[str, Any]):
    """A table that is another from layer to layer: options by name, told apart by their kinds."""


def steps(path: str, stack: str) -> tuple[str, ...]:
    """A path as the keys that lead to it."""
    first, *rest = path.split(".")
    if first in _ROOT:
        return (first, *rest)
    if first in STACKS:
        stack, (first, *rest) = first, rest
    return (stack, "block", first, *rest) if first in _BLOCK else (stack, first, *rest)


def copied(table: Any) -> Any:
    """Nested tables, whose parts can be set without touching the original."""
    if isinstance(table, Mapping):
        return (Either if isinstance(table, Either) else dict)({key: copied(value) for key, value in table.items()})
    return table


def merged(table: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`table` with `over` laid on it; a table whose kind changes is replaced."""
    result = copied(table)
    for key, value in over.items():
        here = result.get(key)
        if isinstance(value, Mapping) and isinstance(here, dict) and not isinstance(value, Either):
            same = value.get("kind", here.get("kind")) == here.get("kind")
            result[key] = merged(here, value) if same else copied(value)
        else:
            result[key] = copied(value)
    return dict(result) if not isinstance(table, Either) else Either(result)


class Tables:
    """Tables to be filled, then read as a specification.

    Args:
        tables: what is the same in every model of a family, copied.
        stack: the stack that paths without one mean.
    """

    def __init__(self, tables: Mapping[str, Any], stack: str) -> None:
        self._tables, self._stack = copied(tables), stack
        self._choices: dict[tuple[str, ...], str | PerLayer] = {}
        self._origins: dict[tuple[str, ...], str] = {}
        self.dropped: list[str] = []
        """Patterns of tensors that this model's file may hold and that have no place, as a family's `dropped`."""

    def set(self, path: str, value: Any, origin: str) -> None:
        """Puts a value (a `PerLayer` for one that differs) at a path; at an `Either`, the names of the options.

        `origin` is the key of the configuration that says so, for messages.
        """
        *parents, last = keys = steps(path, self._stack)
        here = self._tables
        for key in parents:
            here = here.setdefault(key, {})
        self._origins[tuple(keys)] = origin
        if isinstance(here.get(last), Either):
            self._choices[tuple(keys)] = value
        else:
            here[last] = value

    def get(self, path: str) -> Any:
        """What is at a path so far, or `MISSING`."""
        here: Any = self._tables
        for key in steps(path, self._stack):
            if not isinstance(here, dict) or key not in here:
                return MISSING
            here = here[key]
        return here

    def spec(self, where: object) -> ModelSpec:
        """The specification. Raises `SpecError`, each problem under the configuration's own key where one says it."""
        table = {name: value for name, value in self._tables.items() if name not in STACKS}
        for name in STACKS:
            if self._tables.get(name) is not None:
                table[name] = self._stack_of(name, where)
        try:
            return from_table(table, where=where)
        except SpecError as error:
            problems = {str(problem): problem for problem in map(self._named, error.problems)}
            raise SpecError(list(problems.values()), where=where) from None

    def _stack_of(self, name: str, where: object) -> dict[str, Any]:
        stack = dict(self._tables[name])
        block, n_layers = stack.pop("block"), stack.pop("n_layers")
        if not isinstance(n_layers, int) or isinstance(n_layers, bool) or not 1 <= n_layers <= MAX_LAYERS:
            origin = self._origins.get((name, "n_layers"), "n_layers")
            raise SpecError([Problem(origin, "should be a whole number of layers, 1 or more", n_layers)], where=where)
        blocks = [self._at(block, layer, (name, "block")) for layer in range(n_layers)]
        runs = [(block, len(list(run))) for block, run in groupby(blocks)]
        return {**stack, "blocks": [{"repeat": repeat, "block": block} for block, repeat in runs]}

    def _at(self, node: Any, layer: int, place: tuple[str, ...]) -> Any:
        if isinstance(node, PerLayer):
            return self._at(node[layer], layer, place)
        if isinstance(node, Either):
            choice = self._choices.get(place, next(iter(node)))
            name = choice[layer] if isinstance(choice, PerLayer) else choice
            return self._at(node[name], layer, (*place, name))
        if isinstance(node, dict):
            return {key: self._at(value, layer, (*place, key)) for key, value in node.items()}
        return node

    def _named(self, problem: Problem) -> Problem:
        parts = problem.path.split(".")
        if len(parts) > 2 and parts[1] == "blocks":
            parts = [parts[0], "block", *parts[3:]]
        for keys, origin in self._origins.items():
            if list(keys) == parts or [key for key in keys if key not in _OPTIONS] == parts:
                return Problem(origin, problem.why, problem.got, problem.remedy)
        for keys, origin in self._origins.items():  # What a rule finds begins with its place in the block.
            place = ".".join(key for key in keys[1 + (keys[1:2] == ("block",)) :] if key not in _OPTIONS)
            if problem.why.startswith((f"{place} = ", f"{place}: ")):
                return Problem(origin, problem.why, problem.got, problem.remedy)
        return problem


_OPTIONS = frozenset({"dense", "sparse", "normed"})
"""Names of options, which a specification's paths do not have."""


class View:
    """A specification read by the paths that `Tables` sets, for a family whose tables are `tables`."""

    def __init__(self, spec: ModelSpec, tables: Mapping[str, Any], stack: str) -> None:
        self.spec, self._tables, self._stack = spec, tables, stack

    def get(self, path: str) -> Any:
        """The value at a path, `MISSING` where the specification has no such place, `PerLayer` where layers differ.

        Layers without the place are left out, unless all have none.
        """
        values = self.layers(path)
        if not isinstance(values, PerLayer):
            return values
        found = [value for value in values if value is not MISSING]
        if not found:
            return MISSING
        return found[0] if all(value == found[0] for value in found) else PerLayer(values)

    def first(self, path: str) -> Any:
        """The value at a path in the first layer that has one, or `MISSING`."""
        value = self.get(path)
        return next(x for x in value if x is not MISSING) if isinstance(value, PerLayer) else value

    def layers(self, path: str) -> Any:
        """The value at a path in each layer as `PerLayer`, `MISSING` where a layer has none; a value outside layers."""
        keys = steps(path, self._stack)
        if "block" not in keys[:2]:
            return _walk(self.spec, None, keys)
        stack = getattr(self.spec, keys[0])
        if stack is None:
            return MISSING
        template = self._tables.get(keys[0], {}).get("block")
        return PerLayer(_walk(block, template, keys[2:]) for block in stack.blocks)

    def choices(self, path: str) -> PerLayer:
        """For an `Either`, the name of each layer's option; that of the first where none fits."""
        keys = steps(path, self._stack)
        options: Any = self._tables
        for key in keys:
            options = options[key]
        values = self.layers(path)
        default = next(iter(options))
        return PerLayer(
            next((name for name, table in options.items() if table["kind"] == getattr(value, "kind", None)), default)
            for value in (values if isinstance(values, PerLayer) else ())
        )


def _walk(value: Any, template: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        if isinstance(template, Either):
            template = template[key]
            if template["kind"] != getattr(value, "kind", None):
                return MISSING
            continue
        named = isinstance(value, Part) and (key in type(value).model_fields or key == "n_layers")
        if not named:
            return MISSING
        value = getattr(value, key)
        template = template.get(key) if isinstance(template, Mapping) else None
    return value
