import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_runs import table

import anyformer
from anyformer.checkpoint import load
from anyformer.errors import UserError
from anyformer.nn.model import build
from anyformer.report.runs import read_metrics
from anyformer.train import Diverged, train
from anyformer.train.schedule import Cosine, ratio
from anyformer.train.state import read_state

SOURCE = str(Path(anyformer.__file__).parents[1])


class StopAfter:
    """An observer that sends this process a signal once a step is done."""

    def __init__(self, step, number=signal.SIGTERM):
        self.step, self.number = step, number

    def start(self, info):
        pass

    def record(self, record):
        if record["kind"] == "train" and record["step"] == self.step:
            os.kill(os.getpid(), self.number)

    def end(self):
        pass


class Twice(StopAfter):
    """Sends it twice."""

    def record(self, record):
        super().record(record)
        super().record(record)


def go(folder, root="runs", report=False, observers=(), signals=False, resume=False, fresh=False, **changes):
    return train(
        table(folder, **changes),
        root=folder / root,
        report=report,
        observers=observers,
        signals=signals,
        resume=resume,
        fresh=fresh,
    )


def records(run, kind):
    return [r for r in read_metrics(run / "metrics.jsonl")[0] if r["kind"] == kind]


def in_a_new_process(code):
    environment = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", f"import torch; torch.set_num_threads(1)\n{code}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def comparable(run):
    keys = ("step", "loss", "lr", "grad_norm", "tokens", "batch")
    return [[r[k] for k in keys] for r in records(run, "train")]


def weights(run, step=20):
    folder = run / "checkpoints" / f"step-{step:06d}"
    return load_file(folder / "model.safetensors"), load_file(folder / "train" / "optimizer.safetensors")


DROPOUT = {"model": {"dropout": 0.1}, "train": {"evaluate_every": 5, "keep": 9}, "seed": 5}
SAMPLES = {"sample": {"prompts": ["000 the"], "max_new_tokens": 4}}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_b09_stopped_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path, kind):
    """Dropout 0.1, an epoch of 7 steps, stopped at 5, 7 and 11, resumed in a new process."""
    changes = {**DROPOUT, **SAMPLES, "optimizer": {"kind": kind, "lr": 0.01}}
    straight = go(tmp_path, "straight", **changes)
    assert straight.finished
    stops = (5, 7, 11)
    for stop in stops:
        result = go(tmp_path, f"stop{stop}", observers=[StopAfter(stop)], signals=True, **changes)
        assert not result.finished
        assert (result.step, result.signum) == (stop, signal.SIGTERM)
        assert (result.folder / "checkpoints" / "last").resolve().name == f"step-{stop:06d}"
    outcome = in_a_new_process(
        "import json, pathlib, anyformer.train as t\n"
        f"for stop in {stops}:\n"
        f"    root = pathlib.Path({str(tmp_path)!r}) / f'stop{{stop}}'\n"
        "    run = json.loads((root / 'tiny' / 'run.json').read_text())['run']\n"
        "    result = t.train(run, root=root, resume=True, report=False)\n"
        "    assert result.finished\n"
    )
    assert outcome.returncode == 0, outcome.stderr
    wanted = weights(straight.folder)
    for stop in stops:
        folder = tmp_path / f"stop{stop}" / "tiny"
        assert comparable(folder) == comparable(straight.folder)
        for mine, theirs in zip(weights(folder), wanted, strict=True):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        for kind_ in ("eval", "sample"):
            drop = ("evaluation_seconds",)
            mine, theirs = (
                [{k: v for k, v in r.items() if k not in drop} for r in records(f, kind_)]
                for f in (folder, straight.folder)
            )
            assert mine == theirs
    losses = [r["loss"] for r in records(straight.folder, "train")]
    assert losses[-1] < losses[0] - 0.5


