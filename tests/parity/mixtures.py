"""Decoders with experts, and with latent attention."""

import math
from typing import Any

from dense import ENDS, GATED, LLAMA_RULES, PRE_NORMS, PROJECTIONS, QK_NORMS, SIZES, recipe
from maps import Rule, by_head, chunks
from pairs import Family
from torch import Tensor

_FFN = "decoder.blocks.{i}.ffn"
_MLP = "model.layers.{i}.mlp"
EXPERTS: list[Rule] = [
    (f"{_MLP}.gate.weight", f"{_FFN}.router.weight"),
    (f"{_MLP}.gate.e_score_correction_bias", f"{_FFN}.router.choice_bias"),
    (f"{_MLP}.experts.gate_up_proj", [f"{_FFN}.experts.gate.weight", f"{_FFN}.experts.up.weight"], chunks(2, 1)),
    (f"{_MLP}.experts.down_proj", f"{_FFN}.experts.down.weight"),
    *(
        (f"{_MLP}.{shared}.{x}_proj.weight", f"{_FFN}.shared.{x}.weight")
        for shared in ("shared_expert", "shared_experts")
        for x in ("gate", "up", "down")
    ),
    (f"{_MLP}.shared_expert_gate.weight", f"{_FFN}.shared_gate.weight"),
]

MIXTRAL = Family(
    "mixtral",
    "mixtral",
    "MixtralForCausalLM",
    "MixtralConfig",
    {**SIZES, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 6},
    recipe(
        position={"theta": 1e6},
        attention={"mask": {"window": 6}},
        ffn={"kind": "moe", "n_experts": 5, "top_k": 2, "expert": {"kind": "swiglu", "d_ff": 41}},
    ),
    [*LLAMA_RULES, *EXPERTS],
)


def qwen2_moe(name: str, *, normalise: bool) -> Family:
    """Qwen2-MoE: a dense layer, a mixture, each second one; chosen scores divided by their sum or not."""
    return Family(
        name,
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            **SIZES,
            "num_hidden_layers": 3,
            "decoder_sparse_step": 2,
            "moe_intermediate_size": 11,
            "shared_expert_intermediate_size": 17,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "norm_topk_prob": normalise,
        },
        recipe(
            n_layers=3,
            attention={"qkv_bias": True},
            ffn={
                "kind": "moe",
                "n_experts": 7,
                "top_k": 3,
                "normalise": normalise,
                "expert": {"kind": "swiglu", "d_ff": 11},
                "shared": {"d_ff": 17},
                "shared_gate": True,
            },
            pattern=[{"ffn": {"kind": "swiglu", "d_ff": 41}}, {}],
        ),
        [*LLAMA_RULES, *EXPERTS],
    )


QWEN2_MOE_WINDOWS = Family(
    "qwen 2 moe, windows",
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    "Qwen2MoeConfig",
    {
        **SIZES,
        "num_hidden_layers": 4,
        "mlp_only_layers": [0, 2],
        "moe_intermediate_size": 11,
        "shared_expert_intermediate_size": 17,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "qkv_bias": False,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 2,
    },
    recipe(
        n_layers=4,
        ffn={
            "kind": "moe",
            "n_experts": 7,
            "top_k": 3,
            "normalise": False,
            "expert": {"kind": "swiglu", "d_ff": 11},
            "shared": {"d_ff": 17},
            "shared_gate": True,
        },
        pattern=[
            {"ffn": {"kind": "swiglu", "d_ff": 41}, "attention": {"mask": {"window": 6}}},
            {},
            {"ffn": {"kind": "swiglu", "d_ff": 41}},
            {},
        ],
    ),
    [*LLAMA_RULES, *EXPERTS],
)


def qwen3_moe(name: str, over: dict[str, Any], ffn: dict[str, Any], **changes: Any) -> Family:
    """Qwen3-MoE: norms of queries and keys, biases everywhere, no shared expert, layers made dense by number."""
    return Family(
        name,
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            **SIZES,
            "num_hidden_layers": 3,
            "moe_intermediate_size": 11,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "attention_bias": True,
            **over,
        },
        recipe(
            n_layers=3,
            ffn={"kind": "moe", "n_experts": 7, "top_k": 3, "expert": {"kind": "swiglu", "d_ff": 11}, **ffn},
            **changes,
        ),
        [*LLAMA_RULES, *QK_NORMS, *EXPERTS],
    )


