import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from training_runs import table

import anyformer
from anyformer.checkpoint import load
from anyformer.errors import UserError
from anyformer.train import state as states
from anyformer.train import train
from anyformer.train.state import TrainState, all_steps, latest, point, prune, read_state, step_folder

SOURCE = str(Path(anyformer.__file__).parents[1])
EVERY = {"train": {"steps": 8, "checkpoint_every": 2, "evaluate_every": 8, "keep": 9}}


def go(folder, resume=False, **changes):
    changes = {**EVERY, **changes}
    return train(table(folder, **changes), root=folder / "runs", report=False, resume=resume)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished run of 8 steps with checkpoints after 2, 4, 6 and 8."""
    folder = tmp_path_factory.mktemp("made")
    go(folder)
    return folder


@pytest.fixture
def copied(made, tmp_path):
    """The same in a folder that may be broken."""
    shutil.copytree(made, tmp_path / "x", symlinks=True)
    return tmp_path / "x"


def longer(folder, steps=10):
    # The table names its text by path, which a copy must keep.
    run = json.loads((folder / "runs" / "tiny" / "run.json").read_text())["run"]
    run["train"]["steps"] = steps
    return train(run, root=folder / "runs", report=False, resume=True)


def last(folder):
    return folder / "runs" / "tiny" / "checkpoints" / "step-000008"


def test_b62_a_checkpoint_holds_safetensors_and_json_alone(made):
    """Nothing in it is, or is ever read as, a pickle."""
    files = {p.suffix for p in last(made).rglob("*") if p.is_file()}
    assert files == {".json", ".safetensors"}
    for path in last(made).rglob("*.safetensors"):
        length = int.from_bytes(path.read_bytes()[:8], "little")
        json.loads(path.read_bytes()[8 : 8 + length])


def test_b62_a_planted_pickle_is_not_opened(copied):
    """Optimizer.pt beside, or in the place of, the optimiser's state."""
    canary = copied / "canary"
    evil = f"cos\nsystem\n(S'touch {canary}'\ntR.".encode()
    (last(copied) / "train" / "optimizer.pt").write_bytes(evil)
    assert longer(copied).finished
    newest = latest(last(copied).parent)
    for name in (states.OPTIMIZER_FILE, states.RANDOM_FILE):
        shutil.copytree(newest, copied / "keep")
        (newest / "train" / name).write_bytes(evil)
        with pytest.raises(UserError, match="damaged"):
            longer(copied, 12)
        shutil.rmtree(newest)
        shutil.move(copied / "keep", newest)
    assert not canary.exists()


