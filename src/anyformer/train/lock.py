"""One process at a time trains a run: an exclusive lock on a file beside its folder, which the kernel gives back."""

import fcntl
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from anyformer.errors import UserError
from anyformer.files import storage_errors
from anyformer.train.parallel import World


@contextmanager
def sole_trainer(folder: Path, world: World) -> Iterator[None]:
    """Holds the run `folder` for the processes of `world`; the lock ends with the block, or with a killed process.

    The lock lies on `.NAME.lock` beside the folder, so that neither a fresh start nor a copy of the folder meets it.
    The first process takes it, and every process hears whether it could.

    Raises:
        UserError: other processes are training the run.
    """
    place = folder.parent / f".{folder.name}.lock"
    was_there = place.parent.exists()
    handle, owner = _take(place) if world.rank == 0 else (None, None)
    try:
        if world.any(int(owner is not None)):
            remedy = "wait for it to end, stop it, or choose another name"
            raise UserError("this run is being trained by another process", where=folder, got=owner, remedy=remedy)
        yield
    finally:
        if handle is not None:
            _give_back(handle, place)
            if not was_there:
                with suppress(OSError):
                    place.parent.rmdir()  # Nothing came of the run, and nothing else is there.


def _take(place: Path) -> tuple[int | None, str | None]:
    """The locked file, or words for who has it; neither where the file system knows no locks."""
    while True:
        with storage_errors(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(place, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(handle, 32).decode("ascii", "replace").strip()
            os.close(handle)
            return None, f"process {pid}" if pid.isdigit() else "another process"
        except OSError as error:
            os.close(handle)
            warnings.warn(f"nothing keeps other processes from this run: {place}: {error.strerror}", stacklevel=2)
            return None, None
        # The process that had it may have removed the file between the opening and the lock.
        if _is_same(handle, place):
            os.ftruncate(handle, 0)
            os.write(handle, f"{os.getpid()}\n".encode())
            return handle, None
        os.close(handle)


def _is_same(handle: int, place: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), place.stat())
    except FileNotFoundError:
        return False


def _give_back(handle: int, place: Path) -> None:
    """Removes the file while it is still locked."""
    with suppress(OSError):
        if _is_same(handle, place):
            place.unlink()
    os.close(handle)
