"""Reading a run folder: what is there is exact, what is cut or missing is said, what is damaged is refused."""

import json
import math

import numpy as np
import pytest
from run_files import eval_record, sample_record, train_record, usual_records

from anyformer.errors import UserError
from anyformer.report.runs import number, read_metrics, read_run, step_seconds


def test_every_number_is_that_of_the_files(make_run):
    run = read_run(make_run())
    assert (run.name, run.state, run.seed, run.total_steps, run.step) == ("small-run", "finished", 4321, 40, 40)
    assert (run.tokens, run.seconds, run.clip, run.reason, run.resume) == (12000, 10.0, 1.0, None, None)
    assert run.series["loss"].values.tolist() == [train_record(s)["loss"] for s in range(1, 41)]
    assert run.series["grad_norm"].steps.tolist() == list(range(1, 41))
    assert run.learning_rates[""].values.tolist() == [0.003 * min(1, s / 10) for s in range(1, 41)]
    first, last = run.evaluations
    assert (first.step, first.loss, first.tokens, first.seconds) == (20, 1.2345 + 0.02, 6000, 5.0)
    assert last.perplexity == pytest.approx(math.exp(1.2345 + 0.04), rel=1e-15)
    assert run.best == first
    assert [(s.step, s.prompt) for s in run.samples] == [(20, "def "), (40, "def ")]
    assert run.notes == ()


def test_step_time_is_the_difference_of_the_running_time(make_run):
    records = [train_record(s, seconds=t) for s, t in ((1, 2.0), (2, 2.5), (6, 4.5), (7, 5.0))]
    found = step_seconds(read_run(make_run(records)).series["seconds"])
    assert found.values.tolist() == [0.5, 0.5, 0.5]


def test_a_last_line_cut_short_is_left_out_and_said(make_run):
    run = read_run(make_run(tail='{"kind": "train", "step": 41, "lo'))
    assert run.step == 40
    assert run.notes == ("1 damaged line of metrics.jsonl left out.",)


def test_a_cut_line_that_a_resumed_run_wrote_on_loses_itself_alone(make_run):
    tail = '{"kind": "train", "st' + json.dumps(train_record(41)) + "\n" + json.dumps(train_record(42)) + "\n"
    run = read_run(make_run(tail=tail))
    assert run.series["loss"].steps.tolist() == [*range(1, 41), 42]


def test_a_line_break_inside_text_ends_no_record(make_run):
    """U+2028, U+0085 and the like are line breaks to `str.splitlines` and not to JSON lines."""
    folder = make_run([])
    record = json.dumps(sample_record(3, "one\u2028two\x85three"), ensure_ascii=False)
    (folder / "metrics.jsonl").write_text(record + "\n", encoding="utf-8")
    assert read_run(folder).samples[0].text == "one\u2028two\x85three"


def test_a_run_resumed_from_an_earlier_step_takes_back_what_came_after(make_run):
    records = [train_record(s) for s in range(1, 8)] + [eval_record(7, 9.0), sample_record(7, "stale")]
    records += [train_record(s, loss=100.0 + s) for s in range(5, 9)]
    run = read_run(make_run(records))
    assert run.series["loss"].steps.tolist() == list(range(1, 9))
    assert run.series["loss"].values[4:].tolist() == [105.0, 106.0, 107.0, 108.0]
    assert run.evaluations == ()
    assert run.samples == ()


@pytest.mark.parametrize(
    ("changes", "extra", "state", "reason"),
    [
        ({"result": None}, [], "running", None),
        ({"result": {"finished": False, "signum": 15}}, [], "stopped", "Stopped by SIGTERM."),
        ({"result": {"finished": False, "signum": None}}, [], "stopped", None),
        (
            {"result": None},
            [{"kind": "diverged", "step": 41, "batch": "ab12", "got": "loss nan"}],
            "diverged",
            "Not a finite number at step 41, batch ab12: loss nan.",
        ),
        ({"state": "stopped", "reason": "The disk is full."}, [], "stopped", "The disk is full."),
    ],
)
def test_state_and_reason(make_run, changes, extra, state, reason):
    run = read_run(make_run(usual_records() + extra, **changes))
    assert (run.state, run.reason) == (state, reason)
    assert run.diverged_at == (41 if state == "diverged" else None)


def test_nothing_but_an_empty_object_is_a_run(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    run = read_run(tmp_path)
    assert run.name == tmp_path.name
    assert (run.step, run.tokens, run.seconds, run.best, run.evaluations) == (None, None, None, None, ())
    assert run.notes == ("There is no metrics.jsonl in this folder yet.",)


def test_nan_and_infinite_losses_are_kept_as_such_and_never_best(make_run):
    records = [
        train_record(1),
        train_record(2, loss=math.nan),
        train_record(3, loss=math.inf),
        train_record(4, loss=None),
    ]
    records += [eval_record(4, math.nan, bits_per_byte=None), eval_record(5, 2.5)]
    run = read_run(make_run(records))
    assert np.isnan(run.series["loss"].values).tolist() == [False, True, False, True]
    assert run.series["loss"].finite()[0].tolist() == [1.0]
    assert run.best is not None
    assert run.best.step == 5
    assert run.evaluations[0].bits_per_byte is None


def test_bits_per_byte_from_the_bytes_where_the_record_lacks_it(make_run):
    record = eval_record(5, 2.0, n_tokens=30, n_bytes=90)
    del record["bits_per_byte"]
    assert read_run(make_run([record])).evaluations[0].bits_per_byte == pytest.approx(2.0 / math.log(2) / 3, rel=1e-15)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1, 2]", b'"text"', b"\xff\xfe\x00", b"{" * 100_000, b"[" * 100_000],
    ids=["empty", "cut", "list", "text", "binary", "deep", "deeper"],
)
def test_a_damaged_description_is_the_users_to_know(tmp_path, content):
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(UserError, match="this run cannot be read") as caught:
        read_run(tmp_path)
    assert caught.value.where == tmp_path / "run.json"
    assert caught.value.remedy


def test_no_folder_no_description_and_binary_metrics(tmp_path):
    for folder in (tmp_path / "absent", tmp_path):
        with pytest.raises(UserError, match="this run cannot be read"):
            read_run(folder)
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\xfe\x01")
    with pytest.raises(UserError, match="not UTF-8"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_fields_of_the_wrong_kind_are_taken_as_absent(make_run):
    records = [
        train_record(1, loss="x", lr=[1], tokens={}, seconds=True),
        sample_record(1, None),
        {"step": 2},
        {"kind": "eval"},
    ]
    changes = {"plan": 3, "run": [], "versions": "1", "data": None, "name": 7, "seed": "x", "result": 1}
    run = read_run(make_run(records, **changes))
    assert (run.name, run.seed, dict(run.plan), run.samples, run.tokens) == ("folder-name", None, {}, (), None)


@pytest.mark.parametrize(
    ("value", "right"), [("NaN", math.nan), (None, math.nan), (True, math.nan), (3, 3.0), ("1e3", 1e3)]
)
def test_number(value, right):
    assert number(value) == pytest.approx(right, nan_ok=True)
