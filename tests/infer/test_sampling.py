"""The sampling functions against numbers worked out by hand and a plain numpy float64 rendering."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from anyformer.errors import UserError
from anyformer.infer.sampler import Sampler
from anyformer.infer.sampling import History, LogitsError, Sampling, draw, kept

CPU = torch.device("cpu")


def probabilities_in_numpy(logits, s, prompt=(), reply=()):
    """Token by token in float64, straight from the definitions; ranks by (logit descending, id ascending)."""
    x = [float(v) for v in logits]
    for i in set(prompt) | set(reply):
        x[i] = x[i] / s.repetition_penalty if x[i] > 0 else x[i] * s.repetition_penalty
    for i in set(reply):
        x[i] -= s.presence_penalty + s.frequency_penalty * list(reply).count(i)
    z = np.array(x, dtype=np.float64) / s.temperature
    p = np.exp(z - z.max())
    order = sorted(range(len(x)), key=lambda i: (-z[i], i))
    alive = order[: s.top_k] if s.top_k else order
    total = sum(p[i] for i in alive)
    if s.top_p is not None and s.top_p < 1:
        mass, nucleus = 0.0, []
        for i in alive:
            if mass >= s.top_p * total:
                break
            nucleus.append(i)
            mass += p[i]
        alive = nucleus
    alive = [i for i in alive if p[i] >= (s.min_p or 0) * p.max()]
    total = sum(p[i] for i in alive)
    return {i: p[i] / total for i in alive}


def choose(logits, samplings, rounds=1, prompts=None, eos_ids=(), n_allowed=None):
    """`rounds` tokens for each row of constant logits."""
    logits = torch.as_tensor(logits)
    rows = list(range(len(logits)))
    prompts = prompts or [[] for _ in rows]
    sampler = Sampler(samplings, prompts, eos_ids, n_allowed or logits.shape[1], CPU)
    return [sampler(logits, rows) for _ in range(rounds)]


@pytest.mark.parametrize(
    ("logits", "options", "ids"),
    [
        ([3.0, 2.0, 1.0], {"temperature": 0.5, "top_p": 0.8}, [0]),
        ([3.0, 2.0, 1.0], {"temperature": 1.0, "top_p": 0.8}, [0, 1]),
        ([2.0, 1.0, 0.0, -1.0], {"temperature": 2.0, "min_p": 0.3}, [0, 1, 2]),
        ([2.0, 1.0, 0.0, -1.0], {"temperature": 1.0, "min_p": 0.3}, [0, 1]),
        ([2.0, 1.0, 0.0, -1.0], {"temperature": 2.0, "min_p": 0.0}, [0, 1, 2, 3]),
        ([1.0, 2.0, 0.0, 2.0], {"temperature": 2.0, "min_p": 1.0}, [1, 3]),
        # top-p acts on what top-k has left: of 3:2:1 shares, .55 needs one token of (.6, .4) and two of (.5,
        # .33, .17).
        ([math.log(3), math.log(2), 0.0], {"temperature": 1.0, "top_k": 2, "top_p": 0.55}, [0]),
        ([math.log(3), math.log(2), 0.0], {"temperature": 1.0, "top_p": 0.55}, [0, 1]),
        ([0.0, 5.0, -1.0], {"temperature": 0.0, "top_k": 2, "top_p": 0.9}, [1]),
    ],
)
def test_the_kept_set_follows_the_stated_order(logits, options, ids):
    """Temperature first, then top-k, top-p, min-p relative to the most probable token."""
    found, probabilities = kept(torch.tensor(logits), Sampling(**options))
    assert found == ids
    assert sum(probabilities) == pytest.approx(1, abs=1e-12)


def test_ties_keep_the_lowest_ids():
    logits = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, -2.0])
    assert kept(logits, Sampling(temperature=1.0, top_k=2))[0] == [1, 2]
    assert kept(torch.zeros(4), Sampling(temperature=1.0, top_p=0.5))[0] == [0, 1]
    assert kept(logits, Sampling(temperature=0.0))[0] == [1]


@settings(deadline=None, max_examples=150)
@given(
    levels=st.lists(st.integers(-12, 12), min_size=1, max_size=23),
    temperature=st.sampled_from([0.25, 0.5, 1.0, 2.0]),
    top_k=st.none() | st.integers(1, 30),
    top_p=st.none() | st.floats(0.05, 1.0),
    min_p=st.none() | st.floats(0.0, 1.0),
    repetition=st.sampled_from([0.5, 1.0, 2.0]),
    presence=st.sampled_from([-0.5, 0.0, 1.5]),
    frequency=st.sampled_from([0.0, 0.25]),
    data=st.data(),
)
def test_distribution_equals_a_float64_rendering(
    levels, temperature, top_k, top_p, min_p, repetition, presence, frequency, data
):
    """Quarters are exact in float32, so that ties are the same on both sides."""
    logits = [level / 4 for level in levels]
    ids = st.lists(st.integers(0, len(logits) - 1), max_size=6)
    prompt, reply = data.draw(ids), data.draw(ids)
    s = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    expected = probabilities_in_numpy(logits, s, prompt, reply)
    # A mass that equals p to the last bit may fall on either side in another order of summation.
    p = sorted(probabilities_in_numpy(logits, dataclasses.replace(s, top_p=None, min_p=None), prompt, reply).values())
    sums = np.cumsum(p[::-1])
    assume(not any(math.isclose(mass, top_p or 0, rel_tol=1e-6) for mass in sums))
    assume(not any(math.isclose(v, (min_p or 0) * p[-1], rel_tol=1e-6) for v in p))
    found, probabilities = kept(torch.tensor(logits), s, History(prompt, reply))
    assert set(found) == set(expected)
    assert probabilities == pytest.approx([expected[i] for i in found], rel=1e-6)


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_a_nucleus_wider_than_the_first_guess(top_p):
    """A flat distribution over 5,000 tokens needs far more ranks than a peaked one."""
    generator = torch.Generator().manual_seed(3)
    flat = torch.randn(5000, generator=generator) * 0.1
    peaked = flat * 100
    s = Sampling(temperature=1.0, top_p=top_p)
    for logits in (flat, peaked):
        assert set(kept(logits, s)[0]) == set(probabilities_in_numpy(logits.tolist(), s))


def test_repetition_penalty_of_the_paper():
    """[2, -1, .5] with {0,0,0,1} seen and penalty 2 is [1, -2, .5]: once per token."""
    s = Sampling(temperature=1.0, repetition_penalty=2.0)
    ids, probabilities = kept(torch.tensor([2.0, -1.0, 0.5]), s, History(prompt=(0, 0), reply=(0, 1)))
    expected = np.exp(np.array([1.0, -2.0, 0.5]))
    assert ids == [0, 2, 1]
    np.testing.assert_allclose(probabilities, (expected / expected.sum())[[0, 2, 1]], rtol=1e-6)


def test_repetition_penalty_counts_the_prompt_and_the_others_do_not():
    """Prompt-inclusive repetition penalty; presence and frequency count the reply alone."""
    logits = torch.tensor([2.0, 1.5])
    assert kept(logits, Sampling(repetition_penalty=2.0), History(prompt=(0,)))[0] == [1]
    s = Sampling(presence_penalty=9.0, frequency_penalty=9.0)
    assert kept(logits, s, History(prompt=(0,)))[0] == [0]
    assert kept(logits, s, History(reply=(0,)))[0] == [1]
    # 2 - .3 - 2*.3 = 1.1 < 1.5, and 2 - .3 - 1*.3 = 1.4 < 1.5 but 2 - .2 - 1*.2 = 1.6
    assert kept(logits, Sampling(presence_penalty=0.2, frequency_penalty=0.2), History(reply=(0,)))[0] == [0]
    assert kept(logits, Sampling(presence_penalty=0.2, frequency_penalty=0.2), History(reply=(0, 0)))[0] == [1]


def test_penalties_of_one_row_leave_its_neighbour_bitwise():
    """1.0 is a no-op to the last bit, also beside a penalised row."""
    from anyformer.infer.sampling import Penalties, history_tensors, penalise

    logits = torch.randn(2, 101, generator=torch.Generator().manual_seed(1)) * 7
    seen, counts = history_tensors(History(range(60), range(50)), 101, CPU)
    both = [Sampling(), Sampling(repetition_penalty=1.3, presence_penalty=0.1)]
    after = penalise(logits, Penalties.of(both, CPU), seen.expand(2, -1), counts.expand(2, -1))
    assert torch.equal(after[0], logits[0])
    assert not torch.equal(after[1], logits[1])


def test_greedy_takes_the_first_maximum_and_draws_nothing():
    """T = 0 with top-k and top-p present; no row touches the global random state."""
    logits = torch.tensor([[1.0, 4.0, 4.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    before = torch.get_rng_state()
    chosen = choose(logits, [Sampling(temperature=0.0, top_k=3, top_p=0.9), Sampling(temperature=1.0)], rounds=20)
    assert torch.equal(before, torch.get_rng_state())
    assert {row[0] for row in chosen} == {1}
    assert {row[1] for row in chosen} == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [1e-6, 1e-4, 1e-300])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_minute_temperatures_stay_finite(temperature, dtype):
    """In half precision 11/1e-6 overflows; the maximum wins instead."""
    logits = torch.tensor([[3.0, 11.0, -60000.0, 10.5]], dtype=dtype)
    assert choose(logits, [Sampling(temperature=temperature)], rounds=5) == [[1]] * 5
    assert kept(logits[0], Sampling(temperature=temperature)) == ([1], [1.0])


def test_half_precision_logits_are_widened_before_any_arithmetic():
    """Draws from bfloat16 scores equal draws from the same scores in float32."""
    logits = torch.linspace(-200, 255, 60).to(torch.bfloat16)[None]
    s = [Sampling(temperature=80.0, seed=2)]
    assert choose(logits, s, rounds=2000) == choose(logits.float(), s, rounds=2000)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(("value", "name"), [(math.nan, "NaN"), (math.inf, r"\+inf")])
def test_broken_logits_have_their_own_error(temperature, value, name):
    """NaN and +inf are named, with the row and the token."""
    logits = torch.zeros(2, 5)
    logits[1, 3] = value
    with pytest.raises(LogitsError, match=rf"hold {name}\n  where: row 1, token id 3"):
        choose(logits, [Sampling(temperature=temperature)] * 2)
    with pytest.raises(LogitsError, match=name):
        kept(logits[1], Sampling(temperature=temperature))
    with pytest.raises(LogitsError, match="no token"):
        choose(torch.full((1, 4), -math.inf), [Sampling(temperature=temperature)])


def test_padded_ids_are_never_drawn():
    """100 real tokens, 128 rows, T = 5, 10,000 draws; also when padded ids have the highest logits."""
    logits = torch.cat([torch.zeros(100), torch.full((28,), 9.0)]).expand(50, -1)
    s = [Sampling(temperature=5.0, seed=seed) for seed in range(50)]
    drawn = {token for row in choose(logits, s, rounds=200, n_allowed=100) for token in row}
    assert drawn == set(range(100))
    assert choose(logits[:1], [Sampling()], n_allowed=100) == [[0]]
    assert max(kept(logits[0], s[0], n_allowed=100)[0]) == 99
    assert set(kept(logits[0], s[0], n_allowed=100, excluded=(99, 4, 120))[0]) == set(range(99)) - {4}


def test_broken_scores_of_padded_ids_do_not_matter():
    """Untrained rows may hold anything."""
    logits = torch.tensor([[0.0, 2.0, math.nan, math.inf]])
    assert choose(logits, [Sampling()], n_allowed=2) == [[1]]


def chi_square(counts, probabilities):
    expected = np.asarray(probabilities) * sum(counts)
    return float(((np.asarray(counts) - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 1.4, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.85},
        {"temperature": 2.0, "min_p": 0.25, "top_p": 0.95, "top_k": 9},
    ],
)
def test_draws_follow_the_distribution(options):
    """20,000 draws against the float64 rendering; 37.4: chi-square's 99.99% point, 11 degrees of freedom."""
    logits = torch.tensor([1.0, -0.5, 0.25, 2.0, 0.0, -3.0, 1.5, 0.75, -1.0, 0.5, 1.25, -0.25])
    rows, rounds = 100, 200
    samplings = [Sampling(**options, seed=1000 + row) for row in range(rows)]
    drawn = np.array(choose(logits.expand(rows, -1), samplings, rounds))
    expected = probabilities_in_numpy(logits.tolist(), samplings[0])
    counts = np.bincount(drawn.ravel(), minlength=12)
    assert set(np.flatnonzero(counts)) <= set(expected)
    assert chi_square([counts[i] for i in expected], list(expected.values())) < 37.4


