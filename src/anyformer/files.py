"""Files that are whole or absent: everything is written beside its place and then renamed into it."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
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

    An existing folder at `path` is replaced. A process killed inside the block leaves `path` as it was (and a folder
    named `.NAME.…partial`, which nothing reads).
    """
    path = Path(path)
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
