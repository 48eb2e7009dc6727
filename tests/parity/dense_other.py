"""Decoders of other houses than LLaMA's: fused projections, parallel branches, ALiBi, learned positions."""

from typing import Any

from maps import Rule, by_head, columns, rows, turned
from pairs import Family

_QKV = [f"decoder.blocks.{{i}}.attention.{x}.{{p}}" for x in "qkv"]

_GPT2_SETTINGS = {
    "vocab_size": 37,
    "n_embd": 30,
    "n_layer": 3,
    "n_head": 5,
    "n_positions": 40,
    "n_inner": 47,
    "layer_norm_epsilon": 1e-3,
}
_GPT2 = {
    "vocab_size": 37,
    "d_model": 30,
    "n_layers": 3,
    "max_positions": 40,
    "bias": True,
    "norm": {"kind": "layer", "eps": 1e-3},
    "embed": {"position": "learned"},
    "ffn": {"kind": "dense", "activation": "gelu_tanh", "d_ff": 47},
    "attention": {"n_heads": 5, "position": "none"},
}
_GPT2_RULES: list[Rule] = [
    ("transformer.wte.weight", "decoder.embed.token.weight"),
    ("transformer.wpe.weight", "decoder.embed.position.weight"),
    ("transformer.h.{i}.ln_1.{p}", "decoder.blocks.{i}.attention_norms.before.{p}"),
    ("transformer.h.{i}.ln_2.{p}", "decoder.blocks.{i}.ffn_norms.before.{p}"),
    ("transformer.h.{i}.attn.c_attn.{p}", _QKV, columns(30, 30, 30)),
    ("transformer.h.{i}.attn.c_proj.{p}", ["decoder.blocks.{i}.attention.out.{p}"], turned),
    ("transformer.h.{i}.mlp.c_fc.{p}", ["decoder.blocks.{i}.ffn.up.{p}"], turned),
    ("transformer.h.{i}.mlp.c_proj.{p}", ["decoder.blocks.{i}.ffn.down.{p}"], turned),
    ("transformer.ln_f.{p}", "decoder.final_norm.{p}"),
]

GPT2 = Family("gpt 2", "gpt2", "GPT2LMHeadModel", "GPT2Config", _GPT2_SETTINGS, {**_GPT2, "tie": True}, _GPT2_RULES)
GPT2_ROWS = Family(
    "gpt 2, rows",
    "gpt2",
    "GPT2ForSequenceClassification",
    "GPT2Config",
    {**_GPT2_SETTINGS, "pad_token_id": 0, "num_labels": 3},
    {**_GPT2, "head": {"kind": "sequence", "n_labels": 3, "pool": "last", "bias": False}},
    [*_GPT2_RULES, ("score.weight", "head.weight")],
)


def gpt_neox(name: str, *, parallel: bool) -> Family:
    """GPT-NeoX, its branches side by side or not."""
    return Family(
        name,
        "gpt_neox",
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {
            "vocab_size": 37,
            "hidden_size": 60,
            "num_hidden_layers": 2,
            "num_attention_heads": 5,
            "intermediate_size": 47,
            "max_position_embeddings": 64,
            "layer_norm_eps": 1e-3,
            "use_parallel_residual": parallel,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.35},
        },
        {
            "vocab_size": 37,
            "d_model": 60,
            "n_layers": 2,
            "bias": True,
            "norm": {"kind": "layer", "eps": 1e-3},
            "ffn": {"kind": "dense", "activation": "gelu", "d_ff": 47},
            "attention": {"n_heads": 5, "position": {"kind": "rope", "theta": 300.0, "fraction": 0.35}},
            "wiring": {"kind": "parallel", "shared_norm": False} if parallel else "serial",
        },
        [
            ("gpt_neox.embed_in.weight", "decoder.embed.token.weight"),
            ("gpt_neox.layers.{i}.input_layernorm.{p}", "decoder.blocks.{i}.attention_norms.before.{p}"),
            ("gpt_neox.layers.{i}.post_attention_layernorm.{p}", "decoder.blocks.{i}.ffn_norms.before.{p}"),
            ("gpt_neox.layers.{i}.attention.query_key_value.{p}", _QKV, by_head(5, 12, 12, 12)),
            ("gpt_neox.layers.{i}.attention.dense.{p}", "decoder.blocks.{i}.attention.out.{p}"),
            ("gpt_neox.layers.{i}.mlp.dense_h_to_4h.{p}", "decoder.blocks.{i}.ffn.up.{p}"),
            ("gpt_neox.layers.{i}.mlp.dense_4h_to_h.{p}", "decoder.blocks.{i}.ffn.down.{p}"),
            ("gpt_neox.final_layer_norm.{p}", "decoder.final_norm.{p}"),
            ("lm_head.weight", "head.weight"),
        ],
    )


