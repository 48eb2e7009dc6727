import json
import math

import pytest
import torch

from anyformer.errors import UserError
from anyformer.laws import law as book
from anyformer.laws import mutant as models
from anyformer.laws import roundtrip
from anyformer.laws.causality import influence
from anyformer.laws.certificate import certify, weights_hash
from anyformer.laws.draw import Draw, fresh, longest, unreached
from anyformer.laws.law import LAWS, SLOW, chosen, judge, settled
from anyformer.laws.names import NAMES
from anyformer.laws.result import Findings, Result, error_of, exempt
from anyformer.nn.roles import roles
from anyformer.spec import expand

LEARNED, ENCODER, BOTH = (expand(r) for r in (models.LEARNED, models.ENCODER, models.BOTH))


def by_name(results):
    return {result.law: result for result in results}


@pytest.mark.parametrize(
    "recipe",
    [models.LATENT, models.EXPERTS, models.POOLED, models.BOTH, models.WINDOW],
    ids=["latent", "experts", "pooled", "both", "window"],
)
def test_a_model_that_is_whole_obeys_every_law(recipe):
    results = judge(expand(recipe), seed=5)
    assert [r.law for r in results] == [name for name in LAWS if name not in SLOW]
    assert [r for r in results if r.holds is False] == []
    assert all(r.why for r in results)


def test_what_does_not_apply_says_why():
    encoder = by_name(judge(ENCODER, laws=["cache", "cross", "accumulation", "shift"]))
    assert encoder["shift"].holds, "an encoder without positions does not know order"
    assert {n: r.why for n, r in encoder.items() if r.holds is None} == {
        "cache": "an encoder keeps no cache",
        "cross": "there is no encoder beside a decoder",
        "accumulation": "the head scores no vocabulary",
    }
    (shift,) = judge(LEARNED, laws=["shift"])
    assert (shift.holds, shift.why) == (None, "positions on the embeddings are absolute")


def test_laws_come_in_the_order_of_the_book_and_an_unknown_one_is_refused():
    assert tuple(LAWS) == NAMES
    assert chosen(["plan", "causality"]) == ["causality", "plan"]
    assert "compile" not in chosen(None)
    with pytest.raises(UserError, match="there is no such law\n  got: causal\n  expected: causality, cache"):
        judge(ENCODER, laws=["causal"])


def test_progress_is_told_each_law_before_it_is_checked():
    told = []
    judge(ENCODER, laws=["plan", "cross"], progress=told.append)
    assert told == ["cross", "plan"]


def test_an_error_is_relative_to_the_largest_value_and_infinite_for_what_cannot_be_compared():
    want = torch.tensor([2.0, -40.0])
    assert error_of(want + torch.tensor([0.0, 4.0]), want) == pytest.approx(0.1)
    assert error_of(torch.tensor([0.25]), torch.tensor([0.5])) == 0.25
    assert error_of(want[:1], want) == math.inf
    assert error_of(torch.tensor([math.nan]), torch.tensor([1.0])) == math.inf
    assert error_of(torch.tensor([math.inf]), torch.tensor([math.inf])) == math.inf
    assert error_of(want[:0], want[:0]) == 0


def test_the_worst_finding_counts():
    findings = Findings("law", 0.1)
    for error, where in ((0.05, "a"), (0.3, "b"), (0.2, "c")):
        findings.found(error, where)
    assert findings.result("why") == Result("law", False, 0.3, 0.1, "b", "why")
    assert Findings("law", 0.1).result("why").holds is None


@pytest.mark.parametrize(
    ("recipe", "error", "holds"),
    [
        (models.LEARNED, 5e-4, True),
        (models.LEARNED, 5e-3, False),
        (models.EXPERTS, 5e-3, True),
        (models.EXPERTS, math.inf, False),
    ],
    ids=["rounding", "too much", "a choice of experts", "not finite"],
)
def test_what_float32_breaks_and_float64_holds_is_rounding(monkeypatch, recipe, error, holds):
    def rounded(model, seed):
        exact = next(model.parameters()).dtype == torch.float64
        return Result("plan", exact, 0.0 if exact else error, 1e-5, "there", "because")

    monkeypatch.setitem(book.LAWS, "plan", rounded)
    result = settled(fresh(expand(recipe)), "plan", 0)
    assert result.holds is holds
    assert ("rounding" in result.why) is holds


def test_what_float64_breaks_too_is_broken(monkeypatch):
    monkeypatch.setitem(book.LAWS, "plan", lambda model, seed: Result("plan", False, 1e-4, 1e-5, "there", "because"))
    assert settled(fresh(LEARNED), "plan", 0).holds is False


