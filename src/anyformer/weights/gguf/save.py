"""A model written as a GGUF file, in the order and the types that llama.cpp reads."""

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from struct import pack
from typing import Any

import torch
from torch import Tensor

from anyformer.errors import UserError
from anyformer.weights.forms import to_theirs
from anyformer.weights.gguf.encode import quantised
from anyformer.weights.gguf.format import Planned, write_gguf
from anyformer.weights.gguf.reading import Place
from anyformer.weights.gguf.types import FILE_TYPES, KIND, WRITTEN, Kind
from anyformer.weights.shapes import Step, steps

_QUANTISATION_VERSION = 2
_SMALL = ("ffn_gate_inp", "position_embd")
"""Matrices that stay float32, as llama.cpp expects routers and positions."""


def require_kind(name: str) -> Kind:
    """The type of that name. Raises `UserError`."""
    word = name.upper()
    if word not in WRITTEN:
        raise UserError("weights are not written in this type", where="quantize", got=name, expected=", ".join(WRITTEN))
    return KIND[word]


def save_gguf(
    path: Path,
    place: Place,
    state: Mapping[str, Tensor],
    kind: Kind,
    metadata: Mapping[str, Any],
    name: str = "",
    where: object = None,
) -> None:
    """Writes a file, a tensor at a time.

    Matrices are of the wanted type; those whose rows are no whole blocks of it are written as F16, vectors and routers
    as F32.

    Args:
        path: where to.
        place: what `write_place` gave for the specification.
        state: every parameter by its canonical name.
        kind: the type of matrices.
        metadata: of the tokenizer.
        name: what the model is called.
        where: what messages call the file, `path` where None.

    Raises:
        UserError: numbers that the type cannot hold; a file that cannot be written.
    """
    general: dict[str, Any] = {
        "general.architecture": place.dialect.architecture,
        "general.type": "model",
        **({"general.name": name} if name else {}),
        "general.file_type": FILE_TYPES[kind.name],
    }
    if kind.block > 1:
        general["general.quantization_version"] = _QUANTISATION_VERSION
    tables = [_table(title, numbers) for title, numbers in place.tables.items()]
    tensors = list(_planned(place, state, kind, where or path))
    write_gguf(path, {**general, **place.meta, **metadata}, [*tables, *tensors])


def _table(name: str, numbers: list[float]) -> Planned:
    return Planned(name, KIND["F32"], (len(numbers),), lambda: pack(f"<{len(numbers)}f", *numbers))


def _planned(place: Place, state: Mapping[str, Tensor], kind: Kind, where: object) -> Iterator[Planned]:
    written: set[str] = set()
    for step in steps(place.reading, ""):
        if not written.isdisjoint(step.ours):
            continue
        written.update(step.ours)
        for number, (name, shape) in enumerate(zip(step.theirs, step.shapes, strict=True)):
            of = _kind_of(name, shape, kind)

            def make(step: Step = step, number: int = number, of: Kind = of, name: str = name) -> memoryview:
                values = to_theirs(step, [state[ours] for ours in step.ours])[number]
                return _bytes(values, of, f"{where}, {name}")

            yield Planned(name, of, shape, make)
    assert written == set(state), f"no rule writes {sorted(set(state) - written)}"


def _kind_of(name: str, shape: tuple[int, ...], kind: Kind) -> Kind:
    if len(shape) < 2 or any(word in name for word in _SMALL):
        return KIND["F32"]
    return kind if shape[-1] % kind.block == 0 else KIND["F16"]


def _bytes(values: Tensor, kind: Kind, where: str) -> memoryview:
    values = values.detach().cpu()
    rows = values.reshape(-1, values.shape[-1])
    try:
        data = quantised(rows, kind)
    except UserError as error:
        raise UserError(error.what, where=where, got=error.got, expected=error.expected, remedy=error.remedy) from None
    assert data.numel() == prod(rows.shape[:1]) * kind.row_bytes(rows.shape[1])
    return data.contiguous().view(torch.uint8).numpy().data.cast("B")