GPTJ = Family(
    "gpt j",
    "gptj",
    "GPTJForCausalLM",
    "GPTJConfig",
    {
        "vocab_size": 37,
        "n_embd": 40,
        "n_layer": 2,
        "n_head": 5,
        "rotary_dim": 6,
        "n_positions": 64,
        "layer_norm_epsilon": 1e-3,
    },
    {
        "vocab_size": 37,
        "d_model": 40,
        "n_layers": 2,
        "norm": {"kind": "layer", "eps": 1e-3},
        "ffn": {"kind": "dense", "activation": "gelu_tanh", "d_ff": 160, "bias": True},
        "attention": {"n_heads": 5, "position": {"kind": "rope", "fraction": 0.75, "layout": "interleaved"}},
        "wiring": "parallel",
        "head": {"kind": "language", "bias": True},
    },
    [
        ("transformer.wte.weight", "decoder.embed.token.weight"),
        ("transformer.h.{i}.ln_1.{p}", "decoder.blocks.{i}.attention_norms.before.{p}"),
        *((f"transformer.h.{{i}}.attn.{x}_proj.{{p}}", f"decoder.blocks.{{i}}.attention.{x}.{{p}}") for x in "qkv"),
        ("transformer.h.{i}.attn.out_proj.{p}", "decoder.blocks.{i}.attention.out.{p}"),
        ("transformer.h.{i}.mlp.fc_in.{p}", "decoder.blocks.{i}.ffn.up.{p}"),
        ("transformer.h.{i}.mlp.fc_out.{p}", "decoder.blocks.{i}.ffn.down.{p}"),
        ("transformer.ln_f.{p}", "decoder.final_norm.{p}"),
        ("lm_head.{p}", "head.{p}"),
    ],
)

_FALCON_SIZES = {
    "vocab_size": 37,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "ffn_hidden_size": 51,
    "layer_norm_epsilon": 1e-3,
}
_FALCON_RULES: list[Rule] = [
    ("transformer.word_embeddings.weight", "decoder.embed.token.weight"),
    ("transformer.h.{i}.input_layernorm.{p}", "decoder.blocks.{i}.attention_norms.before.{p}"),
    ("transformer.h.{i}.ln_attn.{p}", "decoder.blocks.{i}.attention_norms.before.{p}"),
    ("transformer.h.{i}.ln_mlp.{p}", "decoder.blocks.{i}.ffn_norms.before.{p}"),
    ("transformer.h.{i}.self_attention.dense.{p}", "decoder.blocks.{i}.attention.out.{p}"),
    ("transformer.h.{i}.mlp.dense_h_to_4h.{p}", "decoder.blocks.{i}.ffn.up.{p}"),
    ("transformer.h.{i}.mlp.dense_4h_to_h.{p}", "decoder.blocks.{i}.ffn.down.{p}"),
    ("transformer.ln_f.{p}", "decoder.final_norm.{p}"),
]
_FALCON = {
    "vocab_size": 37,
    "d_model": 48,
    "n_layers": 2,
    "tie": True,
    "norm": {"kind": "layer", "eps": 1e-3},
    "ffn": {"kind": "dense", "activation": "gelu", "d_ff": 51},
    "attention": {"n_heads": 6, "n_kv_heads": 1, "position": "rope"},
    "wiring": "parallel",
}

