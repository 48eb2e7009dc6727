"""Generation from real tiny models, against one full uncached pass for every token."""

import pytest
import torch

from anyformer.errors import UserError
from anyformer.infer import Sampling, generate_ids
from anyformer.nn.model import build
from anyformer.spec import expand, load_spec

POSITIONS = {
    "rope": ({"kind": "rope"}, None),
    "rope, interleaved, partial": ({"kind": "rope", "layout": "interleaved", "fraction": 0.5}, None),
    "learned": ("none", "learned"),
    "sinusoidal": ("none", "sinusoidal"),
    "none": ("none", None),
}


def tiny(name="rope", context=48, dropout=0.0, vocab_size=61):
    """Two layers of odd sizes, their weights doubled: greedy text then does not settle on one token at once."""
    attention, embed = POSITIONS[name]
    table = {
        "vocab_size": vocab_size,
        "d_model": 36,
        "n_layers": 2,
        "max_positions": context,
        "dropout": dropout,
        "attention": {"n_heads": 3, "n_kv_heads": 1, "position": attention},
        "ffn": "swiglu",
    }
    if embed is not None:
        table["embed"] = {"position": embed}
    model = build(load_spec(table), seed=5)
    with torch.no_grad():
        for parameter in model.decoder.blocks.parameters():
            parameter.mul_(2.0)
    return model


@torch.no_grad()
def full_passes(model, prompt, n):
    """Greedy without cache, batch or padding."""
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def new_ids(model, prompts, sampling, **options):
    ids = [[] for _ in prompts]
    for step in generate_ids(model, prompts, sampling, **options):
        if step.token is not None:
            ids[step.row].append(step.token)
    return ids


@pytest.mark.parametrize("name", POSITIONS)
def test_padded_rows_write_what_they_write_alone(name):
    """Prompts of 3 and 7 ids, and one of 5 that ends earlier; 20 greedy tokens as in full passes of each alone."""
    model = tiny(name)
    prompts = [[3, 1, 4], [2, 7, 1, 8, 2, 8, 1], [5, 9, 2, 6, 5]]
    budgets = [Sampling(max_new_tokens=n) for n in (20, 20, 6)]
    expected = [full_passes(model, p, s.max_new_tokens) for p, s in zip(prompts, budgets, strict=True)]
    assert len({tuple(ids) for ids in expected}) == 3
    assert min(len(set(ids)) for ids in expected) > 2
    assert new_ids(model, prompts, budgets) == expected
    assert [new_ids(model, [p], s)[0] for p, s in zip(prompts, budgets, strict=True)] == expected


@pytest.mark.parametrize("name", ["rope", "learned"])
@pytest.mark.parametrize(("n_prompt", "n_new"), [(10, 6), (15, 1), (16, 1)])
def test_the_context_is_a_clean_end(name, n_prompt, n_new):
    """Learned tables and the cache's capacity hold exactly what the rule needs."""
    model = tiny(name, context=16)
    prompt = [(7 * i) % 61 for i in range(n_prompt)]
    (ids,) = new_ids(model, [prompt], Sampling(max_new_tokens=100))
    assert ids == full_passes(model, prompt, n_new)


def test_rows_of_all_lengths_reach_the_context_together():
    """The longest prompt fills the context, the shortest writes until it does."""
    model = tiny("learned", context=16)
    prompts = [[1], [2] * 16, [3] * 9]
    expected = [full_passes(model, p, n) for p, n in zip(prompts, (15, 1, 7), strict=True)]
    assert new_ids(model, prompts, Sampling(max_new_tokens=100)) == expected


def test_without_a_stated_context_there_is_no_limit():
    model = tiny(context=None)
    assert new_ids(model, [[1, 2]], Sampling(max_new_tokens=70)) == [full_passes(model, [1, 2], 70)]


