"""The plan is exact: names, shapes and roles of the model, FLOPs as counted, bytes as allocated."""

import json

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from anyformer.errors import UserError
from anyformer.nn.model import build, build_block
from anyformer.nn.roles import roles
from anyformer.planning import (
    binary,
    block_parameters,
    cache_bytes_per_token,
    largest_batch,
    parameters,
    plan,
    si,
)
from anyformer.spec import expand, load_spec
from spec.strategies import recipes

LLAMA = {
    "vocab_size": 50,
    "d_model": 24,
    "n_layers": 3,
    "max_positions": 40,
    "tie": True,
    "ffn": {"kind": "swiglu", "d_ff": 37},
    "attention": {"n_heads": 6, "n_kv_heads": 2, "d_head": 10, "d_value": 7, "position": "rope"},
}


@settings(max_examples=60)
@given(recipes())
def test_names_shapes_and_roles_are_the_models(recipe):
    spec = expand(recipe)
    model = build(spec, device="meta")
    planned = {p.name: (p.shape, p.role) for p in parameters(spec)}
    role_of = roles(model)
    assert planned == {name: (tuple(p.shape), role_of[name]) for name, p in model.named_parameters()}
    p = plan(spec, batch=2, context=8)
    assert p.parameters == p.active_parameters == sum(x.numel() for x in model.parameters())
    assert p.parameters_by_role == {
        role: sum(x.numel() for name, x in model.named_parameters() if role_of[name] == role)
        for role in set(role_of.values())
    }
    tables = ("decoder.embed.token.weight", "decoder.embed.position.weight")
    assert p.embedding_parameters == sum(x.numel() for name, x in model.named_parameters() if name in tables)
    assert set(model.state_dict()) == set(planned)


@settings(max_examples=40)
@given(recipes())
def test_a_block_alone_has_the_planned_parameters(recipe):
    stack = expand(recipe).decoder
    block = build_block(stack.blocks[-1], stack.d_model, device="meta")
    planned = {p.name: p.shape for p in block_parameters(stack.blocks[-1], stack.d_model)}
    assert planned == {name: tuple(p.shape) for name, p in block.named_parameters()}


def test_norms_over_whole_projections():
    """Of queries H·D wide, of keys G·D."""
    recipe = {**LLAMA, "attention": {**LLAMA["attention"], "qk_norm": {"over": "projection", "norm": "layer"}}}
    shapes = {p.name.rsplit("attention.")[-1]: p.shape for p in parameters(expand(recipe)) if "_norm.norm" in p.name}
    assert shapes["q_norm.norm.weight"] == shapes["q_norm.norm.bias"] == (60,)
    assert shapes["k_norm.norm.weight"] == shapes["k_norm.norm.bias"] == (20,)
    assert plan(expand(recipe)).parameters == sum(p.numel() for p in build(expand(recipe), device="meta").parameters())


def test_a_known_size():
    """GPT-2 small has 124,439,808 parameters (Radford et al. 2019)."""
    gpt2 = {
        "vocab_size": 50257,
        "d_model": 768,
        "n_layers": 12,
        "max_positions": 1024,
        "bias": True,
        "tie": True,
        "norm": "layer",
        "embed": {"position": "learned"},
        "attention": {"n_heads": 12, "position": "none"},
        "ffn": {"kind": "dense", "activation": "gelu_tanh"},
    }
    assert plan(expand(gpt2)).parameters == 124_439_808


