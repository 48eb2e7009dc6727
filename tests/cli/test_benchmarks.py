"""The benchmarks run: the smallest case of each, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import anyformer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SOURCE = str(Path(anyformer.__file__).parents[1])


def output(name, *words):
    environment = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCHMARKS / name), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("memory.py", "--smallest"), "MiB"),
        (("startup.py", "--runs", 1), "goal 0.300"),
        (("kernels.py", "--threads", 1), "rotation"),
    ],
)
def test_a_benchmark_runs(words, said):
    assert said in output(*words)


@pytest.mark.slow
def test_memory_takes_muon_too():
    import json

    sys.path.insert(0, str(BENCHMARKS))
    try:
        from memory import CASES, SMALLEST
    finally:
        sys.path.remove(str(BENCHMARKS))
    assert any(case.get("optimizer") == "muon" for case in CASES.values())
    told = output("memory.py", "--case", json.dumps({**CASES[SMALLEST], "optimizer": "muon"}))
    assert json.loads(told)["planned"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("long", [False, True])
def test_shakespeare_runs(tmp_path, long):
    (tmp_path / "text.txt").write_text("".join(f"{i}: to be or not to be, {i * i}\n" for i in range(400)))
    words = ["train_shakespeare.py", "--text", tmp_path / "text.txt", "--steps", 2, "--seeds", "0,1", "--threads", 1]
    told = output(*words, *(["--long"] if long else []))
    assert told.count("after 2 steps") == 2
    assert "ratio of medians" in told
    assert ("within nanoGPT's time: reached" in told) == long
