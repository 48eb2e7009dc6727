"""What a recipe of any architecture means: stacks, cross-attention, mixtures, tables that are one, heads."""

from math import sqrt

import pytest

from anyformer.spec import expand, load_spec
from anyformer.spec.attention import Bidirectional, Causal, Grouped, Latent, Prefix
from anyformer.spec.ffn import Dense, Gated, MoE
from anyformer.spec.parts import (
    Factor,
    LanguageHead,
    LayerNorm,
    NoNorm,
    NoPosition,
    Pooler,
    RelativeBias,
    RMSNorm,
    SequenceHead,
    Transform,
)

BASE = {
    "vocab_size": 11,
    "d_model": 24,
    "n_layers": 6,
    "attention": {"n_heads": 6, "position": "none"},
    "ffn": "swiglu",
}
BOTH = {**BASE, "architecture": "encoder-decoder"}


def made(base=BASE, **changes):
    return expand({**base, **changes})


def attention(base=BASE, **changes):
    return made(base, attention={**BASE["attention"], **changes}).last.blocks[0].attention


def ffn(**table):
    return made(ffn=table).last.blocks[0].ffn


def test_an_architecture_says_which_stacks_there_are_and_what_they_see():
    for architecture, stacks, mask in (
        ("decoder", ["decoder"], Causal()),
        ("encoder", ["encoder"], Bidirectional()),
        ("encoder-decoder", ["encoder", "decoder"], Causal()),
    ):
        spec = made(architecture=architecture)
        assert list(spec.stacks) == stacks
        assert spec.last.blocks[0].attention.mask == mask
    assert made(BOTH).encoder.blocks[0].attention.mask == Bidirectional()
    assert attention(mask="prefix").mask == Prefix()
    assert attention(mask={"window": 3, "sinks": 1}).mask == Causal(window=3, sinks=1)
    assert attention({**BASE, "architecture": "encoder"}, mask={"window": 3}).mask == Bidirectional(window=3)


@pytest.mark.parametrize(("architecture", "both_sides"), [("decoder", False), ("encoder", True)])
def test_buckets_have_the_sides_that_the_mask_shows(architecture, both_sides):
    base = {**BASE, "architecture": architecture}
    assert attention(base, position="relative").position == RelativeBias(bidirectional=both_sides)
    if architecture == "decoder":
        assert attention(position="relative", mask="prefix").position.bidirectional
        assert attention(position={"kind": "relative", "bidirectional": True}).position.bidirectional


def test_the_tables_of_stacks_lay_on_the_root():
    spec = made(
        BOTH,
        max_positions=9,
        encoder={"n_layers": 2, "attention": {"n_kv_heads": 2}, "bias": True},
        decoder={"d_model": 30, "ffn": {"kind": "dense", "activation": "relu"}, "max_positions": 7, "norm": "layer"},
    )
    encoder, decoder = spec.encoder, spec.decoder
    assert (encoder.n_layers, encoder.d_model, encoder.max_positions) == (2, 24, 9)
    assert (decoder.n_layers, decoder.d_model, decoder.max_positions) == (6, 30, 7)
    assert (encoder.blocks[0].attention.n_kv_heads, decoder.blocks[0].attention.n_kv_heads) == (2, 6)
    assert (encoder.blocks[0].ffn.bias, decoder.blocks[0].ffn) == (True, Dense(activation="relu", d_ff=120))
    assert (encoder.final_norm, decoder.final_norm) == (RMSNorm(), LayerNorm())


