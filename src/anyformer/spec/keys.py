"""What a recipe's tables may hold, and a recipe as far as it is sound."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, get_args

from pydantic import ValidationError

from anyformer.spec.hints import misplaced
from anyformer.spec.part import Part
from anyformer.spec.problems import Problem, from_pydantic, look_up, raw_path
from anyformer.spec.words import WORDS

P = TypeVar("P", bound=Part)


def _parts_in(annotation: Any) -> Iterator[type[Part]]:
    if isinstance(annotation, type) and issubclass(annotation, Part):
        yield annotation
    for argument in get_args(annotation):
        yield from _parts_in(argument)


def known_keys(part: type[Part], raw: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], list[str]]:
    """For every table in `raw`, the keys that a table of its kind may have; at its path and "kind", the kinds."""
    keys = {path: list(part.model_fields)}
    for name, field in part.model_fields.items():
        value = raw.get(name) if isinstance(raw, dict) else None
        entries = enumerate(value) if isinstance(value, list) else [(None, value)]
        for index, entry in entries:
            here = (*path, name) if index is None else (*path, name, str(index))
            for choice in _parts_in(field.rebuild_annotation()):
                kind = choice.model_fields.get("kind")
                if isinstance(entry, dict) and kind is not None:
                    keys.setdefault((*here, "kind"), []).append(str(kind.default))
                if isinstance(entry, dict) and (kind is None or entry.get("kind", kind.default) == kind.default):
                    keys |= known_keys(choice, entry, here)
    return keys


def part_at(part: type[Part], raw: Any, path: Sequence[str]) -> type[Part] | None:
    """The part that the table at `path` of `raw` is, by its kind; None where there is no such table."""
    for name in path:
        field = part.model_fields.get(name)
        raw = raw.get(name) if isinstance(raw, dict) else None
        if field is None or not isinstance(raw, dict):
            return None
        for choice in _parts_in(field.rebuild_annotation()):
            kind = choice.model_fields.get("kind")
            if kind is None or raw.get("kind", kind.default) == kind.default:
                part = choice
                break
        else:
            return None
    return part


_SINGLE = {"kind": "dense", "activation": "relu"}
_PLACEHOLDERS: dict[tuple[str, ...], Any] = {
    ("vocab_size",): 1,
    ("d_model",): 2,
    ("n_layers",): 1,
    ("attention",): {"kind": "grouped", "n_heads": 1, "position": {"kind": "none"}},
    ("attention", "n_heads"): 1,
    ("attention", "kv_rank"): 1,
    ("attention", "position"): {"kind": "none"},
    ("ffn",): _SINGLE,
    ("ffn", "activation"): "relu",
    ("ffn", "n_experts"): 1,
    ("ffn", "top_k"): 1,
    ("ffn", "expert"): _SINGLE,
    ("ffn", "expert", "activation"): "relu",
    ("ffn", "shared", "activation"): "relu",
}


def _without(table: dict[str, Any], path: tuple[str, ...]) -> tuple[str, ...]:
    """Takes the value at `path` out, or the table that misses it, or puts a stand-in; gives the path touched."""
    while path:
        parent = look_up(table, path[:-1])
        if isinstance(parent, dict) and path in _PLACEHOLDERS:
            parent[path[-1]] = copy.deepcopy(_PLACEHOLDERS[path])
            return path
        if isinstance(parent, dict) and path[-1] in parent:
            del parent[path[-1]]
            return path
        path = path[:-1]
    return path


def partly(model: type[P], raw: dict[str, Any]) -> tuple[P, list[Problem], set[str]]:
    """The recipe as far as it is sound: the part, its problems, and the paths whose values are unknown.

    Broken values are left out, or stand-ins where something must be there, so that the rules between fields can still
    judge the rest.
    """
    try:
        return model.model_validate(raw), [], set()
    except ValidationError as error:
        problems = from_pydantic(error, raw, known_keys(model, raw), WORDS, misplaced)
        failed = error
    table: dict[str, Any] = copy.deepcopy(raw)
    unknown: set[str] = set()
    for _ in range(20):
        for each in failed.errors(include_url=False):
            path = raw_path(table, each["loc"])
            if each["type"] == "extra_forbidden":
                parent = look_up(table, path[:-1])
                if isinstance(parent, dict):
                    parent.pop(path[-1], None)
            else:
                unknown |= {".".join(path), ".".join(_without(table, path))} - {""}
        try:
            return model.model_validate(table), problems, unknown
        except ValidationError as error:
            failed = error
    raise AssertionError(f"no sound part of the recipe found: {failed}")
