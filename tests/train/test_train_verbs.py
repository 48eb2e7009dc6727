import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training_runs import table

import anyformer
from anyformer.cli import main
from anyformer.cli.train import resume_command
from anyformer.report.words import toml

SOURCE = str(Path(anyformer.__file__).parents[1])


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.toml"
    path.write_text(
        toml({**table(tmp_path), "sample": {"prompts": ["000 the"], "max_new_tokens": 3}}), encoding="utf-8"
    )
    return path


def call(monkeypatch, capsys, *words):
    """The command line in this process: exit code, stdout, stderr."""
    monkeypatch.setattr(sys, "argv", ["anyformer", *map(str, words)])
    with pytest.raises(SystemExit) as caught:
        main.run()
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return caught.value.code or 0, out, err


def test_train_and_eval_in_words_and_in_json(file, monkeypatch, capsys, tmp_path):
    code, out, err = call(monkeypatch, capsys, "train", file, "--set", "train.steps=6")
    assert code == 0
    assert "validation loss" in out
    assert "bits per byte" in out
    assert "6 steps of 64 tokens" in err
    assert (tmp_path / "runs" / "tiny" / "report.html").exists()
    code, out, err = call(monkeypatch, capsys, "train", file, "--set", "train.steps=8", "--resume", "--json")
    assert code == 0
    told = json.loads(out)
    assert (told["step"], told["finished"], told["resume"]) == (8, True, None)
    assert told["score"]["n_tokens"] > 0
    assert "going on after step 6" in err
    text = tmp_path / "other.txt"
    text.write_text("some other text, scored once\n" * 9, encoding="utf-8")
    code, out, _ = call(monkeypatch, capsys, "eval", "runs/tiny", "--text", text, "--json", "--stride", "4")
    score = json.loads(out)
    assert code == 0
    assert score["n_tokens"] == score["n_bytes"] == 29 * 9
    assert (score["context"], score["stride"]) == (16, 4)
    code, out, _ = call(monkeypatch, capsys, "eval", "runs/tiny/checkpoints/last", "--text", text, "--stride", "4")
    assert code == 0
    assert "bits per byte" in out


def test_dry_run_plans_and_writes_nothing(file, monkeypatch, capsys, tmp_path):
    code, out, _ = call(monkeypatch, capsys, "train", file, "--dry-run")
    assert code == 0
    assert "parameters" in out
    assert "weight_decay = 0.1" in out
    code, out, _ = call(monkeypatch, capsys, "train", file, "--dry-run", "--json", "--set", "train.batch=8")
    told = json.loads(out)
    assert told["run"]["train"]["batch"] == 8
    assert told["plan"]["parameters"] > 0
    assert told["steps"] == 20
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("tokenizer", ["byte", "char", "bpe"])
def test_dry_run_knows_the_parameters_of_the_run(file, monkeypatch, capsys, tokenizer):
    words = ("--set", f"data.tokenizer={tokenizer}", "--json")
    size = ("--set", "data.tokenizer.vocab_size=270") if tokenizer == "bpe" else ()
    _, out, _ = call(monkeypatch, capsys, "train", file, *words, *size, "--dry-run")
    planned = json.loads(out)["plan"]["parameters"]
    code, _, _ = call(monkeypatch, capsys, "train", file, *words, *size, "--set", "train.steps=1")
    assert code == 0
    run = json.loads(Path("runs/tiny/run.json").read_text())
    assert planned == run["parameters"]


def test_mistakes_exit_with_2_and_one_message(file, monkeypatch, capsys, tmp_path):
    (tmp_path / "binary.txt").write_bytes(b"a\x00b" * 400)
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1") * 400)
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "short.txt").write_bytes(b"too short")
    for words, said in (
        (("train", "absent.toml"), "no such file"),
        (("train", "demmo"), "did you mean `demo`?"),
        (("train", file, "--set", "train.stepps=3"), "did you mean `steps`?"),
        (("train", file, "--set", "nonsense"), "KEY.KEY=VALUE"),
        (("train", file, "--resume"), "no run to resume"),
        (("train", file, "--set", 'data.sources=["absent.txt"]'), "no such file or folder"),
        (("train", file, "--set", 'data.sources=["empty.txt"]'), "empty"),
        (("train", file, "--set", 'data.sources=["binary.txt"]'), "binary"),
        (("train", file, "--set", 'data.sources=["latin.txt"]'), "not valid UTF-8"),
        (("train", file, "--set", 'data.sources=["short.txt"]'), "shorter than"),
        (("train", file, "--set", 'data.sources=["absent.txt"]', "--dry-run"), "no such file or folder"),
        (("eval", "runs/absent", "--text", "text.txt"), "no such checkpoint"),
    ):
        code, out, err = call(monkeypatch, capsys, *words)
        assert (code, out) == (2, ""), (words, err)
        assert err.count("error:") == 1
        assert said in err, err
    assert not (tmp_path / "runs" / "tiny" / "checkpoints").exists()


