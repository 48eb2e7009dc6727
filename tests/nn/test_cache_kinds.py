"""Every kind of cache, for every position encoding and mask: parts of a sequence equal the whole."""

import pytest
import torch
from wide import MASKS, POSITIONS, SPLITS, block, by_parts, decoder, latent_block, made_of, tokens, translator

EXACT = {"rtol": 0, "atol": 1e-10}
KINDS = ("static", "ring")
pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture
def no_gradients():
    with torch.no_grad():
        yield


def left_padded(length=17, pads=6):
    """Two rows, the first with padding in front."""
    real = torch.ones(2, length, dtype=torch.bool)
    real[0, :pads] = False
    return real


def two_layers(position, mask):
    return decoder(block(position, mask, sink_logit=True, softcap=3.0), block(position, mask))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("position", POSITIONS)
def test_parts_equal_the_whole(position, mask):
    model, x = made_of(two_layers(position, mask)), tokens()
    whole = model(x)
    for kind in KINDS:
        for sizes in SPLITS:
            torch.testing.assert_close(by_parts(model, x, sizes, kind)[0], whole, **EXACT)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("position", POSITIONS)
def test_rows_of_different_lengths_go_on_as_if_alone(position, mask):
    model, x, real = made_of(two_layers(position, mask)), tokens(), left_padded()
    alone = model(x[:1, 6:])
    more = tokens(length=7, seed=2)
    expected = torch.cat(
        [model(torch.cat([x[:1, 6:], more[:1]], 1))[:, -7:], model(torch.cat([x[1:], more[1:]], 1))[:, -7:]]
    )
    for kind in KINDS:
        cache = model.new_cache(2, 40, kind)
        torch.testing.assert_close(model(x, padding=real, cache=cache)[:1, 6:], alone, **EXACT)
        steps = [model(more[:, :3], cache=cache), *(model(more[:, i : i + 1], cache=cache) for i in range(3, 7))]
        torch.testing.assert_close(torch.cat(steps, 1), expected, **EXACT)


@pytest.mark.parametrize("mask", ["prefix", "prefix window"])
@pytest.mark.parametrize("position", ["rope", "alibi", "shared"])
def test_a_prefix_in_the_first_call_is_seen_by_the_rest(position, mask):
    model, x = made_of(two_layers(position, mask)), tokens()
    lengths = torch.tensor([5, 3])
    whole = model(x, prefix=lengths)
    assert (whole - model(x)).abs().max() > 1e-3
    marks = torch.arange(17) < lengths[:, None]
    torch.testing.assert_close(model(x, prefix=marks), whole, **EXACT)
    for kind in KINDS:
        for sizes in ((5, 12), (9, 3, 1, 1, 3), (6, *(1,) * 11)):
            found, _ = by_parts(model, x, sizes, kind, first={"prefix": lengths})
            torch.testing.assert_close(found, whole, **EXACT)


def test_a_late_prefix_is_refused():
    model, x = made_of(two_layers("rope", "prefix")), tokens()
    cache = model.new_cache(2, 40)
    model(x[:, :5], cache=cache)
    with pytest.raises(ValueError, match="a prefix comes with the first call of a cache"):
        model(x[:, 5:], cache=cache, prefix=torch.tensor([2, 2]))


@pytest.mark.parametrize("mask", ["causal", "window", "sinks"])
@pytest.mark.parametrize("position", ["rope", "alibi", "none", "dynamic"])
def test_latent_attention_keeps_latents_alone(position, mask):
    model, x = made_of(decoder(latent_block(position, mask), latent_block(position, mask, softcap=2.0))), tokens()
    whole = model(x)
    for kind in KINDS:
        for sizes in SPLITS:
            found, cache = by_parts(model, x, sizes, kind)
            torch.testing.assert_close(found, whole, **EXACT)
    a_token = 6 + (0 if position in ("alibi", "none") else 4)
    slots = {"causal": 40, "window": 4, "sinks": 6}[mask]
    positions = 8 * 2 * 40 if position in ("alibi", "dynamic") else 0
    assert cache.nbytes == 2 * 2 * slots * a_token * 8 + positions


def test_a_ring_holds_its_window_and_its_sinks():
    model = made_of(decoder(block("rope", "window"), block("rope", "sinks"), block("rope", "causal")))
    a_slot = 2 * (4 + 3) * 8
    assert model.new_cache(3, 50, "ring").nbytes == 3 * (4 + 6 + 50) * a_slot
    assert model.new_cache(3, 50, "static").nbytes == 3 * 150 * a_slot
    assert model.new_cache(3, 5, "ring").nbytes == 3 * (4 + 5 + 5) * a_slot


