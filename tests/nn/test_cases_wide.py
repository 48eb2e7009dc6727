"""What people met elsewhere, on whole models of the wider space: windows, caps, lengths, padding, grouped heads."""

import math

import pytest
import torch

import anyformer as af
from anyformer.nn.attend import Unsupported
from anyformer.nn.model import build
from anyformer.spec import SpecError, expand
from anyformer.spec.attention import Causal
from anyformer.spec.parts import LanguageHead
from anyformer.spec.positions import DynamicNTKScaling, Rope
from nn.helpers import ids, made, padded, randomise
from nn.wide import block, decoder, latent_block, made_of, tokens

EXACT = {"atol": 1e-10, "rtol": 1e-9}
WIDE = ["alibi", "shared", "own", "dynamic", "longrope"]

BASE = {
    "vocab_size": 19,
    "d_model": 20,
    "n_layers": 2,
    "ffn": {"kind": "swiglu", "d_ff": 33},
    "attention": {"n_heads": 4, "n_kv_heads": 2, "d_head": 8, "position": "rope"},
}


def recipe(**attention):
    return {**BASE, "attention": {**BASE["attention"], **attention}}


def greedy(model, prompts, real, n):
    """The next `n` tokens of each row, against a cache."""
    cache = model.new_cache(len(prompts), prompts.shape[1] + n, "ring")
    out = [model(prompts, padding=real, cache=cache, last_only=True).argmax(-1)]
    while len(out) < n:
        out.append(model(out[-1], cache=cache, last_only=True).argmax(-1))
    return torch.cat(out, 1)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("make", [block, latent_block])
