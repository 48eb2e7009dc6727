import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training_runs import table

import anyformer
from anyformer.errors import UserError
from anyformer.report.words import toml
from anyformer.train import train
from anyformer.train.lock import sole_trainer
from anyformer.train.parallel import Alone

SOURCE = str(Path(anyformer.__file__).parents[1])


def command(folder, *words):
    environment = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-c", "from anyformer.cli.main import run; run()", "train", str(folder / "tiny.toml")]
    call = [*program, "--runs", str(folder / "runs"), *words]
    return subprocess.Popen(call, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_two_processes_do_not_train_one_run(tmp_path):
    """The second is told, exit code 2; a killed first one leaves a run that can be resumed."""
    run = table(tmp_path, train={"steps": 100_000, "checkpoint_every": 5})
    (tmp_path / "tiny.toml").write_text(toml(run), encoding="utf-8")
    first = command(tmp_path)
    try:
        limit = time.monotonic() + 60
        while not (tmp_path / "runs" / "tiny" / "checkpoints" / "last").exists():
            assert time.monotonic() < limit
            assert first.poll() is None
            time.sleep(0.05)
        for flag in ("resume", "fresh"):
            with pytest.raises(UserError, match="being trained by another process") as caught:
                train(run, root=tmp_path / "runs", report=False, **{flag: True})
            assert f"process {first.pid}" in str(caught.value)
        second = command(tmp_path, "--resume")
        assert "being trained by another process" in second.communicate(timeout=60)[1]
        assert second.returncode == 2
        assert first.poll() is None
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    made = json.loads((tmp_path / "runs" / "tiny" / "checkpoints" / "last" / "train" / "state.json").read_text())[
        "step"
    ]
    run["train"]["steps"] = made + 100
    assert train(run, root=tmp_path / "runs", report=False, resume=True).finished
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tiny"]


def test_the_lock_ends_with_the_run_and_a_copy_has_none(tmp_path):
    run = table(tmp_path, train={"steps": 2})
    train(run, root=tmp_path / "runs", report=False)
    train(run, root=tmp_path / "runs", report=False, fresh=True)
    with sole_trainer(tmp_path / "runs" / "tiny", Alone()):
        shutil.copytree(tmp_path / "runs" / "tiny", tmp_path / "copies" / "tiny", symlinks=True)
        longer = {**run, "train": {**run["train"], "steps": 3}}
        assert train(longer, root=tmp_path / "copies", report=False, resume=True).step == 3
    with pytest.raises(UserError, match="no run to resume"):
        train(run, root=tmp_path / "nowhere", report=False, resume=True)
    assert not (tmp_path / "nowhere").exists()