def test_dropout_is_on_and_looking_does_not_change_the_run(tmp_path):
    """Evaluation and samples at other steps leave every loss as it was; without dropout the losses differ."""
    base = go(tmp_path, "a", **DROPOUT).folder
    other = {**DROPOUT, **SAMPLES, "train": {"evaluate_every": 3}}
    assert comparable(go(tmp_path, "b", **other).folder) == comparable(base)
    dry = {**DROPOUT, "model": {}}
    assert comparable(go(tmp_path, "c", **dry).folder)[0][1] != comparable(base)[0][1]


def test_the_run_folder_holds_what_it_should(tmp_path):
    result = go(tmp_path, report=True, track={"tensorboard": True}, **SAMPLES)
    run = json.loads((result.folder / "run.json").read_text())
    assert run["state"] == "finished"
    assert run["steps"] == 20
    assert run["tokens_per_step"] == 64
    loaded = load(result.folder)
    assert run["parameters"] == sum(p.numel() for p in loaded.model.parameters()) == run["plan"]["parameters"]
    assert run["run"]["train"]["clip"] == 1.0
    assert {p.name for p in result.folder.iterdir()} == {
        "run.json",
        "metrics.jsonl",
        "report.html",
        "checkpoints",
        "corpus",
        "tensorboard",
    }
    assert any((result.folder / "tensorboard").iterdir())
    steps = [r["step"] for r in records(result.folder, "train")]
    assert steps == list(range(1, 21))
    for r in records(result.folder, "train"):
        assert r["lr"] == pytest.approx(1e-3 * ratio(Cosine(), r["step"] - 1, 20))
        assert r["tokens"] == 64 * r["step"]
    assert [r["step"] for r in records(result.folder, "sample")] == list(range(2, 21, 2))
    checkpoints = result.folder / "checkpoints"
    assert (checkpoints / "best").resolve() == (checkpoints / f"step-{result.best_step:06d}").resolve()
    assert not os.path.isabs(os.readlink(checkpoints / "best"))
    assert not list(result.folder.rglob("*.pt"))
    assert not list(result.folder.rglob("*.pkl"))
    text = loaded.generate("000 the", max_new_tokens=5)
    assert isinstance(text, str)


def test_validation_is_reported_as_the_model_scores_it(tmp_path):
    """The last evaluation equals one of the saved model by itself."""
    from anyformer.text.corpus import Corpus
    from anyformer.train import evaluate_split

    result = go(tmp_path)
    corpus = Corpus.open(result.folder / "corpus")
    score = evaluate_split(load(result.folder / "checkpoints" / "last").model, corpus.val, context=16)
    assert score.n_tokens == corpus.val.n_tokens - 1
    assert result.score.loss == pytest.approx(score.loss, rel=1e-6)


def test_the_last_and_the_best_stay(tmp_path):
    """A rate that ruins the model late keeps the best early checkpoint beside the last two."""
    changes = {
        "train": {"steps": 30, "checkpoint_every": 3, "evaluate_every": 6, "keep": 2, "clip": 0},
        "optimizer": {"lr": 0.02, "weight_decay": 0.0},
        "schedule": "constant",
    }
    result = go(tmp_path, **changes)
    names = sorted(p.name for p in (result.folder / "checkpoints").glob("step-*"))
    best = f"step-{result.best_step:06d}"
    assert names == sorted({"step-000027", "step-000030", best})
    evaluations = records(result.folder, "eval")
    assert result.best_loss == min(r["loss"] for r in evaluations)
    assert (result.folder / "checkpoints" / "best").resolve().name == best


def test_a_run_that_is_there_is_neither_overwritten_nor_resumed_unasked(tmp_path):
    result = go(tmp_path)
    (result.folder / "notes.txt").write_text("mine")
    before = (result.folder / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="already") as caught:
        go(tmp_path)
    assert "--resume" in str(caught.value)
    assert "--fresh" in str(caught.value)
    assert (result.folder / "metrics.jsonl").read_bytes() == before
    again = go(tmp_path, fresh=True, train={"steps": 4})
    assert again.step == 4
    assert (result.folder / "notes.txt").read_text() == "mine"
    assert len(records(result.folder, "train")) == 4
    assert not (result.folder / "checkpoints" / "step-000020").exists()


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"vocab_size": 50}}, "smaller than the tokenizer's"),
        ({"data": {"context": 5000}}, "shorter than the context"),
        ({"data": {"sources": ["absent.txt"]}}, "no such file"),
    ],
)
def test_a_fresh_run_that_cannot_begin_leaves_the_old_one_whole(tmp_path, changes, said):
    folder = go(tmp_path, train={"steps": 4}).folder
    before = contents(folder)
    (tmp_path / "text.txt").write_text("other text, of which a corpus would be another " * 20)
    with pytest.raises(UserError, match=said):
        go(tmp_path, fresh=True, **changes)
    assert contents(folder) == before