def test_a_point_on_a_border_falls_to_the_next_token():
    """Cumulative 0, .25, .25, 1: each token owns [before, after), so one of probability 0 is never drawn."""
    probabilities = torch.tensor([[0.0, 0.25, 0.0, 0.75]] * 4, dtype=torch.float64)
    points = torch.tensor([[0.0], [0.25], [0.2499], [1 - 2**-53]], dtype=torch.float64)
    assert draw(probabilities, points).tolist() == [1, 3, 1, 3]


def test_seeds_decide_whatever_the_companions_and_the_global_state():
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    warm, cold = Sampling(temperature=1.0, seed=7), Sampling(temperature=1.0, seed=8)
    torch.manual_seed(1)
    alone = [row[0] for row in choose(logits[:1], [warm], rounds=30)]
    torch.manual_seed(2)
    mixed = choose(logits[[1, 0, 2]], [Sampling(), warm, Sampling(temperature=0.3, top_k=2, seed=7)], rounds=30)
    assert [row[1] for row in mixed] == alone
    assert [row[0] for row in choose(logits[:1], [cold], rounds=30)] != alone


def test_rules_that_remove_nothing_change_no_draw():
    """Off is off: top-k of the whole vocabulary, top-p 1, min-p 0 give the text of plain temperature."""
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(0))
    plain = choose(logits, [Sampling(temperature=1.0, seed=3)], rounds=40)
    assert choose(logits, [Sampling(temperature=1.0, seed=3, top_k=4000)], rounds=40) == plain
    assert choose(logits, [Sampling(temperature=1.0, seed=3, top_p=1.0, min_p=0.0)], rounds=40) == plain


