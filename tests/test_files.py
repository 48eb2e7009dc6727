"""Files are whole or absent."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from anyformer.errors import UserError
from anyformer.files import atomic_file, atomic_folder, recover, storage_errors, sweep, write_text


@pytest.fixture
def old(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "weights").write_text("old")
    return folder


def strays(folder):
    return sorted(p.name for p in folder.iterdir() if p.name.startswith("."))


def test_a_folder_takes_the_place_of_the_old_one(old):
    with atomic_folder(old) as partial:
        assert partial.parent == old.parent
        assert list(partial.iterdir()) == []
        (partial / "train").mkdir()
        (partial / "train" / "state").write_text("new")
        assert (old / "weights").read_text() == "old"
    assert [p.relative_to(old) for p in sorted(old.rglob("*"))] == [Path("train"), Path("train/state")]
    assert strays(old.parent) == []


def test_folders_on_the_way_are_made(tmp_path):
    with atomic_folder(tmp_path / "a" / "b") as partial:
        (partial / "x").write_text("1")
    assert (tmp_path / "a" / "b" / "x").read_text() == "1"
    write_text(tmp_path / "c" / "d.txt", "é")
    assert (tmp_path / "c" / "d.txt").read_bytes() == "é".encode()


def leave(path, error):
    """Writes half of something and fails."""
    path.write_text("half")
    raise error


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_the_old_folder(old, error):
    with pytest.raises(error), atomic_folder(old) as partial:
        leave(partial / "weights", error)
    assert (old / "weights").read_text() == "old"
    assert strays(old.parent) == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_the_old_file(tmp_path, error):
    path = tmp_path / "metrics"
    write_text(path, "old")
    with pytest.raises(error), atomic_file(path) as partial:
        leave(partial, error)
    assert path.read_text() == "old"
    assert strays(tmp_path) == []
    with pytest.raises(error), atomic_file(tmp_path / "never") as partial:
        raise error
    assert not (tmp_path / "never").exists()


def test_a_file_takes_the_place_of_the_old_one(tmp_path):
    path = tmp_path / "metrics"
    write_text(path, "old")
    write_text(path, "new")
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "can be written to"),
        (errno.EIO, "check"),
    ],
)
def test_a_full_disk_is_one_clear_message(old, monkeypatch, number, said):
    def full(*_):
        raise OSError(number, os.strerror(number), str(old))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=said) as caught, atomic_folder(old) as partial:
        (partial / "weights").write_text("new")
    assert os.strerror(number) in str(caught.value)
    assert str(old) in str(caught.value)
    assert (old / "weights").read_text() == "old"
    assert strays(old.parent) == []
    with pytest.raises(UserError, match=said):
        write_text(old.parent / "metrics", "new")
    assert not (old.parent / "metrics").exists()
    assert strays(old.parent) == []


def test_a_disk_that_fills_inside_the_block(old):
    with pytest.raises(UserError, match="No space left"), atomic_folder(old):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert (old / "weights").read_text() == "old"


def test_a_rename_that_fails_leaves_the_old_folder(old, monkeypatch):
    rename = Path.rename

    def refuse(self, target):
        if self.name.endswith(".partial"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(UserError, match="Input/output"), atomic_folder(old) as partial:
        (partial / "weights").write_text("new")
    assert (old / "weights").read_text() == "old"
    assert strays(old.parent) == []


def test_a_replacement_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    write_text(tmp_path / "metrics", "old")

    def refuse(self, target):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(UserError, match="Input/output"):
        write_text(tmp_path / "metrics", "new")
    assert (tmp_path / "metrics").read_text() == "old"
    assert strays(tmp_path) == []


def test_a_place_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot write"):
        write_text(tmp_path / "file" / "below", "y")
    with pytest.raises(UserError, match="cannot write"), atomic_folder(tmp_path / "file" / "below"):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o555)
    with pytest.raises(UserError, match="that you may write to"):
        write_text(tmp_path / "locked" / "x", "y")
    with pytest.raises(UserError, match="that you may write to"), atomic_folder(tmp_path / "locked" / "x"):
        pass


def test_killed_while_writing_leaves_the_old_folder(old):
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom anyformer.files import atomic_folder\n"
        "with atomic_folder(Path(sys.argv[1])) as partial:\n"
        "    (partial / 'weights').write_text('half')\n    print('ready', flush=True)\n    time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(old)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert (old / "weights").read_text() == "old"
    assert len(strays(old.parent)) == 1
    with atomic_folder(old) as partial:
        (partial / "weights").write_text("new")
    assert (old / "weights").read_text() == "new"


def test_other_errors_pass_through(tmp_path):
    with pytest.raises(KeyError), storage_errors(tmp_path):
        raise KeyError


def test_the_shape_of_a_message():
    error = UserError("this is wrong", where="here", got=0, expected="1", remedy="write 1")
    assert str(error) == "this is wrong\n  where: here\n  got: 0\n  expected: 1\n  remedy: write 1"
    assert str(UserError("alone")) == "alone"
    assert isinstance(error, ValueError)


BETWEEN = """
import os, signal, sys
from pathlib import Path
from anyformer.files import atomic_folder
rename = Path.rename
def dying(self, target):
    if self.name.endswith(".partial"):
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, target)
Path.rename = dying
with atomic_folder(Path(sys.argv[1])) as partial:
    (partial / "weights").write_text("new")
"""


@pytest.fixture
def torn(old):
    """A folder whose writer was killed exactly between the two renames."""
    done = subprocess.run([sys.executable, "-c", BETWEEN, str(old)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not old.exists()
    assert len(strays(old.parent)) == 2
    return old


def test_killed_between_the_renames_the_old_folder_comes_back(torn):
    recover(torn)
    assert (torn / "weights").read_text() == "old"
    recover(torn)
    sweep(torn.parent, "check*")
    assert [p.name for p in torn.parent.iterdir()] == ["checkpoint"]
    assert (torn / "weights").read_text() == "old"


def test_sweeping_never_removes_the_only_copy(torn):
    (torn.parent / ".checkpoint.old").mkdir()
    (torn.parent / ".other.12345678.partial").mkdir()
    (torn.parent / ".checkpoint.12345678.partial").write_text("a file half written")
    sweep(torn.parent, "checkpoint")
    assert (torn / "weights").read_text() == "old"
    assert strays(torn.parent) == [".checkpoint.old", ".other.12345678.partial"]


def test_the_next_writer_begins_with_the_old_folder(torn):
    with atomic_folder(torn) as partial:
        assert (torn / "weights").read_text() == "old"
        (partial / "weights").write_text("new")
    assert (torn / "weights").read_text() == "new"
    assert recover(torn.parent / "absent") is None
    sweep(torn.parent / "absent", "*")
