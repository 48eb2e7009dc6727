"""A Python file of the user's own: read, compiled and run, each of its mistakes in words. Imports no torch."""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import CodeType, ModuleType

from anyformer.errors import UserError

_NAME = "anyformer_foreign"
"""What the module of the file is called."""


def code_of(path: Path) -> CodeType:
    """The compiled file. Raises `UserError` for one that is not there, is no text, or is no Python."""
    if not path.is_file():
        got = "a folder" if path.is_dir() else None
        remedy = "`anyformer eject SPEC|CHECKPOINT --out model.py` writes one"
        raise UserError("there is no such file", where=path, got=got, remedy=remedy)
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UserError(f"cannot read the file: {error.strerror or error}", where=path) from None
    except UnicodeDecodeError as error:
        got = f"byte 0x{error.object[error.start]:02x} at offset {error.start}"
        raise UserError("the file is not text", where=path, got=got, expected="Python in UTF-8") from None
    try:
        return compile(text, str(path), "exec")
    except SyntaxError as error:
        where = f"{path}, line {error.lineno}" if error.lineno else path
        got = " ".join([str(error.msg), (error.text or "").strip()]).strip()
        raise UserError("the file is not Python", where=where, got=got) from None
    except ValueError as error:  # Bytes of zero, before Python 3.12.
        raise UserError("the file is not Python", where=path, got=error) from None


def run_file(path: Path, code: CodeType) -> ModuleType:
    """The module that the file makes, run as an import is: its `__name__` is not `__main__`. Raises `UserError`."""
    module = ModuleType(_NAME)
    module.__file__ = str(path)
    sys.modules[_NAME] = module  # Dataclasses look their module up there.
    with running(path, "is imported"):
        exec(code, module.__dict__)
    return module


@contextmanager
def running(path: Path, doing: str) -> Iterator[None]:
    """While code of the file runs: what it prints goes to stderr, what it raises becomes a `UserError`.

    An interrupt is the user's, and stays one.

    Args:
        path: of the file, from whose folder it may import as it may when it is run by itself.
        doing: what is done with it, after "while it".
    """
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        with redirect_stdout(sys.stderr), _stdout_goes_to_stderr():
            yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # Whatever a file of anyone's raises is no end of ours.
        raise _in_words(error, path, doing) from error
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


@contextmanager
def _stdout_goes_to_stderr() -> Iterator[None]:
    """What is written past `sys.stdout`, to descriptor 1, goes to stderr too, and so is no part of what we print."""
    _flush()
    kept = None
    with suppress(OSError):  # One of the two is closed: nothing can go astray.
        kept = os.dup(1)
        os.dup2(2, 1)
    try:
        yield
    finally:
        _flush()
        if kept is not None:
            os.dup2(kept, 1)
            os.close(kept)


def _flush() -> None:
    for stream in (sys.stdout, sys.__stdout__):
        with suppress(OSError, ValueError, AttributeError):  # It may be closed, or none at all.
            stream.flush()  # type: ignore[union-attr]


def _in_words(error: BaseException, path: Path, doing: str) -> UserError:
    """The mistake, at the last of the file's own lines that led to it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    where = f"{path}, line {lines[-1]}" if lines else path
    try:
        said = " ".join(str(error).split())
    except Exception:  # Its own text may be what is wrong with it.
        said = ""
    got = f"{type(error).__name__}: {said[:300]}" if said else type(error).__name__
    return UserError(f"the file raises an error while it {doing}", where=where, got=got)
