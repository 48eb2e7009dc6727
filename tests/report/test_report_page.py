"""The page: whole, safe, the same bytes for the same run, and every number that of the metrics."""

import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from run_files import eval_record, sample_record, settings, train_record, usual_records

from anyformer.errors import UserError
from anyformer.report import write_report
from anyformer.report.page import MOST_SAMPLES, sample_groups
from anyformer.report.runs import read_run

_VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Tags, attributes and the text inside each kind of tag; every tag must be closed in order."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.texts = [], [], {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append((tag, []))

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        opened, text = self.open.pop()
        assert opened == tag
        self.texts.setdefault(tag, []).append("".join(text))

    def handle_data(self, data):
        for _, text in self.open:
            text.append(data)


def write(folder):
    path = write_report(folder)
    assert path == folder / "report.html"
    text = path.read_text(encoding="utf-8")
    return text, Page(text)


def test_the_page_is_whole_html(make_run):
    text, page = write(make_run())
    assert text.startswith("<!DOCTYPE html>")
    assert page.texts["h1"] == ["small-run finished"]
    assert page.texts["title"][0] == "small-run · validation loss 1.2745"
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    named = {name for _, a in page.tags for name in (a.get("aria-labelledby") or "").split()}
    assert named
    assert named <= set(ids)


def test_nothing_is_loaded_and_nothing_runs(make_run):
    text, page = write(make_run())
    assert "://" not in text
    assert "@import" not in text
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "iframe", "object", "embed", "img", "form", "base"}
    for _, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href", "srcset", "action"):
            assert re.match(r"#|data:,$", attributes.get(name) or "#")
    assert not re.findall(r"url\((?!#)", text)
    policy = next(a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'")


ATTACK = "</pre></style><script>alert(1)</script><img src=x onerror=alert(2)>&lt;\"'{{ 7 * 7 }}"


def test_text_of_models_and_users_is_shown_and_never_run(make_run):
    records = [*usual_records(), sample_record(40, ATTACK, prompt=ATTACK)]
    records += [
        train_record(41, lr={ATTACK: 0.1, "b": 0.2}),
        {"kind": "diverged", "step": 42, "batch": ATTACK, "got": ATTACK},
    ]
    changes = {
        "name": ATTACK,
        "run": {"name": ATTACK, ATTACK: {ATTACK: ATTACK}},
        "versions": {ATTACK: ATTACK},
        "resume": ATTACK,
        "result": None,
        "plan": {**settings()["plan"], "facts": {ATTACK: ATTACK}, "dtype": ATTACK, "parameters_by_role": {ATTACK: 3}},
    }
    _, page = write(make_run(records, **changes))
    assert not [tag for tag, attributes in page.tags if tag in ("script", "img") or "onerror" in attributes]
    assert ATTACK in page.texts["h1"][0]
    assert any(ATTACK + ATTACK in pre for pre in page.texts["pre"])
    assert page.texts["code"] == [ATTACK]
    assert "49" not in page.texts["h1"][0]
    changes["state"] = 'x" onclick="alert(3)'
    assert not [a for _, a in write(make_run(records, **changes))[1].tags if "onclick" in a]


def test_samples_keep_every_space_tab_and_line_break(make_run):
    written = "\n\n  if x:\n\t\treturn   'ü'  \n"
    text, page = write(make_run([sample_record(1, written, prompt=""), sample_record(1, written, prompt="\ndef ")]))
    # A reader of HTML drops exactly one line break after <pre ...>; html.parser leaves it to us.
    assert page.texts["pre"][:2] == ["\n" + written, "\n\ndef " + written]
    assert re.search(r"pre \{[^}]*white-space: pre-wrap; overflow-wrap: anywhere", text)


def test_characters_that_no_page_can_hold_are_shown_as_others(make_run):
    _, page = write(make_run([sample_record(1, "a\x00b\x1b\ud800c\u202ed")]))
    assert page.texts["pre"][0] == "\ndef a␀b␛�c�d"


def test_the_same_run_gives_the_same_bytes(make_run, tmp_path):
    folder = make_run()
    first = write_report(folder).read_bytes()
    assert write_report(folder).read_bytes() == first
    code = "import sys, pathlib; from anyformer.report import write_report; write_report(pathlib.Path(sys.argv[1]))"
    subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        check=True,
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)},
    )
    assert (folder / "report.html").read_bytes() == first
    assert [p.name for p in folder.iterdir() if p.name.endswith("partial")] == []


