import json
import subprocess
import sys
import tomllib

import pytest
from training_runs import RECIPE, table

from anyformer.errors import UserError
from anyformer.spec import SpecError
from anyformer.train.planned import planned
from anyformer.train.run import AdamW, BpeTokenizer, ByteTokenizer, Muon, load_run, make_run
from anyformer.train.schedule import WSD, Constant, Cosine

TOML = """
seed = 3
[model]
d_model = 24
n_layers = 2
norm = "rms"
ffn = "swiglu"
attention = {n_heads = 3, position = "rope"}
[data]
sources = ["python:docs"]
tokenizer = {kind = "bpe", vocab_size = 700}
context = 32
[train]
steps = 10
[optimizer]
kind = "muon"
muon = {lr = 0.02}
[schedule]
kind = "wsd"
warmup = 5
"""


def problems(raw):
    with pytest.raises(SpecError) as caught:
        make_run(raw)
    return [str(p) for p in caught.value.problems]


def test_a_toml_file_becomes_a_run(tmp_path):
    file = tmp_path / "my run.toml"
    file.write_text(TOML, encoding="utf-8")
    run = load_run(file, ["train.batch=32", "schedule.decay=0.5", "model.n_layers=3", "optimizer.muon.ns_steps=3"])
    assert run.name == "my-run"
    assert run.seed == 3
    assert run.train.batch == 32
    assert isinstance(run.schedule, WSD)
    assert (run.schedule.warmup, run.schedule.decay) == (5, 0.5)
    assert isinstance(run.optimizer, Muon)
    assert (run.optimizer.muon.lr, run.optimizer.muon.ns_steps) == (0.02, 3)
    assert run.data.tokenizer == BpeTokenizer(vocab_size=700)
    spec = run.spec(690)
    assert spec.vocab_size == 690
    assert spec.decoder.max_positions == 32
    assert spec.decoder.n_layers == 3


def test_words_stand_for_tables_and_kinds_have_defaults(tmp_path):
    run = load_run(table(tmp_path, schedule="constant", optimizer={"lr": 0.1}, data={"tokenizer": "byte"}))
    assert run.schedule == Constant()
    assert run.optimizer == AdamW(lr=0.1)
    assert run.data.tokenizer == ByteTokenizer()
    assert load_run(table(tmp_path, schedule={"warmup": 3})).schedule == Cosine(warmup=3)
    assert load_run(table(tmp_path), ["schedule=constant"]).schedule == Constant()


def test_a_run_comes_back_from_its_json(tmp_path):
    run = load_run(table(tmp_path, optimizer={"kind": "muon", "muon": {"coefficients": [[2, -1.5, 0.5]]}}))
    again = make_run(json.loads(json.dumps(run.to_dict())))
    assert again == run
    assert load_run(run, ["train.steps=7"]).train.steps == 7


def test_the_model_may_be_a_shipped_recipe_or_a_file_beside(tmp_path):
    raw = {**table(tmp_path), "model": "llama-tiny"}
    assert load_run(raw).spec(300).vocab_size == 512
    assert load_run(raw, ["model.n_layers=1"]).spec(300).decoder.n_layers == 1
    (tmp_path / "mine.toml").write_text(TOML, encoding="utf-8")
    model = tomllib.loads(TOML)["model"]
    (tmp_path / "run.toml").write_text(
        f'model = "mine.toml"\n[data]\nsources = ["{tmp_path}/text.txt"]\n[train]\nsteps = 1\n', encoding="utf-8"
    )
    assert load_run(tmp_path / "run.toml").model == model
    assert load_run(tmp_path / "run.toml", ["model=llama-tiny"]).model != model


def test_every_problem_is_said_at_once(tmp_path):
    raw = table(tmp_path, model={"d_model": 25}, optimizer={"kind": "adam"}, schedule={"kind": "cosine", "warmpu": 3})
    raw["train"] = {"steps": 10, "minutes": 2, "btach": 3, "micro_batch": 99}
    raw["data"]["context"] = 0
    raw["atention"] = {}
    said = "\n".join(problems(raw))
    for part in (
        "unknown key `atention`",
        "train.btach: unknown key `btach`; did you mean `batch`?",
        "schedule.warmpu: unknown key `warmpu`; did you mean `warmup`?",
        "optimizer.kind: unknown choice `adam`; did you mean `adamw`?",
        "train: takes one of steps, tokens and minutes, got all of steps, minutes",
        "train.micro_batch = 99: is more than train.batch=16",
        "data.context = 0",
        "model.attention.n_heads",
    ):
        assert part in said, said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train": {"steps": None}}, "takes one of steps, tokens and minutes, got none"),
        ({"data": {"sources": []}}, "takes sources or a prepared corpus, got neither"),
        ({"data": {"corpus": "x"}}, "takes sources or a prepared corpus, got both"),
        ({"data": {"sources": [], "corpus": "x"}}, "is settled in the prepared corpus"),
        ({"model": {"max_positions": 8}}, "data.context = 16: is longer than model.max_positions=8"),
        ({"name": "../up"}, "name"),
        ({"seed": -1}, "seed"),
        ({"optimizer": {"lr": 0}}, "optimizer.lr"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "betas"),
        ({"schedule": {"warmup": -1}}, "schedule.warmup"),
        ({"train": {"precision": "float8"}}, "unknown choice `float8`"),
        ({"train": {"device": "tpu"}}, "train.device"),
        ({"model": {"atention": 1}}, "model.atention: unknown key `atention`; did you mean `attention`?"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, change, words):
    said = "\n".join(problems(table(tmp_path, **change)))
    assert words in said


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tmp_path):
    run = load_run(table(tmp_path, model={"vocab_size": 100}))
    with pytest.raises(UserError, match="smaller than the tokenizer's"):
        run.spec(257)
    assert load_run(table(tmp_path, model={"vocab_size": 300})).spec(257).vocab_size == 300