def test_a_failed_call_leaves_a_ring_as_it_was():
    model, x = made_of(two_layers("rope", "sinks")), tokens()
    whole = model(x)
    cache = model.new_cache(2, 40, "ring")
    model(x[:, :9], cache=cache)
    for size in (1, 5):
        with pytest.raises(RuntimeError, match="stop"):
            model(x[:, 9 : 9 + size].flip(1), cache=cache, tap=_Stop())
    found = torch.cat([model(x[:, 9:12], cache=cache), model(x[:, 12:], cache=cache)], 1)
    torch.testing.assert_close(found, whole[:, 9:], **EXACT)


class _Stop:
    """A tap that fails in the last layer."""

    def wants(self, site):
        return False

    def __call__(self, site, value):
        if site == "blocks.1.resid_post":
            raise RuntimeError("stop")
        return value


@pytest.mark.parametrize("kind", KINDS)
def test_chosen_rows_go_on(kind):
    model, x = made_of(two_layers("alibi", "sinks")), tokens(3)
    cache = model.new_cache(3, 40, kind)
    model(x[:, :11], cache=cache)
    rows = torch.tensor([2, 0, 2])
    cache.select(rows)
    found = torch.cat([model(x[rows, i : i + 1], cache=cache) for i in range(11, 17)], 1)
    torch.testing.assert_close(found, model(x)[rows][:, 11:], **EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_the_new_tokens(kind):
    model, x = made_of(two_layers("rope", "window")), tokens()
    with torch.enable_grad():
        vectors = model.decoder.embed.token.weight[x].detach().requires_grad_()
        whole = torch.autograd.grad(model(embeddings=vectors)[:, -1].square().sum(), vectors)[0]
        cache = model.new_cache(2, 40, kind)
        with torch.no_grad():
            model(x[:, :-1], cache=cache)
        last = model(embeddings=vectors[:, -1:], cache=cache)
        found = torch.autograd.grad(last.square().sum(), vectors)[0]
    torch.testing.assert_close(found[:, -1], whole[:, -1], **EXACT)


@pytest.mark.parametrize("position", ["none", "alibi", "shared", "own"])
def test_a_cache_keeps_the_source(position):
    model, x = made_of(translator(position)), tokens()
    source, real = tokens(length=13, seed=3), left_padded(13, 4)
    whole = model(x, source=source)
    torch.testing.assert_close(model(x, memory=model.encode(source)), whole, **EXACT)
    padded = model(x, source=source, source_padding=real)
    torch.testing.assert_close(padded[:1], model(x[:1], source=source[:1, 4:]), **EXACT)
    torch.testing.assert_close(padded[1:], whole[1:], **EXACT)
    for sizes in SPLITS:
        found, cache = by_parts(model, x, sizes, "static", first={"source": source, "source_padding": real})
        torch.testing.assert_close(found, padded, **EXACT)
    own = 2 * 2 * 40 * 2 * (4 + 3) * 8 + (0 if position == "none" else 2 * 40 * 8)
    assert cache.nbytes == own + 2 * 2 * 13 * (5 + 4) * 8


def test_the_source_comes_once():
    model, x, source = made_of(translator()), tokens(), tokens(length=13, seed=3)
    cache = model.new_cache(2, 40)
    with pytest.raises(ValueError, match=r"give source .* or memory"):
        model(x, cache=cache)
    first = model(x, source=source, cache=cache)
    with pytest.raises(ValueError, match="the cache keeps the source of its first call"):
        model(x, source=source, cache=cache)
    cache.reset()
    torch.testing.assert_close(model(x, source=source, cache=cache), first, **EXACT)


def test_a_source_that_cannot_be_is_refused_by_its_own_name():
    model, x, source = made_of(translator()), tokens(), tokens(length=13, seed=3)
    real, memory = torch.ones(2, 13, dtype=torch.bool), torch.zeros(2, 13, 14, dtype=torch.float64)
    for given, said in (
        ({"source": source[:1]}, r"the source is \[2, S\] or memory \[2, S, 14\] .*; got .*\[1, 13\]"),
        ({"memory": memory[..., :10]}, r"or memory \[2, S, 14\] .*; got .*\[2, 13, 10\]"),
        ({"memory": memory.float()}, "memory should be torch.float64 like the model; got torch.float32"),
        ({"memory": memory.long()}, "memory should be torch.float64 like the model; got torch.int64"),
        ({"source": source, "source_padding": real[:, 1:]}, r"source_padding is .* \[2, 13\] .* got .* \[2, 12\]"),
        ({"source": source, "source_padding": real.long()}, "source_padding is torch.bool .* got torch.int64"),
        ({"memory": memory, "source_padding": real[:1]}, r"source_padding is .* got torch.bool \[1, 13\]"),
        ({"source": source, "source_segments": real.long()}, "both segments and source_segments"),
    ):
        with pytest.raises(ValueError, match=said):
            model(x, **given)