def test_a_decoder_beside_an_encoder_attends_to_it():
    own = {"n_heads": 6, "n_kv_heads": 2, "d_head": 5, "d_value": 3, "scale": 1.0, "qk_norm": True, "clip": 2.0}
    more = {"qkv_bias": True, "dropout": 0.1, "position": "relative", "softcap": 3.0, "sink_logit": True}
    spec = made(
        BOTH,
        attention={**own, **more, "mask": {"kind": "causal", "window": 2}},
        encoder={"attention": BASE["attention"] | {"mask": "bidirectional"}},
    )
    block = spec.decoder.blocks[0]
    assert block.cross == block.attention.model_copy(
        update={"position": NoPosition(), "mask": Bidirectional(), "softcap": None, "sink_logit": False}
    )
    assert block.norms.cross == block.norms.attention
    assert spec.encoder.blocks[0].cross is None
    assert spec.encoder.blocks[0].norms.cross.before == NoNorm()
    slots = {name: {"before": "layer"} for name in ("attention", "cross", "ffn")}
    spec = made(BOTH, norms=slots)
    assert spec.decoder.blocks[0].norms.cross.before == LayerNorm()
    assert spec.encoder.blocks[0].norms.cross.before == NoNorm()
    changed = made(BOTH, cross={"n_heads": 3, "sink_logit": True}).decoder.blocks[0].cross
    assert (changed.n_heads, changed.d_head, changed.sink_logit) == (3, 8, True)
    assert changed.scale == pytest.approx(8**-0.5)


def test_some_layers_may_have_no_cross_attention():
    spec = made(BOTH, decoder={"pattern": [{"cross": False}, {"cross": {"n_kv_heads": 1}}, {}]})
    assert [block.cross is not None for block in spec.decoder.blocks] == [False, True, True] * 2
    assert [block.cross.n_kv_heads for block in spec.decoder.blocks[1:3]] == [1, 6]
    assert made(BOTH, cross={"mask": {"window": False}}) == made(BOTH)
    assert spec.decoder.blocks[0].norms.cross.before == NoNorm()
    assert spec.decoder.blocks[1].norms.cross.before == RMSNorm()


def test_latent_attention_takes_what_it_lacks_from_the_width():
    rope = {"kind": "latent", "kv_rank": 7, "d_rope": 2, "position": "rope"}
    a = attention(**rope)
    assert isinstance(a, Latent)
    assert (a.d_nope, a.d_rope, a.d_value, a.q_rank, a.d_head, a.n_kv_heads) == (4, 2, 4, None, 6, 6)
    assert a.scale == pytest.approx(6**-0.5)
    assert (a.bias, a.out_bias, a.norm) == (False, False, RMSNorm())
    assert attention({**BASE, "bias": True, "dropout": 0.1}, **rope).bias
    assert attention({**BASE, "dropout": 0.1}, **rope, d_nope=3).d_value == 3
    crossed = made(BOTH, decoder={"attention": {"n_heads": 6, **rope}, "cross": {"n_heads": 3}}).decoder.blocks[0]
    assert isinstance(crossed.cross, Grouped)
    assert (crossed.cross.n_heads, crossed.cross.d_head) == (3, 8)


EXPERT = {"kind": "swiglu", "d_ff": 5, "limit": 3.0, "bias": True}


@pytest.mark.parametrize(
    ("shared", "becomes"),
    [
        (2, Gated(activation="silu", d_ff=10, limit=3.0, bias=True)),
        ({}, Gated(activation="silu", d_ff=5, limit=3.0, bias=True)),
        ({"d_ff": 9, "limit": False}, Gated(activation="silu", d_ff=9, bias=True)),
        ({"kind": "dense", "activation": "relu"}, Dense(activation="relu", d_ff=96)),
        ("geglu", Gated(activation="gelu", d_ff=5, limit=3.0, bias=True)),
        (False, None),
    ],
)
def test_a_shared_expert_lays_on_the_expert(shared, becomes):
    found = ffn(kind="moe", n_experts=4, top_k=2, expert=EXPERT, shared=shared)
    assert isinstance(found, MoE)
    assert found.expert == Gated(activation="silu", d_ff=5, limit=3.0, bias=True)
    assert found.shared == becomes


def test_an_expert_is_as_wide_as_a_feed_forward_and_so_is_a_multiple_of_it():
    found = ffn(kind="moe", n_experts=4, top_k=2, expert={"kind": "swiglu", "multiple_of": 1}, shared=3)
    assert (found.expert.d_ff, found.shared.d_ff) == (64, 192)
    found = ffn(kind="moe", n_experts=4, top_k=2, expert={"kind": "dense", "activation": "relu"}, shared=2)
    assert (found.expert.d_ff, found.shared.d_ff) == (96, 192)


