"""The decoding loop against a loop that has no cache, no batch and no padding: one full prefix per token."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyformer.errors import UserError
from anyformer.infer.decode import Step, generate_ids, room
from anyformer.infer.sampling import LogitsError, Sampling
from anyformer.nn.model import build
from anyformer.spec import load_spec


def greedy_alone(model, prompt, n, eos=()):
    ids = list(prompt)
    while len(ids) < len(prompt) + n:
        token = int(np.argmax(model.of_prefix(ids)))
        if token in eos:
            return ids[len(prompt) :], "stop"
        ids.append(token)
    return ids[len(prompt) :], "length"


def collect(steps, n_rows):
    ids, reasons = [[] for _ in range(n_rows)], [None] * n_rows
    for step in steps:
        assert reasons[step.row] is None, "a row that has ended gives no more steps"
        if step.token is not None:
            ids[step.row].append(step.token)
        reasons[step.row] = step.finish_reason
    return list(zip(ids, reasons, strict=True))


@settings(deadline=None, max_examples=60)
@given(
    prompts=st.lists(st.lists(st.integers(0, 10), min_size=1, max_size=7), min_size=1, max_size=5),
    budgets=st.lists(st.integers(0, 9), min_size=5, max_size=5),
    eos=st.sets(st.integers(0, 12), max_size=3),
)
def test_every_row_equals_the_row_alone(prefix_model, prompts, budgets, eos):
    """Ragged prompts, own budgets, several end tokens; rows end at different times."""
    model = prefix_model()
    samplings = [Sampling(max_new_tokens=n) for n in budgets[: len(prompts)]]
    found = collect(generate_ids(model, prompts, samplings, eos), len(prompts))
    assert found == [greedy_alone(model, p, n, eos) for p, n in zip(prompts, budgets, strict=False)]


def test_sampled_rows_equal_the_rows_alone(prefix_model):
    """A batch mixes greedy and sampled rows; each row depends on its own prompt, parameters and seed."""
    model = prefix_model()
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [4]]
    samplings = [
        Sampling(max_new_tokens=12),
        Sampling(temperature=1.0, seed=3, max_new_tokens=20),
        Sampling(temperature=0.8, top_p=0.7, repetition_penalty=1.5, seed=3, max_new_tokens=7),
        Sampling(temperature=1.0, seed=4, max_new_tokens=20),
    ]
    together = collect(generate_ids(model, prompts, samplings), 4)
    for row in range(4):
        torch.manual_seed(row)
        assert collect(generate_ids(model, [prompts[row]], samplings[row]), 1) == [together[row]]
    assert together[1] != together[3]


def test_prefill_once_then_one_token_a_step(prefix_model):
    model = prefix_model()
    collect(generate_ids(model, [[1, 2, 3], [4]], Sampling(max_new_tokens=5)), 2)
    assert model.calls == [(2, 3), (2, 1), (2, 1), (2, 1), (2, 1)]
    assert model.caches[0].capacity == 7
    assert model.caches[0].lengths.tolist() == [7, 5]


def test_rows_that_have_ended_cost_nothing(prefix_model):
    model = prefix_model()
    samplings = [Sampling(max_new_tokens=n) for n in (2, 4, 1)]
    found = collect(generate_ids(model, [[1, 2, 3], [4], [5]], samplings), 3)
    assert found == [greedy_alone(model, p, n) for p, n in zip([[1, 2, 3], [4], [5]], (2, 4, 1), strict=True)]
    assert model.calls == [(3, 3), (2, 1), (1, 1), (1, 1)]


def test_steps_come_as_they_are_known(prefix_model):
    model = prefix_model()
    steps = generate_ids(model, [[1, 2], [3]], Sampling(max_new_tokens=3))
    assert model.calls == []
    assert [next(steps).row, next(steps).row] == [0, 1]
    assert len(model.calls) == 1


@pytest.mark.parametrize(
    ("n_prompt", "budget", "expected"),
    [(10, 100, 6), (10, 6, 6), (10, 5, 5), (15, 100, 1), (16, 100, 1), (16, 0, 0)],
)
def test_the_context_bounds_prompt_and_reply_together(prefix_model, n_prompt, budget, expected):
    """Context 16; a prompt that fills it still gets the one token that it predicts."""
    model = prefix_model(context=16)
    prompt = [i % 11 for i in range(n_prompt)]
    ((ids, reason),) = collect(generate_ids(model, [prompt], Sampling(max_new_tokens=budget)), 1)
    assert (ids, reason) == greedy_alone(model, prompt, expected)
    assert room(n_prompt, budget, 16) == expected
    assert all(max(cache.lengths) <= 16 for cache in model.caches)


def test_rows_of_different_room_share_a_batch(prefix_model):
    """The row with the longest prompt ends first, in the context; the others go on to theirs."""
    model = prefix_model(context=16)
    prompts = [[1] * 16, [2] * 3, [3] * 14]
    found = collect(generate_ids(model, prompts, Sampling(max_new_tokens=100)), 3)
    assert found == [greedy_alone(model, p, n) for p, n in zip(prompts, (1, 13, 2), strict=True)]


def test_a_prompt_past_the_context_is_refused_with_both_numbers(prefix_model):
    """Nothing is cut; the refusal comes at the call."""
    with pytest.raises(UserError, match=r"17 tokens, context 16") as caught:
        generate_ids(prefix_model(context=16), [[1], [1] * 17], Sampling())
    assert caught.value.where == "prompt 1"
    assert len(collect(generate_ids(prefix_model(), [[1] * 17], Sampling(max_new_tokens=3)), 1)[0][0]) == 3


@pytest.mark.parametrize("prompt", [[], [11], [-1], [2, 3, 400], [1.0], [True], "text", ["1"]])
def test_prompts_that_cannot_be_read_are_refused(prefix_model, prompt):
    with pytest.raises(UserError):
        generate_ids(prefix_model(), [[1, 2], prompt], Sampling())


def test_arguments_that_cannot_work_are_refused(prefix_model):
    model = prefix_model()
    for n_allowed in (0, 12):
        with pytest.raises(UserError, match="n_allowed"):
            generate_ids(model, [[1]], Sampling(), n_allowed=n_allowed)
    with pytest.raises(UserError, match="differ in number"):
        generate_ids(model, [[1]], [Sampling()] * 2)
    with pytest.raises(UserError, match="stop strings"):
        generate_ids(model, [[1]], Sampling(stop="x"))
    model.spec.head = None
    with pytest.raises(UserError, match="no head"):
        generate_ids(model, [[1]], Sampling())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "encoder"}, "predicts no next token"),
        ({"head": {"kind": "token", "n_labels": 3}}, "predicts no next token"),
        ({"head": "none"}, "has no head"),
    ],
)
def test_models_that_do_not_continue_a_text_are_refused(changes, words):
    recipe = {
        "vocab_size": 11,
        "d_model": 8,
        "n_layers": 1,
        "attention": {"n_heads": 2, "position": "rope"},
        "ffn": "swiglu",
    }
    model = build(load_spec({**recipe, **changes}))
    with pytest.raises(UserError, match=words) as caught:
        generate_ids(model, [[1]], Sampling())
    assert "with a language head" in str(caught.value)


def test_no_prompts_and_no_budget_call_no_model(prefix_model):
    model = prefix_model()
    assert list(generate_ids(model, [], Sampling())) == []
    assert list(generate_ids(model, [[1], [2]], Sampling(max_new_tokens=0))) == [
        Step(0, None, "length"),
        Step(1, None, "length"),
    ]
    assert model.calls == []


def test_ignored_end_tokens_are_tokens_of_the_reply(prefix_model):
    """`ignore_eos` runs to max_new_tokens; its neighbour still ends."""
    model = prefix_model()
    plain, _ = greedy_alone(model, [1, 2], 9)
    eos = {plain[2]}
    samplings = [Sampling(max_new_tokens=9, ignore_eos=True), Sampling(max_new_tokens=9)]
    found = collect(generate_ids(model, [[1, 2], [1, 2]], samplings, eos), 2)
    assert found == [(plain, "length"), greedy_alone(model, [1, 2], 9, eos)]
    assert found[1][1] == "stop"


def test_the_minimum_holds_back_every_end_token(prefix_model):
    """With all but two ids an end token, the reply reaches exactly the minimum or ends later."""
    model = prefix_model()
    eos = set(range(9))
    ((ids, reason),) = collect(generate_ids(model, [[3]], Sampling(max_new_tokens=50, min_new_tokens=4), eos), 1)
    expected = [3]
    while True:
        logits = model.of_prefix(expected)
        if len(expected) - 1 < 4:
            logits[:9] = -np.inf
        token = int(np.argmax(logits))
        if token in eos:
            break
        expected.append(token)
    assert (ids, reason) == (expected[1:], "stop")
    assert len(ids) >= 4


def test_halt_ends_its_row_alone(prefix_model):
    model = prefix_model()
    seen = []

    def halt(row, token):
        seen.append((row, token))
        return row == 1 and len([r for r, _ in seen if r == 1]) == 2

    found = collect(generate_ids(model, [[1], [2]], Sampling(max_new_tokens=5, stop="x"), halt=halt), 2)
    assert found[0] == greedy_alone(model, [1], 5)
    assert found[1] == (greedy_alone(model, [2], 2)[0], "stop")
    assert [token for row, token in seen if row == 0] == found[0][0]


def test_generation_restores_every_module_of_a_training_model(prefix_model):
    """Dropout is off while it generates; each module's own mode is back between and after the steps."""
    model = prefix_model()
    expected = greedy_alone(model, [1, 2], 6)
    model.train()
    model.extra = torch.nn.Dropout().eval()  # frozen by its owner
    steps = generate_ids(model, [[1, 2]], Sampling(max_new_tokens=6))
    first = next(steps)
    assert (model.training, model.dropout.training, model.extra.training) == (True, True, False)
    assert collect([first, *steps], 1) == [expected]
    assert (model.training, model.dropout.training, model.extra.training) == (True, True, False)
    assert torch.is_grad_enabled()


