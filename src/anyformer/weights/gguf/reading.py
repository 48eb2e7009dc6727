"""A GGUF file's metadata as a specification, and a specification as metadata. Imports no torch.

The way leads over the configuration of a published family: metadata are turned into its keys, and its fields read them.
Back is found by trying, as for `write_config`: what is written is read again, and fits where nothing differs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isclose
from pathlib import Path
from typing import Any

from anyformer.errors import UserError
from anyformer.families.config import Config, shown
from anyformer.families.gguf import DIALECTS, Dialect
from anyformer.families.gguf.dialect import Made, Said
from anyformer.families.gguf.rope import TABLES
from anyformer.spec.parts import ModelSpec
from anyformer.spec.problems import did_you_mean
from anyformer.weights.config import Reading, candidates, differences, evaluated, read_config, written
from anyformer.weights.gguf.format import Gguf
from anyformer.weights.gguf.types import READ
from anyformer.weights.shapes import Matching, Shape, Step, match, pattern, steps

_IGNORED = ("vocab_size", "tensor_data_layout")
"""Metadata of any architecture that do not change what a model computes."""
_LONGEST = 4096
"""Letters or items of metadata that a model is made of; one for each layer is the most that is needed."""
_MOST = {"block_count": 512, "expert_count": 1024}
"""That llama.cpp reads. Many more of either, and a small file would take minutes to be refused."""
_NO_EXPERTS = ("expert_count", "expert_used_count")
_ROUNDING = 1e-6
"""Of a float32, which the format stores and llama.cpp computes with."""


@dataclass(frozen=True)
class Place:
    """A file (or specification) as it was understood: the family, and the names of its tensors there."""

    reading: Reading
    dialect: Dialect
    meta: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Understood:
    """A file of which all is checked by name, shape and type, before any tensor is read.

    Attributes:
        file: what it says.
        place: what its metadata mean.
        taken: which of its tensors are made into which of ours.
    """

    file: Gguf
    place: Place
    taken: list[Step]


def understood(file: Gguf, dialects: Sequence[Dialect] = DIALECTS) -> Understood:
    """A file as `read_place` and `matched` understand it. Raises `UserError` for types of numbers that are not read."""
    place = read_place(file, dialects)
    matching = matched(place, file)
    for name, entry in file.tensors.items():
        if entry.kind.name not in READ:
            remedy = "quantise the model otherwise: Q4_K_M and Q8_0 files are read"
            got = f"{name} of type {entry.kind.name}"
            raise UserError("weights of this type are not read", where=file.path, got=got, remedy=remedy)
    if matching.again:
        step = matching.again[0]
        raise UserError("two tensors hold the same weight", where=file.path, got=f"{step.theirs[0]} for {step.ours[0]}")
    return Understood(file, place, matching.taken)


def read_place(file: Gguf, dialects: Sequence[Dialect] = DIALECTS) -> Place:
    """What the metadata of a file mean.

    Raises:
        UserError: an architecture that no dialect has; a key that is not known, or whose value no specification has.
        SpecError: values that contradict each other.
    """
    architecture = file.metadata.get("general.architecture")
    meta = _own(file)
    dialect = _dialect_of(architecture, meta, file.path, dialects)
    shapes = {name: entry.shape for name, entry in file.tensors.items()}
    return _read(dialect, meta, shapes, file.floats, f"{file.path}, metadata {architecture}.*", file.path)


def matched(place: Place, file: Gguf) -> Matching:
    """Which tensor of a file is which of the specification's. Raises `UserError` where they are not the same."""
    flat = [pattern(name) for name in place.dialect.vectors]
    shapes = {name: entry.shape for name, entry in file.tensors.items()}
    rows = [name for name, shape in shapes.items() if len(shape) == 2 and shape[0] == 1]
    shapes |= {name: shapes[name][1:] for name in rows if any(each.fullmatch(name) for each in flat)}
    return match(place.reading, shapes, file.path, (*TABLES, *place.dialect.dropped))


def _own(file: Gguf) -> dict[str, Any]:
    """The metadata of the architecture, without its prefix."""
    architecture = file.metadata.get("general.architecture")
    prefix = f"{architecture}." if isinstance(architecture, str) else "."
    found = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    for name, value in found.items():
        if isinstance(value, str | list) and len(value) > _LONGEST:
            what, got = f"the metadata {prefix}{name} cannot be used", f"{type(value).__name__} of {len(value):,}"
            raise UserError(what, where=file.path, got=got, expected=f"at most {_LONGEST:,} letters or items")
    # Some converters say of a model without experts that it has 0.
    return {name: value for name, value in found.items() if value != 0 or name not in _NO_EXPERTS}


