"""The model's contract: what it takes, what it refuses, how it is built, tied, initialised, compiled."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from anyformer.nn.init import INITS, Init, initialise
from anyformer.nn.layers import Linear
from anyformer.nn.model import Model, build, build_block
from anyformer.nn.roles import roles
from anyformer.planning import plan
from anyformer.spec import expand, load_spec
from nn.helpers import GPT, KINDS, LLAMA, PARALLEL, ids, made
from spec.strategies import normed_recipes, recipes

BACKENDS = ["auto", "reference", "fused"]


@torch.no_grad()
def test_embeddings_instead_of_tokens():
    for kind in KINDS.values():
        model = made(kind)
        tokens = ids(2, 6, 19)
        rows = model.decoder.embed.token.weight[tokens]
        assert torch.equal(model(embeddings=rows), model(tokens))
        assert torch.equal(model.hidden(embeddings=rows), model.hidden(tokens))
        assert model(tokens).shape == (2, 6, 19)
        assert model.hidden(tokens).shape == (2, 6, model.spec.decoder.d_model)


@torch.no_grad()
def test_last_only_is_the_last_position():
    model = made(GPT)
    tokens = ids(3, 6, 19)
    torch.testing.assert_close(model(tokens, last_only=True), model(tokens)[:, -1:], atol=1e-6, rtol=1e-5)


def test_a_model_without_a_head():
    model = made({**GPT, "head": "none"})
    with pytest.raises(ValueError, match=r"this model has no head; model.hidden\(…\) gives its hidden states"):
        model(ids(1, 3, 19))
    assert model.hidden(ids(1, 3, 19)).shape == (1, 3, 18)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "give tokens or embeddings, one of them"),
        ({"tokens": ids(1, 2, 19), "embeddings": torch.zeros(1, 2, 20)}, "give tokens or embeddings, one of them"),
        ({"tokens": torch.zeros(1, 2)}, r"tokens are int64 \[B, T\] .*; got torch.float32 \[1, 2\]"),
        ({"tokens": torch.zeros(3, dtype=torch.int64)}, r"got torch.int64 \[3\]"),
        ({"tokens": torch.zeros(1, 0, dtype=torch.int64)}, r"with B and T at least 1; got torch.int64 \[1, 0\]"),
        ({"tokens": torch.zeros(0, 3, dtype=torch.int64)}, r"got torch.int64 \[0, 3\]"),
        ({"tokens": torch.zeros(1, 2, dtype=torch.bool)}, "got torch.bool"),
        ({"tokens": torch.tensor([[3, 19]])}, r"token id 19 is outside the vocabulary of 19 \(0 … 18\)"),
        ({"tokens": torch.tensor([[3, -1]])}, "token id -1 is outside the vocabulary of 19"),
        ({"embeddings": torch.zeros(1, 2, 19)}, r"numbers \[B, T, 20\]; got torch.float32 \[1, 2, 19\]"),
        ({"embeddings": torch.zeros(2, 20)}, r"got torch.float32 \[2, 20\]"),
        ({"embeddings": torch.zeros(1, 2, 20, dtype=torch.int64)}, "floating-point numbers .* got torch.int64"),
        ({"embeddings": torch.zeros(1, 0, 20)}, r"got torch.float32 \[1, 0, 20\]"),
        (
            {"embeddings": torch.zeros(1, 2, 20, dtype=torch.float64)},
            r"embeddings should be torch.float32 like the model; got torch.float64: embeddings.to\(torch.float32\)",
        ),
    ],
)
def test_input_that_cannot_be_is_refused(arguments, said):
    model = made(LLAMA)
    for call in (model, model.hidden):
        with pytest.raises(ValueError, match=said):
            call(**arguments)


@pytest.mark.parametrize(
    ("argument", "near"),
    [
        ("paddings", "did you mean `padding`?"),
        ("position", "did you mean `positions`?"),
        ("attention_mask", "did you mean `padding`?"),
        ("input_ids", "did you mean `tokens`?"),
        ("colour", "it takes tokens, embeddings, padding, segments,"),
    ],
)
def test_an_argument_that_there_is_not_is_named_with_the_nearest(argument, near):
    model = made({**LLAMA, "architecture": "encoder", "pooler": True})
    calls = {"model(…)": model, "model.hidden(…)": model.hidden, "model.pooled(…)": model.pooled}
    for name, call in calls.items():
        with pytest.raises(TypeError) as caught:
            call(ids(1, 3, 19), **{argument: None})
        assert str(caught.value).startswith(f"{name} takes no argument `{argument}`; {near}")


@pytest.mark.parametrize(("architecture", "said"), [("decoder", "a decoder alone"), ("encoder", "an encoder alone")])
@pytest.mark.parametrize("argument", ["source", "memory", "source_padding", "source_segments"])
def test_a_model_of_one_stack_says_what_it_is_and_what_it_reads(architecture, said, argument):
    model = made({**LLAMA, "architecture": architecture})
    with pytest.raises(ValueError, match=f"^{argument} is for a model with an encoder and a decoder") as caught:
        model(ids(1, 3, 19), **{argument: torch.zeros(1, 3, 24)})
    assert f"and this one is {said}; give the" in str(caught.value)
    assert "as tokens: model(tokens," in str(caught.value)


def test_a_sequence_past_the_learned_positions_is_refused():
    """Context 16, a prompt of 17; 16 exactly is served."""
    model = made({**GPT, "max_positions": 16})
    assert model(ids(1, 16, 19)).shape == (1, 16, 19)
    with pytest.raises(ValueError, match=r"position 16 is past the 16 learned positions \(0 … 15\)"):
        model(ids(1, 17, 19))
    with pytest.raises(ValueError, match="position -2 is before the 16 learned positions"):
        model(ids(1, 2, 19), positions=torch.tensor([-2, 1]))


@torch.no_grad()
def test_rotary_and_sinusoidal_models_go_past_their_context():
    """Max_positions is what the model is made for; only a learned table ends."""
    for kind in ("llama", "sinusoidal", "nope"):
        recipe = {**KINDS[kind], "max_positions": 8}
        assert torch.isfinite(made(recipe)(ids(1, 20, 19))).all()


def test_backends_are_named():
    model = made(LLAMA)
    assert model.use_backend("reference") is model
    assert {block.attention.backend for block in model.layers()} == {"reference"}
    with pytest.raises(ValueError, match="unknown backend 'flash'; known: auto, reference, tiled, fused, flex"):
        model.use_backend("flash")


@settings(max_examples=25)
@given(normed_recipes())
def test_backends_agree_in_gradients(recipe):
    """In float64, over the whole space, with padding."""
    tokens = ids(2, 6, expand(recipe).vocab_size)
    real = torch.ones(2, 6, dtype=torch.bool)
    real[0, :2] = False
    found = []
    for backend in ("reference", "fused"):
        model = made(recipe, dtype="float64", backend=backend)
        out = model.hidden(tokens, padding=real) if model.head is None else model(tokens, padding=real)
        out[real].square().sum().backward()
        found.append((out.detach()[real], {name: p.grad for name, p in model.named_parameters()}))
    torch.testing.assert_close(found[0][0], found[1][0])
    for name, gradient in found[0][1].items():
        assert (gradient is None) == (found[1][1][name] is None)
        if gradient is not None:
            torch.testing.assert_close(found[1][1][name], gradient, atol=1e-9, rtol=1e-6)


DROPPED = {
    **GPT,
    "dropout": 0.5,
    "embed": {**GPT["embed"], "dropout": 0.5},
    "ffn": {**GPT["ffn"], "dropout": 0.5},
}


@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_evaluation_drops_nothing(backend):
    """Every rate .5, evaluation: twice the same and the same as rate 0, cached as well."""
    model = made(DROPPED, backend=backend)
    plain = made(GPT, backend=backend)
    tokens = ids(2, 9, 19)
    assert not model.training
    assert torch.equal(model(tokens), model(tokens))
    assert torch.equal(model(tokens), plain(tokens))
    cache = model.new_cache(batch=2, capacity=9)
    model(tokens[:, :8], cache=cache)
    torch.testing.assert_close(model(tokens[:, 8:], cache=cache), plain(tokens)[:, 8:], atol=1e-5, rtol=1e-5)
    model.train()
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), plain(tokens))


@pytest.mark.parametrize(
    "change",
    [
        {"attention": {**GPT["attention"], "dropout": 0.5}},
        {"attention": {**GPT["attention"], "out_dropout": 0.5}},
        {"ffn": {**GPT["ffn"], "dropout": 0.5}},
        {"ffn": {**GPT["ffn"], "out_dropout": 0.5}},
        {"embed": {**GPT["embed"], "dropout": 0.5}},
    ],
    ids=lambda change: next(iter(change)) + str(sorted(next(iter(change.values())))[-2:]),
)
@torch.no_grad()
def test_each_rate_drops_in_training(change):
    model = made({**GPT, **change}).train()
    tokens = ids(1, 6, 19)
    assert not torch.equal(model(tokens), model(tokens))
    torch.manual_seed(3)
    one = model(tokens)
    torch.manual_seed(3)
    assert torch.equal(model(tokens), one)


def test_tied_weights_are_one_parameter():
    """One key, one optimiser entry, one count, and still tied after copies, casts, moves and assignment."""
    model = made(LLAMA)
    names = [name for name in model.state_dict() if "head" in name or "token" in name]
    assert names == ["decoder.embed.token.weight"]
    assert sum(p.numel() for p in model.parameters()) == plan(model.spec).parameters
    assert [role for role in roles(model).values() if role in ("head", "embedding")] == ["embedding"]
    assigned = made(LLAMA, seed=1)
    assigned.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    meta = build(model.spec, device="meta")
    meta.load_state_dict(model.state_dict(), assign=True)
    tokens = ids(1, 5, 19)
    for each in (copy.deepcopy(model), copy.deepcopy(model).double().float(), assigned, meta):
        assert torch.equal(each(tokens), model(tokens))
        with torch.no_grad():
            each.decoder.embed.token.weight.mul_(2)
        hidden = each.hidden(tokens)
        torch.testing.assert_close(each(tokens), hidden @ each.decoder.embed.token.weight.T)
        with torch.no_grad():
            each.decoder.embed.token.weight.div_(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    assert sum(p.shape == (19, 20) for group in optimizer.param_groups for p in group["params"]) == 1
    before = model.decoder.embed.token.weight.detach().clone()
    model(tokens).logsumexp(-1).sum().backward()
    optimizer.step()
    assert (model.decoder.embed.token.weight - before).abs().min() > 0
    torch.testing.assert_close(model(tokens), model.hidden(tokens) @ model.decoder.embed.token.weight.T)


def test_the_gradient_of_a_tied_weight_is_the_sum():
    """Of what the embedding and the head, kept apart, would get."""
    tied = made(LLAMA, dtype="float64")
    apart = made({**LLAMA, "tie": False}, dtype="float64")
    state = tied.state_dict()
    apart.load_state_dict({**state, "head.weight": state["decoder.embed.token.weight"]})
    assert apart.head.weight is not apart.decoder.embed.token.weight
    tokens = ids(2, 6, 19)
    torch.testing.assert_close(tied(tokens), apart(tokens))
    for model in (tied, apart):
        model(tokens).square().sum().backward()
    both = apart.head.weight.grad + apart.decoder.embed.token.weight.grad
    torch.testing.assert_close(tied.decoder.embed.token.weight.grad, both)


def test_untied_tables_are_kept_apart():
    model = made(GPT)
    assert model.head.weight.data_ptr() != model.decoder.embed.token.weight.data_ptr()
    assert {"head.weight", "decoder.embed.token.weight"} <= set(model.state_dict())


@settings(max_examples=25)
@given(recipes())
def test_initialisation_covers_every_parameter(recipe):
    spec = expand(recipe)
    for init in INITS:
        model = build(spec, init=init)
        kinds = roles(model)
        assert set(kinds) == dict(model.named_parameters()).keys()
        for name, p in model.named_parameters():
            assert torch.isfinite(p).all()
            if kinds[name] == "norm":
                assert (p == 1).all()
            elif kinds[name] == "bias":
                assert (p == 0).all()
            else:
                assert p.abs().min() > 0
                assert p.abs().max() < 10
        assert not model.training


WIDE = {**LLAMA, "d_model": 90, "n_layers": 8, "vocab_size": 301, "tie": False, "max_positions": 50}
WIDE = {**WIDE, "embed": {"position": "learned"}, "ffn": {"kind": "swiglu", "d_ff": 210}}


@pytest.mark.parametrize("init", ["gpt2", "scaled"])
def test_the_spread_of_initial_values(init):
    """gpt2: 0.02; scaled: 1/√fan_in; both divide what writes to the stream by √(2·n_layers)."""
    model = build(expand(WIDE), init=init)
    kinds = roles(model)
    for name, p in model.named_parameters():
        if kinds[name] in ("norm", "bias"):
            continue
        std = 0.02 if init == "gpt2" or kinds[name] == "position" else p.shape[1] ** -0.5
        if kinds[name] == "residual":
            std /= math.sqrt(16)
        assert p.std().item() == pytest.approx(std, rel=0.06), name
        assert abs(p.mean().item()) < 0.1 * std, name


def test_initialisation_rules_of_ones_own():
    model = build(expand(LLAMA), init=Init(hidden=0.5, residual=None, depth="zero", embedding=2.0))
    kinds = roles(model)
    for name, p in model.named_parameters():
        if kinds[name] == "residual":
            assert (p == 0).all()
        if kinds[name] == "hidden":
            assert p.std().item() == pytest.approx(0.5, rel=0.15)
    plain = build(expand(LLAMA), init=Init(depth="none"))
    assert plain.layers()[0].attention.out.weight.std().item() == pytest.approx(0.02, rel=0.1)
    with pytest.raises(ValueError, match="unknown initialisation 'xavier'; known: gpt2, scaled"):
        build(expand(LLAMA), init="xavier")


def test_the_seed_alone_decides_the_values():
    """Whatever the dtype and the state of the global generator, which stays untouched."""
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one = build(expand(PARALLEL), seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    two = build(expand(PARALLEL), seed=3)
    half = build(expand(PARALLEL), seed=3, dtype="bfloat16")
    double = build(expand(PARALLEL), seed=3, dtype=torch.float64)
    other = build(expand(PARALLEL), seed=4)
    for name, p in one.named_parameters():
        assert torch.equal(p, two.get_parameter(name))
        assert torch.equal(p.bfloat16(), half.get_parameter(name))
        torch.testing.assert_close(p.double(), double.get_parameter(name), atol=1e-7, rtol=1e-6)
        assert torch.equal(p, other.get_parameter(name)) == (p.dim() == 1)


def test_built_on_meta_then_filled():
    spec = expand(GPT)
    meta = build(spec, device="meta")
    assert all(p.is_meta for p in meta.parameters())
    assert not list(meta.buffers())
    meta.to_empty(device="cpu")
    initialise(meta, {"": spec.decoder.n_layers}, seed=0, init="scaled")
    tokens = ids(1, 5, 19)
    assert torch.equal(meta(tokens), build(spec)(tokens))
    big = {**LLAMA, "d_model": 8192, "n_layers": 80, "vocab_size": 128256, "ffn": {"kind": "swiglu", "d_ff": 28672}}
    big["attention"] = {"n_heads": 64, "n_kv_heads": 8, "position": "rope"}
    big["tie"] = False
    assert sum(p.numel() for p in build(expand(big), device="meta").parameters()) == 70_553_706_496


@pytest.mark.parametrize("dtype", ["int64", "float33", torch.int32])
def test_a_dtype_that_cannot_be(dtype):
    with pytest.raises(ValueError, match="unknown dtype"):
        build(expand(LLAMA), dtype=dtype)


class Stranger(nn.Module):
    """Owns a parameter and says nothing of it."""

    def __init__(self):
        super().__init__()
        self.known = Linear(3, 3, bias=True, role="hidden")
        self.gain = nn.Parameter(torch.ones(3))


def test_a_parameter_without_a_role_is_refused():
    with pytest.raises(TypeError, match="Stranger at '' gives no role to its parameter 'gain'"):
        roles(Stranger())
    model = Model(expand(LLAMA))
    model.decoder.extra = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"Linear at 'decoder.extra' gives no role to its parameter 'weight'"):
        initialise(model, {"": 3}, seed=0, init="gpt2")


@settings(max_examples=20)
@given(normed_recipes(dropout=False))
def test_a_block_trains_in_anyones_module(recipe):
    stack = expand(recipe).decoder
    blocks = [build_block(block, stack.d_model, seed=i) for i, block in enumerate(stack.blocks)]
    theirs = nn.Sequential(nn.Linear(3, stack.d_model), *blocks, nn.Linear(stack.d_model, 1)).train()
    x = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(theirs.parameters(), lr=1e-3)
    out = theirs(x)
    assert out.shape == (4, 5, 1)
    out.square().mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in theirs.parameters() if p.grad is not None)
    optimizer.step()
    assert not torch.equal(theirs(x), out)


@torch.no_grad()
def test_blocks_in_a_row_are_the_model():
    """A block alone is causal and counts positions from 0."""
    model = made(LLAMA)
    tokens = ids(2, 7, 19)
    x = model.decoder.embed(model.decoder.embed.lookup(tokens), torch.arange(7)[None])
    out = nn.Sequential(*model.layers(), model.decoder.final_norm)(x)
    torch.testing.assert_close(out, model.hidden(tokens))


def test_a_model_learns():
    """A fixed batch by heart, in a few steps."""
    model = build(expand(LLAMA)).train()
    tokens = ids(2, 8, 19)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        loss = nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(19), abs=1.0)
    assert losses[-1] < 0.2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", list(KINDS))
def test_compiled_is_eager_with_padding_and_cache(kind):
    torch._dynamo.reset()
    model = made(KINDS[kind])
    compiled = torch.compile(model, backend="eager")
    tokens, real = ids(2, 6, 19), torch.ones(2, 6, dtype=torch.bool)
    real[0, :2] = False
    torch.testing.assert_close(compiled(tokens, padding=real), model(tokens, padding=real))
    packed = torch.tensor([[1, 1, 1, 4, 4, 4], [0, 0, 2, 2, 2, 2]])
    torch.testing.assert_close(compiled(tokens, segments=packed), model(tokens, segments=packed))
    with torch.no_grad():
        cache = model.new_cache(batch=2, capacity=8)
        compiled(tokens, cache=cache)
        got = compiled(tokens[:, :1], cache=cache)
        torch.testing.assert_close(got, model(torch.cat([tokens, tokens[:, :1]], 1))[:, -1:], atol=1e-5, rtol=1e-5)
    torch._dynamo.reset()


def test_every_public_name_is_there():
    import anyformer as af

    spec = af.load_spec("llama-tiny")
    model = af.build(spec, seed=0)
    assert isinstance(spec, af.ModelSpec)
    assert model(ids(1, 3, 512)).shape == (1, 3, 512)
    q = torch.randn(1, 3, 2, 4)
    assert af.attend(q, q, q, visible=af.masks.Causal()).shape == (1, 3, 2, 4)
    assert af.plan(spec, batch=8, context=256).parameters == sum(p.numel() for p in model.parameters())
    assert af.build_block(spec.decoder.blocks[0], d_model=96)(torch.randn(1, 3, 96)).shape == (1, 3, 96)
    assert load_spec("llama-tiny") == spec
