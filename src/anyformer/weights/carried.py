"""A configuration of Hugging Face that carries our specification: its folder brings the model's own code along.

No published family says such a model. The code names some parameters otherwise than the core does, so the configuration
says as well how; the names in the file are the code's, which is what `transformers` writes again. Imports no torch.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from anyformer.errors import UserError
from anyformer.families import Family, Variant
from anyformer.planning import buffers, parameters
from anyformer.spec.parts import ModelSpec
from anyformer.spec.stored import from_json

MODEL_TYPE = "anyformer"
_SPEC, _RENAMED = "spec", "renamed"
_LONGEST = 1000
"""Far beyond any parameter's name; pairs that lengthen what they made before would fill the memory."""
Renamed = tuple[tuple[str, str], ...]
"""Pairs (stored, here): a core's name becomes the code's where each is replaced, one pair after another."""


def carrying(spec: ModelSpec, renamed: Renamed) -> dict[str, Any]:
    """The keys of a configuration that carry a specification."""
    return {"model_type": MODEL_TYPE, _RENAMED: [list(pair) for pair in renamed], _SPEC: json.loads(spec.to_json())}


def carried(table: Mapping[str, Any], where: object) -> tuple[ModelSpec, Family, str]:
    """The specification that a configuration carries, a family of it alone, and the name of its class.

    Raises:
        UserError: one of these keys is missing or is not what it should be.
        SpecError: a specification that is none.
    """
    spec: Any = table.get(_SPEC)
    pairs: Any = table.get(_RENAMED)
    names: Any = table.get("architectures")
    if not isinstance(spec, dict):
        what = "a configuration of this model type carries a specification, and this one does not"
        raise UserError(what, where=where, got=f"{_SPEC} of type {type(spec).__name__}", expected="a JSON object")
    if not _are_texts(names) or len(names) != 1:
        raise UserError("one class of models is expected", where=where, got=f"architectures = {names!r}")
    if not isinstance(pairs, list) or not all(_is_pair(pair) for pair in pairs):
        raise UserError("these are not pairs of names", where=f"{where}, {_RENAMED}", got=type(pairs).__name__)
    read = from_json(json.dumps(spec), where=where)
    return read, family_of(read, tuple((stored, here) for stored, here in pairs), names[0]), names[0]


def _is_pair(pair: Any) -> bool:
    """Whether these are two parts of parameters' names. Braces would be fields to fill in."""
    return _are_texts(pair) and len(pair) == 2 and bool(pair[0]) and not any(set(text) & {"{", "}"} for text in pair)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def family_of(spec: ModelSpec, renamed: Renamed, model: str) -> Family:
    """The family of one specification: its parameters under the names that the code beside it has."""
    names = dict.fromkeys(p.name for p in (*parameters(spec), *buffers(spec)))
    rules = dict.fromkeys((_any_layer(here(name, renamed)), _any_layer(name)) for name in names)
    return Family(
        name="models with code of their own",
        model_type=MODEL_TYPE,
        stack=next(iter(spec.stacks)),
        spec={},
        config=(),
        models={model: Variant(spec={})},
        tensors=tuple(rules),
    )


def here(name: str, renamed: Iterable[tuple[str, str]]) -> str:
    """What an ejected file calls a parameter of the core. Raises `UserError` for pairs that go on without end."""
    for stored, here in renamed:
        name = name.replace(stored, here)
        if len(name) > _LONGEST:
            what = "renaming makes names without end"
            raise UserError(
                what, where=_RENAMED, got=f"{name[:40]}…", expected=f"names of at most {_LONGEST} characters"
            )
    return name


def _any_layer(name: str) -> str:
    return re.sub(r"\.blocks\.\d+\.", ".blocks.{i}.", name, count=1)