@pytest.mark.parametrize("position", WIDE)
@torch.no_grad()
def test_a_padded_prompt_is_the_prompt_alone(position, make, side):
    """Prompts of 3 and 7 ids: last logits, and the 20 tokens that follow; the pad's id changes nothing."""
    model = made_of(decoder(make(position, "sinks"), make(position)), dtype="float32")
    prompts = [tokens(1, 3, seed=1)[0], tokens(1, 7, seed=2)[0]]
    outs = []
    for pad in (0, 11):
        batch, real = padded(prompts, side, pad)
        outs.append(model(batch, padding=real, last_only=True))
        for row, prompt in enumerate(prompts):
            torch.testing.assert_close(outs[-1][row], model(prompt[None])[0, -1:], atol=1e-5, rtol=1e-5)
        together = greedy(model, batch, real, 20)
        alone = [greedy(model, prompt[None], None, 20)[0] for prompt in prompts]
        assert [row.tolist() for row in together] == [row.tolist() for row in alone]
    assert torch.equal(*outs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("backend", ["reference", "tiled", "auto"])
@pytest.mark.parametrize("position", ["alibi", "own"])
def test_a_row_of_nothing_but_padding_is_finite_and_alone(position, backend, dtype):
    """With a window, so that the first queries of a row padded on the left see nothing either."""
    model = made_of(decoder(block(position, "window"), latent_block(position)), dtype=dtype).use_backend(backend)
    batch, real = tokens(3, 6), torch.ones(3, 6, dtype=torch.bool)
    real[0, :3], real[1] = False, False
    out = model(batch, padding=real)
    out.float().square().sum().backward()
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    filled = real.clone()
    filled[1] = True
    assert torch.equal(model(batch, padding=filled)[[0, 2]], out[[0, 2]])


@pytest.mark.parametrize("make", [block, latent_block])
@torch.no_grad()
def test_a_long_row_leaves_no_trace_in_a_short_one(make):
    """Trained on 16 positions: a row within them has theta = 10,000, whatever came before it or stands beside it."""
    scaled = Rope(scaling=DynamicNTKScaling(factor=2.0, original=16))
    as_trained = made_of(decoder(*_rotary(make, Rope())))
    model = made_of(decoder(*_rotary(make, scaled)))
    short, long = tokens(1, 16, seed=1), tokens(1, 24, seed=2)
    before = model(short)
    assert torch.equal(before, as_trained(short))
    model(long)
    model(torch.cat([long, long[:, :8]], 1))
    assert torch.equal(model(short), before)
    at_24 = made_of(decoder(*_rotary(make, Rope(theta=_base(make, 24)))))
    torch.testing.assert_close(model(long), at_24(long), **EXACT)
    batch, real = padded([short[0], long[0]], "left", 0)
    together = model(batch, padding=real)
    torch.testing.assert_close(together[0, 8:], before[0], **EXACT)
    torch.testing.assert_close(together[1], model(long)[0], **EXACT)


def _rotary(make, rope):
    """Two layers of heads of which eight and four channels turn."""
    made = make("rope").model_copy()
    spec = made.attention.model_copy(update={"position": rope, **({"d_head": 8} if make is block else {"d_rope": 4})})
    return (made.model_copy(update={"attention": spec}),) * 2


def _base(make, length):
    """10,000 · (2·L/16 − 1)^(d/(d − 2)), 25,198.421 for L = 24 and d = 8."""
    d = 8 if make is block else 4
    base = 1e4 * (2 * length / 16 - 1) ** (d / (d - 2))
    assert d != 8 or base == pytest.approx(25198.421, abs=1e-3)
    return base


@torch.no_grad()
def test_bfloat16_tells_position_256_from_257():
    """bfloat16 has no 257."""
    model = made(recipe(), dtype="bfloat16")
    x = ids(1, 2, 19)
    near, far = (model(x, positions=torch.tensor([0, at])) for at in (256, 257))
    assert not torch.equal(near[:, 1], far[:, 1])


def test_scores_beyond_their_cap_are_capped_by_every_backend():
    """Weights so large that the cap shows; fused has no cap and says so."""
    cap, q_and_k = 5.0, ("q.weight", "k.weight")
    capped, plain = made(recipe(softcap=cap), dtype="float64"), made(recipe(), dtype="float64")
    x = ids(2, 9, 19)
    with torch.no_grad():
        for model in (capped, plain):
            for name, p in model.named_parameters():
                if name.endswith(q_and_k):
                    p.mul_(8)
        want = capped.use_backend("reference")(x)
        assert (want - plain(x)).abs().max() > 0.1
        for backend in ("tiled", "auto"):
            torch.testing.assert_close(capped.use_backend(backend)(x), want, **EXACT)
        tap = af.Tap(record=["blocks.0.pattern"])
        capped(x, tap=tap)
    pattern = tap.values["blocks.0.pattern"][:, :, 1, :2]
    # Two visible keys: the logit of their weights is the difference of two capped scores.
    assert torch.logit(pattern[..., 0]).abs().max() <= 2 * cap
    with pytest.raises(Unsupported, match="no soft-cap"):
        capped.use_backend("fused")(x)


@pytest.mark.parametrize("kind", ["static", "ring"])
@pytest.mark.parametrize("backend", ["reference", "tiled", "fused"])
@pytest.mark.parametrize(("window", "query", "keys"), [(4, 10, [7, 8, 9, 10]), (4, 2, [0, 1, 2]), (1, 6, [6])])
@pytest.mark.parametrize("make", [block, latent_block])
def test_a_window_counts_the_token_itself(make, window, query, keys, backend, kind):
    """One layer, so that a logit depends on nothing but what its token sees: whole, and step by step."""
    model = made_of(decoder(make("rope", Causal(window=window)))).use_backend(backend)
    x = model.decoder.embed.lookup(tokens(1, 12)).detach()

    def seen(call):
        base = call(x)[0, query]
        changed = (x + torch.eye(12, dtype=x.dtype)[j][None, :, None] for j in range(12))
        return [j for j, each in enumerate(changed) if not torch.equal(call(each)[0, query], base)]

    def in_steps(each):
        cache = model.new_cache(1, 12, kind)
        return torch.cat([model(embeddings=each[:, i : i + 1], cache=cache) for i in range(12)], 1)

    with torch.no_grad():
        assert seen(lambda each: model(embeddings=each)) == keys
        assert seen(in_steps) == keys


@pytest.mark.parametrize("theta", [10000.0, 500000])
def test_every_spelling_of_a_theta_is_one_specification(theta):
    spellings = [
        {"kind": "rope", "theta": theta},
        {"kind": "rope", "theta": theta, "scaling": "none"},
        {"kind": "rope", "theta": theta, "scaling": {"kind": "none"}},
        {"kind": "rope", "theta": theta, "fraction": 1.0, "layout": "half"},
    ]
    assert len({expand(recipe(position=each)).to_json() for each in spellings}) == 1
    with pytest.raises(SpecError, match="unknown choice `dynamic-yarn`"):
        expand(recipe(position={"kind": "rope", "scaling": {"kind": "dynamic-yarn", "factor": 2.0}}))
    with pytest.raises(SpecError, match=r"scaling.kind: is required"):
        expand(recipe(position={"kind": "rope", "scaling": {"type": "linear", "factor": 2.0}}))


def test_local_layers_of_gemma_3_turn_by_their_own_theta():
    blocks = af.load_spec("gemma-3-1b").decoder.blocks
    for layer, each in enumerate(blocks):
        local = layer % 6 != 5
        assert each.attention.position.theta == (1e4 if local else 1e6)
        assert each.attention.mask.window == (512 if local else None)


def test_only_queries_keys_and_values_of_qwen_2_have_biases():
    spec = af.load_spec("qwen-2-0.5b")
    biases = {name.split(".", 3)[3] for name, _ in build(spec, device="meta").named_parameters() if "bias" in name}
    assert biases == {"attention.q.bias", "attention.k.bias", "attention.v.bias"}


@torch.no_grad()
def test_a_tied_head_of_t5_is_scaled_and_an_untied_one_is_not():
    """Width 64: logits are (h / 8) Eᵀ where the head is tied, h Wᵀ where it is not; scores have no 1/√d."""
    shared = {"architecture": "encoder-decoder", "vocab_size": 19, "d_model": 64, "n_layers": 1, "norm": "rms"}
    shared |= {"attention": {"n_heads": 4, "position": "relative", "scale": 1.0}, "ffn": "geglu"}
    tied = {**shared, "tie": True, "head": {"kind": "language", "scale": 1 / 8}}
    untied = {**shared, "tie": ["encoder.embed", "decoder.embed"]}
    x, source = ids(2, 5, 19), ids(2, 7, 19, seed=1)
    for table, factor in ((tied, 1 / 8), (untied, 1.0)):
        model = made(table, dtype="float64")
        h = model.hidden(x, source=source)
        matrix = model.token_table("encoder") if factor < 1 else model.head.weight
        assert model.token_table("decoder") is model.token_table("encoder")
        torch.testing.assert_close(model(x, source=source), h * factor @ matrix.T, **EXACT)
    for name, scale in (("t5-base", 768**-0.5), ("t5-v1.1-base", 1.0), ("transformer-base", 1.0)):
        spec = af.load_spec(name)
        assert isinstance(spec.head, LanguageHead)
        assert spec.head.scale == pytest.approx(scale, rel=1e-9)
        own = {b.attention.scale for s in spec.stacks.values() for b in s.blocks}
        assert own == ({8**-1.0} if name == "transformer-base" else {1.0})


@torch.no_grad()
def test_embeddings_are_scaled_before_positions_are_added():
    """Vaswani et al. 2017, section 3.4: √d_model once, and not on the sinusoids."""
    table = {**BASE, "embed": {"scale": "sqrt_width", "position": "sinusoidal"}}
    model = made(table, dtype="float64")
    x = ids(1, 6, 19)
    tap = af.Tap(record=["embed"])
    model(x, tap=tap)
    position, pair = torch.arange(6.0, dtype=torch.float64)[:, None], torch.arange(10, dtype=torch.float64)
    angles = position / 1e4 ** (2 * pair / 20)
    added = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
    want = math.sqrt(20) * model.token_table("decoder")[x[0]] + added
    torch.testing.assert_close(tap.values["embed"][0], want, **EXACT)


@pytest.mark.parametrize("kind", [None, "static", "ring"])
@pytest.mark.parametrize("backend", ["reference", "tiled", "fused"])
@pytest.mark.parametrize("n_kv_heads", [1, 2])
@torch.no_grad()
def test_grouped_heads_are_heads_with_repeated_keys(n_kv_heads, backend, kind):
    """Query heads 0 … 3 read key heads 0, 0, 1, 1 (and 0, 0, 0, 0), with every cache."""
    window = {"mask": {"window": 5}}
    grouped = made(recipe(n_kv_heads=n_kv_heads, **window), dtype="float64", backend=backend)
    whole = made(recipe(n_kv_heads=4, **window), dtype="float64", backend=backend)
    state = grouped.state_dict()
    for name in state:
        if name.endswith(("attention.k.weight", "attention.v.weight")):
            heads = state[name].unflatten(0, (n_kv_heads, 8))
            state[name] = heads.repeat_interleave(4 // n_kv_heads, 0).flatten(0, 1)
    whole.load_state_dict(state)
    x = ids(2, 9, 19)
    want = whole(x)
    if kind is None:
        got = grouped(x)
    else:
        cache = grouped.new_cache(2, 9, kind)
        got = torch.cat([grouped(part, cache=cache) for part in x.split([4, 1, 3, 1], 1)], 1)
    torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize("kind", ["static", "ring"])
@torch.no_grad()
def test_three_hundred_steps_in_a_small_ring(kind):
    model = made_of(decoder(block("alibi", Causal(window=3, sinks=2)), latent_block("rope", Causal(window=7))))
    x = tokens(2, 300)
    cache = model.new_cache(2, 300, kind)
    steps = torch.cat([model(x[:, i : i + 1], cache=cache) for i in range(300)], 1)
    torch.testing.assert_close(steps, model(x), **EXACT)


OTHERS = {
    "fewer layers": decoder(block()),
    "more layers": decoder(block(), block(), block()),
    "other heads": decoder(block(), latent_block()),
    "another window": decoder(block(mask=Causal(window=5)), block()),
    "kept positions": decoder(block("dynamic"), block()),
}


@pytest.mark.parametrize("kind", ["static", "ring"])
@pytest.mark.parametrize("name", OTHERS)
def test_a_cache_of_another_model_is_refused(name, kind):
    """Its window or its number of layers would have been taken without a word."""
    model, other = made_of(decoder(block(mask=Causal(window=4)), block())), made_of(OTHERS[name])
    cache = other.new_cache(2, 20, kind)
    with pytest.raises(ValueError, match=r"cache is of another model.*model.new_cache\(…\) makes one for it"):
        model(tokens(), cache=cache)
    assert cache.lengths.tolist() == [0, 0]
    other(tokens(), cache=cache)


@torch.no_grad()
def test_a_cache_in_another_dtype_or_place_is_refused():
    model = made(recipe())
    x = ids(2, 5, 19)
    cache = made(recipe(), dtype="bfloat16").new_cache(2, 9)
    with pytest.raises(ValueError, match=r"cache is torch.bfloat16 on cpu and the model torch.float32 on cpu"):
        model(x, cache=cache)
    with pytest.raises(ValueError, match=r"cache is torch.float32 on meta and the model torch.float32 on cpu"):
        model(x, cache=build(expand(recipe()), device="meta").new_cache(2, 9))
    with pytest.raises(ValueError, match=r"cache is what model.new_cache\(…\) gives; got a dict"):
        model(x, cache={})
    own = model.new_cache(2, 9)
    model(x, cache=own)
    with pytest.raises(ValueError, match=r"cache is torch.float32 .* and the model torch.float64"):
        model.double()(x[:, :1], cache=own)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (torch.tensor([True, False]), r"rows are int64 indices \[N\], at least one; got torch.bool \[2\]"),
        (torch.tensor([0.0]), r"got torch.float32 \[1\]"),
        (torch.tensor([[0, 1]]), r"got torch.int64 \[1, 2\]"),
        (torch.zeros(0, dtype=torch.int64), r"got torch.int64 \[0\]"),
        ([0], "got a list"),
        (torch.tensor([0, 2]), r"there is no row 2 in a cache of 2 rows \(0 … 1\)"),
        (torch.tensor([-1]), "there is no row -1"),
    ],
)
@torch.no_grad()
def test_rows_that_cannot_be_selected_change_nothing(rows, said):
    """Marks of rows were taken for rows, and the cache was then of as many rows as marks."""
    model, x = made_of(decoder(block("alibi"), block("rope", "window"))), tokens(2, 9)
    cache = model.new_cache(2, 9, "ring")
    model(x[:, :6], cache=cache)
    with pytest.raises(ValueError, match=said):
        cache.select(rows)
    torch.testing.assert_close(model(x[:, 6:], cache=cache), model(x)[:, 6:], **EXACT)