def test_a_model_in_half_precision_is_judged_in_float32_and_stays_as_it_is():
    model = fresh(LEARNED, 1, "bfloat16")
    before = weights_hash(model)
    assert all(result.holds is not False for result in judge(model, laws=["causality", "padding", "precision"]))
    assert weights_hash(model) == before


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_no_number_comes_back_and_what_is_not_finite_is_said_by_the_law_of_that(value):
    model = fresh(LEARNED, 1)
    with torch.no_grad():
        model.decoder.final_norm.weight[3] = value
    results = by_name(judge(model, laws=["round trip", "plan", "precision"]))
    assert results["round trip"].holds
    assert results["plan"].holds
    assert not results["precision"].holds
    assert results["precision"].where.endswith("are finite")


def test_a_zero_that_comes_back_with_the_other_sign_is_another_weight(monkeypatch):
    """Bits are compared, not numbers."""
    model = fresh(LEARNED, 1)
    with torch.no_grad():
        model.decoder.final_norm.weight[3] = -0.0
    before = roundtrip.load

    def unsigned(*given, **more):
        found = before(*given, **more)
        with torch.no_grad():
            found.model.decoder.final_norm.weight[3] = 0.0
        return found

    monkeypatch.setattr(roundtrip, "load", unsigned)
    (result,) = judge(model, laws=["round trip"])
    assert (result.holds, result.where) == (False, "a checkpoint's decoder.final_norm.weight")


def test_judging_leaves_a_model_as_it_was():
    model = fresh(expand(models.EXPERTS), 1)
    before = weights_hash(model)
    judge(model)
    assert weights_hash(model) == before
    assert not any(p.grad is not None for p in model.parameters())
    assert {block.attention.backend for block in model.layers()} == {"auto"}


def test_fresh_weights_hide_nothing():
    spec = expand(
        models.EXPERTS
        | {"norm": {"kind": "layer", "offset": 1}, "attention": {"n_heads": 5, "d_head": 4, "position": "rope"}}
    )
    model = fresh(spec, 2)
    kinds = roles(model)
    for name, parameter in model.named_parameters():
        assert parameter.std() > 0.05, name
        if kinds[name] == "norm":
            assert abs(float(parameter.detach().mean())) < 0.5, "a weight beside an offset of 1 is about 0"
    assert all(buffer.abs().min() > 0 for buffer in model.buffers())
    twin = fresh(spec, 2)
    assert weights_hash(twin) == weights_hash(model) != weights_hash(fresh(spec, 3))


def test_the_reach_of_layers_is_that_of_their_windows_together():
    stack = expand(models.WINDOW).decoder
    seen = influence(stack, 12, 0)
    want = torch.zeros(12, 12, dtype=torch.bool)
    for i in range(12):
        for j in range(i + 1):
            # Two windows of 3 reach 4 back; the first 2 tokens are seen by all.
            want[i, j] = i - j <= 4 or j < 2
    assert torch.equal(seen, want)
    prefix = influence(expand(models.attention(mask="prefix")).decoder, 6, 3)
    assert prefix.long().tolist() == [[1, 1, 1, 0, 0, 0]] * 3 + [[1] * n + [0] * (6 - n) for n in (4, 5, 6)]


def test_rows_are_long_enough_to_leave_a_window_and_short_enough_for_a_table():
    assert longest(LEARNED.decoder) == 17
    wide = expand(models.attention(mask={"kind": "causal", "window": 25}))
    assert longest(wide.decoder) == 30
    assert unreached(wide) == ""
    assert unreached(expand(models.attention(mask={"kind": "causal", "window": 4096}))).endswith("the window of 4096")
    assert longest(expand(models.LEARNED | {"max_positions": 6}).decoder) == 6


def test_inputs_are_those_that_the_model_has_a_place_for():
    assert set(Draw(fresh(LEARNED), 0).inputs(2, 5)) == {"tokens"}
    assert set(Draw(fresh(BOTH), 0).inputs(2, 5)) == {"tokens", "source"}
    assert set(Draw(fresh(expand(models.attention(mask="prefix"))), 0).inputs(2, 5)) == {"tokens", "prefix"}
    typed = expand(models.ENCODER | {"embed": {"types": 2}})
    assert set(Draw(fresh(typed), 0).inputs(2, 5)) == {"tokens", "types"}


def test_a_certificate_names_the_model_to_the_bit(tmp_path):
    model = fresh(LEARNED, 1)
    broken = Result("cache", False, math.inf, 1e-5, "there", "because")
    certificate = certify("mine", model, [exempt("cross", "no encoder"), broken], 4)
    assert not certificate.holds
    assert certificate.line() == "0 laws hold, 1 are broken, 1 have no case here"
    written = json.loads(certificate.write(tmp_path).read_text(encoding="utf-8"))
    assert written == certificate.to_dict()
    assert (written["seed"], written["dtype"], written["subject"], written["format_version"]) == (
        4,
        "float32",
        "mine",
        1,
    )
    assert written["results"][1]["error"] is None
    with torch.no_grad():
        model.decoder.final_norm.weight[0] += 1e-6
    again = certify("mine", model, [], 4)
    assert again.holds
    assert (again.spec, again.weights == certificate.weights) == (certificate.spec, False)
    other = certify("mine", fresh(ENCODER, 1), [], 4)
    assert other.spec != certificate.spec