def _dialect_of(architecture: Any, meta: Mapping[str, Any], where: Path, dialects: Sequence[Dialect]) -> Dialect:
    for dialect in dialects:
        if dialect.architecture == architecture and dialect.suits(meta):
            return dialect
    known = sorted({dialect.architecture for dialect in dialects})
    near = did_you_mean(architecture, known) if isinstance(architecture, str) else None
    remedy = f"did you mean `{near}`?" if near else None
    raise UserError(
        "no family of this GGUF architecture is known" if architecture else "the file names no architecture",
        where=where,
        got=f"general.architecture = {shown(architecture)}",
        expected=", ".join(known),
        remedy=remedy,
    )


def _read(
    dialect: Dialect, meta: Mapping[str, Any], shapes: Mapping[str, Shape], numbers: Any, where: str, file: object
) -> Place:
    said = Said(Config(_flat(meta), where, "file"), shapes, numbers)
    for name, most in _MOST.items():
        if isinstance(meta.get(name), int) and meta[name] > most:
            said.meta.refuse(name, meta[name], f"at most {most:,}, as in llama.cpp")
    config: dict[str, Any] = {"model_type": dialect.family.model_type, "architectures": [dialect.model]}
    for key in dialect.keys:
        key.read(said, config)
    said.meta.finish({}, (*_IGNORED, *dialect.ignored))
    reading = read_config(config, file, (dialect.family,))
    return Place(named(reading, dialect), dialect)


def _flat(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata as tables inside tables: `Config` reads the points in a name so."""
    table: dict[str, Any] = {}
    for key, value in meta.items():
        here = table
        *parents, last = key.split(".")
        for parent in parents:
            inner = here.setdefault(parent, {})
            if not isinstance(inner, dict):
                inner = here[parent] = {"": inner}
            here = inner
        here[last] = value
    return table


def named(reading: Reading, dialect: Dialect) -> Reading:
    """A reading whose tensors have the names of a dialect."""
    family = reading.family
    variant = replace(family.models[dialect.model], tensors=(), config=(), body="")
    models = {dialect.model: variant}
    return replace(
        reading,
        family=replace(family, tensors=dialect.tensors, models=models, computed={}, dropped=()),
        model=dialect.model,
        dropped=(),
    )


def write_place(spec: ModelSpec, dialects: Sequence[Dialect] = DIALECTS) -> Place:
    """The metadata of the architecture that is exactly `spec`, and how its tensors are called there.

    Numbers are rounded to float32, as the format stores them; what acts in training alone is left out.

    Raises `UserError` where no architecture says the specification, with the nearest and what it cannot say.
    """
    nearest: tuple[int, str, str] | None = None
    for dialect in dialects:
        if all(model != dialect.model for _, model in candidates(spec, (dialect.family,))):
            continue
        try:
            place = _written(dialect, spec)
        except UserError as error:
            why = f"{error.what}: {error.got}" if error.got is not None else error.what
            nearest = min(nearest or (10_000, "", ""), (1_000, dialect.architecture, why))
            continue
        found = [
            x for x in differences(evaluated(spec), evaluated(place.reading.spec)) if not _rounded(x.ours, x.theirs)
        ]
        if not found:
            return place
        weight = sum(difference.weight for difference in found)
        nearest = min(nearest or (10_000, "", ""), (weight, dialect.architecture, str(found[0])))
    raise UserError(
        "no architecture of GGUF is this model, so it has no GGUF form",
        got=nearest[2]
        if nearest
        else " and ".join([*spec.stacks, f"a head of kind {getattr(spec.head, 'kind', None)}"]),
        expected=f"an architecture that llama.cpp knows; the nearest is {nearest[1]}"
        if nearest
        else "a decoder that is a language model",
        remedy='format="anyformer" keeps everything',
    )


def _rounded(ours: Any, theirs: Any) -> bool:
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (ours, theirs))
    return numbers and isclose(ours, theirs, rel_tol=_ROUNDING)


def _written(dialect: Dialect, spec: ModelSpec) -> Place:
    table, reading = written(dialect.family, dialect.model, spec)
    where = f"{dialect.family.name}'s configuration"
    made = Made()
    for key in dialect.keys:
        key.write(Config(table, where), made)
    ours = named(reading, dialect)
    shapes = dict(_shapes(ours)) | {name: (len(numbers),) for name, numbers in made.tables.items()}
    again = _read(dialect, made.meta, shapes, made.tables.__getitem__, f"{dialect.architecture}.*", where)
    return replace(again, meta={f"{dialect.architecture}.{k}": v for k, v in made.meta.items()}, tables=made.tables)


def _shapes(reading: Reading) -> Iterator[tuple[str, Shape]]:
    """Every tensor that a file of this reading holds, once for each of ours."""
    written: set[str] = set()
    for step in steps(reading, ""):
        if written.isdisjoint(step.ours):
            written.update(step.ours)
            yield from zip(step.theirs, step.shapes, strict=True)
