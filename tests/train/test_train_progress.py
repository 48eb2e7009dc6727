import io

import pytest
from rich.console import Console

from anyformer.train.progress import ConsoleProgress, duration

INFO = {
    "name": "n",
    "folder": "runs/n",
    "step": 0,
    "steps": 40,
    "parameters": 12,
    "tokens_per_step": 64,
    "device": "cpu",
}


def record(step, **more):
    return {"kind": "train", "step": step, "loss": 2.0, "tokens_per_second": 640.0, "targets": 64, **more}


def shown(terminal, monkeypatch, **more):
    monkeypatch.setattr("anyformer.train.progress._QUIET_SECONDS", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    progress = ConsoleProgress(Console(file=stream, force_terminal=terminal, width=100, no_color=True))
    for done in (10, 20):
        progress.preparing(done, 20)
    progress.start(INFO)
    for step in range(1, 21):
        progress.record(record(step, **more))
    progress.record({"kind": "eval", "step": 20, "loss": 1.5, "perplexity": 4.48, "bits_per_byte": 2.1})
    progress.record({"kind": "sample", "step": 20, "prompt": "[b]", "text": "x\x1b[31m"})
    progress.record({"kind": "checkpoint", "step": 20, "path": "p", "best": True})
    progress.record({"kind": "checkpoint", "step": 20, "path": "q", "best": False})
    progress.end()
    return stream.getvalue()


def test_plain_lines_off_a_terminal(monkeypatch):
    said = shown(False, monkeypatch)
    assert "\x1b" not in said
    assert "step 20/40  loss 2.0000  640 tokens/s  ETA 0:02" in said
    assert "step 20/40  validation loss 1.5000  perplexity 4.48  2.100 bits per byte" in said
    assert "sample: [b]x\ufffd[31m" in said
    assert "the best so far: p" in said
    assert " q" not in said


def test_a_bar_on_a_terminal(monkeypatch):
    said = shown(True, monkeypatch)
    assert "20/40" in said
    assert "loss 2.0000" in said
    assert "640 tokens/s" in said
    assert "ETA" in said
    assert "encoding the text" in said
    assert "x\ufffd[31m" in said


@pytest.mark.parametrize("terminal", [False, True])
def test_the_load_of_experts_is_shown_where_there_are_some(terminal, monkeypatch):
    assert "busiest expert 1.8 × mean" in shown(terminal, monkeypatch, expert_load=1.81)
    assert "expert" not in shown(terminal, monkeypatch)


def test_durations():
    assert [duration(s) for s in (0, 59.6, 61, 3723)] == ["0:00", "1:00", "1:01", "1:02:03"]


def test_the_text_being_prepared_is_said_once_off_a_terminal(monkeypatch):
    assert shown(False, monkeypatch).count("preparing the text: 20 bytes\n") == 1
    assert "preparing the text" not in shown(True, monkeypatch)


def test_an_endless_perplexity_is_shown():
    stream = io.StringIO()
    progress = ConsoleProgress(Console(file=stream, width=100))
    progress.record({"kind": "eval", "step": 20, "loss": 800.0, "perplexity": None, "bits_per_byte": 2.1})
    assert "perplexity inf" in stream.getvalue()
