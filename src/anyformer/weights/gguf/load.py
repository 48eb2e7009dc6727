"""A GGUF file read into a model: every tensor mapped, put in order by rows, and kept or dequantised."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from anyformer.errors import UserError
from anyformer.families.gguf import DIALECTS, Dialect
from anyformer.nn.model import Model, build
from anyformer.nn.packed import GROUP, Codes, Pairs, Parts, can_keep
from anyformer.nn.precision import exact
from anyformer.nn.quantised import keep, load_rest
from anyformer.planning import buffers, parameters
from anyformer.weights.dtypes import name_of
from anyformer.weights.forms import to_ours
from anyformer.weights.gguf.blocks import PLAIN, dequantised, grouped, paired
from anyformer.weights.gguf.format import Entry, Gguf, read_gguf
from anyformer.weights.gguf.layouts import LAYOUTS, NIBBLES
from anyformer.weights.gguf.placement import Placed, by_rows, placements
from anyformer.weights.gguf.reading import Place, matched, read_place
from anyformer.weights.gguf.types import HALVES, KEPT, READ
from anyformer.weights.mapping import lies_in, release, trim
from anyformer.weights.shapes import Shape, Step

_TABLE = ".embed.token.weight"
_EXPONENT = 0x7C
"""All ones in the upper byte of a half-precision number that is not finite."""


@dataclass(frozen=True)
class Loaded:
    """A file as a model, and what became of each of its tensors."""

    model: Model
    placed: list[Placed]


def load_gguf(
    source: Path | Gguf,
    dtype: torch.dtype | None,
    device: torch.device,
    quantize: str | None = None,
    dialects: Sequence[Dialect] = DIALECTS,
) -> Loaded:
    """The model in a file, in evaluation mode; all is checked by name, shape and type before any tensor is read.

    Args:
        source: the file, or the first of several; or what was read of it.
        dtype: of the weights in memory; None is that of the file's matrices where it holds all of the file's numbers,
            else float32.
        device: where they go.
        quantize: None, or "keep": matrices that this machine has a product for stay in the file's quantised values.
        dialects: the architectures that are known.

    Raises:
        UserError: whatever is wrong with the file.
    """
    file = source if isinstance(source, Gguf) else read_gguf(source)
    place = read_place(file, dialects)
    matching = matched(place, file)
    _require_known(file)
    if matching.again:
        step = matching.again[0]
        raise UserError("two tensors hold the same weight", where=file.path, got=f"{step.theirs[0]} for {step.ours[0]}")
    dtype = dtype or _own_type(file)
    refusal = can_keep((GROUP, GROUP), device) or ""
    placed = placements(place, file, matching.taken, quantize=quantize, dtype=name_of(dtype), refusal=refusal)
    model = build(place.reading.spec, device="meta", dtype=dtype)
    kept = {each.name for each in placed if each.kept}
    loader = _Loader(place, file, kept, dtype, device)
    tensors: dict[str, Tensor] = {}
    # Packing is numpy's work on small pieces, each on one thread: several tensors go side by side.
    with ThreadPoolExecutor(torch.get_num_threads() if kept else 1) as pool:
        for made in pool.map(lambda step: list(loader.tensors(model, step)), matching.taken):
            tensors.update(made)
    load_rest(model, tensors)
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


def _require_known(file: Gguf) -> None:
    for name, entry in file.tensors.items():
        if entry.kind.name not in READ:
            remedy = "quantise the model otherwise: Q4_K_M and Q8_0 files are read"
            got = f"{name} of type {entry.kind.name}"
            raise UserError("weights of this type are not read", where=file.path, got=got, remedy=remedy)


def _require_finite(name: str, entry: Entry, rows: Tensor) -> None:
    """Refuses scales that are no numbers: scores of NaN count as hidden, so a damaged model would go on talking."""
    blocks = rows.view(-1, entry.kind.n_bytes)
    for at in HALVES.get(entry.kind.name, ()):
        if bool((blocks[:, at + 1] & _EXPONENT == _EXPONENT).any()):
            got, remedy = f"NaN or infinity in {name}, of type {entry.kind.name}", "the file is damaged: fetch it again"
            raise UserError("a scale of quantised weights is not finite", where=entry.file, got=got, remedy=remedy)


class _Loader:
    def __init__(self, place: Place, file: Gguf, kept: set[str], dtype: torch.dtype, device: torch.device) -> None:
        spec = place.reading.spec
        self._file, self._kept, self._dtype, self._device = file, kept, dtype, device
        self._tied = "head" in spec.ties
        self._exact = {p.name for p in buffers(spec)}
        self._shapes = {p.name: p.shape for p in (*parameters(spec), *buffers(spec))}
        self._mapped = {path: _mapped(path) for path in {entry.file for entry in file.tensors.values()}}

    def tensors(self, model: Model, step: Step) -> Iterator[tuple[str, Tensor]]:
        """What a step gives, kept weights put into the model at once."""
        entries = [self._file.tensors[name] for name in step.theirs]
        whole = [self._bytes(entry) for entry in entries]
        for theirs_name, entry, rows in zip(step.theirs, entries, whole, strict=True):
            _require_finite(theirs_name, entry, rows)
        kind = entries[0].kind
        if by_rows(step) and len({entry.kind.name for entry in entries}) == 1:
            shapes = [(*self._shapes[name][:-1], kind.row_bytes(self._shapes[name][-1])) for name in step.ours]
            parts = [rows.reshape(-1, rows.shape[-1]) for rows in to_ours(step, whole, shapes)]
            for name, rows in zip(step.ours, parts, strict=True):
                if name in self._kept:
                    self._keep(model, name, rows, entries[0])
                else:
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

    def _keep(self, model: Model, name: str, rows: Tensor, entry: Entry) -> None:
        kind, shape = entry.kind, self._shapes[name]

        def codes() -> Codes:
            return grouped(rows, kind)

        def some(start: int, stop: int) -> Codes | Pairs:
            make = paired if kind.name in NIBBLES and (stop - start) % 2 == 0 else grouped
            return make(rows[start:stop], kind)

        def lookup(ids: Tensor) -> Tensor:
            return dequantised(rows[ids], kind)

        parts = Parts(shape, LAYOUTS[kind.name].bits, KEPT[kind.name], some)
        if not name.endswith(_TABLE):
            keep(model, name, parts)
        else:  # Looked up in the file: it takes memory only where it is the head's matrix too.
            keep(model, name, parts if self._tied else codes, lookup)

    def _wanted(self, name: str) -> torch.dtype:
        return exact(self._dtype) if name in self._exact else self._dtype

    def _floats(self, rows: Tensor, entry: Entry, wanted: torch.dtype | None) -> Tensor:
        """Rows of bytes as numbers: of the wanted type, or the file's own, float32 for a quantised one."""
        return dequantised(rows, entry.kind, dtype=wanted or PLAIN.get(entry.kind.name, torch.float32))

    def _placed(self, name: str, value: Tensor, whole: Sequence[Tensor]) -> Tensor:
        made = value.view(self._shapes[name]).to(self._device, self._wanted(name))
        return made.clone() if lies_in(made, whole) and made.data_ptr() % made.element_size() else made

    def _bytes(self, entry: Entry) -> Tensor:
        """A tensor's bytes [..., bytes of a row], mapped from the file."""
        row: int = entry.kind.row_bytes(entry.shape[-1])
        shape: Shape = (*entry.shape[:-1], row)
        return self._mapped[entry.file][entry.offset : entry.offset + prod(shape)].view(shape)


def _mapped(file: Path) -> Tensor:
    """A file's bytes, mapped: they are read when they are used, and what is written to them changes no file."""
    return torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
