"""`anyformer plan`: models and whole runs, from their descriptions."""

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from anyformer.cli.plan import plan
from anyformer.cli.train import train
from anyformer.errors import UserError
from anyformer.planning import plan as make_plan
from anyformer.spec import load_spec, recipe_names

verbs = typer.Typer(pretty_exceptions_enable=False)
verbs.command()(plan)
verbs.command()(train)


def run(*words):
    result = CliRunner().invoke(verbs, [*map(str, words)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def planned(*words):
    return json.loads(run("plan", *words, "--json"))


def test_the_list_tells_models_and_runs_apart():
    names = json.loads(run("plan", "--list", "--json"))
    assert list(names) == ["models", "runs"]
    assert "demo" in names["runs"]
    assert "llama-tiny" in names["models"]
    assert sorted(names["models"] + names["runs"]) == recipe_names()
    listed = run("plan", "--list")
    assert listed.index("llama-tiny") < listed.index("runs") < listed.index("demo")


@pytest.mark.parametrize("name", recipe_names())
def test_all_that_is_listed_can_be_planned(name):
    assert planned(name)["parameters"] > 0


def test_a_run_is_planned_as_it_would_be_trained():
    changes = ("--set", "train.micro_batch=3", "--set", "model.n_layers=2")
    for words in ((), changes):
        assert planned("demo", *words) == json.loads(run("train", "demo", "--dry-run", "--json", *words))["plan"]
    whole = planned("demo", *changes)
    assert (whole["batch"], whole["context"], whole["optimizer"]) == (3, 256, "muon")


def test_options_go_before_the_run():
    made = planned("demo", "--batch", 5, "--context", 99, "--optimizer", "sgd", "--memory", "4GiB")
    assert (made["batch"], made["context"], made["optimizer"]) == (5, 99, "sgd")
    assert made["largest_batch"]["rows"] > planned("demo", "--memory", "4GiB")["largest_batch"]["rows"]


RUN = """
[model]
d_model = 24
n_layers = 1
ffn = "swiglu"
attention = {{ n_heads = 2, position = "rope" }}
[data]
sources = ["{}"]
tokenizer = "char"
context = 20
[train]
steps = 3
"""


def test_a_run_file_with_characters_counts_them(tmp_path):
    (tmp_path / "text.txt").write_text("abcdefg " * 200)
    file = tmp_path / "mine.toml"
    file.write_text(RUN.format(tmp_path / "text.txt"))
    made = planned(file)
    assert made["facts"]["vocabulary"].startswith("8")
    assert (made["batch"], made["context"], made["optimizer"]) == (16, 20, "adamw")
    bfloat16 = ("--set", "train.precision=bfloat16")
    assert planned(file, *bfloat16) == json.loads(run("train", file, "--dry-run", "--json", *bfloat16))["plan"]


def test_planning_a_run_imports_no_torch():
    code = "from anyformer.cli.main import run\nimport sys\ntry: run()\nfinally: print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "plan", "demo"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_a_model_is_planned_as_before(tmp_path):
    made = planned("llama-tiny")
    assert made == json.loads(json.dumps(make_plan(load_spec("llama-tiny")).to_dict()))
    assert (made["batch"], made["context"], made["optimizer"]) == (8, 256, "adamw")


def test_a_source_is_planned_beside_the_target():
    made = planned("t5-small", "--context", 30, "--source", 50)
    spec = load_spec("t5-small")
    assert made == json.loads(json.dumps(make_plan(spec, context=30, source=50).to_dict()))
    assert "30 tokens from 50" in run("plan", "t5-small", "--context", 30, "--source", 50, "--memory", "8GiB")
    with pytest.raises(UserError, match="only an encoder–decoder reads a source"):
        run("plan", "llama-tiny", "--source", 5)


def test_a_name_with_a_dot_is_a_name():
    assert "494,032,768" in run("plan", "qwen-2-0.5b")
    with pytest.raises(UserError, match="did you mean `qwen"):
        run("plan", "qwen-2-0.5")


def test_mistakes_are_user_errors(tmp_path):
    for words in (("demmo",), ("absent.toml",), (), ("demo", "--set", "train.stepps=3"), ("demo", "--optimizer", "x")):
        with pytest.raises(UserError):
            run("plan", *words)