def test_every_evaluation_and_headline_number_is_that_of_the_metrics(make_run):
    folder = make_run()
    _, page = write(folder)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = [r for r in records if r["kind"] == "eval"]
    made = settings()
    exact = [float(a["value"]) for tag, a in page.tags if tag == "data" and a["value"]]
    last = evaluations[-1]
    assert exact[:6] == [
        last["loss"],
        pytest.approx(last["perplexity"]),
        last["bits_per_byte"],
        made["parameters"],
        12000,
        10.0,
    ]
    cells = page.texts["td"]
    for record in evaluations:
        for key in ("loss", "bits_per_byte"):
            assert any(cell.startswith(f"{record[key]:.4f}") for cell in cells)
        assert f"{record['perplexity']:.2f}" in cells
        assert f"{300 * record['step']:,}" in cells
    assert f"{evaluations[0]['loss']:.4f}best" in cells


def test_the_plan_is_shown_and_scored_against_the_measured_peak(make_run):
    made = settings()["plan"]
    peak = made["memory"]["peak"]
    records = usual_records()
    records[-4]["peak_memory_bytes"] = round(1.25 * peak)
    records[0]["peak_memory_bytes"] = 5
    _, page = write(make_run(records))
    exact = [float(a["value"]) for tag, a in page.tags if tag == "data" and a["value"]]
    shown = [made[k] for k in ("parameters", "embedding_parameters", "cache_bytes", "flops_training_per_token")]
    shown += [*made["parameters_by_role"].values(), *made["memory"].values()]
    assert set(shown) <= set(exact)
    assert "1.25" in page.texts["td"]
    median = sorted(r["tokens_per_second"] for r in records if r["kind"] == "train")
    median = (median[19] + median[20]) / 2
    assert any(value == pytest.approx(made["flops_training_per_token"] * median) for value in exact)
    assert made["flops_training_per_token"] * 12000 in exact
    assert "1.25" not in write(make_run())[1].texts["td"]


def test_samples_of_many_checkpoints_are_spread_and_the_rest_folded(make_run):
    folder = make_run(
        [r for s in range(1, 24) for r in (train_record(s), sample_record(s, f"w{s}"), sample_record(s, "v", "p2"))]
    )
    shown, folded = sample_groups(read_run(folder))
    assert [g.step for g in shown] == [1, 5, 10, 14, 19, 23]
    assert len(shown) == MOST_SAMPLES
    assert sorted(g.step for g in shown + folded) == list(range(1, 24))
    assert all(len(g.samples) == 2 for g in shown)
    _, page = write(folder)
    assert sum("w" in pre for pre in page.texts["pre"]) == 23


def test_seed_versions_data_description_and_resume_are_there(make_run):
    command = "anyformer train small.toml --set train.steps=40 --resume"
    _, page = write(make_run(resume=command))
    values = page.texts["dd"]
    assert {"4321", "2.13.0+cpu", "cpu"} <= set(values)
    assert page.texts["code"] == [command]
    assert "91,234" in page.texts["td"]
    source = page.texts["pre"][-1]
    assert "[model.attention]\nn_heads = 6" in source
    assert "code" not in write(make_run())[1].texts


@pytest.mark.parametrize("what", ["nothing", "no metrics", "no evaluation", "nan", "one step"])
def test_runs_with_little_in_them(make_run, what):
    records = {
        "nothing": [],
        "no metrics": [],
        "no evaluation": [train_record(s) for s in range(1, 9)],
        "nan": [train_record(1, loss=math.nan, grad_norm=math.nan), eval_record(1, math.nan, bits_per_byte=math.nan)],
        "one step": [train_record(1)],
    }[what]
    folder = make_run(
        records, **({"result": None, "plan": {}, "run": {}, "data": {}, "versions": {}} if what == "nothing" else {})
    )
    if what == "no metrics":
        (folder / "metrics.jsonl").unlink()
    _, page = write(folder)
    first = next(data for data in page.texts["data"])
    last = {"no evaluation": 8, "one step": 1}.get(what)
    assert first == (f"{train_record(last)['loss']:.4f}" if last else "NaN" if what == "nan" else "–")
    assert "nan" not in page.texts.get("td", [])


def test_a_page_that_cannot_be_written_is_the_users_to_know(tmp_path, make_run):
    with pytest.raises(UserError, match="cannot be read"):
        write_report(tmp_path / "nowhere")
    folder = make_run()
    (folder / "report.html").mkdir()
    with pytest.raises(UserError, match="cannot write"):
        write_report(folder)


def test_importing_the_room_draws_nothing():
    code = "import sys, anyformer.report; sys.exit('matplotlib' in sys.modules or 'torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