FILES = ["train/optimizer.safetensors", "train/random.safetensors", "train/state.json", "model.safetensors"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["cut", "gone", "noise"])
def test_a_damaged_checkpoint_is_said_and_an_earlier_one_named(copied, name, how):
    path = last(copied) / name
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(data[: len(data) // 2] if how == "cut" else b"\x93" * 50)
    with pytest.raises(UserError) as caught:
        longer(copied)
    assert path.name in str(caught.value) or how == "gone"
    if name.startswith("train/"):
        assert "remove step-000008 to go on from step-000006" in str(caught.value)
    shutil.rmtree(last(copied))
    assert longer(copied).step == 10


def test_another_version_is_refused(copied):
    path = last(copied) / "train" / "state.json"
    table_ = json.loads(path.read_text())
    path.write_text(json.dumps({**table_, "format_version": 99}))
    with pytest.raises(UserError, match="another version"):
        longer(copied)
    path.write_text(json.dumps({**table_, "format": "something"}))
    with pytest.raises(UserError, match="no training state"):
        longer(copied)
    path.write_text(json.dumps({k: v for k, v in table_.items() if k != "corpus"}))
    with pytest.raises(UserError, match="not whole"):
        longer(copied)
    run = copied / "runs" / "tiny" / "run.json"
    run.write_text(json.dumps({**json.loads(run.read_text()), "format_version": 99}))
    with pytest.raises(UserError, match="another version"):
        go(copied, resume=True)
    run.write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        go(copied, resume=True)


def test_links_survive_a_copy_that_follows_them(made, tmp_path):
    """A copy without links has whole folders in their place; resuming puts links back."""
    folder = tmp_path / "y"
    shutil.copytree(made, folder, symlinks=False)
    checkpoints = last(folder).parent
    assert not (checkpoints / "last").is_symlink()
    assert load(folder / "runs" / "tiny").spec == load(made / "runs" / "tiny").spec
    assert longer(folder).step == 10
    assert (checkpoints / "last").is_symlink()
    assert (checkpoints / "last").resolve().name == "step-000010"


def test_where_links_cannot_be_made_a_file_names_the_folder(tmp_path, monkeypatch):
    def refuse(self, *_, **__):
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    result = go(tmp_path)
    pointer = result.folder / "checkpoints" / "last"
    assert pointer.is_file()
    assert pointer.read_text().strip() == "step-000008"
    assert latest(result.folder / "checkpoints").name == "step-000008"
    assert load(result.folder).spec.vocab_size == 257


def test_a_full_disk_ends_with_one_message_and_leaves_earlier_checkpoints(tmp_path, monkeypatch):
    real = states.save_file
    calls = []

    def full(tensors, path, *arguments, **keywords):
        calls.append(path)
        if len(calls) > 4:  # two checkpoints of two files each, then the optimiser's state of the third
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(tensors, path, *arguments, **keywords)

    monkeypatch.setattr(states, "save_file", full)
    with pytest.raises(UserError, match="No space left") as caught:
        go(tmp_path)
    assert "free some space" in str(caught.value)
    checkpoints = tmp_path / "runs" / "tiny" / "checkpoints"
    assert [p.name for p in all_steps(checkpoints)] == ["step-000002", "step-000004"]
    assert not list(checkpoints.glob(".step*"))
    monkeypatch.setattr(states, "save_file", real)
    assert go(tmp_path, resume=True).finished


def test_a_full_disk_while_metrics_are_written_is_one_message(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    go(tmp_path)
    metrics = tmp_path / "runs" / "tiny" / "metrics.jsonl"
    from anyformer.train.metrics import MetricsFile

    writer = MetricsFile(metrics, 8)
    writer._file.close()
    writer._file = open("/dev/full", "w", encoding="utf-8")
    with pytest.raises(UserError, match="No space left"):
        writer.record({"kind": "train", "step": 9})
    try:
        writer._file.close()
    except OSError:
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_one_message(tmp_path):
    (tmp_path / "runs").mkdir(mode=0o555)
    with pytest.raises(UserError, match="cannot write"):
        go(tmp_path)


def test_a_file_in_the_place_of_the_run_folder_is_one_message(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(UserError):
        go(tmp_path)


SLOW_WRITER = """
import sys, time, pathlib
import torch
torch.set_num_threads(1)
from anyformer.train import state, train
import json
real = state.save_file
def slow(tensors, path, *a, **k):
    real(tensors, path, *a, **k)
    if 'step-000004' in str(path):
        data = pathlib.Path(path).read_bytes()
        pathlib.Path(path).write_bytes(data[:len(data)//2])
        print('half', flush=True)
        time.sleep(60)
state.save_file = slow
train(json.loads(sys.argv[1]), root=sys.argv[2], report=False)
"""


def test_killed_in_the_middle_of_a_save_nothing_half_is_taken_for_whole(tmp_path):
    """kill −9 while a slow disk writes the second checkpoint."""
    run = table(tmp_path, **EVERY)
    environment = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_WRITER, json.dumps(run), str(tmp_path / "runs")],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline().strip() == "half"
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    process.stdout.close()
    checkpoints = tmp_path / "runs" / "tiny" / "checkpoints"
    assert [p.name for p in all_steps(checkpoints)] == ["step-000002"]
    assert list(checkpoints.glob(".step-000004.*"))
    assert load(tmp_path / "runs" / "tiny").spec.vocab_size == 257
    begin = time.monotonic()
    result = go(tmp_path, resume=True)
    assert time.monotonic() - begin < 30
    assert result.finished
    assert not list(checkpoints.glob(".*"))


def test_pruning_keeps_the_newest_and_the_best(tmp_path):
    for step in (3, 20, 100, 1000000):
        (tmp_path / f"step-{step:06d}").mkdir()
    (tmp_path / "step-best").mkdir()
    prune(tmp_path, keep=2, best=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000003", "step-000100", "step-1000000", "step-best"]
    assert [p.name for p in all_steps(tmp_path)] == ["step-000003", "step-000100", "step-1000000"]
    point(tmp_path, "last", tmp_path / "step-000100")
    point(tmp_path, "last", tmp_path / "step-1000000")
    assert os.readlink(tmp_path / "last") == "step-1000000"


def test_state_and_random_state_come_back(made, tmp_path):
    state = read_state(last(made))
    assert isinstance(state, TrainState)
    assert (state.step, state.steps, state.tokens, state.evaluated) == (8, 8, 8 * 64, 8)
    device = torch.device("cpu")
    stored = states.random_state(device)
    first = torch.rand(5)
    states.set_random_state(stored, device)
    assert torch.equal(torch.rand(5), first)


def tear(folder):
    """As a writer leaves it that is killed between moving the old folder away and the new one in."""
    kept = folder.parent / f".{folder.name}.ab12cd34.old"
    kept.mkdir()
    folder.rename(kept / folder.name)


def test_a_checkpoint_torn_from_its_place_is_put_back(copied):
    """The newest checkpoint, and the run's own corpus, are each under their hidden name alone."""
    run = copied / "runs" / "tiny"
    for step in (2, 4, 6):
        shutil.rmtree(step_folder(run / "checkpoints", step))
    tear(last(copied))
    assert load(run).spec.vocab_size == 257
    tear(last(copied))
    tear(run / "corpus")
    (run / ".corpus.zz12cd34.partial").mkdir()
    result = longer(copied)
    assert (result.step, result.finished) == (10, True)
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == 1
    assert not [*run.glob(".*"), *run.glob("checkpoints/.*")]


FIELDS = [
    ("step", 7),
    ("step", "8"),
    ("step", True),
    ("steps", 7),
    ("steps", 8.0),
    ("context", 0),
    ("corpus", 5),
    ("tokens", -1),
    ("tokens", None),
    ("seconds", "long"),
    ("seconds", float("nan")),
    ("evaluated", 9),
    ("sampled", -1),
    ("best_step", [1]),
    ("best_step", 9),
    ("best_loss", "low"),
    ("best_loss", None),
    ("score", 3),
    ("score", {"loss": 1.0}),
]


@pytest.mark.parametrize(("name", "value"), FIELDS)
def test_a_state_with_a_changed_field_is_refused_by_name(copied, name, value):
    path = last(copied) / "train" / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(UserError, match="training state is damaged") as caught:
        longer(copied)
    assert f"{name} = " in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_state_nested_too_deep_is_refused(copied):
    (last(copied) / "train" / "state.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="cannot be read"):
        longer(copied)


@pytest.mark.parametrize("how", ["short", "zeros", "dtype"])
def test_a_random_state_that_no_generator_takes_is_refused(copied, how):
    path = last(copied) / "train" / states.RANDOM_FILE
    good = load_file(path)["torch"]
    bad = {"short": good[:, :-9], "zeros": torch.zeros_like(good), "dtype": good.to(torch.int32)}[how]
    save_file({"torch": bad.contiguous()}, path)
    with pytest.raises(UserError, match="random state is not whole"):
        longer(copied)


def test_moments_of_another_dtype_are_refused(copied):
    path = last(copied) / "train" / states.OPTIMIZER_FILE
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("exp_avg"))
    save_file({**tensors, name: tensors[name].to(torch.int32)}, path)
    with pytest.raises(UserError, match=r"int32 and should be torch\.float32"):
        longer(copied)


def test_foreign_lines_of_the_metrics_are_counted_and_a_cut_last_line_is_not(copied):
    path = copied / "runs" / "tiny" / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"kind": "tra')
    assert longer(copied, 9).step == 9
    path.write_text("not json\n\n[1]\n" + path.read_text() + '{"kind": "tra')
    with pytest.warns(UserWarning, match="2 lines that are no records"):
        longer(copied, 10)
    assert json.loads(path.read_text().splitlines()[0]) == json.loads(whole.splitlines()[0])