@torch.no_grad()
def test_a_call_that_fails_at_its_last_check_stores_nothing():
    """A tap's misspelt name is known only at the end; the cache had counted the tokens already."""
    model, x = made_of(decoder(block("alibi"), block("rope", "window"))), tokens(2, 9)
    cache = model.new_cache(2, 9, "ring")
    model(x[:, :4], cache=cache)
    with pytest.raises(ValueError, match=r"no activation site is called 'blocks.7.q'"):
        model(x[:, 4:6], cache=cache, tap=af.Tap(record=["blocks.7.q"]))
    torch.testing.assert_close(model(x[:, 4:], cache=cache), model(x)[:, 4:], **EXACT)


@pytest.mark.parametrize("options", [{"batch": 2.5}, {"batch": True}, {"capacity": "9"}, {"capacity": None}])
def test_a_cache_has_a_whole_number_of_places(options):
    with pytest.raises(ValueError, match="a cache needs whole numbers batch ≥ 1 and capacity ≥ 1; got batch="):
        made(recipe()).new_cache(**{"batch": 1, "capacity": 9, **options})


def test_a_prefix_is_within_its_row():
    model, x = made_of(decoder(block("rope", "prefix"))), tokens(2, 6)
    real = torch.ones(2, 6, dtype=torch.bool)
    real[1, 2:] = False
    for prefix, padding, said in (
        ([2, 7], None, "prefix is 7 for row 1, which has 6 real tokens in this call"),
        ([2, 3], real, "prefix is 3 for row 1, which has 2 real tokens"),
        ([-1, 0], None, "prefix is -1 for row 0"),
    ):
        cache = model.new_cache(2, 9)
        with pytest.raises(ValueError, match=said):
            model(x, prefix=torch.tensor(prefix), padding=padding, cache=cache)
        assert cache.lengths.tolist() == [0, 0]
    whole = model(x, prefix=torch.tensor([6, 0]))
    torch.testing.assert_close(model(x[:1], prefix=torch.ones(1, 6, dtype=torch.bool)), whole[:1], **EXACT)


