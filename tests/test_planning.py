"""The plan is exact: names, shapes and roles of the model, FLOPs as counted, bytes as allocated."""

import itertools
import json
import re

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
    buffers,
    cache_bytes,
    figures,
    parameters,
    plan,
    si,
    visible_pairs,
)
from anyformer.spec import expand, load_spec
from anyformer.spec.attention import Bidirectional, Causal, Prefix
from planned_models import LLAMA
from spec.strategies import every_recipe


@settings(max_examples=60)
@given(every_recipe())
def test_names_shapes_and_roles_are_the_models(recipe):
    spec = expand(recipe)
    model = build(spec, device="meta")
    planned = [(p.name, p.shape, p.role) for p in parameters(spec)]
    role_of = roles(model)
    assert planned == [(name, tuple(p.shape), role_of[name]) for name, p in model.named_parameters()]
    p = plan(spec, batch=2, context=8)
    assert p.parameters == sum(x.numel() for x in model.parameters())
    assert p.parameters_by_role == {
        role: sum(x.numel() for name, x in model.named_parameters() if role_of[name] == role)
        for role in set(role_of.values())
    }
    tables = ("embedding", "position")
    assert p.embedding_parameters == sum(x.numel() for name, x in model.named_parameters() if role_of[name] in tables)
    lasting = {p.name: p.shape for p in (*parameters(spec), *buffers(spec))}
    assert {name: tuple(x.shape) for name, x in model.state_dict().items()} == lasting


@settings(max_examples=40)
@given(every_recipe())
def test_a_block_alone_has_the_planned_parameters(recipe):
    stack = expand(recipe).last
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


def test_norms_with_a_weight_for_each_head():
    """Of queries [H, D], of keys [G, D]."""
    qk_norm = {"weights": "per_head", "norm": {"kind": "rms", "bias": True}}
    spec = expand({**LLAMA, "attention": {**LLAMA["attention"], "qk_norm": qk_norm}})
    shapes = {p.name: p.shape for p in parameters(spec) if "_norm.norm" in p.name and "blocks.0" in p.name}
    assert sorted(shapes.values()) == [(2, 10), (2, 10), (6, 10), (6, 10)]
    assert shapes == {n: tuple(p.shape) for n, p in build(spec, device="meta").named_parameters() if n in shapes}


PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-v1.1-base": 247_577_856,
    "llama-1-7b": 6_738_415_616,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-8b": 8_030_261_248,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "gemma-2b": 2_506_172_416,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "qwen-2-0.5b": 494_032_768,
    "qwen-2.5-0.5b": 494_032_768,
    "qwen-3-0.6b": 596_049_920,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "modernbert-base": 149_655_232,
}
"""Parameters of the published weights, each shared table once."""


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_shipped_recipes_have_the_published_parameters(name, count):
    assert plan(load_spec(name), context=16).parameters == count


@pytest.mark.parametrize(("name", "count"), [("bert-base", 109_482_240), ("modernbert-base", 149_014_272)])
def test_encoders_are_published_without_a_head(name, count):
    assert plan(load_spec(name, ["head=none", "tie=false"]), context=16).parameters == count


def test_the_choice_bias_is_beside_the_parameters():
    """The published 671,026,419,200 of DeepSeek-V3 hold one number for each of 256 experts in 58 layers."""
    spec = load_spec("deepseek-v3")
    beside = sum(b.size for b in buffers(spec))
    assert beside == 58 * 256
    assert plan(spec, context=16).parameters + beside == 671_026_419_200


@pytest.mark.parametrize(
    ("name", "billions", "digits"),
    [("palm-8b", 8.63, 2), ("palm-540b", 540.35, 2), ("deepseek-v3", 671, 0), ("deepseek-v2", 236, 0)],
)
def test_sizes_that_papers_round(name, billions, digits):
    """PaLM (Chowdhery et al. 2022, table 1; its norms aside) and the DeepSeek papers' abstracts."""
    p = plan(load_spec(name), context=16)
    assert round((p.parameters - p.parameters_by_role["norm"]) / 1e9, digits) == billions


