"""The law of the round trip through an ejected file: what it compares, and that it notices what is wrong with one."""

import math

import pytest
import torch

from anyformer.laws import eject as law
from anyformer.laws import mutant as models
from anyformer.laws.draw import fresh, wide
from anyformer.laws.law import judge, settled
from anyformer.laws.result import Findings
from anyformer.spec import expand

PREFIX = models.attention(mask="prefix")
LABELS = models.recipe(head={"kind": "token", "n_labels": 3})
"""A decoder that must know which tokens are real."""
TYPED = models.ENCODER | {"embed": {"types": 2}, "head": {"kind": "none"}}
SCALED = models.attention(position={"kind": "rope", "scaling": {"kind": "dynamic", "factor": 2.0, "original": 13}})
CACHE = "call with a cache"


def seen(recipe, dtype=torch.float32):
    """Every comparison that the law makes, with its error."""
    findings = Findings("law", 1.0)
    law.check(wide(fresh(expand(recipe), 3), dtype), 3, findings)
    return {where.removeprefix("an ejected file's "): error for error, where in findings._seen}


@pytest.mark.parametrize(
    ("recipe", "compared"),
    [
        (models.LEARNED, {"scores", CACHE}),
        (PREFIX, {"scores", CACHE}),
        (SCALED, {"scores", CACHE}),
        (LABELS, {"scores", "scores of padded rows", CACHE}),
        (TYPED, {"scores", "scores of padded rows"}),
        (models.BOTH, {"scores", "scores of padded sources", CACHE}),
    ],
    ids=["learned", "prefix", "by length", "labels", "types without a head", "both"],
)
def test_a_file_is_compared_in_every_way_that_it_can_be_called(recipe, compared):
    found = seen(recipe, torch.float64)
    said = {CACHE if where.startswith(CACHE) else where for where in found if not where.startswith("gradient")}
    assert said == compared
    names = {f"gradient of {name}" for name, _ in fresh(expand(recipe)).named_parameters()}
    assert names <= set(found)
    assert max(found.values()) < 1e-10, found
    if recipe is SCALED:
        assert f"{CACHE} for tokens 15 to 15" in found, "past the length at which frequencies change"
    assert any(found.values()), "not one and the same tensor"


def edited(monkeypatch, old, new):
    before = law.eject

    def eject(spec):
        text = before(spec)
        assert old in text
        return text.replace(old, new)

    monkeypatch.setattr(law, "eject", eject)


@pytest.mark.parametrize(
    ("recipe", "old", "new", "where"),
    [
        (models.recipe(), "NORM_EPS = 1e-06", "NORM_EPS = 1e-03", "scores"),
        (models.recipe(), "torch.cat([store[name], x], dim=1)", "torch.cat([x, store[name]], dim=1)", CACHE),
        (models.recipe(), "F.silu(self.gate(x))", "F.silu(self.gate(x)).detach()", "gradient of"),
        (LABELS, "(k <= q) & real[:, None, None, :]", "(k <= q)", "scores of padded rows"),
        (models.BOTH, "self.encode(source, source_real)", "self.encode(source)", "scores of padded sources"),
    ],
    ids=["epsilon", "cache", "gradient", "padding", "source"],
)
def test_what_is_wrong_with_a_file_is_named(monkeypatch, recipe, old, new, where):
    edited(monkeypatch, old, new)
    wrong = [name for name, error in seen(recipe).items() if error > 1e-4]
    assert where in wrong[0]
    result = settled(fresh(expand(recipe), 3), "round trip", 3)
    assert result.holds is False
    assert result.where.startswith("an ejected file's ")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("self.gate = ", "self.gates = ", "blocks.0.ffn.gates.weight"),
        ("class Model", "class Modell", "runs: NameError name 'Model' is not defined"),
        ("class Model(nn.Module):", "class Model(nn.Module)", "runs: SyntaxError"),
    ],
)
def test_a_file_that_does_not_run_breaks_the_law_and_raises_nothing(monkeypatch, old, new, said):
    edited(monkeypatch, old, new)
    (result,) = judge(expand(models.recipe()), laws=["round trip"])
    assert (result.holds, result.error) == (False, math.inf)
    assert said in result.where


def test_a_choice_of_experts_that_rounding_turns_is_decided_in_float64(monkeypatch):
    """The file follows the dtype of the weights: what float32 breaks, float64 holds."""
    before = law.ejected

    def ejected(model, text=None):
        file = before(model, text)
        if next(model.parameters()).dtype == torch.float32:
            file.model.register_forward_hook(lambda module, given, out: out + 1e-2)
        return file

    monkeypatch.setattr(law, "ejected", ejected)
    result = settled(fresh(expand(models.EXPERTS), 3), "round trip", 3)
    assert result.holds
    assert result.tolerance == 1e-10
    assert "in float32 rounding makes" in result.why
    assert settled(fresh(expand(models.recipe()), 3), "round trip", 3).holds is False, "without experts 1e-2 is none"
