"""The command line as a user meets it: a process of its own, its exit code, and what it says where."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import anyformer
from anyformer.checkpoint import Checkpoint
from anyformer.nn.model import build
from anyformer.spec import load_spec
from anyformer.text import Tokenizer

FRONT = "from anyformer.cli.main import program; program()"
SOURCE = str(Path(anyformer.__file__).parents[1])


def environment(**more):
    return {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", **more}


def call(*words, code=FRONT, **more):
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        capture_output=True,
        text=True,
        env=environment(**more),
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    tokenizer = Tokenizer.train("byte", [])
    spec = load_spec("llama-tiny", [f"vocab_size={tokenizer.vocab_size}", "max_positions=1024", "n_layers=1"])
    return Checkpoint(spec, build(spec, seed=3), tokenizer).save(tmp_path_factory.mktemp("front") / "good")


@pytest.mark.parametrize("verb", [("generate", "--prompt", "x"), ("generate", "--prompt", "x", "--json"), ("chat",)])
def test_what_is_no_checkpoint_is_said_in_one_message(checkpoint, tmp_path, verb):
    for name in ("weights.gguf", "pytorch_model.bin", "notes.txt"):
        (tmp_path / name).write_bytes(b"\x80\x04.")
    (tmp_path / "empty").mkdir()
    for path, said in (
        (checkpoint.with_name("goof"), "there is no such checkpoint"),
        (tmp_path / "weights.gguf", "too short to be GGUF"),
        (tmp_path / "pytorch_model.bin", "never opened"),
        (tmp_path / "notes.txt", "a checkpoint is a folder or a GGUF file"),
        (tmp_path / "empty", "holds no checkpoint"),
    )[:: 1 if verb[-1] == "x" else 4]:
        code, out, err = call(verb[0], path, *verb[1:])
        assert (code, out) == (2, ""), err
        assert err.startswith("error: ")
        assert err.count("error: ") == 1
        assert said in err
        assert str(path) in err
        assert "Traceback" not in err


def test_json_is_one_document_and_nothing_else(checkpoint):
    code, out, err = call("generate", checkpoint, "--prompt", "x", "--json", "--max-new-tokens", 3, "--device", "cpu")
    assert (code, err) == (0, "")
    assert json.loads(out)["n_new_tokens"] == 3
    code, out, _ = call("generate", checkpoint, "--prompt", "x" * 2000, "--json")
    assert (code, out) == (2, "")


@pytest.mark.parametrize("verb", [("generate", "--prompt", "x"), ("chat",)])
def test_a_device_that_cannot_be_used_is_named(checkpoint, verb):
    code, out, err = call(verb[0], checkpoint, *verb[1:], "--device", "tpu")
    assert (code, out) == (2, "")
    assert "error: this device is not known" in err
    assert "where: --device" in err


def reader_that_leaves(*words):
    """Runs the command with a reader of its output that goes at once: exit code and stderr."""
    process = subprocess.Popen(
        [sys.executable, "-c", FRONT, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    process.stdout.close()
    err = process.stderr.read().decode()
    process.stderr.close()
    return process.wait(timeout=120), err


def test_a_reader_that_leaves_ends_it_quietly(checkpoint):
    """As in `anyformer generate … | head -c 1`: written piece by piece, at the end, by rich, and by echo."""
    for words in (
        ("generate", checkpoint, "--prompt", "x", "--max-new-tokens", 200),
        ("generate", checkpoint, "--prompt", "x", "--max-new-tokens", 2, "--json"),
        ("--help",),
        ("plan", "--list"),
    ):
        code, err = reader_that_leaves(*words)
        assert (code, err) == (141, ""), words


def test_closed_standard_output_is_no_fault():
    script = f'"$0" -c "{FRONT}" --version >&-'
    done = subprocess.run(["sh", "-c", script, sys.executable], env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("kind", ["ValueError", "UserError", "OSError", "RuntimeError"])
def test_a_traceback_is_shown_on_request_alone(kind):
    code = (
        "from anyformer.cli import main\nfrom anyformer.errors import UserError\n"
        f"@main.app.command()\ndef broken():\n    raise {kind}('inside')\nmain.run()"
    )
    status, out, err = call("broken", code=code)
    assert (status, out) == (1 if kind == "RuntimeError" else 2, "")
    assert "inside" in err
    assert "Traceback" not in err
    status, out, err = call("broken", code=code, ANYFORMER_TRACEBACK="1")
    assert (status, out) == (1, "")
    assert "Traceback" in err
    assert "in broken" in err


def test_both_verbs_offer_the_same_sampling():
    """One set of options: names, kinds and help agree; the defaults and the words on seeds are each verb's own."""
    import typer

    from anyformer.cli.main import app

    verbs = typer.main.get_command(app).commands
    shared = "max_new_tokens temperature top_k top_p min_p repetition_penalty stop device".split()

    def options(verb):
        return {p.name: (p.opts, p.multiple, p.help) for p in verbs[verb].params if p.name in shared}

    assert options("generate") == options("chat")
    assert sorted(options("chat")) == sorted(shared)
    assert {p.name: p.default for p in verbs["eval"].params}["device"] == "auto"
