"""The deep run: its counts, its exit codes, and how it shrinks what breaks a law."""

import subprocess
import sys
import tomllib
from dataclasses import replace
from functools import cache

import pytest
import torch

from anyformer.laws import command, law, run, trial
from anyformer.laws.result import Result
from anyformer.laws.shrink import candidates, places, shrink
from anyformer.laws.space import sample
from anyformer.laws.trial import Violation, attempt, described, smallest
from anyformer.spec import SpecError, expand


def _result(holds, error=0.0):
    return Result("causality", holds, error, 1e-5, "token 3", "compared")


@pytest.fixture
def breaks(monkeypatch):
    """Puts a law in place of causality's, and leaves it alone."""

    def place(check):
        monkeypatch.setitem(law.LAWS, "causality", check)

    return place


def _alibi(model, seed):
    """A law that models with ALiBi break."""
    stacks = model.spec.stacks.values()
    broken = any(block.attention.position.kind == "alibi" for stack in stacks for block in stack.blocks)
    return _result(not broken, 0.5 * broken)


@cache
def _seed_that_breaks():
    for seed in range(1000):
        spec = expand(sample(seed))
        if len(spec.stacks) == 2 and spec.decoder.n_layers > 1:
            positions = [b.attention.position.kind for b in spec.decoder.blocks]
            if "alibi" in positions and "alibi" not in [b.attention.position.kind for b in spec.encoder.blocks]:
                return seed
    raise AssertionError("the space has no such recipe")


def _alibi_alone(table):
    position = table["attention"]["position"]
    return position == "alibi" or position == {"kind": "alibi"}


def test_an_injected_fault_shrinks_to_what_it_needs_and_prints_as_what_reproduces_it(breaks):
    breaks(_alibi)
    seed = _seed_that_breaks()
    violation = attempt(sample(seed), seed, ["causality"]).violations[0]
    found = smallest(sample(seed), violation)
    assert _alibi_alone(found)
    spec = expand(found)
    assert list(spec.stacks) == ["decoder"]
    assert spec.decoder.n_layers == 1
    assert len(list(places(found))) <= 12

    words = described(found, violation)
    assert "causality" in words
    assert f"--seed {seed}" in words
    assert "token 3" in words
    assert attempt(tomllib.loads(words), seed, ["causality"]).violations == [violation]


def test_a_crash_in_a_law_is_a_violation_of_it_and_shrinks_as_one(breaks):
    def crash(model, seed):
        if model.spec.last.blocks[0].attention.softcap is not None:
            raise RuntimeError("two\nlines")
        return _result(True)

    breaks(crash)
    seed = next(s for s in range(100) if attempt(sample(s), s, ["causality"]).violations)
    violation = attempt(sample(seed), seed, ["causality"]).violations[0]
    assert violation.crash == "RuntimeError"
    assert "RuntimeError: two; lines" in violation.what
    assert "test_run.py" in violation.what
    found = expand(smallest(sample(seed), violation))
    assert found.last.blocks[0].attention.softcap is not None
    assert found.last.n_layers == 1


def test_a_warning_in_a_law_is_a_violation(breaks):
    import warnings

    def warn(model, seed):
        warnings.warn("careful", stacklevel=1)
        return _result(True)

    breaks(warn)
    assert attempt(sample(0), 0, ["causality"]).violations[0].crash == "UserWarning"


def test_a_recipe_that_is_refused_is_a_violation_of_the_space():
    found = attempt({**sample(0), "vocab_size": 0}, 0).violations
    assert [(each.law, each.crash) for each in found] == [("space", "SpecError")]


def test_a_refused_recipe_shrinks_too():
    table = {**sample(3, architectures=["decoder"]), "vocab_size": 0}
    violation = attempt(table, 3).violations[0]
    found = smallest(table, violation, tries=300)
    assert found["vocab_size"] == 0
    with pytest.raises(SpecError):
        expand(found)


def test_a_model_that_cannot_be_built_is_a_violation(monkeypatch):
    def broken(spec, seed):
        raise KeyError("weight")

    monkeypatch.setattr(trial, "fresh", broken)
    found = attempt(sample(0), 0).violations
    assert [(each.law, each.crash) for each in found] == [("build", "KeyError")]


def test_exempt_laws_are_counted_apart(breaks):
    breaks(lambda model, seed: _result(None))
    found = attempt(sample(0), 0, ["causality"])
    assert (found.checked, found.exempt, found.violations) == (0, 1, [])


