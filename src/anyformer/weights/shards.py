"""Safetensors in a folder: one file, or shards with an index; names, shapes and types known before anything is read."""

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from anyformer.errors import UserError
from anyformer.spec.folder import PICKLES
from anyformer.weights.config import read_object
from anyformer.weights.own import WEIGHTS_FILE

INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: its shape, the format's name of its type, the file."""

    shape: tuple[int, ...]
    dtype: str
    file: Path


class Shards:
    """The tensors of a folder, opened and mapped.

    Attributes:
        entries: every tensor by its name.
    """

    def __init__(self, handles: dict[Path, Any], entries: dict[str, Entry]) -> None:
        self._handles, self.entries = handles, entries

    def tensor(self, name: str) -> Tensor:
        """A tensor, mapped from its file: changing it changes no file, and its pages are read when they are used."""
        file = self.entries[name].file
        with _readable(file):
            value: Tensor = self._handles[file].get_tensor(name)
        return value


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise UserError("there is no such file of weights", where=file) from None
    except (SafetensorError, OSError, ValueError) as error:
        remedy = "the file is cut short or damaged: fetch it again"
        raise UserError(f"cannot read the weights: {error}", where=file, remedy=remedy) from None


@contextmanager
def open_shards(folder: Path) -> Iterator[Shards]:
    """The folder's safetensors. Raises `UserError` for none, for damaged ones, and for an index that says otherwise."""
    files = _files(folder)
    with ExitStack() as stack:
        handles: dict[Path, Any] = {}
        entries: dict[str, Entry] = {}
        for file in files:
            with _readable(file):
                handle = handles[file] = stack.enter_context(safe_open(file, framework="pt"))
                for name in handle.keys():  # noqa: SIM118  no mapping
                    if name in entries:
                        got = f"{entries[name].file.name} and {file.name}"
                        raise UserError(f"two shards hold the tensor {name}", where=folder, got=got)
                    part = handle.get_slice(name)
                    entries[name] = Entry(tuple(part.get_shape()), part.get_dtype(), file)
        if files != [folder / WEIGHTS_FILE]:
            _require_index(folder, entries)
        yield Shards(handles, entries)


def _files(folder: Path) -> list[Path]:
    single, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if single.exists():
        return [single]
    if not index.exists():
        _refuse_none(folder)
    named = _weight_map(index)
    for name, file in named.items():
        if file != Path(file).name or file in ("", ".", ".."):
            what = "the index names a file outside the folder"
            raise UserError(what, where=f"{index}, {name}", got=file, expected="the name of a file beside the index")
        if not file.endswith(".safetensors"):
            raise UserError(
                "the index names a file that is not safetensors",
                where=f"{index}, {name}",
                got=file,
                remedy="convert the weights to safetensors; a pickle can run code and is never opened",
            )
    files = [folder / file for file in sorted(set(named.values()))]
    stems = {path.name.split("-")[0] for path in files}
    for path in sorted(folder.glob("*.safetensors")):
        shard = re.fullmatch(r"([^-]+)-\d+-of-\d+\.safetensors", path.name)
        if shard and shard[1] in stems and path not in files:
            raise UserError("the index does not name this shard", where=index, got=path.name)
    for path in files:
        if not os.path.isfile(path):  # False for a name that the system cannot have, where a Path raises
            remedy = "fetch the missing file"
            raise UserError("a shard that the index names is missing", where=index, got=path.name, remedy=remedy)
    return files


def _weight_map(index: Path) -> dict[str, str]:
    named = read_object(index).get("weight_map")
    if not isinstance(named, dict) or not named or not all(isinstance(file, str) for file in named.values()):
        raise UserError("the index has no weight_map of tensors and files", where=index)
    return named


def _require_index(folder: Path, entries: dict[str, Entry]) -> None:
    index = folder / INDEX_FILE
    named = _weight_map(index)
    for name, file in named.items():
        if name not in entries:
            got = f"{name} in {file}"
            raise UserError("the index names a tensor that its file does not hold", where=index, got=got)
        if entries[name].file.name != file:
            got, expected = f"{name} in {file}", entries[name].file.name
            raise UserError("the index names another file than the tensor's", where=index, got=got, expected=expected)
    extra = [name for name in entries if name not in named]
    if extra:
        got = f"{extra[0]} in {entries[extra[0]].file.name}"
        raise UserError("a shard holds a tensor that the index does not name", where=index, got=got)


def _refuse_none(folder: Path) -> None:
    there = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in there if name.endswith(PICKLES)]
    shards = [name for name in there if re.fullmatch(r".*\.safetensors", name)]
    if pickles:
        remedy = "a pickle can run code and is never opened: convert it to safetensors where you trust it"
        raise UserError("the folder has no safetensors", where=folder, got=pickles[0], remedy=remedy)
    raise UserError(
        "the folder holds no weights",
        where=folder,
        got=", ".join(shards[:3]) or "no file of weights",
        expected=f"{WEIGHTS_FILE}, or {INDEX_FILE} and its shards",
    )
