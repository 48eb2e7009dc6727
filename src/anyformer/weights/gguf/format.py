"""The container of GGUF: metadata and tensors' places read from a file, bounded by what the file holds; and written.

Imports no torch. Layout (ggml's gguf.md, versions 2 and 3, little-endian): magic, version, number of tensors, number of
metadata; each metadata as name, type, value; each tensor as name, dimensions, type, offset; padding to the alignment;
the tensors' bytes. Nothing that a file says of sizes is believed before it is compared with the file's own size.
"""

import mmap
import re
import stat
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from anyformer.errors import UserError
from anyformer.files import atomic_file
from anyformer.weights.gguf.types import KINDS, Kind

MAGIC = b"GGUF"
VERSION = 3
ALIGNMENT = 32
MOST_ITEMS = 3_000_000
"""In the lists of a file together; the largest published vocabulary has 1.3 million (Gemma 4)."""
MOST_BYTES = 1 << 26
"""Before the first tensor; the largest published vocabulary takes 15 MiB (Gemma 4)."""
MOST_NAMES = 1 << 16
"""Tensors, or metadata; the largest published models have some 2,000."""
_LONGEST_NAME = 256
"""In bytes; llama.cpp reads tensors' names of up to 63."""
_LEAST_ALIGNMENT, _MOST_ALIGNMENT = 8, 1 << 20
_DIMENSIONS = 4
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _LIST = 8, 9
_UINT8, _UINT32, _INT32, _FLOAT32, _BOOL, _UINT64, _INT64 = 0, 4, 5, 6, 7, 10, 11
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<part>[0-9]{5})-of-(?P<parts>[0-9]{5})\.gguf")
_AGAIN = "the file is cut short or damaged: fetch it again"


@dataclass(frozen=True)
class Entry:
    """A tensor of a file.

    Attributes:
        file: which file.
        kind: the type of its numbers.
        shape: the longest stride first, the row's length last.
        offset: of its first byte, from the file's beginning.
    """

    file: Path
    kind: Kind
    shape: tuple[int, ...]
    offset: int

    @property
    def n_bytes(self) -> int:
        """Bytes in the file."""
        return self.kind.row_bytes(self.shape[-1]) * prod(self.shape[:-1])


