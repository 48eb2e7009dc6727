"""Where text comes from: files, folders, and two bodies of text that every Python installation has.

A document is one file, or one topic of the Python documentation. Documents are listed first and read later,
one at a time; each is known by a hash of its content, so that the two passes over a corpus see the same
text.
"""

import hashlib
import importlib
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

from anyformer.errors import UserError

STDLIB, DOCS = "python:stdlib", "python:docs"
BUILT_IN = (STDLIB, DOCS)
# Tests, an editor and installed packages are no part of the library that people mean.
_NOT_LIBRARY = frozenset(
    (
        "test",
        "tests",
        "idlelib",
        "idle_test",
        "turtledemo",
        "site-packages",
        "dist-packages",
        "__pycache__",
    )
)
# fmt: off
TEXT_SUFFIXES = frozenset(
    (
        ".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc", ".html", ".htm", ".xml", ".svg",
        ".csv", ".tsv", ".json", ".jsonl", ".toml", ".yaml", ".yml", ".ini", ".cfg", ".py", ".pyi", ".c",
        ".h", ".cc", ".cpp", ".cxx", ".hh", ".hpp", ".cu", ".rs", ".go", ".java", ".kt", ".scala", ".swift",
        ".js", ".mjs", ".ts", ".jsx", ".tsx", ".css", ".sh", ".bash", ".rb", ".pl", ".php", ".lua", ".jl",
        ".r", ".hs", ".ml", ".el", ".clj", ".lisp", ".sql", ".proto", ".tf", ".vim", ".bat", ".ps1", ".f90",
        ".asm", ".s", ".dart", ".zig",
    )
)
# fmt: on


@dataclass(frozen=True)
class Document:
    """One document of a corpus.

    Attributes:
        name: its path or topic, for messages.
        size: its length in bytes of UTF-8.
        digest: SHA-256 of those bytes, in hexadecimal.
    """

    name: str
    size: int
    digest: str
    _read: Callable[[], bytes] = field(repr=False, compare=False)

    def text(self) -> str:
        """The whole text, read again; `UserError` when it is no longer what was listed."""
        data = self._read()
        if hashlib.sha256(data).hexdigest() != self.digest:
            raise UserError(
                "this file changed while the corpus was prepared",
                where=self.name,
                remedy="prepare again once nothing writes to it",
            )
        return data.decode("utf-8")


@dataclass
class Listing:
    """The documents of all sources, in a fixed order, and what was left out and why.

    Attributes:
        documents: in the order of the sources, each folder sorted by path.
        skipped: how many files of folders were left out, by reason.
    """

    documents: list[Document] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    _left_out: set[Path] = field(default_factory=set)

    def skip(self, reason: str, path: Path) -> None:
        """Counts a file that is left out, once however often it is met."""
        if path not in self._left_out:
            self._left_out.add(path)
            self.skipped[reason] += 1


def list_documents(sources: Sequence[str | Path], exclude: Path | None = None) -> Listing:
    """Every document of `sources`, in a fixed order; a file that is reached twice counts once.

    Args:
        sources: files, folders (searched through their subfolders for text by suffix; hidden names are left
            out), and the names in `BUILT_IN`.
        exclude: a folder in which nothing is looked for.

    `UserError` for a source that has no name, is missing or is without a document, and for a file named by
    itself that is not text.
    """
    if not sources:
        raise UserError("no text was given", where="sources", expected=f"files, folders, {' or '.join(BUILT_IN)}")
    if any(not str(source).strip() for source in sources):
        raise UserError(
            "an empty name names no text", where="sources", expected="a file or a folder; '.' is the folder you are in"
        )
    listing = Listing()
    seen: set[Path] = set()
    for source in sources:
        if str(source) == DOCS:
            found = _add_topics(listing)
        elif str(source) == STDLIB:
            found = _add_files(listing, _library_files(), seen)
        elif Path(source).is_dir():
            found = _add_files(listing, _folder_files(Path(source), listing, exclude, set()), seen)
        else:
            found = _add_named(listing, Path(source), seen)
        if not found:
            _nothing(source, listing)
    return listing


def _nothing(source: str | Path, listing: Listing) -> NoReturn:
    reasons = ", ".join(f"{count} {reason}" for reason, count in listing.skipped.items())
    raise UserError(
        "there is no text here",
        where=source,
        got=reasons or "no file",
        expected="at least one text file that is not empty",
        remedy="name files directly to read them whatever their suffix",
    )


def _add_topics(listing: Listing) -> int:
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise UserError("this Python comes without its documentation topics", where=DOCS) from error
    known = {document.name for document in listing.documents}
    for name, text in sorted(topics.items()):
        if f"{DOCS} {name}" in known:
            continue
        data = text.encode("utf-8")
        digest = hashlib.sha256(data).hexdigest()
        listing.documents.append(Document(f"{DOCS} {name}", len(data), digest, partial(bytes, data)))
    return len(topics)


def _library_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - _NOT_LIBRARY)
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    if not found:
        raise UserError("this Python comes without the source of its library", where=root)
    return sorted(found)


def _folder_files(folder: Path, listing: Listing, exclude: Path | None, entered: set[Path]) -> Iterator[Path]:
    real = folder.resolve()
    # A link that leads back to a folder already entered would otherwise be followed for ever.
    if real in entered or real == exclude:
        return
    entered.add(real)
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise UserError("this folder cannot be read", where=folder, got=error.strerror) from error
    for path in entries:
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _folder_files(path, listing, exclude, entered)
        elif path.suffix.lower() not in TEXT_SUFFIXES:
            listing.skip("not text by suffix", path)
        elif path.is_file():
            yield path


def _add_files(listing: Listing, paths: Iterator[Path] | list[Path], seen: set[Path]) -> int:
    """Adds each file that is text and new; returns how many are text, new or not."""
    found = 0
    for path in paths:
        if path.resolve() in seen:
            found += 1
            continue
        try:
            data = path.read_bytes()
        except OSError:
            listing.skip("unreadable", path)
            continue
        fault = _fault(data)
        if fault is not None:
            listing.skip(fault[0], path)
            continue
        found += 1
        seen.add(path.resolve())
        listing.documents.append(_document(path, data))
    return found


def _add_named(listing: Listing, path: Path, seen: set[Path]) -> int:
    if path.resolve() in seen:
        return 1
    if not path.exists():
        raise UserError(
            "there is no such file or folder",
            where=path,
            expected=f"a text file, a folder, {' or '.join(BUILT_IN)}",
        )
    if not path.is_file():
        raise UserError("this is neither a file nor a folder", where=path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError("this file cannot be read", where=path, got=error.strerror) from error
    fault = _fault(data)
    if fault is not None:
        reason, offset = fault
        raise UserError(
            f"this file is {reason}",
            where=path if offset is None else f"{path}, byte {offset}",
            got=None if offset is None else f"byte 0x{data[offset]:02X}",
            expected="text in UTF-8",
            remedy="choose another file" if offset is None else "convert it to UTF-8, or leave it out",
        )
    seen.add(path.resolve())
    listing.documents.append(_document(path, data))
    return 1


def _document(path: Path, data: bytes) -> Document:
    return Document(str(path), len(data), hashlib.sha256(data).hexdigest(), path.read_bytes)


def _fault(data: bytes) -> tuple[str, int | None] | None:
    """Why `data` is not a text, and at which byte; None for a text."""
    if not data:
        return "empty", None
    zero = data.find(b"\0")
    if zero >= 0:
        return "binary, not text", zero
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return "not valid UTF-8", error.start
    return None