def test_the_transformer_of_2017_is_near_its_published_size():
    """65 M (Vaswani et al. 2017, table 3), with a vocabulary that they call "about" 37,000; layers alone are exact.

    Their rows of 2, 4, 6 and 8 layers differ by 7.35 M for a layer of each stack.
    """
    spec = load_spec("transformer-base")
    counts = [plan(load_spec("transformer-base", [f"n_layers={n}"]), context=16).parameters for n in (2, 4, 6, 8)]
    assert counts[2] == pytest.approx(65e6, rel=0.04)
    pairs = [(b - a) / 2 for a, b in itertools.pairwise(counts)]
    assert pairs == [pytest.approx(7.35e6, rel=0.002)] * 3
    assert plan(spec, context=16).embedding_parameters == 37000 * 512


@pytest.mark.parametrize(("name", "billions"), [("mixtral-8x7b", 13), ("deepseek-v2", 21), ("deepseek-v3", 37)])
def test_parameters_that_a_token_uses(name, billions):
    """Of the abstracts of Mixtral (Jiang et al. 2024), DeepSeek-V2 and V3; a token reads one row of the embedding."""
    p = plan(load_spec(name), context=16)
    assert round((p.active_parameters - p.parameters_by_role["embedding"]) / 1e9) == billions


def counted(spec, batch, context, source):
    """FLOPs of a forward pass, and of it and its backward pass."""
    model = build(spec).use_backend("reference")
    tokens = torch.zeros(batch, context, dtype=torch.int64)
    read = {"source": torch.zeros(batch, source, dtype=torch.int64)} if source else {}
    with FlopCounterMode(display=False) as counter:
        out = model.hidden(tokens, **read) if spec.head is None else model(tokens, **read)
        forward = counter.get_total_flops()
        out.square().sum().backward()
    return forward, counter.get_total_flops()


def has_products(spec):
    """Whether every product is one to torch: those over one channel or one key are not."""
    attentions = [x for s in spec.stacks.values() for b in s.blocks for x in (b.attention, b.cross) if x is not None]
    return all(min(a.d_head, a.d_value) > 1 for a in attentions)


@settings(max_examples=25)
@given(every_recipe(max_layers=3), st.integers(1, 3), st.sampled_from([2, 9, 17, 32]), st.integers(2, 20))
def test_flops_are_the_counted_ones(recipe, batch, context, source):
    spec = expand(recipe)
    assume(has_products(spec))
    source = source if len(spec.stacks) == 2 else None
    p = plan(spec, batch=batch, context=context, source=source)
    forward, both = counted(spec, batch, context, source)
    assert p.flops_forward_per_token * batch * context == pytest.approx(forward, rel=0.01)
    assert p.flops_training_per_token * batch * context == pytest.approx(both, rel=0.01)


def test_flops_by_hand():
    """2 for each weight and token, and 2·T·H·(D + Dv) for scores and mixing."""
    p = plan(expand(LLAMA), batch=1, context=16)
    weights = 3 * (24 * 60 + 24 * 20 + 24 * 14 + 42 * 24 + 3 * 24 * 37) + 50 * 24
    assert p.flops_forward_per_token == 2 * weights + 3 * 2 * 16 * 6 * 17
    assert p.flops_training_per_token == 3 * p.flops_forward_per_token


MOE = {
    **LLAMA,
    "attention": {"kind": "latent", "n_heads": 5, "q_rank": 7, "kv_rank": 9, "d_nope": 6, "d_rope": 4, "d_value": 3}
    | {"position": "rope"},
    "ffn": {"kind": "moe", "n_experts": 6, "top_k": 2, "expert": {"kind": "swiglu", "d_ff": 11}, "shared": 2}
    | {"shared_gate": True},
}
"""Latent attention, 2 of 6 experts and a shared one."""

