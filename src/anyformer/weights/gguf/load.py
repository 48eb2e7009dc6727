"""A GGUF file read into a model: every tensor mapped, put in order by rows, and kept or dequantised."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from anyformer.families.gguf import DIALECTS, Dialect
from anyformer.nn.model import Model, build
from anyformer.nn.packed import GROUP, can_keep
from anyformer.nn.packing import Blocks
from anyformer.nn.precision import exact
from anyformer.nn.quantised import keep, load_rest
from anyformer.planning import buffers, parameters
from anyformer.weights.dtypes import name_of
from anyformer.weights.forms import to_ours
from anyformer.weights.gguf.ahead import Ahead
from anyformer.weights.gguf.blocks import PLAIN, dequantised, grouped
from anyformer.weights.gguf.format import Entry, Gguf, read_gguf
from anyformer.weights.gguf.packing import not_finite, packed_matrices
from anyformer.weights.gguf.placement import Placed, by_rows, placements
from anyformer.weights.gguf.reading import Understood, understood
from anyformer.weights.gguf.types import HALVES, Kind
from anyformer.weights.mapping import lies_in, release, trim
from anyformer.weights.shapes import Shape, Step

_TABLE = ".embed.token.weight"
_SMALL = 2**16
"""Bytes below which a tensor is copied out of the file: a touch of a mapped page brings 64 KiB around it along."""
_EXPONENT = 0x7C
"""All ones in the upper byte of a half-precision number that is not finite."""


@dataclass(frozen=True)
class Loaded:
    """A file as a model, and what became of each of its tensors."""

    model: Model
    placed: list[Placed]


def load_gguf(
    source: Path | Gguf | Understood,
    dtype: torch.dtype | None,
    device: torch.device,
    quantize: str | None = None,
    dialects: Sequence[Dialect] = DIALECTS,
    ahead: Ahead | None = None,
) -> Loaded:
    """The model in a file, in evaluation mode; all is checked by name, shape and type before any tensor is read.

    Args:
        source: the file, or the first of several; or what was read and understood of it.
        dtype: of the weights in memory; None is that of the file's matrices where it holds all of the file's numbers,
            else float32.
        device: where they go.
        quantize: None, or "keep": matrices that this machine has a product for stay in the file's quantised values.
        dialects: the architectures that are known.
        ahead: what was packed of it already, which is used where it fits.

    Raises:
        UserError: whatever is wrong with the file.
    """
    if not isinstance(source, Understood):
        source = understood(source if isinstance(source, Gguf) else read_gguf(source), dialects)
    dtype = dtype or _own_type(source.file)
    refusal = can_keep((GROUP, GROUP), device) or ""
    placed = placements(source, quantize=quantize, dtype=name_of(dtype), refusal=refusal)
    model = build(source.place.reading.spec, device="meta", dtype=dtype)
    loader = _Loader(source, {each.name for each in placed if each.kept}, dtype, device)
    blocks = None if ahead is None else ahead.blocks(placed)
    if blocks is None:
        blocks = packed_matrices(source, placed, torch.get_num_threads())
    tensors: dict[str, Tensor] = {}
    for step in source.taken:
        loader.keep(model, step, blocks)
        tensors.update(loader.floats(step))
    load_rest(model, tensors)
    loader.release()
    trim()
    return Loaded(model.eval(), placed)


def _own_type(file: Gguf) -> torch.dtype:
    """One type for all of a file: that of its matrices where the vectors, always float32, lose nothing by it."""
    kinds = {entry.kind.name for entry in file.tensors.values() if len(entry.shape) > 1}
    wanted = PLAIN.get(next(iter(kinds)), torch.float32) if len(kinds) == 1 else torch.float32
    for entry in file.tensors.values():
        if len(entry.shape) == 1 and entry.kind.name == "F32" and wanted in (torch.float16, torch.bfloat16):
            data = np.fromfile(entry.file, np.float32, entry.shape[0], offset=entry.offset)
            numbers = torch.from_numpy(data)
            if not torch.equal(numbers.to(wanted).float(), numbers):
                return torch.float32
    return wanted


def _require_finite(name: str, entry: Entry, rows: Tensor) -> None:
    """Raises `UserError` for scales that are no numbers."""
    blocks = rows.view(-1, entry.kind.n_bytes)
    for at in HALVES.get(entry.kind.name, ()):
        if bool((blocks[:, at + 1] & _EXPONENT == _EXPONENT).any()):
            raise not_finite(name, entry)


class _Loader:
    def __init__(self, model: Understood, kept: set[str], dtype: torch.dtype, device: torch.device) -> None:
        spec = model.place.reading.spec
        self._file, self._kept, self._dtype, self._device = model.file, kept, dtype, device
        self._exact = {p.name for p in buffers(spec)}
        self._shapes = {p.name: p.shape for p in (*parameters(spec), *buffers(spec))}
        self._mapped = {path: _mapped(path) for path in {entry.file for entry in self._file.tensors.values()}}

    def floats(self, step: Step) -> Iterator[tuple[str, Tensor]]:
        """What a step gives that is not kept."""
        if self._kept.issuperset(step.ours):
            return
        entries = [self._file.tensors[name] for name in step.theirs]
        whole = [self._bytes(entry) for entry in entries]
        for theirs_name, entry, rows in zip(step.theirs, entries, whole, strict=True):
            _require_finite(theirs_name, entry, rows)
        if by_rows(step) and len({entry.kind.name for entry in entries}) == 1:
            for name, rows in zip(step.ours, self._rows(step, whole), strict=True):
                if name not in self._kept:
                    value = self._floats(rows, entries[0], self._wanted(name))
                    yield name, self._placed(name, value, whole)
        else:
            theirs = [
                self._floats(rows.reshape(-1, rows.shape[-1]), entry, None).view(shape)
                for rows, entry, shape in zip(whole, entries, step.shapes, strict=True)
            ]
            for name, value in zip(
                step.ours, to_ours(step, theirs, [self._shapes[name] for name in step.ours]), strict=True
            ):
                yield name, self._placed(name, value, whole)
        release(whole)

    def release(self) -> None:
        """Lets go of what was read beside what was asked for."""
        release(list(self._mapped.values()))

    def keep(self, model: Model, step: Step, blocks: Mapping[str, Blocks]) -> None:
        """Puts what a step gives that is kept into the model."""
        entry = self._file.tensors[step.theirs[0]]
        for index, name in enumerate(step.ours):
            if name not in self._kept:
                continue
            if name.endswith(_TABLE):
                whole = self._bytes(entry)
                if name not in blocks:
                    _require_finite(step.theirs[0], entry, whole)
                rows = self._rows(step, [whole])[index]
                made = blocks.get(name, partial(grouped, rows, entry.kind))
                keep(model, name, made, partial(_looked_up, rows, entry.kind))
                release([whole])
            else:
                keep(model, name, blocks[name])

    def _rows(self, step: Step, whole: Sequence[Tensor]) -> list[Tensor]:
        """The bytes of each row of each of ours."""
        row = whole[0].shape[-1], step.shapes[0][-1]
        shapes = [(*shape[:-1], shape[-1] * row[0] // row[1]) for shape in (self._shapes[name] for name in step.ours)]
        return [rows.reshape(-1, rows.shape[-1]) for rows in to_ours(step, whole, shapes)]

    def _wanted(self, name: str) -> torch.dtype:
        return exact(self._dtype) if name in self._exact else self._dtype

    def _floats(self, rows: Tensor, entry: Entry, wanted: torch.dtype | None) -> Tensor:
        """Rows of bytes as numbers: of the wanted type, or the file's own, float32 for a quantised one."""
        return dequantised(rows, entry.kind, dtype=wanted or PLAIN.get(entry.kind.name, torch.float32))

    def _placed(self, name: str, value: Tensor, whole: Sequence[Tensor]) -> Tensor:
        made = value.view(self._shapes[name]).to(self._device, self._wanted(name))
        if not lies_in(made, whole):
            return made
        return made.clone() if made.nbytes < _SMALL or made.data_ptr() % made.element_size() else made

    def _bytes(self, entry: Entry) -> Tensor:
        """A tensor's bytes [..., bytes of a row], mapped from the file."""
        row: int = entry.kind.row_bytes(entry.shape[-1])
        shape: Shape = (*entry.shape[:-1], row)
        return self._mapped[entry.file][entry.offset : entry.offset + prod(shape)].view(shape)


def _looked_up(rows: Tensor, kind: Kind, ids: Tensor) -> Tensor:
    return dequantised(rows[ids], kind)


def _mapped(file: Path) -> Tensor:
    """A file's bytes, mapped: they are read when they are used, and what is written to them changes no file."""
    return torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
