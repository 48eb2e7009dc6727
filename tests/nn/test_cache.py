"""Cached calls equal one full pass, however they are cut, and rows may be ragged."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nn.helpers import GPT, KINDS, LLAMA, PARALLEL, ids, made
from spec.strategies import normed_recipes

BACKENDS = ["auto", "reference", "fused"]
SPLITS = {"13": [13], "5+8": [5, 8], "5+1x8": [5] + [1] * 8, "1x13": [1] * 13, "4+4+5": [4, 4, 5]}
NORMS = {
    "layer": {"norm": {"kind": "layer", "bias": False}},
    "rms": {"norm": {"kind": "rms", "weight": False}},
    "output": {"placement": "output"},
    "slots": {"norms": {"attention": {"before": "rms", "residual": "layer"}, "ffn": {"after": "rms"}}},
}
ALL = {**KINDS, **{f"norm {name}": {**GPT, **change} for name, change in NORMS.items()}}


def in_pieces(model, tokens, sizes, *, cache=None, **options):
    """The outputs of calls on successive pieces, joined."""
    cache = cache or model.new_cache(batch=tokens.shape[0], capacity=tokens.shape[1])
    return torch.cat([model(piece, cache=cache, **options) for piece in tokens.split(sizes, 1)], 1), cache


@pytest.mark.parametrize("kind", list(ALL))
@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_any_split_is_one_pass(kind, backend):
    """13 tokens as 13 / 5+8 / 5+1×8 / 1×13 / 4+4+5."""
    model = made(ALL[kind], backend=backend)
    tokens = ids(2, 13, 19)
    whole = model(tokens)
    for sizes in SPLITS.values():
        got, cache = in_pieces(model, tokens, sizes)
        torch.testing.assert_close(got, whole, atol=1e-5, rtol=1e-5)
        assert cache.lengths.tolist() == [13, 13]
        assert cache.longest == 13


@settings(max_examples=40)
@given(normed_recipes(), st.lists(st.integers(1, 5), min_size=1, max_size=4), st.sampled_from(BACKENDS), st.booleans())
@torch.no_grad()
def test_any_model_in_any_pieces(recipe, sizes, backend, spare):
    """In float64, over the whole space."""
    model = made(recipe, dtype="float64", backend=backend)
    tokens = ids(2, sum(sizes), model.spec.vocab_size)
    cache = model.new_cache(batch=2, capacity=sum(sizes) + 3 * spare)
    call = model.hidden if model.head is None else model
    got = torch.cat([call(piece, cache=cache) for piece in tokens.split(sizes, 1)], 1)
    torch.testing.assert_close(got, call(tokens), atol=1e-10, rtol=1e-9)


def test_hidden_states_advance_the_cache_too():
    model = made(LLAMA)
    tokens = ids(1, 6, 19)
    cache = model.new_cache(batch=1, capacity=6)
    with torch.no_grad():
        one = model.hidden(tokens[:, :4], cache=cache)
        two = model.hidden(tokens[:, 4:], cache=cache)
        torch.testing.assert_close(torch.cat([one, two], 1), model.hidden(tokens), atol=1e-5, rtol=1e-5)


ROUNDS = [
    # Each row's real tokens in a call: (padding on the left, real, padding on the right).
    [(3, 4, 0), (0, 7, 0), (0, 2, 5)],
    [(0, 0, 3), (1, 2, 0), (0, 3, 0)],
    [(0, 1, 0), (0, 0, 1), (0, 1, 0)],
    [(1, 1, 0), (0, 2, 0), (0, 1, 1)],
    [(0, 3, 0), (0, 0, 3), (3, 0, 0)],
]


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_ragged_rows_equal_rows_alone(kind, backend):
    """Padded left and right over several rounds, with rows that idle."""
    model = made(KINDS[kind], backend=backend)
    streams = ids(3, 30, 19, seed=5)
    cache = model.new_cache(batch=3, capacity=12)
    done = [0, 0, 0]
    alone = [model(streams[row : row + 1]) for row in range(3)]
    for layout in ROUNDS:
        width = sum(layout[0])
        tokens, padding = torch.full((3, width), 7), torch.zeros(3, width, dtype=torch.bool)
        for row, (left, real, _) in enumerate(layout):
            tokens[row, left : left + real] = streams[row, done[row] : done[row] + real]
            padding[row, left : left + real] = True
        before = cache.lengths.clone()
        state = [layer["k"].clone() for layer in (shelf.buffers for shelf in cache.shelves)]
        out = model(tokens, padding=padding, cache=cache)
        assert torch.isfinite(out).all()
        for row, (left, real, _) in enumerate(layout):
            want = alone[row][0, done[row] : done[row] + real]
            torch.testing.assert_close(out[row, left : left + real], want, atol=1e-5, rtol=1e-5)
            done[row] += real
            if not real:
                now = [shelf.buffers["k"][row] for shelf in cache.shelves]
                assert all(torch.equal(a[row], b) for a, b in zip(state, now, strict=True))
        assert cache.lengths.tolist() == done
        assert ((cache.lengths - before) == padding.sum(1)).all()
    assert cache.longest == max(done)


@torch.no_grad()
def test_ragged_rows_go_on_without_padding():
    """After a padded prefill, steps need no mask."""
    model = made(LLAMA)
    streams = ids(2, 9, 19)
    cache = model.new_cache(batch=2, capacity=9)
    padding = torch.tensor([[False, False, True, True], [True] * 4])
    tokens = torch.stack([torch.cat([torch.zeros(2, dtype=torch.int64), streams[0, :2]]), streams[1, :4]])
    model(tokens, padding=padding, cache=cache)
    for step in range(3):
        new = torch.stack([streams[0, 2 + step], streams[1, 4 + step]])[:, None]
        out = model(new, cache=cache)
        for row, start in ((0, 2), (1, 4)):
            want = model(streams[row : row + 1, : start + step + 1])[0, -1]
            torch.testing.assert_close(out[row, 0], want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        model(torch.stack([streams[0, 5:7], streams[1, 7:9]]), cache=cache)[0, -1],
        model(streams[:1, :7])[0, -1],
        atol=1e-5,
        rtol=1e-5,
    )


@pytest.mark.parametrize("kind", list(KINDS))
@torch.no_grad()
def test_greedy_continuations_of_padded_prompts(kind):
    """Prompts of 3 and 7 ids give the 20 tokens that they give alone, padded on either side."""
    model = made(KINDS[kind], seed=3)
    prompts = [ids(1, 3, 19, seed=1)[0], ids(1, 7, 19, seed=2)[0]]

    def greedy(tokens, padding):
        cache = model.new_cache(batch=len(tokens), capacity=30)
        token = model(tokens, padding=padding, cache=cache, last_only=True).argmax(-1)
        out = [token]
        for _ in range(19):
            token = model(token, cache=cache, last_only=True).argmax(-1)
            out.append(token)
        return torch.cat(out, 1)

    alone = [greedy(prompt[None], None)[0] for prompt in prompts]
    for side in ("left", "right"):
        pad = torch.full((4,), 11)
        short = torch.cat([pad, prompts[0]] if side == "left" else [prompts[0], pad])
        real = torch.tensor([False] * 4 + [True] * 3)
        padding = torch.stack([real if side == "left" else real.flip(0), torch.ones(7, dtype=torch.bool)])
        together = greedy(torch.stack([short, prompts[1]]), padding)
        assert together[0].tolist() == alone[0].tolist()
        assert together[1].tolist() == alone[1].tolist()
    full = prompts[0][None]
    for _ in range(20):
        full = torch.cat([full, model(full)[:, -1:].argmax(-1)], 1)
    assert full[0, 3:].tolist() == alone[0].tolist()


@torch.no_grad()
def test_overflow_is_refused_and_leaves_the_cache_usable():
    """Capacity 16; prompt 17; prompt 10 then 7; ragged rows."""
    model = made(LLAMA)
    tokens = ids(2, 17, 19)
    cache = model.new_cache(batch=2, capacity=16)
    with pytest.raises(ValueError, match="0 tokens are stored, 17 come, and its capacity is 16"):
        model(tokens, cache=cache)
    assert cache.lengths.tolist() == [0, 0]
    model(tokens[:, :10], cache=cache)
    with pytest.raises(ValueError, match="10 tokens are stored, 7 come, and its capacity is 16"):
        model(tokens[:, 10:], cache=cache)
    out = model(tokens[:, 10:16], cache=cache)
    torch.testing.assert_close(out, model(tokens[:, :16])[:, 10:], atol=1e-5, rtol=1e-5)
    assert cache.lengths.tolist() == [16, 16]
    with pytest.raises(ValueError, match="the cache is full"):
        model(tokens[:, :1], cache=cache)
    idle = torch.tensor([[False], [False]])
    model(tokens[:, :1], padding=idle, cache=cache)
    assert cache.lengths.tolist() == [16, 16]


@torch.no_grad()
def test_only_real_tokens_count_towards_overflow():
    model = made(LLAMA)
    cache = model.new_cache(batch=2, capacity=4)
    padding = torch.tensor([[False, False, True, True], [True, True, True, True]])
    tokens = ids(2, 4, 19)
    model(tokens, padding=padding, cache=cache)
    with pytest.raises(ValueError, match="capacity is 4"):
        model(tokens[:, :1], cache=cache)
    model(tokens[:, :2], padding=torch.tensor([[True, True], [False, False]]), cache=cache)
    assert cache.lengths.tolist() == [4, 4]


def test_a_cache_that_cannot_be():
    model = made(LLAMA)
    for arguments in ({"batch": 0, "capacity": 3}, {"batch": 1, "capacity": 0}):
        with pytest.raises(ValueError, match="batch ≥ 1 and capacity ≥ 1"):
            model.new_cache(**arguments)
    with pytest.raises(ValueError, match="unknown kind of cache 'rolling'; known: static"):
        model.new_cache(batch=1, capacity=1, kind="rolling")
    cache = model.new_cache(batch=2, capacity=8)
    with pytest.raises(ValueError, match="the cache has 2 rows and the input 3"):
        model(ids(3, 2, 19), cache=cache)
    with pytest.raises(ValueError, match="segments and a cache do not go together"):
        model(ids(2, 2, 19), cache=cache, segments=torch.zeros(2, 2, dtype=torch.int64))
    assert cache.lengths.tolist() == [0, 0]


@torch.no_grad()
def test_reset_empties_every_row():
    model = made(GPT)
    cache = model.new_cache(batch=1, capacity=6)
    first, _ = in_pieces(model, ids(1, 6, 19), [4, 2], cache=cache)
    cache.reset()
    assert cache.lengths.tolist() == [0]
    again, _ = in_pieces(model, ids(1, 6, 19), [4, 2], cache=cache)
    assert torch.equal(first, again)
    cache.reset()
    model(ids(1, 2, 19), padding=torch.tensor([[False, True]]), cache=cache)
    cache.reset()
    other, _ = in_pieces(model, ids(1, 6, 19), [1, 5], cache=cache)
    torch.testing.assert_close(other, first, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_select_keeps_repeats_and_orders_rows():
    model = made(LLAMA)
    streams = ids(3, 8, 19)
    cache = model.new_cache(batch=3, capacity=10)
    padding = torch.tensor([[True, True, True, False], [True] * 4, [True, False, False, False]])
    model(streams[:, :4], padding=padding, cache=cache)
    cache.select(torch.tensor([2, 0, 2, 1]))
    assert (cache.batch, cache.lengths.tolist(), cache.longest) == (4, [1, 3, 1, 4], 4)
    new = ids(4, 3, 19, seed=8)
    out = model(new, cache=cache)
    for row, (source, length) in enumerate(((2, 1), (0, 3), (2, 1), (1, 4))):
        want = model(torch.cat([streams[source, :length], new[row]])[None])[0, -3:]
        torch.testing.assert_close(out[row], want, atol=1e-5, rtol=1e-5)
    cache.select(torch.tensor([0, 2]))
    assert cache.longest == 4
    out = model(new[:2, :1], cache=cache)
    want = model(torch.cat([streams[2, :1], new[0], new[0, :1]])[None])[0, -1]
    torch.testing.assert_close(out[0, 0], want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_through_cached_calls(backend, ragged):
    """Within a call gradients are those of a full pass whose stored part is constant."""
    model = made(LLAMA, dtype="float64", backend=backend)
    tokens = ids(2, 9, 19)
    real = torch.ones(2, 4, dtype=torch.bool)
    if ragged:
        real[0, 0] = False
    cache = model.new_cache(batch=2, capacity=9)
    embeddings = model.decoder.embed.lookup(tokens).detach()
    with torch.no_grad():
        model(embeddings=embeddings[:, :4], padding=real, cache=cache)
    new = embeddings[:, 4:].clone().requires_grad_()
    model(embeddings=new, cache=cache).square().sum().backward()
    for row in range(2):
        old = embeddings[row, :4][real[row]]
        again = embeddings[row, 4:].clone().requires_grad_()
        model(embeddings=torch.cat([old, again])[None])[:, len(old) :].square().sum().backward()
        torch.testing.assert_close(new.grad[row], again.grad, atol=1e-9, rtol=1e-8)


def test_gradients_with_an_empty_cache_are_those_without():
    model = made(PARALLEL, dtype="float64")
    tokens = ids(2, 6, 19)
    model(tokens).square().sum().backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    cache = model.new_cache(batch=2, capacity=8)
    model(tokens, cache=cache).square().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, want[name])
    assert not any(tensor.requires_grad for shelf in cache.shelves for tensor in shelf.buffers.values())


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_a_cache_under_autocast(grad, ragged):
    model = made(LLAMA)
    tokens = ids(2, 7, 19)
    real = torch.ones(2, 4, dtype=torch.bool)
    real[0, 0] = not ragged
    cache = model.new_cache(batch=2, capacity=8)
    with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=torch.bfloat16):
        model(tokens[:, :4], padding=real, cache=cache)
        got = model(tokens[:, 4:], cache=cache)
    want = model(tokens[1:])[:, 4:]
    assert (got[1:].float() - want).abs().mean() < 0.05 * want.abs().mean()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@torch.no_grad()
def test_a_cache_has_the_models_dtype(dtype):
    model = made(LLAMA, dtype=dtype)
    cache = model.new_cache(batch=1, capacity=9)
    assert {t.dtype for shelf in cache.shelves for t in shelf.buffers.values()} == {getattr(torch, dtype)}
    got, _ = in_pieces(model, ids(1, 9, 19), [4, 1, 4], cache=cache)
    want = model(ids(1, 9, 19))
    assert (got - want).abs().float().mean() < 0.05 * want.abs().float().mean()


@torch.no_grad()
def test_explicit_positions_with_a_cache():
    """Positions turn the queries and keys; what is seen follows the order of the row."""
    model = made({**LLAMA, "attention": {**LLAMA["attention"], "position": "rope"}})
    tokens = ids(1, 6, 19)
    positions = torch.tensor([[5, 6, 9, 10, 11, 30]])
    whole = model(tokens, positions=positions)
    cache = model.new_cache(batch=1, capacity=6)
    parts = [model(tokens[:, a:b], positions=positions[:, a:b], cache=cache) for a, b in ((0, 2), (2, 3), (3, 6))]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-5)
    assert (whole - model(tokens)).abs().max() > 1e-3


@torch.no_grad()
def test_a_failed_call_leaves_no_trace():
    """A learned table that ends refuses the call; the cache goes on from before."""
    model = made({**GPT, "max_positions": 8})
    tokens = ids(1, 9, 19)
    cache = model.new_cache(batch=1, capacity=20)
    model(tokens[:, :6], cache=cache)
    with pytest.raises(ValueError, match="position 8 is past the 8 learned positions"):
        model(tokens[:, 6:], cache=cache)
    assert cache.lengths.tolist() == [6]
    out = model(tokens[:, 6:8], cache=cache)
    torch.testing.assert_close(out, model(tokens[:, :8])[:, 6:], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_copied_cache_goes_its_own_way():
    model = made(LLAMA)
    tokens = ids(1, 5, 19)
    cache = model.new_cache(batch=1, capacity=8)
    model(tokens, cache=cache)
    other = copy.deepcopy(cache)
    model(tokens[:, :2], cache=other)
    assert (cache.lengths.tolist(), other.lengths.tolist()) == ([5], [7])