def test_resume_needs_a_run_and_the_same_description(tmp_path):
    with pytest.raises(UserError, match="no run to resume"):
        go(tmp_path, resume=True)
    go(tmp_path, train={"steps": 6})
    with pytest.raises(UserError, match="another description") as caught:
        go(tmp_path, resume=True, train={"steps": 6}, optimizer={"lr": 0.5}, seed=9)
    assert "optimizer.lr: 0.001 became 0.5" in str(caught.value)
    assert "seed: 0 became 9" in str(caught.value)
    with pytest.raises(UserError, match="past that step"):
        go(tmp_path, resume=True, train={"steps": 3})
    with pytest.raises(UserError, match="not both"):
        go(tmp_path, resume=True, fresh=True)


def test_a_run_can_be_made_longer(tmp_path):
    first = go(tmp_path, train={"steps": 6})
    longer = go(tmp_path, resume=True, train={"steps": 12, "evaluate_every": 4, "keep": 1})
    assert (first.step, longer.step) == (6, 12)
    assert [r["step"] for r in records(longer.folder, "train")] == list(range(1, 13))
    done = go(tmp_path, resume=True, train={"steps": 12})
    assert done.finished
    assert done.score == longer.score
    assert len(records(longer.folder, "train")) == 12


def test_other_data_are_noticed(tmp_path):
    from anyformer.text.corpus import prepare

    result = go(tmp_path, train={"steps": 4})
    (tmp_path / "text.txt").write_text("something else entirely " * 40)
    prepare([str(tmp_path / "text.txt")], result.folder / "corpus", "byte", val_fraction=0.2)
    with pytest.raises(UserError, match="not those that the run began with"):
        go(tmp_path, resume=True, train={"steps": 8})


def test_resuming_does_not_read_the_sources_again(tmp_path):
    go(tmp_path, train={"steps": 4})
    (tmp_path / "text.txt").write_text("changed " * 90)
    assert go(tmp_path, resume=True, train={"steps": 6}).step == 6


def test_metrics_after_the_checkpoint_are_made_again_once(tmp_path):
    """A crash between checkpoints leaves lines that resuming replaces, and a line cut short that it drops."""
    result = go(tmp_path, train={"steps": 6, "checkpoint_every": 6, "evaluate_every": 6})
    path = result.folder / "metrics.jsonl"
    lines = path.read_text().splitlines()
    extra = json.dumps({"kind": "train", "step": 7, "loss": 1.0})
    path.write_text("\n".join([*lines, extra, '{"kind": "train", "st']))
    go(tmp_path, resume=True, train={"steps": 9})
    steps = [r["step"] for r in records(result.folder, "train")]
    assert steps == list(range(1, 10))
    assert [r["loss"] for r in records(result.folder, "train")][6] != 1.0
    for line in path.read_text().splitlines():
        json.loads(line)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_after_the_step_and_handlers_come_back(tmp_path, number):
    before = signal.getsignal(number)
    result = go(tmp_path, observers=[StopAfter(3, number)], signals=True)
    assert (result.step, result.signum, result.finished) == (3, number, False)
    assert signal.getsignal(number) is before
    run = json.loads((result.folder / "run.json").read_text())
    assert run["state"] == "stopped"
    assert load(result.folder / "checkpoints" / "last").spec.vocab_size == 257


