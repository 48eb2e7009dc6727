"""Planned bytes: of weights and optimisers exactly, of what autograd keeps within a few parts in a hundred."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyformer.nn.model import build
from anyformer.planning import largest_batch, parameters, plan
from anyformer.spec import expand
from planned_models import LLAMA
from spec.strategies import every_recipe

WIDE = {
    "vocab_size": 64,
    "d_model": 192,
    "n_layers": 4,
    "max_positions": 256,
    "ffn": {"kind": "swiglu", "d_ff": 512},
    "attention": {"n_heads": 6, "n_kv_heads": 2, "d_head": 32, "position": "rope"},
}
LATENT = {"kind": "latent", "n_heads": 6, "q_rank": 64, "kv_rank": 96, "d_nope": 32, "d_rope": 16, "position": "rope"}
RELU = {"kind": "dense", "activation": "relu", "d_ff": 768}
KINDS = {
    "grouped": WIDE,
    "sandwich": {**WIDE, "placement": "sandwich", "attention": {**WIDE["attention"], "softcap": 9.0, "qk_norm": True}},
    "parallel": {**WIDE, "wiring": "parallel", "norm": "layer", "ffn": RELU},
    "latent": {**WIDE, "attention": LATENT},
    "mixture": {
        **WIDE,
        "ffn": {"kind": "moe", "n_experts": 8, "top_k": 2, "expert": {"kind": "swiglu", "d_ff": 256}, "shared": 1},
    },
    "encoder": {
        **WIDE,
        "architecture": "encoder",
        "placement": "post",
        "norm": "layer",
        "bias": True,
        "embed": {"position": "learned", "types": 2, "norm": "layer"},
        "attention": {"n_heads": 6, "position": "none"},
        "ffn": {"kind": "dense", "activation": "gelu", "d_ff": 768},
    },
    "encoder-decoder": {**WIDE, "architecture": "encoder-decoder", "ffn": RELU},
}


def kept_for_the_backward_pass(model, **call):
    """Bytes of every tensor that autograd keeps of a call, parameters aside."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept, held = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model.hidden(**call)
    assert out.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("kind", KINDS)
def test_activations_are_what_autograd_keeps(kind):
    """With an attention that keeps no T×S weights."""
    spec = expand(KINDS[kind])
    model = build(spec).train().use_backend("tiled")
    tokens = torch.randint(0, 64, (4, 96), generator=torch.Generator().manual_seed(0))
    source = {"source": tokens[:, :50]} if len(spec.stacks) == 2 else {}
    planned = plan(spec, batch=4, context=96, source=50 if source else None).memory
    assert planned.activations == pytest.approx(kept_for_the_backward_pass(model, tokens=tokens, **source), rel=0.1)


def test_a_source_token_is_kept_by_the_encoder_and_by_each_decoder_layer():
    spec = expand({**KINDS["encoder-decoder"], "attention": {"n_heads": 6, "position": "rope"}})
    model, target = build(spec).train().use_backend("tiled"), torch.ones(4, 8, dtype=torch.int64)
    sources = [torch.ones(4, n, dtype=torch.int64) for n in (50, 90)]
    kept = [kept_for_the_backward_pass(model, tokens=target, source=each) for each in sources]
    planned = [plan(spec, batch=4, context=8, source=each.shape[1]).memory.activations for each in sources]
    assert planned[1] - planned[0] == pytest.approx(kept[1] - kept[0], rel=0.05)


def test_source_and_target_are_counted_apart():
    spec = expand(KINDS["encoder-decoder"])
    short, long = (plan(spec, batch=2, context=16, source=n) for n in (10, 20))
    assert long.memory.activations > short.memory.activations
    assert long.memory.logits == short.memory.logits
    serving = plan(spec, batch=2, context=16, source=10, optimizer="none")
    assert serving.memory.cache == serving.cache_bytes


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


@settings(max_examples=60)
@given(every_recipe(), st.integers(10_000, 10_000_000), st.sampled_from(["adamw", "none"]))
def test_the_largest_batch_fits_and_one_more_does_not(recipe, memory, optimizer):
    spec = expand(recipe)
    n = largest_batch(spec, memory, context=16, optimizer=optimizer)

    def peak(batch):
        return plan(spec, batch=batch, context=16, optimizer=optimizer).memory.peak

    assert n == 0 or peak(n) <= memory
    assert peak(n + 1) > memory