@dataclass(frozen=True)
class Gguf:
    """What a file (or a model split into several) says before any tensor is read.

    Attributes:
        path: the file, the first of several.
        metadata: text, numbers, truth values, and lists of these, by name.
        tensors: by name, in the order of the file.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Entry]

    def floats(self, name: str) -> list[float]:
        """The numbers of a small tensor of float32. Raises `UserError`."""
        entry = self.tensors[name]
        if entry.kind.name != "F32" or len(entry.shape) != 1 or entry.shape[0] > 1 << 16:
            got = f"{entry.kind.name} of shape {list(entry.shape)}"
            raise UserError(f"the tensor {name} should be a short list", where=self.path, got=got, expected="F32 [n]")
        with entry.file.open("rb") as file:
            file.seek(entry.offset)
            data = file.read(entry.n_bytes)
        return [x for (x,) in struct.iter_unpack("<f", data)]


def read_gguf(path: Path) -> Gguf:
    """Reads metadata and places of tensors; of a model in several files, from all of them.

    Raises:
        UserError: a file that cannot be read, is cut short, contradicts itself, or is of an unknown version or type.
    """
    first = _read_one(path)
    named = _SPLIT.fullmatch(path.name)
    if "split.count" not in first.metadata and named is not None and int(named["parts"]) > 1:
        got, expected = "no split.count", f"split.count = {int(named['parts'])}"
        raise UserError(
            "the file's name is that of a part, and its metadata are not", where=path, got=got, expected=expected
        )
    n = _split(first, "split.count", 0)
    if n <= 1:  # llama.cpp writes 0 where it has joined the parts of a model.
        return first
    if named is None or int(named["part"]) != 1 or int(named["parts"]) != n:
        stem = path.stem if named is None else named["stem"]
        expected = f"the first part, {stem}-00001-of-{n:05}.gguf"
        raise UserError("this file is one of several that hold a model", where=path, got=path.name, expected=expected)
    tensors: dict[str, Entry] = {}
    for part in range(1, n + 1):
        other = path.with_name(f"{named['stem']}-{part:05}-of-{n:05}.gguf")
        for name, entry in _part(first, other, part, n).tensors.items():
            if name in tensors:
                raise UserError("two files hold one tensor", where=other, got=name)
            tensors[name] = entry
    counted = _split(first, "split.tensors.count", len(tensors))
    if counted != len(tensors):
        what = "the parts of the model do not hold as many tensors as they say"
        raise UserError(what, where=path, got=len(tensors), expected=f"split.tensors.count = {counted}")
    return Gguf(path, first.metadata, tensors)


def _part(first: Gguf, path: Path, part: int, n: int) -> Gguf:
    """One of several files, which must say so itself."""
    if part > 1 and not path.exists():
        expected = f"{n} files beside each other"
        raise UserError("a part of the model is missing", where=first.path, got=f"no {path.name}", expected=expected)
    found = first if part == 1 else _read_one(path)
    said = _split(found, "split.no", -1), _split(found, "split.count", -1)
    if said != (part - 1, n):
        got = ", ".join(f"{key} = {found.metadata.get(key)}" for key in ("split.no", "split.count"))
        expected = f"split.no = {part - 1}, split.count = {n}"
        raise UserError("this file is another part than its name says", where=path, got=got, expected=expected)
    return found


def _split(file: Gguf, key: str, default: int) -> int:
    if key not in file.metadata:
        return default
    value = file.metadata[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        got = value if isinstance(value, int | float) else type(value).__name__
        raise UserError(f"the metadata {key} cannot be used", where=file.path, got=got, expected="a whole number")
    return value


def _read_one(path: Path) -> Gguf:
    try:
        status = path.stat()
        _require_file(path, status.st_mode)
        size = status.st_size
        if size < 24:
            remedy = "fetch the file again" if size else None
            raise UserError("the file is too short to be GGUF", where=path, got=f"{size} bytes", remedy=remedy)
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), min(size, MOST_BYTES), access=mmap.ACCESS_READ) as data,
        ):
            return _Reader(path, data, size).header()
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError("there is no such file", where=path) from None
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        raise UserError(f"the file cannot be read: {said}", where=path) from None


def _require_file(path: Path, mode: int) -> None:
    """Refuses what has no size, or would be waited for."""
    if stat.S_ISREG(mode):
        return
    if stat.S_ISDIR(mode):
        got, remedy = "a folder", "name the file in it"
    else:
        got, remedy = "a pipe, a socket or a device", "write what comes from it to a file first"
    raise UserError("this is no file", where=path, got=got, expected="a GGUF file", remedy=remedy)


class _Reader:
    """A place in a file, moved forward by what is read; every length is compared with what is left."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self._path, self._data, self._size, self._at = path, data, size, 0
        self._items = 0

    def header(self) -> Gguf:
        self._version()
        n_tensors, n_metadata = self._one("Q"), self._one("Q")
        # The shortest tensor takes 33 bytes here, the shortest metadata 14.
        for word, n, least in (("tensors", n_tensors, 33), ("metadata", n_metadata, 14)):
            most = min(self._size // least, MOST_NAMES)
            if n > most:
                self._refuse(f"the file counts more {word} than it can hold", n, f"at most {most:,}", _AGAIN)
        metadata: dict[str, Any] = {}
        for _ in range(n_metadata):
            name = self._name("a name of metadata")
            if name in metadata:
                self._refuse("the file has one name of metadata twice", name)
            metadata[name] = self._value(name, self._one("I"))
        places = self._places(n_tensors)
        tensors = self._placed(places, self._alignment(metadata))
        return Gguf(self._path, metadata, tensors)

    def _version(self) -> None:
        magic = self._take(4, "the first bytes")
        if magic != MAGIC:
            pointer = self._data[:20] == b"version https://git-"
            remedy = "git holds a pointer to the file here: `git lfs pull` fetches it" if pointer else None
            self._refuse("this is no GGUF file", f"a file that begins with {magic!r}", repr(MAGIC), remedy)
        version = self._one("I")
        if version in (2, VERSION):
            return
        if version & 0xFFFF == 0 and version >> 16:
            got, remedy = f"version {version:#x}", "convert the model again on a little-endian machine"
            self._refuse("the file is of a big-endian machine", got, "a little-endian file", remedy)
        self._refuse("this version of GGUF is not known", version, "2 or 3", "convert the model again with llama.cpp")

    def _places(self, n: int) -> dict[str, tuple[Kind, tuple[int, ...], int]]:
        places: dict[str, tuple[Kind, tuple[int, ...], int]] = {}
        for _ in range(n):
            name = self._name("a tensor's name")
            if name in places:
                self._refuse("the file has one tensor twice", name)
            n_dims = self._one("I")
            if not 1 <= n_dims <= _DIMENSIONS:
                self._refuse(f"the tensor {name} has a number of dimensions that none has", n_dims, "1 to 4")
            shape = tuple(reversed([self._one("Q") for _ in range(n_dims)]))
            kind = self._kind(name, self._one("I"))
            if min(shape) < 1 or prod(shape) >= 1 << 60:
                self._refuse(
                    f"the tensor {name} has a size that no tensor has",
                    list(shape),
                    "sizes of 1 or more, and fewer than 2^60 numbers",
                )
            if shape[-1] % kind.block:
                got = f"rows of {shape[-1]} numbers"
                self._refuse(
                    f"the tensor {name} does not fill blocks of {kind.name}", got, f"a multiple of {kind.block}"
                )
            places[name] = kind, shape, self._one("Q")
        return places

    def _kind(self, name: str, number: int) -> Kind:
        if number not in KINDS:
            expected = f"one of ggml's types, which are numbered to {max(KINDS)}"
            self._refuse(f"the tensor {name} is of a type that is not known", f"type {number}", expected)
        return KINDS[number]

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        value = metadata.get("general.alignment", ALIGNMENT)
        legal = isinstance(value, int) and _LEAST_ALIGNMENT <= value <= _MOST_ALIGNMENT and value & (value - 1) == 0
        if not legal:
            got = value if isinstance(value, int | float) else type(value).__name__
            expected = f"a power of two from {_LEAST_ALIGNMENT} to {_MOST_ALIGNMENT:,}"
            self._refuse("general.alignment cannot be used", got, expected)
        return int(value)

    def _placed(self, places: Mapping[str, tuple[Kind, tuple[int, ...], int]], alignment: int) -> dict[str, Entry]:
        start = _padded(self._at, alignment)
        tensors: dict[str, Entry] = {}
        spans: list[tuple[int, int, str]] = []
        for name, (kind, shape, offset) in places.items():
            entry = tensors[name] = Entry(self._path, kind, shape, start + offset)
            if offset % alignment:
                self._refuse(f"the tensor {name} does not begin at a multiple of {alignment} bytes", f"offset {offset}")
            if entry.offset + entry.n_bytes > self._size:
                got = f"bytes {entry.offset:,} to {entry.offset + entry.n_bytes:,} of {self._size:,}"
                self._refuse(f"the tensor {name} goes beyond the end of the file", got, remedy=_AGAIN)
            spans.append((entry.offset, entry.offset + entry.n_bytes, name))
        self._require_full(sorted(spans), start, alignment)
        return tensors

    def _require_full(self, spans: Sequence[tuple[int, int, str]], start: int, alignment: int) -> None:
        """Tensors fill the file, padding aside: a count that is too low would shift every one of them unseen."""
        end, before = (start, "the header") if spans else (self._at, "the header")
        for begin, finish, name in spans:
            if begin < end:
                self._refuse("two tensors lie over each other", f"{before} and {name}", remedy=_AGAIN)
            self._require_owned(end, begin, alignment)
            end, before = finish, name
        self._require_owned(end, self._size, alignment)

    def _require_owned(self, end: int, begin: int, alignment: int) -> None:
        if begin > _padded(end, alignment):
            what, got = "the file has bytes that belong to no tensor", f"bytes {end:,} to {begin:,} of {self._size:,}"
            self._refuse(what, got, f"{begin - end:,} bytes fewer, or more tensors", "fetch the file again")

    def _value(self, name: str, kind: int) -> Any:
        if kind == _STRING:
            return self._text(f"the metadata {name}")
        if kind == _LIST:
            return self._list(name)
        return self._scalars(name, kind, 1)[0]

    def _list(self, name: str) -> Any:
        kind, n = self._one("I"), self._one("Q")
        self._items += n
        if self._items > MOST_ITEMS:
            got, expected = f"{self._items} up to {name}", f"at most {MOST_ITEMS:,}"
            self._refuse("the lists of the file's metadata have more items than any has", got, expected)
        return self._texts(name, n) if kind == _STRING else list(self._scalars(name, kind, n))

    def _scalars(self, name: str, kind: int, n: int) -> tuple[Any, ...]:
        if kind not in _SCALARS:
            remedy = "a list inside a list is not read" if kind == _LIST else None
            self._refuse(f"the metadata {name} is of a type that is not read", f"type {kind}", "0 to 12", remedy)
        form = struct.Struct(f"<{n}{_SCALARS[kind]}")
        data = self._take(form.size, f"the metadata {name}")
        if kind == _BOOL and data.strip(b"\0\1"):
            self._refuse(f"the metadata {name} is neither true nor false", f"{max(data)}", "1 or 0")
        return form.unpack(data)

    def _texts(self, name: str, n: int) -> list[str]:
        """A list of texts; written out, since vocabularies have hundreds of thousands."""
        data, at, size = self._data, self._at, len(self._data)
        found: list[str] = []
        unpack = struct.Struct("<Q").unpack_from
        try:
            for _ in range(n):
                (length,) = unpack(data, at)
                at += 8
                end = at + length
                if end > size:
                    self._short(f"the metadata {name}")
                found.append(data[at:end].decode())
                at = end
        except struct.error:
            self._short(f"the metadata {name}")
        except UnicodeDecodeError:
            self._refuse(f"an item of the metadata {name} is not valid UTF-8", f"item {len(found)}")
        self._at = at
        return found

    def _name(self, what: str) -> str:
        name = self._text(what)
        if not name or len(name) > _LONGEST_NAME or not name.isprintable():
            expected = f"1 to {_LONGEST_NAME} printable characters"
            self._refuse(f"{what} cannot be used", f"{len(name)} characters, {name[:32]!r}", expected, _AGAIN)
        return name

    def _text(self, what: str) -> str:
        length = self._one("Q", what)
        begin = self._at
        try:
            return self._take(length, what).decode()
        except UnicodeDecodeError:
            self._refuse(f"{what} is not valid UTF-8", f"{length} bytes from byte {begin:,}")

    def _one(self, form: str, what: str = "its header") -> Any:
        layout = struct.Struct(f"<{form}")
        return layout.unpack(self._take(layout.size, what))[0]

    def _take(self, n: int, what: str) -> bytes:
        if n > len(self._data) - self._at:
            self._short(what)
        found = self._data[self._at : self._at + n]
        self._at += n
        return found

    def _short(self, what: str) -> NoReturn:
        if self._size > len(self._data):
            got, expected = f"beyond byte {len(self._data):,} within {what}", f"at most {MOST_BYTES:,} bytes"
            self._refuse("the file's header is longer than any", got, expected)
        self._refuse(f"the file ends within {what}", f"{self._size:,} bytes", remedy=_AGAIN)

    def _refuse(self, what: str, got: object, expected: str | None = None, remedy: str | None = None) -> NoReturn:
        raise UserError(what, where=self._path, got=got, expected=expected, remedy=remedy)


@dataclass(frozen=True)
class Planned:
    """A tensor to be written: `make` gives its bytes when its turn comes."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    make: Callable[[], bytes | memoryview]

    @property
    def n_bytes(self) -> int:
        """Bytes in the file."""
        return self.kind.row_bytes(self.shape[-1]) * prod(self.shape[:-1])


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Sequence[Planned]) -> None:
    """Writes a file of version 3, a tensor at a time; whole, or not at all.

    A whole number becomes the narrowest of uint32, int32, uint64 and int64 that holds it, in lists of int32 and int64;
    other numbers become float32, and bytes a list of uint8.

    Raises:
        UserError: metadata that the format cannot hold; a place that cannot be written to.
    """
    head = bytearray(MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(metadata)))
    for name, value in metadata.items():
        try:
            head += _said(name) + _typed(value)
        except (struct.error, OverflowError, UnicodeEncodeError) as error:
            what = f"the metadata {name} cannot be written to GGUF: {error}"
            raise UserError(what, where=path, expected="valid Unicode, and numbers of float32 or 64 bits") from None
    offset = 0
    for tensor in tensors:
        sizes = tuple(reversed(tensor.shape))
        head += _said(tensor.name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        head += struct.pack("<IQ", tensor.kind.number, offset)
        offset += _padded(tensor.n_bytes)
    with atomic_file(path) as partial, partial.open("wb") as file:
        file.write(head.ljust(_padded(len(head)), b"\0"))
        for tensor in tensors:
            data = tensor.make()
            assert len(data) == tensor.n_bytes, (tensor.name, len(data), tensor.n_bytes)
            file.write(data)
            file.write(bytes(_padded(len(data)) - len(data)))


def _padded(n: int, alignment: int = ALIGNMENT) -> int:
    return -(-n // alignment) * alignment


def _said(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _typed(value: Any) -> bytes:
    match value:
        case str():
            return struct.pack("<I", _STRING) + _said(value)
        case bytes():
            return struct.pack("<IIQ", _LIST, _UINT8, len(value)) + value
        case list() | tuple():
            return struct.pack("<I", _LIST) + _listed(value)
    kind = _number_kind([value], (_UINT32, _INT32, _UINT64, _INT64))
    return struct.pack(f"<I{_SCALARS[kind]}", kind, value)


def _listed(items: Sequence[Any]) -> bytes:
    if all(isinstance(item, str) for item in items):
        return struct.pack("<IQ", _STRING, len(items)) + b"".join(map(_said, items))
    kind = _number_kind(items, (_INT32, _INT64))
    return struct.pack(f"<IQ{len(items)}{_SCALARS[kind]}", kind, len(items), *items)


_LIMITS = {_UINT32: (0, 1 << 32), _INT32: (-(1 << 31), 1 << 31), _UINT64: (0, 1 << 64), _INT64: (-(1 << 63), 1 << 63)}


def _number_kind(items: Sequence[Any], whole: Sequence[int]) -> int:
    """The type of truth values or numbers; the first of `whole` that holds whole numbers, the last where none does."""
    kinds = {type(item) for item in items}
    if kinds == {bool}:
        return _BOOL
    assert kinds <= {int, float}, kinds
    if float in kinds:
        return _FLOAT32
    least, most = min(items), max(items)
    return next((kind for kind in whole if _LIMITS[kind][0] <= least and most < _LIMITS[kind][1]), whole[-1])