def test_an_evaluation_that_gave_way_to_a_stop_is_made_up_for(tmp_path):
    """Stopped at the last step, before its evaluation: resuming evaluates, and the checkpoint knows it as the best."""
    result = go(tmp_path, observers=[StopAfter(5)], signals=True, train={"steps": 5, "evaluate_every": 5})
    assert (result.step, result.finished, result.score) == (5, False, None)
    assert records(result.folder, "eval") == []
    result = go(tmp_path, resume=True, train={"steps": 5, "evaluate_every": 5})
    assert result.finished
    assert [r["step"] for r in records(result.folder, "eval")] == [5]
    state = read_state(result.folder / "checkpoints" / "best")
    assert (state.best_step, state.evaluated, state.best_loss) == (5, 5, result.score.loss)


def test_a_second_signal_stops_at_once_without_half_a_checkpoint(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, observers=[Twice(5, signal.SIGINT)], signals=True, train={"checkpoint_every": 2})
    checkpoints = tmp_path / "runs" / "tiny" / "checkpoints"
    assert (checkpoints / "last").resolve().name == "step-000004"
    assert go(tmp_path, resume=True, train={"checkpoint_every": 2}).finished


def test_a_run_without_a_checkpoint_resumes_from_the_beginning(tmp_path):
    straight = go(tmp_path, "straight", train={"steps": 4})
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, observers=[Twice(1)], signals=True, train={"steps": 4, "evaluate_every": 4})
    result = go(tmp_path, resume=True, train={"steps": 4, "evaluate_every": 4})
    assert comparable(result.folder) == comparable(straight.folder)


def test_a_loss_that_diverges_stops_with_step_batch_and_last_good_checkpoint(tmp_path):
    changes = {
        "optimizer": {"lr": 1e18, "weight_decay": 0.0},
        "schedule": "constant",
        "train": {"clip": 0, "checkpoint_every": 1, "evaluate_every": 100},
    }
    with pytest.raises(Diverged) as caught:
        go(tmp_path, report=True, **changes)
    said = str(caught.value)
    folder = tmp_path / "runs" / "tiny"
    last = (folder / "checkpoints" / "last").resolve()
    step = int(last.name[5:]) + 1
    assert f"step {step}, batch " in said
    assert last.name in said
    assert "first at " in said
    found = records(folder, "diverged")
    assert found[0]["step"] == step
    assert found[0]["batch"] in said
    assert len(found[0]["starts"]) == 4
    assert load(last).spec.vocab_size == 257
    assert json.loads((folder / "run.json").read_text())["state"] == "diverged"
    assert (folder / "report.html").exists()


def test_what_breaks_in_bfloat16_alone_is_found_in_bfloat16(tmp_path, monkeypatch):
    """A weight between bfloat16's largest number and float32's becomes infinite under autocast only."""

    def broken(*arguments, **keywords):
        model = build(*arguments, **keywords)
        with torch.no_grad():
            model.decoder.blocks[1].ffn.up.weight.mul_(1e-3)
            model.decoder.blocks[1].ffn.down.weight[0, 0] = 3.4e38
        return model

    monkeypatch.setattr("anyformer.train.loop.build", broken)
    with pytest.raises(Diverged, match=r"first at blocks\.1\.mlp_out"):
        go(tmp_path, train={"steps": 2, "precision": "bfloat16"})


