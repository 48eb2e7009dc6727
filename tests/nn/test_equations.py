"""The model is its equations: against a second one written from them, over the whole space, and finite differences."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyformer.nn.layers import ACTIVATIONS, NormLayer
from anyformer.nn.position import rotate, rotation, sinusoids
from anyformer.spec.parts import LayerNorm, RMSNorm, Rope, Sinusoidal
from nn.helpers import GPT, KINDS, LLAMA, PARALLEL, ids, made
from nn.oracle import hidden, logits, read_weights
from spec.strategies import normed_recipes


@settings(max_examples=60)
@given(normed_recipes(), st.sampled_from(["reference", "fused"]), st.integers(0, 99))
def test_every_legal_model_is_its_equations(recipe, backend, seed):
    model = made(recipe, dtype="float64", backend=backend, seed=seed)
    tokens = ids(2, 7, model.spec.vocab_size, seed)
    weights = read_weights(model)
    with torch.no_grad():
        states = model.hidden(tokens)
        for row in range(2):
            np.testing.assert_allclose(states[row], hidden(model.spec, weights, tokens[row].tolist()), atol=1e-9)
        if model.head is not None:
            scores = model(tokens)
            np.testing.assert_allclose(scores[0], logits(model.spec, weights, tokens[0].tolist()), atol=1e-9)


@pytest.mark.parametrize("backend", ["reference", "fused"])
@pytest.mark.parametrize("recipe", [LLAMA, GPT, PARALLEL], ids=["llama", "gpt", "parallel"])
def test_gradients_are_finite_differences(recipe, backend):
    """Every parameter, two of its elements each, in float64."""
    model = made({**recipe, "n_layers": 2, "pattern": []}, dtype="float64", backend=backend)
    tokens = ids(2, 5, 19)

    def loss():
        return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())

    loss().backward()
    step = 1e-6
    for name, parameter in model.named_parameters():
        flat, gradient = parameter.detach().view(-1), parameter.grad.view(-1)
        for at in {int(gradient.abs().argmax()), len(flat) // 2}:
            before = float(flat[at])
            flat[at] = before + step
            above = loss().item()
            flat[at] = before - step
            below = loss().item()
            flat[at] = before
            assert (above - below) / (2 * step) == pytest.approx(float(gradient[at]), abs=2e-8, rel=1e-5), name


def test_the_two_rotary_layouts_by_number():
    """B60: x = [1, 2, 3, 4] at position 1, base 10,000."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
    at = torch.tensor([[1]])

    def turn(values, layout):
        return rotate(values, rotation(Rope(layout=layout), 4, at, values.dtype), layout).flatten()

    half, interleaved = turn(x, "half"), turn(x, "interleaved")
    torch.testing.assert_close(half, torch.tensor([-1.984111, 1.959901, 2.462378, 4.019800]), atol=1e-6, rtol=0)
    torch.testing.assert_close(interleaved, torch.tensor([-1.142640, 1.922076, 2.959851, 4.029800]), atol=1e-6, rtol=0)
    permutation = [0, 2, 1, 3]
    torch.testing.assert_close(turn(x[..., permutation], "interleaved"), half[permutation])


def test_interleaved_weights_permuted_are_half_weights():
    """B60: a checkpoint in one layout, its query and key rows permuted, is the same model in the other."""
    recipe = {**LLAMA, "attention": {**LLAMA["attention"], "qk_norm": False, "qkv_bias": True, "d_head": 8}}
    half = made(recipe, dtype="float64")
    recipe["attention"] = {**recipe["attention"], "position": {"kind": "rope", "layout": "interleaved"}}
    interleaved = made(recipe, dtype="float64")
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    state = half.state_dict()
    for name, value in state.items():
        if ".attention.q." in name or ".attention.k." in name:
            state[name] = value.reshape(-1, 8, *value.shape[1:])[:, order].reshape(value.shape)
    interleaved.load_state_dict(state)
    tokens = ids(2, 9, 19)
    torch.testing.assert_close(interleaved(tokens), half(tokens))
    half_again = made({**recipe, "attention": {**recipe["attention"], "position": "rope"}}, dtype="float64")
    half_again.load_state_dict(state)
    assert (half_again(tokens) - half(tokens)).abs().max() > 1e-2


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_partial_rotation_changes_only_the_first_channels(layout):
    """B60."""
    x = torch.randn(1, 3, 2, 10)
    rope = Rope(fraction=0.4, layout=layout)
    turned = rotate(x, rotation(rope, 10, torch.arange(3)[None], x.dtype), layout)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert torch.equal(turned[:, 0], x[:, 0])
    assert (turned[:, 1:, :, :4] - x[:, 1:, :, :4]).abs().min() > 0
    alone = rotate(x[..., :4], rotation(Rope(layout=layout), 4, torch.arange(3)[None], x.dtype), layout)
    assert torch.equal(turned[..., :4], alone)


