"""Decoders without experts."""

import math
from typing import Any

from maps import Rule, chunks, from_halves, rows
from pairs import Family

ENDS: list[Rule] = [
    ("model.embed_tokens.weight", "decoder.embed.token.weight"),
    ("model.norm.{p}", "decoder.final_norm.{p}"),
    ("lm_head.weight", "head.weight"),
]
PROJECTIONS: list[Rule] = [
    ("model.layers.{i}.self_attn.q_proj.{p}", "decoder.blocks.{i}.attention.q.{p}"),
    ("model.layers.{i}.self_attn.k_proj.{p}", "decoder.blocks.{i}.attention.k.{p}"),
    ("model.layers.{i}.self_attn.v_proj.{p}", "decoder.blocks.{i}.attention.v.{p}"),
    ("model.layers.{i}.self_attn.o_proj.{p}", "decoder.blocks.{i}.attention.out.{p}"),
]
QK_NORMS: list[Rule] = [
    ("model.layers.{i}.self_attn.q_norm.weight", "decoder.blocks.{i}.attention.q_norm.norm.weight"),
    ("model.layers.{i}.self_attn.k_norm.weight", "decoder.blocks.{i}.attention.k_norm.norm.weight"),
]
GATED: list[Rule] = [
    ("model.layers.{i}.mlp.gate_proj.{p}", "decoder.blocks.{i}.ffn.gate.{p}"),
    ("model.layers.{i}.mlp.up_proj.{p}", "decoder.blocks.{i}.ffn.up.{p}"),
    ("model.layers.{i}.mlp.down_proj.{p}", "decoder.blocks.{i}.ffn.down.{p}"),
]
PRE_NORMS: list[Rule] = [
    ("model.layers.{i}.input_layernorm.{p}", "decoder.blocks.{i}.attention_norms.before.{p}"),
    ("model.layers.{i}.post_attention_layernorm.{p}", "decoder.blocks.{i}.ffn_norms.before.{p}"),
]
SANDWICH: list[Rule] = [
    ("model.layers.{i}.input_layernorm.{p}", "decoder.blocks.{i}.attention_norms.before.{p}"),
    ("model.layers.{i}.post_attention_layernorm.{p}", "decoder.blocks.{i}.attention_norms.after.{p}"),
    ("model.layers.{i}.pre_feedforward_layernorm.{p}", "decoder.blocks.{i}.ffn_norms.before.{p}"),
    ("model.layers.{i}.post_feedforward_layernorm.{p}", "decoder.blocks.{i}.ffn_norms.after.{p}"),
]
OUTPUT_NORMS: list[Rule] = [
    ("model.layers.{i}.post_attention_layernorm.{p}", "decoder.blocks.{i}.attention_norms.after.{p}"),
    ("model.layers.{i}.post_feedforward_layernorm.{p}", "decoder.blocks.{i}.ffn_norms.after.{p}"),
]
LLAMA_RULES = [*ENDS, *PROJECTIONS, *GATED, *PRE_NORMS]

SIZES = {
    "vocab_size": 37,
    "hidden_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 41,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
    "head_dim": 10,
}


def recipe(
    *, attention: dict[str, Any] | None = None, position: dict[str, Any] | None = None, **over: Any
) -> dict[str, Any]:
    """LLaMA of the sizes above, with changes."""
    heads = {"n_heads": 6, "n_kv_heads": 2, "d_head": 10, "position": {"kind": "rope", **(position or {})}}
    return {
        "vocab_size": 37,
        "d_model": 36,
        "n_layers": 2,
        "norm": {"kind": "rms", "eps": 1e-3},
        "ffn": {"kind": "swiglu", "d_ff": 41},
        "attention": {**heads, **(attention or {})},
        **over,
    }


def llama(name: str, rope: dict[str, Any], position: dict[str, Any], rules: list[Rule] = LLAMA_RULES) -> Family:
    """LLaMA with biases everywhere, rotary in some way."""
    return Family(
        name,
        "llama",
        "LlamaForCausalLM",
        "LlamaConfig",
        {**SIZES, "attention_bias": True, "mlp_bias": True, "rope_parameters": {"rope_theta": 500.0, **rope}},
        recipe(bias=True, position={"theta": 500.0, **position}),
        rules,
    )