T5 = {
    "architecture": "encoder-decoder",
    "vocab_size": 50,
    "d_model": 24,
    "tie": True,
    "encoder": {"n_layers": 2, "d_model": 24},
    "decoder": {"n_layers": 3},
    "n_layers": 3,
    "ffn": {"kind": "dense", "activation": "relu", "d_ff": 37},
    "attention": {"n_heads": 6, "n_kv_heads": 2, "d_head": 10, "d_value": 7, "position": "relative"},
}
"""Two stacks, grouped heads in both and across."""


def test_flops_of_a_mixture_and_of_latent_attention_by_hand():
    """The router, two experts and the shared one; every head's keys and values unfolded."""
    p = plan(expand(MOE), batch=1, context=16)
    attention = 24 * 7 + 7 * 5 * 10 + 24 * 13 + 9 * 5 * 6 + 9 * 5 * 3 + 5 * 3 * 24
    experts = 24 * 6 + 2 * 3 * 24 * 11 + 3 * 24 * 22 + 24
    assert p.flops_forward_per_token == 2 * (3 * (attention + experts) + 50 * 24) + 3 * 2 * 16 * 5 * 13
    assert p.parameters - p.active_parameters == 3 * 4 * 3 * 24 * 11
    assert p.parameters_by_role["router"] == 3 * (24 * 6 + 24)


def test_flops_of_an_encoder_decoder_by_hand():
    """The source once through the encoder and into each decoder layer's keys and values."""
    p = plan(expand(T5), batch=2, context=16, source=11)
    attention, ffn = 24 * 60 + 24 * 20 + 24 * 14 + 42 * 24, 2 * 24 * 37
    pair = 2 * 6 * 17
    encoder = 11 * 2 * 2 * (attention + ffn) + 2 * 11 * 11 * pair
    across = 16 * 2 * (24 * 60 + 42 * 24) + 11 * 2 * (24 * 20 + 24 * 14) + 16 * 11 * pair
    decoder = 16 * 2 * (3 * (attention + ffn) + 50 * 24) + 3 * (16 * 16 * pair + across)
    assert p.flops_forward_per_token * 16 == encoder + decoder
    hidden = 3 * (16 * 15 // 2) * pair
    assert (p.flops_forward_per_token - p.flops_forward_per_token_visible) * 16 == pytest.approx(hidden)


def test_a_factorised_embedding_is_a_product():
    plain, factored = (plan(expand({**LLAMA, "tie": False, "embed": embed})) for embed in ({}, {"factor": 7}))
    assert factored.flops_forward_per_token - plain.flops_forward_per_token == 2 * 7 * 24


def test_layers_that_share_parameters_compute_each_time():
    one, shared = (plan(expand({**LLAMA, **more}), context=9) for more in ({"n_layers": 1}, {"share": "all"}))
    assert one.parameters == shared.parameters
    head = 2 * 50 * 24
    assert shared.flops_forward_per_token - head == 3 * (one.flops_forward_per_token - head)
    assert shared.cache_bytes == 3 * one.cache_bytes


def test_a_sequence_head_is_computed_once_a_row():
    base = {**LLAMA, "architecture": "encoder", "tie": False, "pooler": True}
    bare, pooled = (
        plan(expand({**base, "head": head}), batch=1, context=16)
        for head in ("none", {"kind": "sequence", "n_labels": 5})
    )
    assert (pooled.flops_forward_per_token - bare.flops_forward_per_token) * 16 == 2 * (24 * 24 + 24 * 5)
    assert pooled.memory.logits == 3 * 4 * 5


@pytest.mark.parametrize("context", [1, 2, 7, 33])
def test_the_visible_share_is_the_masks(context):
    mask = torch.ones(context, context).tril()
    p = plan(expand(LLAMA), batch=1, context=context)
    assert p.visible_share == pytest.approx(float(mask.sum()) / context**2)
    scores = 3 * 2 * 6 * 17
    hidden = float((1 - mask).sum()) / context
    assert p.flops_forward_per_token - p.flops_forward_per_token_visible == pytest.approx(scores * hidden)


def pairs_by_hand(mask, n, prefix):
    def sees(i, j):
        ahead = {"causal": j <= i, "bidirectional": True, "prefix": j <= i or j < prefix}[mask.kind]
        return ahead and (mask.window is None or abs(i - j) < mask.window or j < mask.sinks)

    return sum(sees(i, j) for i in range(n) for j in range(n))


@pytest.mark.parametrize("kind", [Causal, Bidirectional, Prefix])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 9])
def test_visible_pairs_are_counted_exactly(kind, window):
    for n, sinks, prefix in itertools.product(range(1, 8), (0, 1, 2, 4, 8) if window else (0,), range(5)):
        mask, prefix = kind(window=window, sinks=sinks), min(prefix, n)
        assert visible_pairs(mask, n, prefix) == pairs_by_hand(mask, n, prefix)