@pytest.mark.parametrize("name", ["tokens", "embeddings", "padding", "segments", "positions", "types", "prefix"])
def test_what_is_no_tensor_is_named(name):
    model = made_of(decoder(block("rope", "prefix")))
    given = {name: [[1, 2]]} if name in ("tokens", "embeddings") else {"tokens": tokens(1, 2), name: [[1, 2]]}
    with pytest.raises(ValueError, match=rf"{name} (is|are) .*; got a list"):
        model(**given)


def test_what_a_block_by_itself_cannot_read():
    spec = expand(recipe()).decoder.blocks[0]
    layer = af.build_block(spec, 20)
    for x in (torch.zeros(3, 20), torch.zeros(1, 3, 21), torch.zeros(1, 3, 20, dtype=torch.int64), [1]):
        with pytest.raises(ValueError, match=r"a block reads floating-point numbers \[B, T, 20\]; got "):
            layer(x)
    for width in (0, -4, "8", True):
        with pytest.raises(ValueError, match="d_model is a number of channels, at least 1; got "):
            af.build_block(spec, width)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "gpu"}, "unknown device 'gpu'"),
        ({"dtype": None}, "unknown dtype None; known: float32"),
        ({"dtype": "float8_e4m3fn"}, "unknown dtype 'float8_e4m3fn'"),
        ({"seed": 1.5}, "seed is a whole number of 64 bits; got 1.5"),
        ({"seed": 2**70}, "seed is a whole number"),
    ],
)
def test_a_model_that_cannot_be_built(options, said):
    with pytest.raises(ValueError, match=said):
        build(expand(recipe()), **options)


@torch.no_grad()
def test_the_largest_and_the_smallest_numbers_compute():
    """What a specification admits is not lost in float32: a scale of 10⁻³⁰⁰ was 0, and 0 · −∞ no number."""
    for change in (
        {"scale": 1e-30},
        {"softcap": 1e-30},
        {"softcap": 1e30},
        {"clip": 1e30},
        {"position": {"kind": "rope", "theta": 1e-30}},
        {"position": {"kind": "alibi", "scale": 1e30}},
    ):
        model = randomise(build(expand(recipe(**change))))
        x = ids(2, 5, 19)
        cache = model.new_cache(2, 5)
        assert torch.isfinite(model(x)).all()
        assert torch.isfinite(torch.cat([model(x[:, i : i + 1], cache=cache) for i in range(5)], 1)).all()