def test_files_that_are_no_runs_are_refused(tmp_path):
    (tmp_path / "bad.toml").write_text("a = [", encoding="utf-8")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    for name, words in (("bad.toml", "not TOML"), ("binary.toml", "not UTF-8"), ("absent.toml", "no such file")):
        with pytest.raises(UserError, match=words):
            load_run(tmp_path / name)
    assert RECIPE


def test_a_recipe_is_told_from_a_run(tmp_path):
    """One problem, and what to write instead of it."""
    with pytest.raises(SpecError, match="a model recipe, not a run") as caught:
        load_run("llama-tiny", ["train.steps=3"])
    (problem,) = caught.value.problems
    assert "model = 'llama-tiny'" in problem.remedy
    with pytest.raises(SpecError, match="a model recipe, not a run") as caught:
        load_run(RECIPE)
    assert len(caught.value.problems) == 1
    assert len(problems({"d_model": 3, "data": {}})) > 3


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"architecture": "encoder"}, "an encoder with a language head"),
        ({"head": "none", "tie": False}, "a decoder with no head"),
        ({"attention": {**RECIPE["attention"], "mask": "prefix"}}, "a prefix model"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_before_any_text_is_read(tmp_path, model, said):
    with pytest.raises(UserError, match="cannot be trained here") as caught:
        load_run(table(tmp_path, model={**RECIPE, **model}, data={"sources": ["there is no such text.txt"]}))
    assert said in str(caught.value)


def modules_after(code):
    script = f"import sys\n{code}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import anyformer.train.run, anyformer.train.schedule",
        "from anyformer.train import load_run, ratio",
        # A mistake is said before torch is loaded.
        "from anyformer.cli.train import train_on_console\n"
        "try:\n    train_on_console('demo', ['model.architecture=encoder'])\n"
        "except ValueError as error:\n    assert 'cannot be trained' in str(error)\nelse:\n    raise SystemExit(1)",
        "from anyformer.train import load_run\nfrom anyformer.train.planned import expected_spec, planned, steps_of\n"
        "run = load_run('demo'); planned(run, expected_spec(run)).table(); steps_of(run)",
    ],
)
def test_a_run_is_read_and_planned_without_torch(code):
    assert "torch" not in modules_after(code)


def test_the_public_names_of_the_room_are_all_there():
    import anyformer.train as room

    assert set(room.__all__) <= set(dir(room))
    for name in room.__all__:
        assert getattr(room, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = room.trian


def test_a_bfloat16_run_says_what_its_plan_counts(tmp_path):
    """Weights and moments stay float32 under autocast; the plan counts activations so, too, and says it."""
    run = load_run(table(tmp_path, train={"precision": "bfloat16"}))
    spec = run.spec(257)
    plan, plain = planned(run, spec), planned(load_run(table(tmp_path)), spec)
    assert plan.memory == plain.memory
    assert "counted as float32" in plan.table()
    assert "counted as float32" not in plain.table()


def test_one_source_may_stand_without_a_list(tmp_path):
    run = table(tmp_path, sample={"prompts": "once"})
    assert load_run(run, ["data.sources=missing.txt"]).data.sources == ("missing.txt",)
    assert load_run(run).sample.prompts == ("once",)
    with pytest.raises(SpecError, match="should be a list"):
        load_run(run, ["data.sources=3"])


@pytest.mark.parametrize(
    ("name", "said"), [("x" * 101, "100"), ("a/b", "letters"), ("-x", "letters"), ("", "letters"), ("a\n", "letters")]
)
def test_a_name_that_cannot_be_is_explained_in_words(tmp_path, name, said):
    with pytest.raises(SpecError, match=said) as caught:
        load_run(table(tmp_path, name=name))
    assert "pattern" not in str(caught.value)
    assert load_run(table(tmp_path, name="x" * 100)).name == "x" * 100
