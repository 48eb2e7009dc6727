"""LLaMA's kin, each with a choice of its own."""

from dense import ENDS, GATED, LLAMA_RULES, PROJECTIONS, QK_NORMS, SIZES, recipe
from pairs import Family

_COHERE_SETTINGS = {
    **{name: value for name, value in SIZES.items() if name != "rms_norm_eps"},
    "layer_norm_eps": 1e-3,
    "logit_scale": 0.3,
}
_COHERE_NORM = {"kind": "layer", "eps": 1e-3, "bias": False}
_COHERE_RULES = [
    *ENDS,
    *PROJECTIONS,
    *GATED,
    *QK_NORMS,
    ("model.layers.{i}.input_layernorm.{p}", "decoder.blocks.{i}.attention_norms.before.{p}"),
]

COHERE = Family(
    "cohere",
    "cohere",
    "CohereForCausalLM",
    "CohereConfig",
    {**_COHERE_SETTINGS, "use_qk_norm": True},
    recipe(
        norm=_COHERE_NORM,
        wiring="parallel",
        tie=True,
        head={"kind": "language", "scale": 0.3},
        position={"theta": 500000.0, "layout": "interleaved"},
        attention={"qk_norm": {"weights": "per_head", "norm": _COHERE_NORM}},
    ),
    _COHERE_RULES,
)

COHERE2 = Family(
    "cohere 2",
    "cohere2",
    "Cohere2ForCausalLM",
    "Cohere2Config",
    {**_COHERE_SETTINGS, "num_hidden_layers": 3, "sliding_window": 5, "sliding_window_pattern": 3},
    recipe(
        n_layers=3,
        norm=_COHERE_NORM,
        wiring="parallel",
        tie=True,
        head={"kind": "language", "scale": 0.3},
        position={"layout": "interleaved"},
        attention={"mask": {"window": 5}},
        pattern=[{"repeat": 2}, {"attention": {"position": "none", "mask": {"window": False}}}],
    ),
    _COHERE_RULES,
)

GRANITE = Family(
    "granite",
    "granite",
    "GraniteForCausalLM",
    "GraniteConfig",
    {
        **SIZES,
        "embedding_multiplier": 3.0,
        "logits_scaling": 5.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
    },
    recipe(
        beta=0.4,
        embed={"scale": 3.0},
        head={"kind": "language", "scale": 0.2},
        attention={"scale": 0.2},
    ),
    LLAMA_RULES,
)

OLMO = Family(
    "olmo",
    "olmo",
    "OlmoForCausalLM",
    "OlmoConfig",
    {**{name: value for name, value in SIZES.items() if name not in ("rms_norm_eps", "head_dim")}, "clip_qkv": 0.8},
    recipe(
        norm={"kind": "layer", "weight": False, "bias": False},
        attention={"d_head": 6, "clip": 0.8},
    ),
    [*ENDS, *PROJECTIONS, *GATED],
)

HUNYUAN = Family(
    "hunyuan",
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    "HunYuanDenseV1Config",
    {**SIZES, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 1.0, "alpha": 3.0}},
    recipe(
        position={"theta": 500.0, "scaling": {"kind": "ntk", "factor": 3.0}},
        attention={"qk_norm": {"order": "after", "norm": {"kind": "rms", "eps": 1e-3}}},
    ),
    [
        *LLAMA_RULES,
        ("model.layers.{i}.self_attn.query_layernorm.weight", QK_NORMS[0][1]),
        ("model.layers.{i}.self_attn.key_layernorm.weight", QK_NORMS[1][1]),
    ],
)

KIN = [COHERE, COHERE2, GRANITE, OLMO, HUNYUAN]
