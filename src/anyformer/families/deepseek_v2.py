"""DeepSeek-V2 (DeepSeek-AI 2024a): latent attention, and groups of small experts beside shared ones."""

from anyformer.families.common import ENDS, GATED, PRE_NORMS, RMS, decoders, norms
from anyformer.families.experts import ACTIVATION, BALANCE, EXPERTS, IGNORED, ExpertGroups, SharedExperts, shared
from anyformer.families.family import Family
from anyformer.families.fields import Always, Same, SparseLayers, Tied
from anyformer.families.latent import ATTENTION, LATENT, Equal, LatentScale
from anyformer.families.llama import DROPOUT, RMS_EPS
from anyformer.families.rotary import Rotary
from anyformer.families.sizes import Divides
from anyformer.families.tables import Either

SPEC = {
    "decoder": {
        "final_norm": RMS,
        "block": {
            "attention": ATTENTION,
            "ffn": Either(
                dense={"kind": "gated"},
                sparse={"kind": "moe", "normalise": False, "expert": {"kind": "gated"}, "shared": {"kind": "gated"}},
            ),
            "norms": norms({"before": RMS}),
        },
    }
}
SIZES = (
    Same("vocab_size", "vocab_size"),
    Same("hidden_size", "d_model"),
    Same("num_hidden_layers", "n_layers"),
    Same("num_attention_heads", "attention.n_heads"),
    Equal("num_key_value_heads", "num_attention_heads"),
    Same("kv_lora_rank", "attention.kv_rank", default=512),
    Same("q_lora_rank", "attention.q_rank", default=1536, nullable=True),
    Same("qk_nope_head_dim", "attention.d_nope", default=128),
    Same("qk_rope_head_dim", "attention.d_rope", default=64),
    Same("v_head_dim", "attention.d_value", default=128),
)
BIAS = Same("attention_bias", ("attention.bias", "attention.out_bias"), default=False)
TENSORS = (*ENDS, *LATENT, *GATED, *PRE_NORMS, *EXPERTS, *shared("shared_experts"))
DERIVED = ("head_dim", "qk_head_dim", "ep_size")
"""Keys that repeat what others say, and the number of devices for experts."""

FAMILY = Family(
    name="DeepSeek-V2",
    model_type="deepseek_v2",
    stack="decoder",
    spec=SPEC,
    config=(
        *SIZES,
        Divides(),
        Same("max_position_embeddings", "max_positions", default=2048),
        SparseLayers(dense_first=("first_k_dense_replace", 0)),
        Always("moe_layer_freq", 1, default=1),
        Same("intermediate_size", "ffn.dense.d_ff", default=11008),
        Same("moe_intermediate_size", "ffn.sparse.expert.d_ff", default=1407),
        SharedExperts("n_shared_experts", default=2),
        Same("n_routed_experts", "ffn.sparse.n_experts", default=64),
        Same("num_experts_per_tok", "ffn.sparse.top_k", default=None),
        Always("scoring_func", "softmax", default="softmax"),
        Always("norm_topk_prob", value=False, default=False),
        Same("routed_scaling_factor", "ffn.sparse.scale", default=1.0),
        ExpertGroups("max", method=("topk_method", "greedy", "group_limited_greedy")),
        *BALANCE,
        ACTIVATION,
        RMS_EPS,
        BIAS,
        Same("mlp_bias", ("ffn.dense.bias", "ffn.sparse.shared.bias"), default=False),
        DROPOUT,
        Rotary(),
        LatentScale(),
        Tied(default=False),
    ),
    models=decoders("DeepseekV2", tokens=False),
    tensors=TENSORS,
    ignored=(*IGNORED, *DERIVED),
    presets=("deepseek-v2", "deepseek-v2-lite"),
)