_QK_NORM = {"qk_norm": {"norm": {"kind": "rms", "eps": 1e-3}}, "qkv_bias": True, "out_bias": True}
_DENSE = {"ffn": {"kind": "swiglu", "d_ff": 41}}
QWEN3_MOE = qwen3_moe(
    "qwen 3 moe",
    {"norm_topk_prob": True, "mlp_only_layers": [1], "rope_parameters": {"rope_type": "default", "rope_theta": 700.0}},
    {},
    attention=_QK_NORM,
    position={"theta": 700.0},
    pattern=[{}, _DENSE, {}],
)
QWEN3_MOE_WINDOW = qwen3_moe(
    "qwen 3 moe, window",
    {"decoder_sparse_step": 3, "use_sliding_window": True, "sliding_window": 6, "tie_word_embeddings": True},
    {"normalise": False},
    attention={**_QK_NORM, "mask": {"window": 6}},
    tie=True,
    pattern=[{**_DENSE, "repeat": 2}, {}],
)


def _every_other(value: Tensor) -> list[Tensor]:
    """Gates and ups of one output channel after another: [E, C, 2F], or biases [E, 2F]."""
    value = value.mT if value.dim() == 3 else value
    return [value[:, 0::2], value[:, 1::2]]


GPT_OSS = Family(
    "gpt-oss",
    "gpt_oss",
    "GptOssForCausalLM",
    "GptOssConfig",
    {
        **SIZES,
        "max_position_embeddings": 256,
        "sliding_window": 6,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "swiglu_limit": 0.8,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 700.0,
            "factor": 4.0,
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    recipe(
        position={
            "theta": 700.0,
            "scaling": {"kind": "yarn", "factor": 4.0, "original": 64, "beta_fast": 4.0, "truncate": False},
        },
        attention={"qkv_bias": True, "out_bias": True, "sink_logit": True},
        ffn={
            "kind": "moe",
            "n_experts": 5,
            "top_k": 2,
            "router_bias": True,
            "expert": {
                "kind": "gated",
                "activation": "quick_gelu",
                "d_ff": 41,
                "bias": True,
                "limit": 0.8,
                "up_offset": 1.0,
            },
        },
        pattern=[{"attention": {"mask": {"window": 6}}}, {}],
    ),
    [
        *ENDS,
        *PROJECTIONS,
        *PRE_NORMS,
        ("model.layers.{i}.self_attn.sinks", "decoder.blocks.{i}.attention.sink"),
        (f"{_MLP}.router.{{p}}", f"{_FFN}.router.{{p}}"),
        (
            f"{_MLP}.experts.gate_up_proj",
            [f"{_FFN}.experts.gate.weight", f"{_FFN}.experts.up.weight"],
            _every_other,
        ),
        (
            f"{_MLP}.experts.gate_up_proj_bias",
            [f"{_FFN}.experts.gate.bias", f"{_FFN}.experts.up.bias"],
            _every_other,
        ),
        (f"{_MLP}.experts.down_proj", [f"{_FFN}.experts.down.weight"], lambda value: [value.mT]),
        (f"{_MLP}.experts.down_proj_bias", f"{_FFN}.experts.down.bias"),
    ],
)

_ATTENTION = "decoder.blocks.{i}.attention"
_THEIRS = "model.layers.{i}.self_attn"
LATENT: list[Rule] = [
    (f"{_THEIRS}.q_proj.weight", f"{_ATTENTION}.q.weight"),
    (f"{_THEIRS}.q_a_proj.{{p}}", f"{_ATTENTION}.q_down.{{p}}"),
    (f"{_THEIRS}.q_a_layernorm.weight", f"{_ATTENTION}.q_norm.weight"),
    (f"{_THEIRS}.q_b_proj.weight", f"{_ATTENTION}.q_up.weight"),
    (f"{_THEIRS}.kv_a_proj_with_mqa.{{p}}", f"{_ATTENTION}.kv_down.{{p}}"),
    (f"{_THEIRS}.kv_a_layernorm.weight", f"{_ATTENTION}.kv_norm.weight"),
    (f"{_THEIRS}.kv_b_proj.weight", [f"{_ATTENTION}.k_up.weight", f"{_ATTENTION}.v_up.weight"], by_head(6, 7, 5)),
    (f"{_THEIRS}.o_proj.{{p}}", f"{_ATTENTION}.out.{{p}}"),
]
_LATENT_SIZES = {
    **{name: value for name, value in SIZES.items() if name != "head_dim"},
    "num_hidden_layers": 3,
    "num_key_value_heads": 6,
    "kv_lora_rank": 11,
    "qk_nope_head_dim": 7,
    "qk_rope_head_dim": 8,
    "v_head_dim": 5,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 9,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
}


def latent(position: dict[str, Any], attention: dict[str, Any], ffn: dict[str, Any]) -> dict[str, Any]:
    """DeepSeek's recipe of the sizes above."""
    made = recipe(
        n_layers=3,
        ffn={"kind": "moe", "n_experts": 8, "top_k": 3, "expert": {"kind": "swiglu", "d_ff": 9}, **ffn},
        pattern=[{"ffn": {"kind": "swiglu", "d_ff": 41}}, {"repeat": 2}],
    )
    made["attention"] = {
        "kind": "latent",
        "n_heads": 6,
        "kv_rank": 11,
        "d_nope": 7,
        "d_rope": 8,
        "d_value": 5,
        "position": {"kind": "rope", **position},
        **attention,
    }
    return made


def _mscale(factor: float, m: float) -> float:
    return 0.1 * m * math.log(factor) + 1


_RULES = [*LATENT, *ENDS, *GATED, *PRE_NORMS, *EXPERTS]
DEEPSEEK_V2 = Family(
    "deepseek v2",
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    "DeepseekV2Config",
    {
        **_LATENT_SIZES,
        "max_position_embeddings": 256,
        "q_lora_rank": 13,
        "attention_bias": True,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 1.7,
        "n_shared_experts": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 300.0,
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "beta_fast": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    latent(
        {
            "theta": 300.0,
            "layout": "interleaved",
            "scaling": {
                "kind": "yarn",
                "factor": 4.0,
                "original": 64,
                "beta_fast": 4.0,
                "attention_factor": _mscale(4.0, 1.0) / _mscale(4.0, 0.7),
            },
        },
        {"q_rank": 13, "bias": True, "out_bias": True, "scale": 15**-0.5 * _mscale(4.0, 0.7) ** 2},
        {"normalise": False, "scale": 1.7, "shared": 2, "groups": {"n_groups": 4, "top_groups": 2}},
    ),
    _RULES,
)

DEEPSEEK_V2_LITE = Family(
    "deepseek v2 lite",
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    "DeepseekV2Config",
    {**_LATENT_SIZES, "q_lora_rank": None, "topk_method": "greedy", "n_shared_experts": 1},
    latent({"layout": "interleaved"}, {}, {"normalise": False, "shared": 1}),
    _RULES,
)


def deepseek_v3(name: str, *, q_rank: int | None, interleaved: bool, normalise: bool) -> Family:
    """DeepSeek-V3: sigmoid scores, a bias for the choice alone, groups by their best two."""
    return Family(
        name,
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **_LATENT_SIZES,
            "q_lora_rank": q_rank,
            "n_routed_experts": 12,
            "n_group": 3,
            "topk_group": 1,
            "norm_topk_prob": normalise,
            "routed_scaling_factor": 2.5,
            "rope_interleave": interleaved,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        },
        latent(
            {"theta": 300.0, "layout": "interleaved" if interleaved else "half"},
            {} if q_rank is None else {"q_rank": q_rank},
            {
                "n_experts": 12,
                "scoring": "sigmoid",
                "normalise": normalise,
                "scale": 2.5,
                "shared": 1,
                "choice_bias": True,
                "groups": {"n_groups": 3, "top_groups": 1, "score": "top2"},
            },
        ),
        _RULES,
    )


MIXTURES = [
    MIXTRAL,
    qwen2_moe("qwen 2 moe", normalise=False),
    qwen2_moe("qwen 2 moe, normalised", normalise=True),
    QWEN2_MOE_WINDOWS,
    QWEN3_MOE,
    QWEN3_MOE_WINDOW,
    GPT_OSS,
]
LATENTS = [
    DEEPSEEK_V2,
    DEEPSEEK_V2_LITE,
    deepseek_v3("deepseek v3", q_rank=13, interleaved=True, normalise=True),
    deepseek_v3("deepseek v3, no query latent, half", q_rank=None, interleaved=False, normalise=False),
]
