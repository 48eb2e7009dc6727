"""Files that are whole or absent: everything is written beside its place and then renamed into it."""

import errno
import glob
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from anyformer.errors import UserError

_REMEDIES = {
    errno.ENOSPC: "free some space and try again; nothing that was there before has changed",
    errno.EDQUOT: "free some of your quota and try again; nothing that was there before has changed",
    errno.EACCES: "choose a folder that you may write to",
    errno.EPERM: "choose a folder that you may write to",
    errno.EROFS: "choose a folder on a file system that can be written to",
}


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turns an operating system's refusal to store `path` into one clear `UserError`."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "check the path and try again")
        where = error.filename or path
        raise UserError(f"cannot write: {error.strerror or error}", where=where, remedy=remedy) from error


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yields an empty folder beside `path`; it takes the place of `path` only when the block ends well.

    An existing folder at `path` is replaced, by two renames: it goes to `.NAME.….old/NAME`, and the new one takes its
    place. A process killed before them leaves `path` as it was (and a folder named `.NAME.….partial`, which nothing
    reads); one killed exactly between them leaves the old folder, whole, under its hidden name alone, from where
    `recover` and `sweep` put it back.
    """
    path = Path(path)
    recover(path)
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
        partial.chmod(0o755)
    try:
        with storage_errors(path):
            yield partial
            for file in sorted(partial.rglob("*")):
                _sync(file)
            _sync(partial)
            old = None
            if path.exists():
                old = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".old", dir=path.parent)) / path.name
                path.rename(old)
            try:
                partial.rename(path)
            except BaseException:
                if old is not None:
                    old.rename(path)
                    old.parent.rmdir()
                raise
            _sync(path.parent)
            if old is not None:
                shutil.rmtree(old.parent, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


_LEFTOVER = re.compile(r"\.(?P<name>.+)\.[a-z0-9_]{8}\.(partial|old)")
"""The hidden names that this module gives out."""


def recover(path: Path) -> None:
    """Puts back the folder `path` if a process that was replacing it was killed between the two renames."""
    path = Path(path)
    if path.exists():
        return
    kept = [place for place in path.parent.glob(f".{glob.escape(path.name)}.*.old") if (place / path.name).is_dir()]
    for place in sorted(kept, key=lambda place: place.stat().st_mtime_ns, reverse=True)[:1]:
        with storage_errors(path), suppress(FileNotFoundError):  # Another process may be doing the same.
            (place / path.name).rename(path)
            place.rmdir()


def sweep(folder: Path, names: str) -> None:
    """Removes what killed processes left beside the files and folders of `folder` whose names match the glob `names`.

    A folder whose only copy is the one moved out of the way is put back first.
    """
    for leftover in sorted(Path(folder).glob(f".{names}.*")):
        found = _LEFTOVER.fullmatch(leftover.name)
        if found is None:
            continue
        recover(leftover.with_name(found["name"]))
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a name beside `path` to write to; it is renamed to `path` only when the block ends well."""
    path = Path(path)
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
        os.close(handle)
    partial = Path(name)
    try:
        with storage_errors(path):
            yield partial
            partial.chmod(0o644)
            _sync(partial)
            partial.replace(path)
            _sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes `text` as UTF-8 to `path`, whole or not at all."""
    with atomic_file(path) as partial:
        partial.write_text(text, encoding="utf-8")