def counted(spec, batch, context):
    """FLOPs of a forward pass, and of it and its backward pass."""
    model = build(spec).use_backend("reference")
    tokens = torch.zeros(batch, context, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        out = model.hidden(tokens) if spec.head is None else model(tokens)
        forward = counter.get_total_flops()
        out.square().sum().backward()
    return forward, counter.get_total_flops()


@settings(max_examples=15)
@given(recipes(max_layers=3), st.integers(1, 3), st.sampled_from([2, 9, 17, 32]))
def test_flops_are_the_counted_ones(recipe, batch, context):
    spec = expand(recipe)
    # Products over one channel or one key are no matrix products to torch.
    assume(all(block.attention.d_head > 1 for block in spec.decoder.blocks))
    p = plan(spec, batch=batch, context=context)
    forward, both = counted(spec, batch, context)
    assert p.flops_forward_per_token * batch * context == pytest.approx(forward, rel=0.01)
    assert p.flops_training_per_token * batch * context == pytest.approx(both, rel=0.01)


def test_flops_by_hand():
    """2 for each weight and token, and 2·T·H·(D + Dv) for scores and mixing."""
    p = plan(expand(LLAMA), batch=1, context=16)
    weights = 3 * (24 * 60 + 24 * 20 + 24 * 14 + 42 * 24 + 3 * 24 * 37) + 50 * 24
    assert p.flops_forward_per_token == 2 * weights + 3 * 2 * 16 * 6 * 17
    assert p.flops_training_per_token == 3 * p.flops_forward_per_token


@pytest.mark.parametrize("context", [1, 2, 7, 33])
def test_the_visible_share_is_the_masks(context):
    mask = torch.ones(context, context).tril()
    p = plan(expand(LLAMA), batch=1, context=context)
    assert p.visible_share == pytest.approx(float(mask.sum()) / context**2)
    scores = 3 * 2 * 6 * 17
    hidden = float((1 - mask).sum()) / context
    assert p.flops_forward_per_token - p.flops_forward_per_token_visible == pytest.approx(scores * hidden)


@settings(max_examples=40)
@given(recipes(), st.integers(1, 3), st.integers(1, 9), st.sampled_from(["float32", "bfloat16", "float64"]))
def test_cache_bytes_are_the_allocated_ones(recipe, batch, capacity, dtype):
    spec = expand(recipe)
    cache = build(spec, dtype=dtype, device="meta").new_cache(batch=batch, capacity=capacity)
    p = plan(spec, batch=batch, context=capacity, dtype=dtype)
    assert cache.nbytes == p.cache_bytes == cache_bytes_per_token(spec, dtype) * batch * capacity
    assert p.cache_bytes_per_token * batch * capacity == p.cache_bytes


@pytest.mark.parametrize(("optimizer", "copies"), [("adamw", 2), ("sgd", 0), ("none", 0)])
def test_bytes_of_weights_gradients_and_optimiser(optimizer, copies):
    spec = expand(LLAMA)
    memory = plan(spec, batch=2, context=8, optimizer=optimizer).memory
    n = plan(spec).parameters
    assert memory.weights == 4 * n
    assert memory.gradients == (0 if optimizer == "none" else 4 * n)
    assert memory.optimizer == 4 * copies * n
    assert memory.peak >= memory.weights + memory.gradients + memory.optimizer + memory.activations


def test_adamw_state_is_the_planned_one():
    model = build(expand(LLAMA))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 3, dtype=torch.int64)).sum().backward()
    optimizer.step()
    state = sum(x.nbytes for values in optimizer.state.values() for x in values.values() if x.dim())
    assert state == plan(expand(LLAMA), optimizer="adamw").memory.optimizer


def test_muon_keeps_one_copy_of_matrices_and_two_of_the_rest():
    spec = expand(LLAMA)
    listed = list(parameters(spec))
    matrices = sum(p.size for p in listed if p.role in ("hidden", "residual"))
    rest = sum(p.size for p in listed) - matrices
    assert plan(spec, optimizer="muon").memory.optimizer == 4 * (matrices + 2 * rest)


@settings(max_examples=30)
@given(recipes(), st.integers(10_000, 10_000_000), st.sampled_from(["adamw", "none"]))
def test_the_largest_batch_fits_and_one_more_does_not(recipe, memory, optimizer):
    spec = expand(recipe)
    n = largest_batch(spec, memory, context=16, optimizer=optimizer)

    def peak(batch):
        return plan(spec, batch=batch, context=16, optimizer=optimizer).memory.peak

    assert n == 0 or peak(n) <= memory
    assert peak(n + 1) > memory


def test_the_context_is_the_models_where_not_given():
    assert plan(expand(LLAMA)).context == 40
    assert plan(expand({**LLAMA, "max_positions": 77})).context == 77
    without = {k: v for k, v in LLAMA.items() if k != "max_positions"}
    assert plan(expand(without)).context == 1024


@settings(max_examples=30)
@given(recipes())
def test_the_plan_as_json_and_as_a_table(recipe):
    p = plan(expand(recipe), batch=3, context=12)
    table = json.loads(json.dumps(p.to_dict()))
    assert table["parameters"] == p.parameters
    assert table["memory"]["peak"] == p.memory.peak
    assert (table["batch"], table["context"]) == (3, 12)
    text = p.table()
    assert f"{p.parameters:,}" in text
    assert f"{recipe['vocab_size']}" in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_the_table_says_what_the_model_is():
    text = plan(load_spec("llama-tiny")).table()
    for words in ("GQA 6/2 heads of 16", "gated silu 256", "rotary, theta 10000, half", "head tied to the embedding"):
        assert words in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"batch": 0}, "at least one row"),
        ({"context": 0}, "at least one row"),
        ({"context": -1}, "at least one row"),
        ({"dtype": "int8"}, "unknown dtype"),
        ({"optimizer": "adam"}, "unknown optimiser"),
    ],
)
def test_a_plan_for_nothing_is_refused(arguments, said):
    with pytest.raises(UserError, match=said):
        plan(expand(LLAMA), **arguments)


def test_numbers_in_words():
    assert [si(x) for x in (12, 1500, 2.5e6, 3e9, 4e12, 5e15)] == ["12", "1.5 k", "2.5 M", "3 G", "4 T", "5 P"]
    assert [binary(x) for x in (12, 1536, 2**20, 3 * 2**30, 2**40)] == ["12 B", "1.5 KiB", "1 MiB", "3 GiB", "1 TiB"]
