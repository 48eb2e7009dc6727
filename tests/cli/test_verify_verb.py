"""`anyformer verify`: the laws on a specification or a checkpoint."""

import json
import subprocess
import sys
from functools import partial

import pytest
import typer

from anyformer.checkpoint import Checkpoint
from anyformer.cli.verify import verify
from anyformer.errors import UserError
from anyformer.laws import law as book
from anyformer.laws.certificate import weights_hash
from anyformer.laws.result import Result
from anyformer.nn.model import build
from anyformer.spec import load_spec
from command_line import invoked

verbs = typer.Typer(pretty_exceptions_enable=False)
verbs.command()(verify)
SMALL = [
    "d_model=18",
    "n_layers=1",
    "vocab_size=19",
    "attention.n_heads=3",
    "attention.n_kv_heads=1",
    "max_positions=24",
]


run = partial(invoked, verbs)


@pytest.fixture
def checkpoint(tmp_path):
    spec = load_spec("llama-tiny", SMALL)
    return Checkpoint(spec, build(spec, seed=3)).save(tmp_path / "mine")


def test_a_checkpoint_is_judged_as_it_is_and_gets_a_certificate(checkpoint):
    said = run(checkpoint)
    for law in ("causality", "cache", "round trip", "precision"):
        assert law in said.stdout
    for part in ("files", "logits", "padding", "cache"):
        assert f"parity: {part}" in said.stdout
    assert "16 laws hold, 0 are broken, 1 have no case here" in said.stdout
    assert str(checkpoint / "certificate.json") in said.stderr
    written = json.loads((checkpoint / "certificate.json").read_text(encoding="utf-8"))
    assert written["holds"]
    assert written["subject"] == str(checkpoint)
    assert written["weights"] == weights_hash(build(load_spec(checkpoint), seed=3))


def test_a_specification_gets_random_weights_and_one_json_document(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = run("llama-tiny", "--laws", "plan, cross", "--seed", 7, "--json")
    table = json.loads(said.stdout)
    assert [(r["law"], r["holds"]) for r in table["results"]] == [("cross", None), ("plan", True)]
    assert table["seed"] == 7
    assert list(tmp_path.iterdir()) == []


def test_a_broken_law_is_shown_and_exits_with_1(checkpoint, monkeypatch):
    monkeypatch.setitem(book.LAWS, "plan", lambda model, seed: Result("plan", False, 0.5, 0.0, "the head", "counted"))
    said = run(checkpoint, "--laws", "plan", code=1)
    assert "BROKEN" in said.stdout
    assert "the head" in said.stdout
    assert not json.loads((checkpoint / "certificate.json").read_text(encoding="utf-8"))["holds"]


def test_some_laws_by_name_make_no_certificate(checkpoint):
    """A part that holds would take the place of what all laws said."""
    said = run(checkpoint, "--laws", "plan")
    assert "no certificate is written" in said.stderr
    assert not (checkpoint / "certificate.json").exists()


@pytest.mark.parametrize("names", ["", " , "])
def test_no_law_is_no_proof(checkpoint, names):
    with pytest.raises(UserError, match="nothing would be checked"):
        run(checkpoint, "--laws", names)


def test_an_unknown_law_is_refused_before_anything_is_built(tmp_path):
    with pytest.raises(UserError, match="there is no such law"):
        run(tmp_path / "nowhere", "--laws", "gravity")


def test_a_run_description_says_what_to_give_instead(tmp_path):
    """Its model takes what it lacks from the run's data."""
    with pytest.raises(UserError, match="a run description") as caught:
        run("demo")
    assert "model.vocab_size: is required" in caught.value.got
    assert "runs/demo once the run is trained, or its [model] table" in caught.value.remedy
    file = tmp_path / "mine.toml"
    file.write_text('name = "x"\nmodel = "llama-tiny"\n[data]\nsources = ["a.txt"]\n[train]\nsteps = 1\n')
    assert "plan" in run(file, "--laws", "plan").stdout, "a model that is whole is judged"
    (tmp_path / "part.toml").write_text("d_model = 8\n")
    file.write_text(file.read_text().replace("llama-tiny", "part.toml"))
    with pytest.raises(UserError, match="a run description") as caught:
        run(file)
    assert caught.value.remedy == "give runs/x once the run is trained, or part.toml with what is missing"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--help"], "--laws"),
        (["llama-tiny", "--laws", "causalty"], "did you mean `causality`?"),
        (["llama-tinny"], "did you mean `llama-tiny`?"),
        (["demo"], "a run description"),
    ],
)
def test_help_and_mistakes_come_without_torch(words, said):
    code = (
        "import sys; from anyformer.cli.main import run\n"
        f"sys.argv = ['anyformer', 'verify', *{words}]\n"
        "try: run()\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout + done.stderr