FALCON = Family(
    "falcon, one key head",
    "falcon",
    "FalconForCausalLM",
    "FalconConfig",
    _FALCON_SIZES,
    _FALCON,
    [
        *_FALCON_RULES,
        ("transformer.h.{i}.self_attention.query_key_value.{p}", _QKV, rows(48, 8, 8)),
    ],
)

FALCON_GROUPED = Family(
    "falcon, grouped",
    "falcon",
    "FalconForCausalLM",
    "FalconConfig",
    {**_FALCON_SIZES, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    {
        **_FALCON,
        "bias": True,
        "attention": {"n_heads": 6, "n_kv_heads": 2, "position": "rope"},
        "wiring": {"kind": "parallel", "shared_norm": False},
    },
    [
        *_FALCON_RULES,
        ("transformer.h.{i}.self_attention.query_key_value.{p}", _QKV, by_head(2, 24, 8, 8)),
    ],
)


def _by_sdpa(model: Any) -> None:
    """Their other path adds the bias twice."""
    model.config._attn_implementation = "sdpa"


FALCON_ALIBI = Family(
    "falcon, alibi",
    "falcon",
    "FalconForCausalLM",
    "FalconConfig",
    {**_FALCON_SIZES, "alibi": True, "bias": True, "multi_query": False, "parallel_attn": False},
    {
        **_FALCON,
        "bias": True,
        "wiring": "serial",
        "attention": {"n_heads": 6, "position": {"kind": "alibi", "scale": 8**-0.5}},
    },
    [
        *_FALCON_RULES,
        ("transformer.h.{i}.post_attention_layernorm.{p}", "decoder.blocks.{i}.ffn_norms.before.{p}"),
        ("transformer.h.{i}.self_attention.query_key_value.{p}", _QKV, by_head(6, 8, 8, 8)),
    ],
    prepare=_by_sdpa,
)

BLOOM = Family(
    "bloom",
    "bloom",
    "BloomForCausalLM",
    "BloomConfig",
    {"vocab_size": 37, "hidden_size": 48, "n_layer": 2, "n_head": 6, "layer_norm_epsilon": 1e-3},
    {
        "vocab_size": 37,
        "d_model": 48,
        "n_layers": 2,
        "bias": True,
        "tie": True,
        "norm": {"kind": "layer", "eps": 1e-3},
        "embed": {"norm": {"kind": "layer", "eps": 1e-3}},
        "ffn": {"kind": "dense", "activation": "gelu_tanh"},
        "attention": {"n_heads": 6, "position": {"kind": "alibi", "symmetric": False}},
    },
    [
        ("transformer.word_embeddings.weight", "decoder.embed.token.weight"),
        ("transformer.word_embeddings_layernorm.{p}", "decoder.embed.norm.{p}"),
        ("transformer.h.{i}.input_layernorm.{p}", "decoder.blocks.{i}.attention_norms.before.{p}"),
        ("transformer.h.{i}.post_attention_layernorm.{p}", "decoder.blocks.{i}.ffn_norms.before.{p}"),
        ("transformer.h.{i}.self_attention.query_key_value.{p}", _QKV, by_head(6, 8, 8, 8)),
        ("transformer.h.{i}.self_attention.dense.{p}", "decoder.blocks.{i}.attention.out.{p}"),
        ("transformer.h.{i}.mlp.dense_h_to_4h.{p}", "decoder.blocks.{i}.ffn.up.{p}"),
        ("transformer.h.{i}.mlp.dense_4h_to_h.{p}", "decoder.blocks.{i}.ffn.down.{p}"),
        ("transformer.ln_f.{p}", "decoder.final_norm.{p}"),
    ],
    # Theirs writes √(2/π) in GELU with eight digits.
    tolerance=1e-8,
)

MPT = Family(
    "mpt",
    "mpt",
    "MptForCausalLM",
    "MptConfig",
    {
        "vocab_size": 37,
        "d_model": 48,
        "n_layers": 2,
        "n_heads": 6,
        "max_seq_len": 64,
        "layer_norm_epsilon": 1e-3,
        "attn_config": {"clip_qkv": 0.7, "alibi_bias_max": 8, "softmax_scale": 0.9},
    },
    {
        "vocab_size": 37,
        "d_model": 48,
        "n_layers": 2,
        "tie": True,
        "norm": {"kind": "layer", "eps": 1e-3, "bias": False},
        "ffn": {"kind": "dense", "activation": "gelu"},
        "attention": {"n_heads": 6, "clip": 0.7, "scale": 0.9, "position": {"kind": "alibi"}},
    },
    [
        ("transformer.wte.weight", "decoder.embed.token.weight"),
        ("transformer.blocks.{i}.norm_1.weight", "decoder.blocks.{i}.attention_norms.before.weight"),
        ("transformer.blocks.{i}.norm_2.weight", "decoder.blocks.{i}.ffn_norms.before.weight"),
        ("transformer.blocks.{i}.attn.Wqkv.{p}", _QKV, rows(48, 48, 48)),
        ("transformer.blocks.{i}.attn.out_proj.weight", "decoder.blocks.{i}.attention.out.weight"),
        ("transformer.blocks.{i}.ffn.up_proj.weight", "decoder.blocks.{i}.ffn.up.weight"),
        ("transformer.blocks.{i}.ffn.down_proj.weight", "decoder.blocks.{i}.ffn.down.weight"),
        ("transformer.norm_f.weight", "decoder.final_norm.weight"),
    ],
)


def opt(name: str, *, pre: bool) -> Family:
    """OPT, with norms before the branches, or after the sums (its 350M model)."""
    slot = "before" if pre else "residual"
    return Family(
        name,
        "opt",
        "OPTForCausalLM",
        "OPTConfig",
        {
            "vocab_size": 37,
            "hidden_size": 30,
            "word_embed_proj_dim": 30,
            "num_hidden_layers": 2,
            "num_attention_heads": 5,
            "ffn_dim": 47,
            "max_position_embeddings": 40,
            "do_layer_norm_before": pre,
        },
        {
            "vocab_size": 37,
            "d_model": 30,
            "n_layers": 2,
            "max_positions": 40,
            "bias": True,
            "tie": True,
            "norm": "layer",
            "placement": "pre" if pre else "post",
            "embed": {"position": {"kind": "learned", "offset": 2}},
            "ffn": {"kind": "dense", "activation": "relu", "d_ff": 47},
            "attention": {"n_heads": 5, "position": "none"},
        },
        [
            ("model.decoder.embed_tokens.weight", "decoder.embed.token.weight"),
            ("model.decoder.embed_positions.weight", "decoder.embed.position.weight"),
            ("model.decoder.final_layer_norm.{p}", "decoder.final_norm.{p}"),
            ("model.decoder.layers.{i}.self_attn_layer_norm.{p}", f"decoder.blocks.{{i}}.attention_norms.{slot}.{{p}}"),
            ("model.decoder.layers.{i}.final_layer_norm.{p}", f"decoder.blocks.{{i}}.ffn_norms.{slot}.{{p}}"),
            *(
                (f"model.decoder.layers.{{i}}.self_attn.{x}_proj.{{p}}", f"decoder.blocks.{{i}}.attention.{x}.{{p}}")
                for x in ("q", "k", "v", "out")
            ),
            ("model.decoder.layers.{i}.fc1.{p}", "decoder.blocks.{i}.ffn.up.{p}"),
            ("model.decoder.layers.{i}.fc2.{p}", "decoder.blocks.{i}.ffn.down.{p}"),
        ],
    )


OTHERS = [
    GPT2,
    gpt_neox("gpt neox", parallel=True),
    gpt_neox("gpt neox, serial", parallel=False),
    GPTJ,
    FALCON,
    FALCON_ALIBI,
    FALCON_GROUPED,
    BLOOM,
    MPT,
    opt("opt", pre=True),
    opt("opt, norms after", pre=False),
]