def test_layers_share_the_visible_by_their_own_masks():
    """Gemma 3's five windows to one layer that sees all, at 8,192 tokens."""
    p = plan(load_spec("gemma-3-1b"), context=8192)
    windows, whole = 512 * 513 // 2 + (8192 - 512) * 512, 8192 * 8193 // 2
    assert p.visible_share == pytest.approx((22 * windows + 4 * whole) / (26 * 8192**2))


@settings(max_examples=40)
@given(
    every_recipe(), st.integers(1, 3), st.integers(1, 9), st.integers(1, 7), st.sampled_from(["float32", "bfloat16"])
)
def test_cache_bytes_are_the_allocated_ones(recipe, batch, capacity, source, dtype):
    spec = expand(recipe)
    assume(spec.decoder is not None)
    crosses = {"source": source} if spec.encoder is not None else {}
    model = build(spec, dtype=dtype)
    for kind in ("static", "ring"):
        cache = model.new_cache(batch=batch, capacity=capacity, kind=kind)
        if crosses:
            reads_source(model, cache, batch, source)
        assert cache.nbytes == cache_bytes(spec, batch, capacity, kind, dtype=dtype, **crosses)
    p = plan(spec, batch=batch, context=capacity, dtype=dtype, **crosses)
    assert p.cache_bytes == cache_bytes(spec, batch, capacity, dtype=dtype, **crosses)
    assert p.cache_bytes_per_token * batch * capacity == cache_bytes(spec, batch, capacity, dtype=dtype)


def reads_source(model, cache, batch, source):
    """A first call, after which the cache holds the source's keys and values."""
    one = torch.zeros(batch, 1, dtype=torch.int64)
    with torch.no_grad():
        model.hidden(one, source=one.expand(batch, source), cache=cache)


def test_cache_bytes_of_published_models():
    """DeepSeek-V2 keeps 512 + 64 numbers a layer and token (2024, section 2.1.4), Mistral's ring 4,096 tokens."""
    assert cache_bytes(load_spec("deepseek-v2"), 1, 1, dtype="bfloat16") == 60 * 576 * 2
    static, ring = (cache_bytes(load_spec("mistral-7b"), 2, 32768, kind) for kind in ("static", "ring"))
    assert static == 2 * 32768 * 32 * 8 * 256 * 4
    assert ring * 8 == static
    small = load_spec("t5-small")
    assert cache_bytes(small, 3, 20, source=50) == 3 * (20 * 8 + 4 * 6 * (20 + 50) * 8 * 128)
    assert cache_bytes(load_spec("bert-base"), 3, 20) == 0