def test_two_generations_interleave_on_a_training_model(prefix_model):
    """Neither the mode nor the cache of one reaches the other."""
    model = prefix_model().train()
    one = generate_ids(model, [[1, 2]], Sampling(max_new_tokens=3))
    two = generate_ids(model, [[5]], Sampling(max_new_tokens=6))
    steps_one, steps_two = [next(one)], [next(two)]
    steps_one += one
    steps_two += two
    assert collect(steps_one, 1) == [greedy_alone(model, [1, 2], 3)]
    assert collect(steps_two, 1) == [greedy_alone(model, [5], 6)]


def test_a_failure_leaves_nothing_behind(prefix_model):
    """An exception in the middle, a long call, an abandoned one; then a call equals a fresh one."""
    model = prefix_model().train()

    def explode(model, out):
        if len(model.calls) == 3:
            raise RuntimeError("in the middle")

    model.fault = explode
    with pytest.raises(RuntimeError, match="in the middle"):
        list(generate_ids(model, [[1, 2], [3]], Sampling(max_new_tokens=9)))
    assert model.training
    assert model.dropout.training
    model.fault = None
    list(generate_ids(model, [[1] * 30] * 3, Sampling(max_new_tokens=30)))
    abandoned = generate_ids(model, [[7]], Sampling(max_new_tokens=30))
    next(abandoned)
    abandoned.close()
    assert model.training
    assert collect(generate_ids(model, [[1, 2]], Sampling(max_new_tokens=9)), 1) == [greedy_alone(model, [1, 2], 9)]