def test_a_deep_post_norm_stack_without_warm_up_is_warned_of(tmp_path):
    deep, none = {"n_layers": 12, "placement": "post"}, {"kind": "cosine", "warmup": 0}
    with pytest.warns(UserWarning, match="post-norm stack of 12 layers without warm-up"):
        go(tmp_path, "a", model=deep, schedule=none, train={"steps": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        go(tmp_path, "b", model=deep, schedule={"kind": "cosine", "warmup": 1}, train={"steps": 1})
        go(tmp_path, "c", model={**deep, "n_layers": 11}, schedule=none, train={"steps": 1})
        go(tmp_path, "d", model={"n_layers": 12}, schedule=none, train={"steps": 1})


def test_tokens_and_minutes_become_steps(tmp_path):
    assert go(tmp_path, "a", train={"steps": None, "tokens": 65 * 4}).steps == 5
    timed = go(tmp_path, "b", train={"steps": None, "minutes": 0.01})
    assert timed.finished
    assert timed.steps > 5
    run = table(tmp_path, train={"steps": None, "minutes": 0.01})
    again = train(run, root=tmp_path / "b", resume=True, report=False)
    assert again.steps == timed.steps


def test_documents_packing_trains(tmp_path):
    for index in range(30):
        (tmp_path / f"{index}.txt").write_text(f"{index} is a number, and {index + 1} comes next\n" * (index % 3 + 1))
    run = table(tmp_path, data={"packing": "documents", "val_fraction": 0.3})
    run["data"]["sources"] = [str(tmp_path)]
    result = train(run, root=tmp_path / "runs", report=False)
    assert result.finished
    assert any(r["targets"] < 64 for r in records(result.folder, "train"))


def test_no_validation_text_means_no_evaluation(tmp_path):
    result = go(tmp_path, data={"val_fraction": 0.0})
    assert result.score is None
    assert result.finished
    assert (result.folder / "checkpoints" / "best").resolve().name == "step-000020"


def test_bfloat16_and_every_tokenizer_train(tmp_path):
    for index, tokenizer in enumerate(["char", {"kind": "bpe", "vocab_size": 280}]):
        result = go(tmp_path, f"r{index}", data={"tokenizer": tokenizer}, train={"precision": "bfloat16", "steps": 3})
        assert result.finished
    folder = tmp_path / "r1" / "tiny" / "corpus" / "tokenizer"
    again = go(tmp_path, "r9", data={"tokenizer": {"kind": "file", "path": str(folder)}}, train={"steps": 2})
    assert load(again.folder).tokenizer.vocab_size == 280


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file"),
        (b"", "empty"),
        (b"abc\x00def" * 100, "binary"),
        (b"abc\xff\xfe" * 100, "UTF-8"),
        (b"short", "shorter than"),
    ],
)
def test_text_that_cannot_be_learned_from_is_refused(tmp_path, content, words):
    run = table(tmp_path)
    file = tmp_path / "text.txt"
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError) as caught:
        train(run, root=tmp_path / "runs", report=False)
    assert words in str(caught.value)
    assert not (tmp_path / "runs" / "tiny" / "checkpoints").exists()
    assert not (tmp_path / "runs" / "tiny" / "run.json").exists()


def test_a_sample_prompt_that_cannot_be_continued_is_said_before_training(tmp_path):
    with pytest.raises(UserError):
        go(tmp_path, sample={"prompts": [LONG]})
    assert not (tmp_path / "runs" / "tiny" / "metrics.jsonl").exists()


LONG = "a prompt that is longer than the context of sixteen"


def test_missing_tensorboard_is_said_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr("anyformer.train.metrics.find_spec", lambda name: None)
    with pytest.raises(UserError, match="TensorBoard is not installed") as caught:
        go(tmp_path, track={"tensorboard": True})
    assert "pip install" in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_compile_without_a_compiler_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("anyformer.train.setup.shutil.which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match=r"C\+\+ compiler"):
        go(tmp_path, train={"compile": True, "device": "cpu"})


def test_library_use_is_silent_and_leaves_the_random_state_alone(tmp_path, capfd):
    state = torch.get_rng_state()
    go(tmp_path, train={"steps": 2})
    assert capfd.readouterr() == ("", "")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_run_equals_an_eager_one(tmp_path):
    if not any(map(shutil.which, ("g++", "clang++", "c++"))):
        pytest.skip("no C++ compiler here")
    losses = []
    for root, compiled in (("eager", False), ("compiled", True)):
        # A micro-batch that does not divide the batch changes the shape in every step.
        result = go(tmp_path, root, train={"steps": 4, "compile": compiled, "device": "cpu"})
        losses.append([r["loss"] for r in records(result.folder, "train")])
        load(result.folder)
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
