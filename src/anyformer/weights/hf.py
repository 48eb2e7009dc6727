"""A folder of Hugging Face: config.json and safetensors, read into a model and written from one."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anyformer.errors import UserError
from anyformer.families import FAMILIES, Family
from anyformer.families.common import DROPPED
from anyformer.families.family import Otherwise, Twice
from anyformer.nn.model import Model, build
from anyformer.nn.precision import exact
from anyformer.nn.quantised import dequantised_state
from anyformer.planning import buffers, parameters
from anyformer.spec.parts import LanguageHead, ModelSpec
from anyformer.weights.computed import require_tables
from anyformer.weights.config import CONFIG_FILE, Reading, read_config, read_object
from anyformer.weights.dtypes import require_float
from anyformer.weights.forms import to_ours, to_theirs
from anyformer.weights.mapping import lies_in, release, same_bits, trim
from anyformer.weights.own import WEIGHTS_FILE, save_tensors
from anyformer.weights.shapes import Matching, Step, match, steps
from anyformer.weights.shards import INDEX_FILE, Shards, open_shards

MAX_SHARD = 5 * 10**9
"""Bytes of a file before another is begun."""


def read_folder(folder: Path, families: Sequence[Family] = FAMILIES) -> Reading:
    """What the configuration in a folder means. Raises `UserError`."""
    path = folder / CONFIG_FILE
    return read_config(read_object(path), path, families)


def load_model(
    folder: Path, dtype: torch.dtype | None, device: torch.device, families: Sequence[Family] = FAMILIES
) -> tuple[Reading, Model]:
    """The model in a folder, in evaluation mode; all is checked by name, shape and type before anything is read.

    Weights that are already of the wanted type stay mapped from their file, which should not be written to meanwhile.

    Args:
        folder: with config.json and safetensors.
        dtype: of the weights, None for the file's own.
        device: where they go.
        families: those that are known.

    Raises:
        UserError: whatever is wrong with the folder.
    """
    reading = read_folder(folder, families)
    with open_shards(folder) as shards:
        found = {name: entry.shape for name, entry in shards.entries.items()}
        matching = match(reading, found, folder, (*DROPPED, *reading.family.dropped, *reading.dropped))
        _require_floats(matching, shards)
        require_tables(reading, shards)
        tensors = dict(_converted(reading, matching, shards, dtype, device))
    model = build(reading.spec, device="meta")
    model.load_state_dict(tensors, assign=True)
    return reading, model.eval()


def _require_floats(matching: Matching, shards: Shards) -> None:
    for step in (*matching.taken, *matching.again):
        for name in step.theirs:
            entry = shards.entries[name]
            require_float(entry.dtype, f"{entry.file}, {name}")


def _converted(
    reading: Reading, matching: Matching, shards: Shards, dtype: torch.dtype | None, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    spec = reading.spec
    kept = {p.name for p in buffers(spec)}
    shapes = {p.name: p.shape for p in (*parameters(spec), *buffers(spec))}

    def ours(step: Step) -> tuple[list[Tensor], list[Tensor]]:
        theirs = [shards.tensor(name) for name in step.theirs]
        return theirs, to_ours(step, theirs, [shapes[name] for name in step.ours])

    made_of = {name: step for step in matching.taken for name in step.ours}
    for step in matching.again:
        for name, value in zip(step.ours, ours(step)[1], strict=True):
            first = made_of[name]
            if not same_bits(value, ours(first)[1][first.ours.index(name)]):
                what = f"two tensors hold {name}, and they differ"
                ties = "the configuration ties these tables: set its tie_word_embeddings to false if they are apart"
                remedy = ties if name.endswith(".embed.token.weight") else None
                got = f"{step.theirs[0]} and {first.theirs[0]}"
                raise UserError(what, where=shards.entries[step.theirs[0]].file, got=got, remedy=remedy)
    for step in matching.taken:
        theirs, values = ours(step)
        made = []
        for name, value in zip(step.ours, values, strict=True):
            wanted = dtype or value.dtype
            made.append(value.to(device, exact(wanted) if name in kept else wanted))
            yield name, made[-1]
        if not any(lies_in(value, theirs) for value in made):
            release(theirs)
            if len(theirs) > 1:  # Stacking made a copy in their type, which is as large as what is kept.
                del values, value
                trim()


def _is_written(step: Step, spec: ModelSpec) -> bool:
    match step.form:
        case Otherwise():
            return False
        case Twice(untied=True):
            return isinstance(spec.head, LanguageHead) and "head" not in spec.ties
    return True


def exported(reading: Reading, state: Mapping[str, Tensor]) -> Iterator[tuple[Callable[[], list[Tensor]], Step]]:
    """For each step that writes something: what makes its tensors, and the step."""
    written: set[str] = set()
    for step in steps(reading, reading.variant.body):
        if _is_written(step, reading.spec) and (isinstance(step.form, Twice) or written.isdisjoint(step.ours)):
            written.update(step.ours)

            def make(step: Step = step) -> list[Tensor]:
                return to_theirs(step, [state[name] for name in step.ours])

            yield make, step
    assert written == set(state), f"no rule writes {sorted(set(state) - written)}"


def save_folder(folder: Path, model: nn.Module, reading: Reading, config: dict[str, Any]) -> None:
    """Writes config.json and the weights into a folder that is there, in shards of at most 5 GB each.

    Args:
        folder: where to.
        model: of the reading's specification; weights in codes are written as float32.
        reading: the family and class that say the specification.
        config: its configuration, as `write_config` gave it, with whatever else belongs into it.
    """
    state = {name: value.detach() for name, value in dequantised_state(model).items()}
    groups: list[list[Callable[[], list[Tensor]]]] = [[]]
    names: list[list[tuple[str, ...]]] = [[]]
    size = 0
    for make, step in exported(reading, state):
        n_bytes = sum(state[name].numel() * state[name].element_size() for name in step.ours)
        if size and size + n_bytes > MAX_SHARD:
            groups.append([])
            names.append([])
            size = 0
        groups[-1].append(make)
        names[-1].append(step.theirs)
        size += n_bytes
    weight_map: dict[str, str] = {}
    for number, (makers, named) in enumerate(zip(groups, names, strict=True), 1):
        file = WEIGHTS_FILE if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
        tensors = {
            name: value.cpu().contiguous()
            for make, theirs in zip(makers, named, strict=True)
            for name, value in zip(theirs, make(), strict=True)
        }
        save_tensors(folder / file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
    if len(groups) > 1:
        total = sum(value.numel() * value.element_size() for value in state.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(folder / INDEX_FILE, index)
    _write_json(folder / CONFIG_FILE, config)


def _write_json(path: Path, table: dict[str, Any]) -> None:
    path.write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