def test_works_inside_inference_mode(prefix_model):
    model = prefix_model()
    with torch.inference_mode():
        assert collect(generate_ids(model, [[1, 2]], Sampling(max_new_tokens=4)), 1) == [greedy_alone(model, [1, 2], 4)]


def test_diverged_logits_name_the_callers_row(prefix_model):
    """Row 0 has no budget and is not in the batch; the broken row is still called 2."""

    def fault(model, out):
        if len(model.calls) == 2:
            out[1, 0, 4] = math.nan

    model = prefix_model(fault=fault)
    samplings = [Sampling(max_new_tokens=0), Sampling(max_new_tokens=5), Sampling(max_new_tokens=5)]
    with pytest.raises(LogitsError, match=r"NaN\n  where: row 2, token id 4"):
        list(generate_ids(model, [[1], [2], [3]], samplings))


@pytest.mark.parametrize("n_new", [1, 4, 12])
def test_a_row_that_grows_past_its_original_context_is_what_a_whole_pass_says(n_new):
    """LongRoPE turns every key by other divisors from there on, and what was stored no longer holds."""
    position = {"kind": "rope", "scaling": {"kind": "longrope", "original": 9, "short": [1.0, 1.5], "long": [3.0, 7.0]}}
    recipe = {
        "vocab_size": 23,
        "d_model": 16,
        "n_layers": 2,
        "max_positions": 40,
        "ffn": "swiglu",
        "attention": {"n_heads": 4, "position": position},
    }
    model = build(load_spec(recipe), seed=2, dtype="float64")
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4], [9]]
    steps = list(generate_ids(model, prompts, Sampling(max_new_tokens=n_new)))
    for row, prompt in enumerate(prompts):
        ids = list(prompt)
        for _ in range(n_new):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        assert [step.token for step in steps if step.row == row] == ids[len(prompt) :]