def test_the_first_layers_may_be_dense():
    moe = {"kind": "moe", "n_experts": 4, "top_k": 2, "expert": "swiglu"}
    spec = made(ffn=moe, pattern=[{"repeat": 2, "ffn": {"kind": "swiglu", "d_ff": 9}}, {"repeat": 4}])
    assert [block.ffn.kind for block in spec.decoder.blocks] == ["gated"] * 2 + ["moe"] * 4


@pytest.mark.parametrize(
    ("share", "owners"),
    [
        ("all", (0,) * 6),
        ({"distinct": 2}, (0, 1, 0, 1, 0, 1)),
        ({"distinct": 4, "order": "cycle"}, (0, 1, 2, 3, 0, 1)),
        ({"distinct": 2, "order": "runs"}, (0, 0, 0, 3, 3, 3)),
        ({"distinct": 4, "order": "runs"}, (0, 0, 2, 3, 3, 5)),
        ([0, 1, 0, 1, 4, 4], (0, 1, 0, 1, 4, 4)),
        ([0, 1, 2, 3, 4, 5], None),
        ({"distinct": 6}, None),
        (False, None),
    ],
)
def test_layers_share_parameters(share, owners):
    assert made(share=share).decoder.owners == owners


def test_ties_name_tables():
    assert made(tie=True).ties == {"decoder.embed", "head"}
    assert made(architecture="encoder", tie=True).ties == {"encoder.embed", "head"}
    assert made(BOTH, tie=True).ties == {"encoder.embed", "decoder.embed", "head"}
    assert made(BOTH, tie=["encoder.embed", "decoder.embed"]).ties == {"encoder.embed", "decoder.embed"}
    assert made(BOTH, tie=False).ties == made(BOTH).ties == frozenset()


def test_the_embedding_has_a_scale_types_and_a_width_of_its_own():
    embed = made(embed={"scale": "sqrt_width", "types": 2, "factor": 5}, d_model=30).decoder.embed
    assert (embed.scale, embed.types, embed.factor) == (sqrt(30), 2, Factor(width=5))
    assert made(BOTH, embed={"scale": "sqrt_width"}, encoder={"d_model": 30}).encoder.embed.scale == sqrt(30)
    assert made(embed={"factor": {"width": 5, "bias": True}}).decoder.embed.factor.bias
    assert made(embed={"scale": 3, "factor": False}).decoder.embed.scale == 3.0


def test_heads():
    encoder = {**BASE, "architecture": "encoder"}
    assert made(encoder, head={"kind": "language", "transform": True}).head == LanguageHead(
        transform=Transform(width=24)
    )
    narrow = made(
        encoder, head={"kind": "language", "transform": {"activation": "relu"}}, embed={"factor": 5}, tie=True
    )
    assert narrow.head.transform == Transform(width=5, activation="relu")
    pooled = made(encoder, head={"kind": "sequence", "n_labels": 3}, pooler=True)
    assert (pooled.head, pooled.pooler) == (SequenceHead(n_labels=3), Pooler())
    assert made(encoder, head="span").head.kind == "span"
    assert made(encoder, head={"kind": "token", "n_labels": 3}).head.n_labels == 3
    assert made(encoder, pooler={"activation": "relu"}).pooler == Pooler(activation="relu")
    assert made(encoder, pooler=False).pooler is None


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich", "output"])
def test_a_placement_and_its_multipliers_are_those_of_every_branch(placement):
    norms = made(BOTH, placement=placement, alpha=2.0, beta=0.5).decoder.blocks[0].norms
    assert norms.attention == norms.cross == norms.ffn
    assert (norms.ffn.alpha, norms.ffn.beta) == (2.0, 0.5)
    assert (norms.ffn.residual == RMSNorm()) == (placement == "post")