@pytest.mark.parametrize(
    ("position", "kept"),
    [
        ("rope", 0),
        ("none", 0),
        ("alibi", 8),
        ("relative", 8),
        ({"kind": "rope", "scaling": {"kind": "dynamic", "factor": 2.0, "original": 9}}, 8),
        ({"kind": "rope", "scaling": {"kind": "linear", "factor": 2.0}}, 0),
    ],
)
def test_positions_are_kept_where_keys_are_told_apart_by_them(position, kept):
    recipe = {**LLAMA, "attention": {**LLAMA["attention"], "position": position}}
    assert cache_bytes(expand(recipe), 5, 7) == 5 * 7 * (3 * 2 * 17 * 4 + kept)


def test_a_ring_keeps_no_more_than_the_capacity():
    recipe = {**LLAMA, "attention": {**LLAMA["attention"], "mask": {"kind": "causal", "window": 7, "sinks": 2}}}
    token = 3 * 2 * 17 * 4
    sizes = [cache_bytes(expand(recipe), 1, n, "ring") for n in (5, 9, 40)]
    assert sizes == [token * 5, token * 9, token * 9]
    p = plan(expand(recipe), batch=1, context=40)
    assert (p.cache_bytes, p.cache_bytes_ring) == (token * 40, token * 9)
    assert "windows in rings" in p.table()
    assert "window 7 + first 2" in p.table()


def test_the_context_is_the_models_where_not_given():
    assert plan(expand(LLAMA)).context == 40
    assert plan(expand({**LLAMA, "max_positions": 77})).context == 77
    without = {k: v for k, v in LLAMA.items() if k != "max_positions"}
    assert plan(expand(without)).context == 1024


@settings(max_examples=40)
@given(every_recipe())
def test_the_plan_as_json_and_as_a_table(recipe):
    p = plan(expand(recipe), batch=3, context=12)
    table = json.loads(json.dumps(p.to_dict()))
    assert table["parameters"] == p.parameters
    assert table["memory"]["peak"] == p.memory.peak
    assert (table["batch"], table["context"]) == (3, 12)
    text = p.table()
    assert f"{p.parameters:,}" in text
    assert f"{recipe['vocab_size']}" in text
    assert ("KV cache" in text) == (p.cache_bytes > 0)
    assert all(line == line.rstrip() for line in text.splitlines())


def test_the_table_says_what_the_model_is():
    text = plan(load_spec("llama-tiny")).table()
    for words in ("GQA 6/2 heads of 16", "gated silu 256", "rotary, theta 10,000, half", "head tied to the embedding"):
        assert words in text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("deepseek-v3", ["3 × MLA 128 heads of 128 + 64 rotary, latent 512, gated silu 18432, serial"]),
        ("deepseek-v3", ["MoE 256/8 experts of gated silu 2048 + shared gated silu 2048", "3×1, 58×2", "yarn"]),
        ("gemma-3-1b", ["22 × MQA 4/1 heads of 256, window 512", "5×1, 2, over and over", "theta 1,000,000"]),
        ("t5-small", ["encoder: layers", "bidirectional", "cross MHA 8/8 heads of 64", "one table for both stacks"]),
        ("t5-small", ["relative bias, 32 buckets", "from S = 512"]),
        ("bert-base", ["bidirectional", "learned", "head tied"]),
        ("palm-8b", ["MQA 16/1 heads of 256", "parallel"]),
    ],
)
def test_the_table_knows_every_kind(name, words):
    text = plan(load_spec(name)).table()
    for word in words:
        assert word in text


def test_a_head_that_is_none_or_for_labels_is_named():
    assert "sequence" in plan(expand({**T5_LABELS, "head": {"kind": "sequence", "n_labels": 3}})).facts["head"]
    assert plan(expand({**T5_LABELS, "head": "none"})).facts["head"] == "none"
    assert "head" not in plan(expand(LLAMA)).facts


T5_LABELS = {**LLAMA, "architecture": "encoder", "tie": False, "pooler": True}


