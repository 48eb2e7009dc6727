"""The model is its equations: against a second one written from them, over the whole space, and finite differences."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyformer.nn.frame import Frame
from anyformer.nn.position import rotation
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


def test_interleaved_weights_permuted_are_half_weights():
    """A checkpoint in one layout, its query and key rows permuted, is the same model in the other."""
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


def test_head_width_is_free_of_the_models():
    """Width 80, heads 4, kv 2, head width 32: q 128×80, out 80×128, 16 pairs, scale 1/√32."""
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


def used_rotation(model, tokens, **context):
    """The rotary tables in force in a call."""
    seen = []
    made = Frame.rotation

    def spy(frame, *options):
        seen.append(made(frame, *options))
        return seen[-1]

    with patch.object(Frame, "rotation", spy):
        model(tokens, **context)
    return seen[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_cast_reaches_the_rotation(dtype):
    """Cast, built on meta then cast, under autocast, cast down then up: the same tables, in float32."""
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