def test_a_placement_and_slots_take_each_others_place():
    slots = {"attention": {"before": "layer", "alpha": 3.0}}
    spec = made(norms=slots, pattern=[{}, {"placement": "post", "beta": 2.0}])
    first, second = (block.norms for block in spec.decoder.blocks[:2])
    assert (first.attention.before, first.attention.alpha, first.ffn.before) == (LayerNorm(), 3.0, NoNorm())
    assert (second.attention.residual, second.attention.before, second.ffn.beta) == (RMSNorm(), NoNorm(), 2.0)
    spec = made(alpha=2.0, pattern=[{}, {"norms": slots}])
    assert [block.norms.attention.alpha for block in spec.decoder.blocks[:2]] == [2.0, 3.0]
    assert spec.decoder.blocks[1].norms.ffn.alpha == 1.0


def test_false_takes_away_what_the_root_has():
    root = {"softcap": 3.0, "clip": 2.0, "scale": 1.0, "mask": {"window": 3}, "qk_norm": True}
    spec = made(
        attention={**BASE["attention"], **root},
        pattern=[
            {},
            {"attention": {**dict.fromkeys(["softcap", "clip", "scale", "qk_norm"], False), "mask": {"window": False}}},
        ],
    )
    first, second = (block.attention for block in spec.decoder.blocks[:2])
    assert (first.softcap, first.clip, first.scale, first.mask.window) == (3.0, 2.0, 1.0, 3)
    assert (second.softcap, second.clip, second.qk_norm, second.mask.window) == (None,) * 4
    assert second.scale == pytest.approx(4**-0.5)


def test_false_takes_away_what_follows_or_is_a_number():
    """What is left out follows from the rest, or is 0: false says so over a root that gives it."""
    moe = {"kind": "moe", "n_experts": 4, "top_k": 2, "expert": {"kind": "swiglu", "d_ff": 5}, "choice_bias": True}
    root = {"n_kv_heads": 2, "d_head": 10, "d_value": 7, "dropout": 0.5, "out_dropout": 0.5}
    spec = made(
        attention={**BASE["attention"], **root, "mask": {"window": 3, "sinks": 1}},
        ffn={**moe, "shared": {"d_ff": 9, "dropout": 0.5}, "balance_loss": 0.1, "z_loss": 0.1, "bias_rate": 0.1},
        pattern=[
            {},
            {
                "attention": {**dict.fromkeys(root, False), "mask": {"sinks": False}},
                "ffn": {
                    "shared": {"d_ff": False, "dropout": False},
                    **dict.fromkeys(["balance_loss", "z_loss", "bias_rate"], False),
                },
            },
            {"attention": {"mask": {"window": False}}},
        ],
    )
    _, second, third = spec.decoder.blocks[:3]
    heads = second.attention
    assert (heads.n_kv_heads, heads.d_head, heads.d_value, heads.dropout, heads.out_dropout) == (6, 4, 4, 0.0, 0.0)
    assert heads.mask == Causal(window=3)
    assert (second.ffn.shared.d_ff, second.ffn.shared.dropout) == (64, 0.0)
    assert (second.ffn.balance_loss, second.ffn.z_loss, second.ffn.bias_rate) == (0.0, 0.0, 0.0)
    # Sinks are the keys that a window leaves out.
    assert third.attention.mask == Causal()
    both = made(BOTH, max_positions=9, decoder={"max_positions": False}, embed={"types": False})
    assert (both.encoder.max_positions, both.decoder.max_positions) == (9, None)


def test_overrides_reach_stacks_and_switches():
    spec = load_spec(
        BOTH,
        [
            "encoder.n_layers=2",
            "decoder.attention.n_kv_heads=3",
            "attention.qk_norm=true",
            "attention.qk_norm.order=after",
        ],
    )
    assert (spec.encoder.n_layers, spec.decoder.blocks[0].attention.n_kv_heads) == (2, 3)
    assert spec.encoder.blocks[0].attention.qk_norm.order == "after"
    assert load_spec(spec, ["encoder.ffn.d_ff=9"]).encoder.blocks[0].ffn.d_ff == 9