def test_what_does_not_fail_is_not_smaller():
    table = {"a": 1, "b": {"c": True, "d": [3, 4]}}
    assert shrink(table, lambda _: False) == table
    assert shrink(table, lambda t: "c" in t.get("b", {})) == {"b": {"c": True}}


def test_shrinking_stops_when_tries_or_time_run_out():
    table = {str(i): i for i in range(50)}
    asked = []
    shrink(table, lambda t: asked.append(t) or True, tries=10)
    assert len(asked) == 9
    assert shrink(table, lambda _: True, seconds=0.0) == table


def test_candidates_do_not_change_what_they_come_from():
    table = sample(_seed_that_breaks())
    before = repr(table)
    assert len(list(candidates(table))) > 20
    assert repr(table) == before


def test_the_last_line_counts(breaks, capsys):
    breaks(_alibi)
    code = command.main(["12", "--laws", "causality", "--processes", "1", "--no-shrink"])
    broken = sum(not _alibi_free(expand(sample(seed))) for seed in range(12))
    assert broken
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith(f"12 specifications, 12 laws checked, 0 exempt, {broken} violations, ")
    assert code == 1


def _alibi_free(spec):
    blocks = [block for stack in spec.stacks.values() for block in stack.blocks]
    return all(block.attention.position.kind != "alibi" for block in blocks)


def test_a_run_without_a_violation_is_done(breaks, capsys):
    breaks(lambda model, seed: _result(True))
    assert command.main(["3", "--laws", "causality", "--processes", "1", "--seed", "40"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("3 specifications, 3 laws checked, 0 exempt, 0 violations")
    assert err == ""


def test_seeds_of_violations_alike_are_listed(breaks, capsys):
    breaks(lambda model, seed: _result(False, 0.1))
    assert command.main(["3", "--laws", "causality", "--processes", "1", "--no-shrink"]) == 1
    out = capsys.readouterr().out
    assert "# the same of seeds 1, 2" in out
    assert out.count("# causality:") == 1


@pytest.mark.slow
def test_processes_give_what_one_gives():
    names = ["round trip"]
    one = run.Tally()
    for found in run.trials(range(4), names, 1):
        one.add(found)
    many = run.Tally()
    for found in run.trials(range(4), names, 2):
        many.add(found)
    assert replace(one) == many
    assert one.specs == 4


@pytest.mark.parametrize(("arguments", "words"), [(["--laws", "no-such"], "no such law"), (["0"], "at least 1")])
def test_mistakes_are_said(arguments, words, capsys):
    try:
        code = command.main(arguments)
    except SystemExit as leaving:
        code = leaving.code
    assert code == 2
    assert words in capsys.readouterr().err


def test_a_mistake_is_said_without_torch():
    code = (
        "import sys, runpy\nsys.argv = ['laws', '--laws', 'plam']\n"
        "try: runpy.run_module('anyformer.laws', run_name='__main__')\n"
        "except SystemExit as leaving: sys.exit(leaving.code if 'torch' not in sys.modules else 3)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "did you mean `plan`?" in done.stderr


def test_what_comes_before_the_laws_can_be_asked_for_alone(capsys):
    """As the command under a violation of it does."""
    assert command.main(["2", "--laws", "space", "--processes", "1"]) == 0
    assert capsys.readouterr().out.startswith("2 specifications, 0 laws checked, 0 exempt, 0 violations")
    table = {**sample(3), "vocab_size": 0}
    words = described(table, attempt(table, 3).violations[0])
    assert "python -m anyformer.laws 1 --seed 3 --laws space" in words
    assert words.splitlines()[2].endswith("anyformer verify smallest.toml --seed 3")


def test_a_violation_before_the_laws_that_is_gone_is_none():
    assert not trial._fails_like(sample(3), Violation(3, "build", "KeyError: weight", "KeyError"))


def test_an_interrupt_counts_what_was_done(breaks, capsys):
    def interrupt(model, seed):
        raise KeyboardInterrupt

    breaks(interrupt)
    assert command.main(["2", "--laws", "causality", "--processes", "1"]) == 130
    assert "0 specifications" in capsys.readouterr().out


def test_violations_are_kept_apart_by_law_and_exception():
    tally = run.Tally(
        violations=[Violation(5, "cache", "b"), Violation(2, "cache", "a"), Violation(1, "cache", "c", "E")]
    )
    assert [[each.seed for each in kind] for kind in tally.kinds()] == [[1], [2, 5]]


def test_the_runner_uses_one_thread_a_process():
    before = torch.get_num_threads()
    try:
        trial.one_thread()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