def test_penalties_follow_the_reply_as_it_grows():
    """Constant logits under a growing frequency penalty visit the tokens in turn."""
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    greedy = [row[0] for row in choose(logits, [Sampling(frequency_penalty=0.75)], rounds=6)]
    # scores: 3 2 1 → 2.25 2 1 → 1.5 2 1 → 1.5 1.25 1 → .75 1.25 1 → .75 .5 1
    assert greedy == [0, 0, 1, 0, 1, 2]
    repeated = [row[0] for row in choose(logits, [Sampling(repetition_penalty=4.0)], rounds=3, prompts=[[0, 0]])]
    assert repeated == [1, 2, 0]


def test_no_end_token_before_the_minimum():
    """The minimum suppresses every end-of-sequence id, for its row alone, and no longer than it must."""
    logits = torch.tensor([[0.0, 1.0, 3.0, 2.0]] * 2)
    chosen = choose(logits, [Sampling(min_new_tokens=2), Sampling()], rounds=3, eos_ids=(2, 3, 900))
    assert chosen == [[1, 2], [1, 2], [2, 2]]
    assert logits[0].tolist() == [0.0, 1.0, 3.0, 2.0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", v) for v in (-0.1, math.nan, math.inf, -math.inf, True, "0.5", None, 10**400)],
        *[("top_k", v) for v in (0, -1, 2.0, True, "3")],
        *[("top_p", v) for v in (0.0, -0.5, 1.0001, math.nan, True, "0.9")],
        *[("min_p", v) for v in (-0.01, 1.01, math.nan, False, "0")],
        *[("repetition_penalty", v) for v in (0.0, -1.0, math.inf, math.nan, True, None)],
        *[(n, v) for n in ("presence_penalty", "frequency_penalty") for v in (math.nan, math.inf, "1", True)],
        *[("seed", v) for v in (-1, 2**64, 0.5, True, None)],
        *[("max_new_tokens", v) for v in (-1, 1.5, True, None)],
        *[("min_new_tokens", v) for v in (-1, 129, True)],
        *[("stop", v) for v in ("", ("a", ""), 3, (b"x",), None)],
        ("ignore_eos", 1),
    ],
)
def test_unusable_parameters_do_not_construct(name, value):
    """The message names the parameter, the value and what would do."""
    with pytest.raises(UserError) as caught:
        Sampling(**{name: value})
    assert caught.value.where == name
    assert caught.value.got is not None
    assert caught.value.expected is not None


def test_usable_parameters_are_normalised():
    s = Sampling(temperature=1, top_k=np.int64(3), top_p=np.float32(0.5), stop=["a", "b"], seed=2**64 - 1)
    assert type(s.temperature) is float
    assert type(s.top_k) is int
    assert s.stop == ("a", "b")
    assert Sampling(stop="ab").stop == ("ab",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        s.seed = 1
