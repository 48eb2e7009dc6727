"""Gemma 3 (Gemma Team 2025), its text part: Gemma 2 with norms on queries and keys, and two thetas."""

from anyformer.families.common import ATTENTION, ENDS, GATED, LANGUAGE, LAST, QK_NORMS, eps
from anyformer.families.family import Family, Variant
from anyformer.families.fields import Labels, Same, Tied, Windows
from anyformer.families.gemma import CAUSAL, OFFSET_RMS
from anyformer.families.gemma2 import SANDWICH, SANDWICH_NORMS, SHAPE
from anyformer.families.rotary import Rotary
from anyformer.families.sizes import sizes
from anyformer.families.tables import merged

FAMILY = Family(
    name="Gemma 3",
    model_type="gemma3_text",
    stack="decoder",
    spec=merged(SANDWICH, {"decoder": {"block": {"attention": {"qk_norm": {"over": "head", "norm": OFFSET_RMS}}}}}),
    config=(
        *sizes(max_positions=131072, n_kv_heads=4),
        *SHAPE,
        Same("rms_norm_eps", (*eps("before", "after"), "attention.qk_norm.norm.eps"), default=1e-6),
        Windows(rule="pattern", pattern=("sliding_window_pattern", 6), default=4096, needed=True),
        Rotary(theta=1_000_000.0, local=("rope_local_base_freq", 10_000.0), label="rope_type"),
        Tied(default=True),
    ),
    models={
        "Gemma3ForCausalLM": Variant(
            {"head": LANGUAGE},
            (("lm_head.{p}", "head.{p}"),),
            (Same("final_logit_softcapping", "head.softcap", default=None, nullable=True),),
            "model.",
        ),
        "Gemma3TextModel": Variant({"head": None}),
        "Gemma3TextForSequenceClassification": Variant(
            {"head": LAST}, (("score.weight", "head.weight"),), (Labels(),), "model."
        ),
    },
    tensors=(*ENDS, *ATTENTION, *GATED, *SANDWICH_NORMS, *QK_NORMS),
    fixed={**CAUSAL, "attn_logit_softcapping": None, "_sliding_window_pattern": 6},
    ignored=("cache_implementation", "final_logit_softcapping"),
    presets=("gemma-3-1b",),
)
