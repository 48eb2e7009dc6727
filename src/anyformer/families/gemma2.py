"""Gemma 2 (Gemma Team 2024b): norms before and after each branch, caps on scores, a window in every other layer."""

from anyformer.families.common import ATTENTION, ENDS, GATED, LANGUAGE, decoders, eps, norms
from anyformer.families.family import Family, Rule, Variant
from anyformer.families.fields import Named, Same, Tied, Windows
from anyformer.families.gemma import CAUSAL, HIDDEN_ACT, OFFSET_RMS
from anyformer.families.llama import BIASES, DROPOUT, SPEC
from anyformer.families.rotary import Rotary
from anyformer.families.sizes import Again, Divides, RootOfWidth, ScoresOver, head_dim, sizes
from anyformer.families.tables import merged

SANDWICH = merged(
    SPEC,
    {
        "decoder": {
            "final_norm": OFFSET_RMS,
            "block": {"norms": norms({"before": OFFSET_RMS, "after": OFFSET_RMS})},
        }
    },
)
SHAPE = (
    Divides(),
    head_dim(256),
    Same("intermediate_size", "ffn.d_ff"),
    Named("hidden_activation", "ffn.activation", default="gelu_pytorch_tanh"),
    Again("hidden_act", "ffn.activation", HIDDEN_ACT),
    BIASES,
    DROPOUT,
    RootOfWidth(),
    ScoresOver("query_pre_attn_scalar", 256),
)
SANDWICH_NORMS: tuple[Rule, ...] = (
    ("{body}layers.{i}.input_layernorm.{p}", "decoder.blocks.{i}.attention_norms.before.{p}"),
    ("{body}layers.{i}.post_attention_layernorm.{p}", "decoder.blocks.{i}.attention_norms.after.{p}"),
    ("{body}layers.{i}.pre_feedforward_layernorm.{p}", "decoder.blocks.{i}.ffn_norms.before.{p}"),
    ("{body}layers.{i}.post_feedforward_layernorm.{p}", "decoder.blocks.{i}.ffn_norms.after.{p}"),
)
FINAL_CAP = Same("final_logit_softcapping", "head.softcap", default=30.0, nullable=True)
"""Of a language model; what other heads score has no cap."""

FAMILY = Family(
    name="Gemma 2",
    model_type="gemma2",
    stack="decoder",
    spec=SANDWICH,
    config=(
        *sizes(max_positions=8192, n_kv_heads=4),
        *SHAPE,
        Same("rms_norm_eps", eps("before", "after"), default=1e-6),
        Same("attn_logit_softcapping", "attention.softcap", default=50.0, nullable=True),
        Windows(rule="pattern", pattern=(None, 2), default=4096, needed=True),
        Again("sliding_window_size", "attention.mask.window"),
        Rotary(),
        Tied(default=True),
    ),
    models={
        **decoders("Gemma2"),
        "Gemma2ForCausalLM": Variant({"head": LANGUAGE}, (("lm_head.{p}", "head.{p}"),), (FINAL_CAP,), "model."),
    },
    tensors=(*ENDS, *ATTENTION, *GATED, *SANDWICH_NORMS),
    fixed={**CAUSAL, "sliding_window_pattern": 2, "_sliding_window_pattern": 2},
    ignored=("cache_implementation", "final_logit_softcapping"),
    presets=("gemma-2-2b", "gemma-2-9b"),
)