_TURNED_ROWS: list[Rule] = [
    (
        f"model.layers.{{i}}.self_attn.{x}_proj.{{p}}",
        [f"decoder.blocks.{{i}}.attention.{x}.{{p}}"],
        from_halves(n_heads),
    )
    for x, n_heads in (("q", 6), ("k", 2))
]
# Numbers that float32 holds exactly: a list becomes a tensor before its type can be widened.
_LONG, _SHORT = [1.5, 2.0, 3.5, 5.0, 9.0], [1.0, 1.125, 1.375, 1.25, 1.625]

LLAMAS = [
    llama("llama", {"rope_type": "default"}, {}),
    llama("llama, interleaved", {"rope_type": "default"}, {"layout": "interleaved"}, [*_TURNED_ROWS, *LLAMA_RULES]),
    llama(
        "llama 3.1",
        {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        {"scaling": {"kind": "llama3", "factor": 4.0, "original": 32}},
    ),
    llama("llama, linear", {"rope_type": "linear", "factor": 2.5}, {"scaling": {"kind": "linear", "factor": 2.5}}),
    llama(
        "llama, yarn",
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 4.0},
        {"scaling": {"kind": "yarn", "factor": 4.0, "original": 64, "beta_fast": 4.0}},
    ),
    llama(
        "llama, yarn over fractions of pairs",
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 2.0,
            "beta_slow": 0.5,
            "truncate": False,
            "attention_factor": 1.3,
        },
        {
            "scaling": {
                "kind": "yarn",
                "factor": 4.0,
                "original": 16,
                "beta_fast": 2.0,
                "beta_slow": 0.5,
                "truncate": False,
                "attention_factor": 1.3,
            }
        },
    ),
]

DYNAMIC = Family(
    "llama, dynamic",
    "llama",
    "LlamaForCausalLM",
    "LlamaConfig",
    {
        **SIZES,
        "max_position_embeddings": 16,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0},
    },
    recipe(position={"theta": 500.0, "scaling": {"kind": "dynamic", "factor": 2.0, "original": 16}}),
    LLAMA_RULES,
)

LONGROPE = llama(
    "llama, longrope",
    {
        "rope_type": "longrope",
        "short_factor": _SHORT,
        "long_factor": _LONG,
        "original_max_position_embeddings": 16,
        "factor": 4.0,
    },
    {
        "scaling": {
            "kind": "longrope",
            "original": 16,
            "short": _SHORT,
            "long": _LONG,
            "attention_factor": math.sqrt(1 + math.log(4.0) / math.log(16)),
        }
    },
)

MISTRAL = Family(
    "mistral",
    "mistral",
    "MistralForCausalLM",
    "MistralConfig",
    {**SIZES, "sliding_window": 5, "tie_word_embeddings": True},
    recipe(tie=True, attention={"mask": {"window": 5}}),
    LLAMA_RULES,
)

QWEN2 = Family(
    "qwen 2",
    "qwen2",
    "Qwen2ForCausalLM",
    "Qwen2Config",
    {**SIZES, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    recipe(attention={"qkv_bias": True}, pattern=[{}, {"attention": {"mask": {"window": 4}}}]),
    LLAMA_RULES,
)

QWEN3 = Family(
    "qwen 3",
    "qwen3",
    "Qwen3ForCausalLM",
    "Qwen3Config",
    SIZES,
    recipe(attention={"qk_norm": {"norm": {"kind": "rms", "eps": 1e-3}}}),
    [*LLAMA_RULES, *QK_NORMS],
)

OLMO2 = Family(
    "olmo 2",
    "olmo2",
    "Olmo2ForCausalLM",
    "Olmo2Config",
    {name: value for name, value in SIZES.items() if name != "head_dim"},
    recipe(
        placement="output",
        attention={"d_head": 6, "qk_norm": {"over": "projection", "norm": {"kind": "rms", "eps": 1e-3}}},
    ),
    [*ENDS, *PROJECTIONS, *GATED, *OUTPUT_NORMS, *QK_NORMS],
)

GEMMA = Family(
    "gemma",
    "gemma",
    "GemmaForCausalLM",
    "GemmaConfig",
    {**SIZES, "num_key_value_heads": 1},
    recipe(
        norm={"kind": "rms", "eps": 1e-3, "offset": 1},
        attention={"n_kv_heads": 1},
        ffn={"kind": "gated", "activation": "gelu_tanh", "d_ff": 41},
        embed={"scale": "sqrt_width"},
        tie=True,
    ),
    LLAMA_RULES,
)

GEMMA2 = Family(
    "gemma 2",
    "gemma2",
    "Gemma2ForCausalLM",
    "Gemma2Config",
    {
        **SIZES,
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 3,
        "sliding_window": 5,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 30.0,
    },
    recipe(
        n_layers=4,
        norm={"kind": "rms", "eps": 1e-3, "offset": 1},
        placement="sandwich",
        attention={"scale": 3**-0.5, "softcap": 2.0},
        ffn={"kind": "gated", "activation": "gelu_tanh", "d_ff": 41},
        embed={"scale": "sqrt_width"},
        head={"kind": "language", "softcap": 30.0},
        pattern=[{"attention": {"mask": {"window": 5}}}, {}],
        tie=True,
    ),
    [*ENDS, *PROJECTIONS, *GATED, *SANDWICH],
)

GEMMA3 = Family(
    "gemma 3",
    "gemma3",
    "Gemma3ForCausalLM",
    "Gemma3TextConfig",
    {
        **SIZES,
        "num_hidden_layers": 6,
        "query_pre_attn_scalar": 7,
        "sliding_window": 5,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
        },
    },
    recipe(
        n_layers=6,
        norm={"kind": "rms", "eps": 1e-3, "offset": 1},
        placement="sandwich",
        position={"theta": 5000.0, "scaling": {"kind": "linear", "factor": 4.0}},
        attention={"scale": 7**-0.5, "qk_norm": {"norm": {"kind": "rms", "eps": 1e-3, "offset": 1}}},
        ffn={"kind": "gated", "activation": "gelu_tanh", "d_ff": 41},
        embed={"scale": "sqrt_width"},
        pattern=[
            {"repeat": 5, "attention": {"position": {"theta": 100.0, "scaling": "none"}, "mask": {"window": 5}}},
            {},
        ],
        tie=True,
    ),
    [*ENDS, *PROJECTIONS, *GATED, *SANDWICH, *QK_NORMS],
)