def test_eval_refuses_what_it_cannot_score(file, monkeypatch, capsys, tmp_path):
    call(monkeypatch, capsys, "train", file, "--set", "train.steps=1")
    (tmp_path / "binary.txt").write_bytes(b"a\x00b")
    (tmp_path / "empty.txt").write_bytes(b"")
    for words, said in (
        (("--text", "absent.txt"), "no such file"),
        (("--text", "binary.txt"), "binary"),
        (("--text", "empty.txt"), "empty"),
        (("--text", "text.txt", "--context", "17"), "shorter context"),
        (("--text", "text.txt", "--stride", "17"), "stride"),
        (("--text", "text.txt", "--device", "tpu"), "cannot be used here"),
    ):
        code, out, err = call(monkeypatch, capsys, "eval", "runs/tiny", *words)
        assert (code, out) == (2, ""), (words, err)
        assert said in err, err
    weights = tmp_path / "runs" / "tiny" / "checkpoints" / "step-000001" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    code, _, err = call(monkeypatch, capsys, "eval", "runs/tiny", "--text", "text.txt")
    assert code == 2
    assert "cut short or damaged" in err


def test_a_diverged_run_exits_with_2(file, monkeypatch, capsys):
    words = ("optimizer.lr=1e18", "schedule=constant", "train.clip=0")
    code, _, err = call(monkeypatch, capsys, "train", file, *(x for w in words for x in ("--set", w)))
    assert code == 2
    assert "not a finite number" in err
    assert "last good checkpoint" in err


def test_a_warning_is_one_line(file, monkeypatch, capsys):
    words = ("model.n_layers=12", "model.placement=post", "schedule.warmup=0", "train.steps=1")
    _, _, err = call(monkeypatch, capsys, "train", file, *(x for w in words for x in ("--set", w)))
    assert err.count("warning: a post-norm stack of 12 layers") == 1
    assert "UserWarning" not in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_prints_the_command_to_go_on(file, tmp_path, number, code):
    """The command printed goes on with the run."""
    environment = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    verb = [sys.executable, "-c", "from anyformer.cli.main import run; run()"]
    process = subprocess.Popen(
        [*verb, "train", file.name, "--set", "train.steps=3000", "--set", "name=n1"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "runs" / "n1" / "metrics.jsonl"
    begin = time.monotonic()
    while not (metrics.exists() and metrics.read_text().count("\n") > 2) and time.monotonic() - begin < 60:
        time.sleep(0.02)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert out == ""
    assert "Traceback" not in err
    if number == signal.SIGTERM:
        return
    command = next(line.strip() for line in err.splitlines() if line.strip().startswith("anyformer train"))
    step = int((tmp_path / "runs" / "n1" / "checkpoints" / "last").resolve().name[5:])
    words = [w if w != "train.steps=3000" else f"train.steps={step + 2}" for w in shlex.split(command)[1:]]
    assert words[-1] == "--resume"
    again = subprocess.run([*verb, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert again.returncode == 0, again.stderr
    assert f"going on after step {step:,}" in again.stderr


def test_the_resume_command_is_quoted_for_a_shell(monkeypatch):
    found = resume_command("my run.toml", ['data.sources=["a b.txt"]'], Path("other"))
    assert shlex.split(found) == [
        "anyformer",
        "train",
        "my run.toml",
        "--set",
        'data.sources=["a b.txt"]',
        "--runs",
        "other",
        "--resume",
    ]
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert resume_command("r", [], Path("runs")).startswith("torchrun --nproc-per-node=4 --no-python anyformer train r")


def test_help_needs_no_torch():
    code = (
        "import sys\nfrom anyformer.cli import train, eval\n"
        "assert not {'torch', 'numpy', 'rich'} & set(sys.modules), sys.modules.keys()"
    )
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    outcome = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert outcome.returncode == 0, outcome.stderr