def test_a_model_in_training_is_deterministic_and_stays_in_training():
    """All dropouts .5; greedy equals evaluation, and the mode is restored."""
    model = tiny(dropout=0.5)
    expected = full_passes(model, [1, 2, 3], 12)
    model.train()
    assert new_ids(model, [[1, 2, 3]], Sampling(max_new_tokens=12)) == [expected]
    assert all(module.training for module in model.modules())
    loss = model(torch.tensor([[1, 2, 3]])).sum()
    loss.backward()  # nothing made during generation is in the way of training
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_calls_do_not_see_each_other():
    """Long then short, batch 3 then batch 1, an abandoned call, an exception: each equals a fresh one."""
    model = tiny()
    short = full_passes(model, [4, 5], 8)
    new_ids(model, [[1] * 20, [2] * 9, [3]], Sampling(max_new_tokens=20))
    assert new_ids(model, [[4, 5]], Sampling(max_new_tokens=8)) == [short]
    abandoned = generate_ids(model, [[6] * 5], Sampling(max_new_tokens=20))
    next(abandoned)
    assert new_ids(model, [[4, 5]], Sampling(max_new_tokens=8)) == [short]
    with pytest.raises(ZeroDivisionError):
        new_ids(model, [[6, 7], [8]], Sampling(max_new_tokens=9), halt=lambda row, token: 1 // 0)
    assert new_ids(model, [[4, 5]], Sampling(max_new_tokens=8)) == [short]


def test_the_same_seed_writes_the_same_ids_whatever_the_companions():
    model = tiny()
    sampled = Sampling(temperature=0.9, top_p=0.9, repetition_penalty=1.2, seed=11, max_new_tokens=25)
    torch.manual_seed(1)
    (alone,) = new_ids(model, [[3, 1, 4]], sampled)
    torch.manual_seed(2)
    batch = new_ids(model, [[2] * 7, [3, 1, 4], [9]], [Sampling(max_new_tokens=5), sampled, sampled])
    assert batch[1] == alone
    assert new_ids(model, [[3, 1, 4]], Sampling(temperature=0.9, top_p=0.9, seed=12, max_new_tokens=25)) != [alone]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_at_a_minute_temperature(dtype):
    """Temperature 1e-6 in half precision is finite and greedy in effect."""
    model = tiny().to(dtype)
    greedy = new_ids(model, [[1, 2, 3]], Sampling(max_new_tokens=6))
    first = Sampling(temperature=1e-6, max_new_tokens=6)
    assert all(0 <= token < 61 for token in new_ids(model, [[1, 2, 3]], first)[0])
    assert new_ids(model, [[1, 2, 3]], Sampling(temperature=1e-6, top_k=1, max_new_tokens=6)) == greedy


def test_padded_embedding_rows_are_never_written():
    """50 real ids, 61 rows, 10,000 draws at T = 5."""
    model = tiny()
    samplings = [Sampling(temperature=5.0, seed=seed, max_new_tokens=40) for seed in range(250)]
    found = new_ids(model, [[1]] * 250, samplings, n_allowed=50)
    assert {token for ids in found for token in ids} == set(range(50))
    assert sum(len(ids) for ids in found) == 10_000


@pytest.mark.parametrize("budget", [2**50, 10**30])
def test_a_cache_that_no_memory_holds_is_refused(budget):
    """Without a context nothing else bounds the cache."""
    with pytest.raises(UserError, match="no memory") as caught:
        new_ids(tiny(context=None), [[1, 2]], Sampling(max_new_tokens=budget))
    assert caught.value.where == "max_new_tokens"


def test_the_prompt_is_the_prefix_of_a_prefix_model():
    """Prompts of different lengths give what full passes with those prefixes give."""
    recipe = {
        "vocab_size": 23,
        "d_model": 20,
        "n_layers": 2,
        "ffn": "swiglu",
        "attention": {"n_heads": 5, "position": "rope", "mask": "prefix"},
    }
    model = build(expand(recipe), seed=3)
    prompts = [[3, 5, 7], [2, 9, 4, 11, 6, 8, 1]]
    replies = {0: [], 1: []}
    for step in generate_ids(model, prompts, Sampling(temperature=0.0, max_new_tokens=8)):
        replies[step.row].append(step.token)
    for row, prompt in enumerate(prompts):
        ids = list(prompt)
        for token in replies[row]:
            whole = torch.tensor([ids])
            logits = model(whole, prefix=torch.tensor([len(prompt)]))
            assert int(logits[0, -1].argmax()) == token
            assert not torch.allclose(logits, model(whole))
            ids.append(token)