def test_gelu_variants_by_number():
    """B61."""
    x = torch.tensor([3.0, -1.0], dtype=torch.float64)
    exact = torch.tensor([2.9959503, -0.1586553], dtype=torch.float64)
    tanh = torch.tensor([2.9963626, -0.1588080], dtype=torch.float64)
    torch.testing.assert_close(ACTIVATIONS["gelu"](x), exact, atol=1e-7, rtol=0)
    torch.testing.assert_close(ACTIVATIONS["gelu_tanh"](x), tanh, atol=1e-7, rtol=0)
    torch.testing.assert_close(ACTIVATIONS["relu2"](x), torch.tensor([9.0, 0.0], dtype=torch.float64))


@pytest.mark.parametrize(("eps", "value"), [(1e-5, 0.301511), (1e-6, 0.707107), (1e-12, 1.0)])
def test_the_epsilon_of_a_norm_is_its_own(eps, value):
    """B61: x = [.001, −.001]; LayerNorm and RMSNorm agree, since the mean is zero."""
    x = torch.tensor([[0.001, -0.001]])
    for spec in (LayerNorm(eps=eps, weight=False, bias=False), RMSNorm(eps=eps, weight=False)):
        torch.testing.assert_close(NormLayer(spec, 2)(x), torch.tensor([[value, -value]]), atol=1e-6, rtol=0)


def test_head_width_is_free_of_the_models():
    """B52: width 80, heads 4, kv 2, head width 32: q 128×80, out 80×128, 16 pairs, scale 1/√32."""
    recipe = {
        "vocab_size": 11,
        "d_model": 80,
        "n_layers": 1,
        "ffn": {"kind": "swiglu", "d_ff": 48},
        "attention": {"n_heads": 4, "n_kv_heads": 2, "d_head": 32, "position": "rope"},
    }
    model = made(recipe, dtype="float64")
    attention = model.layers()[0].attention
    assert tuple(attention.q.weight.shape) == (128, 80)
    assert tuple(attention.k.weight.shape) == tuple(attention.v.weight.shape) == (64, 80)
    assert tuple(attention.out.weight.shape) == (80, 128)
    cos, sin = rotation(attention.spec.position, 32, torch.arange(3)[None], torch.float64)
    assert cos.shape[-1] == sin.shape[-1] == 32
    angles = 2 * 10000.0 ** (-np.arange(16) / 16)
    np.testing.assert_allclose(cos[0, 2, 0, :16], np.cos(angles), atol=1e-12)
    tokens = ids(1, 6, 11)
    np.testing.assert_allclose(
        model(tokens)[0].detach(), logits(model.spec, read_weights(model), tokens[0].tolist()), atol=1e-9
    )


TABLES = [Rope(layout="half"), Rope(layout="interleaved"), Sinusoidal(), Sinusoidal(layout="halves")]


def table(spec, positions, dtype):
    """What a model of `dtype` uses at `positions`, as [T, width] of cosines then sines in float64."""
    if isinstance(spec, Sinusoidal):
        values = sinusoids(spec, 32, positions[None], dtype)[0]
        values = values[:, [*range(1, 32, 2), *range(0, 32, 2)]] if spec.layout == "interleaved" else values.roll(16, 1)
        return values.double()
    cos, sin = (x[0, :, 0] for x in rotation(spec, 32, positions[None], dtype))
    if spec.layout == "half":
        return torch.cat([cos[:, :16], sin[:, 16:]], 1).double()
    return torch.cat([cos[:, ::2], sin[:, 1::2]], 1).double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", TABLES, ids=lambda s: f"{s.kind}-{s.layout}")