_PHI_SIZES = {name: value for name, value in SIZES.items() if name != "head_dim"} | {"hidden_size": 48}
PHI3 = Family(
    "phi 3",
    "phi3",
    "Phi3ForCausalLM",
    "Phi3Config",
    {
        **_PHI_SIZES,
        "original_max_position_embeddings": 16,
        "sliding_window": 11,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.75,
            "short_factor": _SHORT[:3],
            "long_factor": _LONG[:3],
            "original_max_position_embeddings": 16,
        },
    },
    recipe(
        d_model=48,
        position={
            "theta": 500.0,
            "fraction": 0.75,
            "scaling": {
                "kind": "longrope",
                "original": 16,
                "short": _SHORT[:3],
                "long": _LONG[:3],
                "attention_factor": math.sqrt(1 + math.log(64 / 16) / math.log(16)),
            },
        },
        attention={"d_head": 8, "mask": {"window": 11}},
    ),
    [
        *ENDS,
        *PRE_NORMS,
        (
            "model.layers.{i}.self_attn.qkv_proj.weight",
            [f"decoder.blocks.{{i}}.attention.{x}.weight" for x in "qkv"],
            rows(48, 16, 16),
        ),
        *PROJECTIONS[3:],
        (
            "model.layers.{i}.mlp.gate_up_proj.weight",
            ["decoder.blocks.{i}.ffn.gate.weight", "decoder.blocks.{i}.ffn.up.weight"],
            chunks(2),
        ),
        *GATED[2:],
    ],
)

STARCODER2 = Family(
    "starcoder 2",
    "starcoder2",
    "Starcoder2ForCausalLM",
    "Starcoder2Config",
    {
        **{name: value for name, value in SIZES.items() if name != "rms_norm_eps"},
        "norm_epsilon": 1e-3,
        "sliding_window": 7,
        "head_dim": 6,
    },
    recipe(
        bias=True,
        tie=True,
        norm={"kind": "layer", "eps": 1e-3},
        ffn={"kind": "dense", "activation": "gelu_tanh", "d_ff": 41},
        attention={"d_head": 6, "mask": {"window": 7}},
    ),
    [
        *ENDS,
        *PROJECTIONS,
        *PRE_NORMS,
        ("model.layers.{i}.mlp.c_fc.{p}", "decoder.blocks.{i}.ffn.up.{p}"),
        ("model.layers.{i}.mlp.c_proj.{p}", "decoder.blocks.{i}.ffn.down.{p}"),
    ],
)

DENSE = [*LLAMAS, DYNAMIC, LONGROPE, MISTRAL, QWEN2, QWEN3, OLMO2, GEMMA, GEMMA2, GEMMA3, PHI3, STARCODER2]