def test_the_source_is_as_long_as_the_model_says():
    assert plan(expand(T5), context=33).source == 33
    assert plan(expand({**T5, "max_positions": 21})).source == 21


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"batch": 0}, "at least one row"),
        ({"context": 0}, "at least one row"),
        ({"context": -1}, "at least one row"),
        ({"dtype": "int8"}, "unknown dtype"),
        ({"optimizer": "adam"}, "unknown optimiser"),
        ({"source": 3}, "only an encoder–decoder reads a source"),
        ({"context": 4, "prefix": 5}, "within the context"),
        ({"prefix": 5}, "no layer of this model has a prefix mask"),
    ],
)
def test_a_plan_for_nothing_is_refused(arguments, said):
    with pytest.raises(UserError, match=said):
        plan(expand(LLAMA), **arguments)


def test_a_prefix_is_for_models_that_show_one():
    """It changed nothing where there was none to show."""
    spec = expand({**LLAMA, "pattern": [{}, {"attention": {"mask": "prefix"}}]})
    assert plan(spec, prefix=5).visible_share > plan(spec).visible_share
    with pytest.raises(UserError, match="a token of an encoder sees the whole row") as caught:
        plan(expand({**LLAMA, "architecture": "encoder"}), prefix=5)
    assert (caught.value.where, caught.value.got, caught.value.remedy) == ("prefix", 5, "leave it out")
    assert plan(expand({**LLAMA, "architecture": "encoder"}), prefix=0)


def test_numbers_are_those_that_people_write():
    numbers = (1010.0, 1023, 999.4, 99.96, 1.004e-3, 12345.67, 0, -2.5, float("inf"), 3e-7, 1e6)
    words = ["1,010", "1,023", "999", "100", "0.001", "12,346", "0", "-2.5", "inf", "3e-07", "1,000,000"]
    assert [figures(x) for x in numbers] == words
    assert (figures(12345.67, 6), figures(0.1234567, 6)) == ("12,345.7", "0.123457")
    assert [si(x) for x in (999, 999.9, 999_999, 1e20)] == ["999", "1 k", "1 M", "100,000 P"]
    assert [binary(x) for x in (1023, 1010 * 2**20, 1023.9 * 2**20)] == ["1,023 B", "1,010 MiB", "1 GiB"]
    table = plan(load_spec("gemma-3-1b"), context=32768).table()
    assert "theta 1,000,000, half; rotary, theta 10,000" in table
    assert "T = 32,768" in table
    assert not re.search(r"\de[+-]\d", table)


def test_numbers_in_words():
    assert [si(x) for x in (12, 1500, 2.5e6, 3e9, 4e12, 5e15)] == ["12", "1.5 k", "2.5 M", "3 G", "4 T", "5 P"]
    assert [binary(x) for x in (12, 1536, 2**20, 3 * 2**30, 2**40)] == ["12 B", "1.5 KiB", "1 MiB", "3 GiB", "1 TiB"]


def test_an_unknown_cache_is_refused():
    with pytest.raises(UserError, match="unknown kind of cache"):
        cache_bytes(expand(LLAMA), 1, 1, "paged")
    with pytest.raises(UserError, match="unknown dtype"):
        cache_bytes(expand(LLAMA), 1, 1, dtype="int8")
    with pytest.raises(UserError, match="at least one row"):
        plan(expand(T5), source=0)


def test_the_source_too_ends_with_the_learned_positions():
    spec = expand({**T5, "max_positions": 9, "embed": {"position": "learned"}})
    assert plan(spec).source == 9
    with pytest.raises(UserError, match="source is past the learned positions"):
        plan(spec, source=10)


@pytest.mark.parametrize("options", [{"batch": 2.5}, {"batch": True}, {"batch": float("nan")}, {"context": "8"}])
def test_a_plan_is_for_a_whole_number_of_rows_and_tokens(options):
    with pytest.raises(UserError, match="a whole number of rows and tokens"):
        plan(load_spec("llama-tiny"), **options)
