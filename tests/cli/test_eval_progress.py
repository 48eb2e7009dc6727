"""`anyformer eval` on long work: a bar on stderr where that is a terminal, and silence where it is not."""

import io
import json
import sys

import pytest
import typer
from typer.testing import CliRunner

from anyformer.checkpoint import Checkpoint
from anyformer.cli.eval import evaluate
from anyformer.nn.model import build
from anyformer.spec import load_spec
from anyformer.text import Tokenizer
from anyformer.train.evaluate import score_texts

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(evaluate)
TEXTS = ["first text, ünique " * 9, "", "the second one " * 7]


@pytest.fixture(scope="module")
def made():
    tokenizer = Tokenizer.train("byte", [])
    spec = load_spec("llama-tiny", [f"vocab_size={tokenizer.vocab_size}", "max_positions=16", "n_layers=1"])
    return Checkpoint(spec, build(spec), tokenizer)


def test_progress_rises_within_documents_and_ends_at_all_bytes(made):
    heard = []
    how = {"context": 16, "stride": 8, "rows": 2}
    score = score_texts(made.model, made.tokenizer, TEXTS, **how, progress=heard.append)
    total = sum(len(text.encode()) for text in TEXTS)
    assert heard == sorted(heard)
    assert heard[-1] == total
    assert sum(0 < done < len(TEXTS[0].encode()) for done in heard) >= 5
    assert score == score_texts(made.model, made.tokenizer, TEXTS, **how)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_goes_to_a_terminal_alone(made, tmp_path, monkeypatch):
    folder = made.save(tmp_path / "c")
    (tmp_path / "text.txt").write_text(TEXTS[0])
    words = [str(folder), "--text", str(tmp_path / "text.txt"), "--json", "--device", "cpu"]
    quiet = CliRunner().invoke(app, words)
    assert quiet.exit_code == 0, quiet.output
    assert quiet.stderr == ""
    terminal, pipe = Terminal(), io.StringIO()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", pipe)
    app(words, standalone_mode=False)
    assert "scoring" in terminal.getvalue()
    assert json.loads(pipe.getvalue()) == json.loads(quiet.stdout)


def test_characters_that_the_tokenizer_does_not_know_are_said(tmp_path):
    tokenizer = Tokenizer.train("char", ["abc def"])
    spec = load_spec("llama-tiny", [f"vocab_size={tokenizer.vocab_size}", "max_positions=16", "n_layers=1"])
    folder = Checkpoint(spec, build(spec), tokenizer).save(tmp_path / "c")
    for name, text, inexact in (("known", "cab fed " * 9, 0), ("unknown", "cab Ünd " * 9, 1)):
        (tmp_path / f"{name}.txt").write_text(text)
        ran = CliRunner().invoke(app, [str(folder), "--text", str(tmp_path / f"{name}.txt"), "--json"])
        assert json.loads(ran.stdout)["inexact_documents"] == inexact
        assert ("does not know" in ran.stderr) == bool(inexact)