def test_position_tables_are_exact_whatever_the_models_dtype(spec, dtype):
    """B22: to position 8191; a sinusoid is rounded once, when it is added."""
    positions = torch.arange(8192)
    angles = positions[:, None].double() * 10000.0 ** (-torch.arange(16).double() / 16)
    exact = torch.cat([angles.cos(), angles.sin()], 1)
    assert (table(spec, positions, dtype) - exact).abs().max() < 4e-3
    if isinstance(spec, Rope):
        assert (table(spec, positions, dtype) - exact).abs().max() < 6e-4
        one, two = table(spec, torch.tensor([256, 257]), dtype)
        assert (one - two).abs().max() > 0.1


def test_a_known_angle():
    """B22: width 32, base 10,000, pair 1, position 1857: angle 1044.2678, cosine 0.306693."""
    cos, _ = rotation(Rope(), 32, torch.tensor([[1857]]), torch.bfloat16)
    assert float(cos[0, 0, 0, 1]) == pytest.approx(0.306693, abs=2e-4)


def used_rotation(model, tokens, **context):
    """The rotary tables in force in a call."""
    seen = []
    attention = model.layers()[0].attention
    placed = attention._placed

    def spy(q, k, frame):
        seen.append(frame.rotation(attention.spec.position, attention.spec.d_head, q.dtype))
        return placed(q, k, frame)

    attention._placed = spy
    try:
        model(tokens, **context)
    finally:
        del attention._placed
    return seen[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_cast_reaches_the_rotation(dtype):
    """B22: cast, built on meta then cast, under autocast, cast down then up: the same tables, in float32."""
    tokens = ids(1, 300, 19)
    recipe = {**LLAMA, "max_positions": None, "n_layers": 1}
    del recipe["max_positions"]
    never = used_rotation(made(recipe), tokens)
    cast = used_rotation(made(recipe).to(dtype), tokens)
    born = used_rotation(made(recipe, dtype=dtype), tokens)
    meta = made(recipe).to("meta").to(dtype).to_empty(device="cpu")
    meta.load_state_dict(made(recipe, dtype=dtype).state_dict())
    rebuilt = used_rotation(meta, tokens)
    back = used_rotation(made(recipe).to(dtype).float(), tokens)
    with torch.autocast("cpu", dtype=dtype):
        auto = used_rotation(made(recipe), tokens)
    for tables in (cast, born, rebuilt, back, auto):
        for one, two in zip(never, tables, strict=True):
            assert two.dtype == torch.float32
            assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_half_precision_is_finite_and_near(kind, dtype):
    tokens = ids(2, 13, 19)
    exact = made(KINDS[kind], dtype="float64")
    near = made(KINDS[kind], dtype=dtype)
    near.load_state_dict(exact.state_dict())
    exact.load_state_dict(near.state_dict())
    with torch.no_grad():
        want, got = exact(tokens), near(tokens)
        single = exact.float()(tokens)
    assert got.dtype == getattr(torch, dtype)
    assert torch.isfinite(got).all()
    torch.testing.assert_close(single.double(), want, atol=2e-5, rtol=0)
    assert (got.double() - want).abs().mean() < (0.05 if dtype == "bfloat16" else 0.01) * want.abs().mean()


def test_autocast_is_near_and_trains():
    model = made(LLAMA)
    tokens = ids(2, 9, 19)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = model(tokens)
    assert (got.float() - model(tokens)).abs().mean() < 0.05 * model(tokens).abs().mean()
    got.float().logsumexp(-1).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_norm_statistics_are_float32_in_half_precision():
    """Squares of 300 overflow float16; the statistics do not."""
    x = torch.full((1, 64), 300.0, dtype=torch.float16)
    x[0, 0] = -300.0
    for spec in (RMSNorm(), LayerNorm()):
        layer = NormLayer(spec, 64).half()
        torch.nn.init.ones_(layer.weight)
        if layer.bias is not None:
            torch.nn.init.zeros_(layer.bias)
        assert torch.isfinite(layer(x)).all()
        assert (layer(x).float() - layer.float()(x.float())).abs().max() < 1e-2
