"""Qwen3-MoE (Qwen Team 2025): Qwen3 with many small experts and none that is shared."""

from anyformer.families.common import LLAMA_TENSORS, QK_NORMS, RMS, decoders, eps, spans
from anyformer.families.experts import EXPERTS, IGNORED
from anyformer.families.family import Family
from anyformer.families.fields import Flag, Named, Same, Tied, Windows
from anyformer.families.llama import BIASES, DROPOUT, HEAD_DIM, SPEC
from anyformer.families.qwen2_moe import SPARSE_LAYERS
from anyformer.families.rotary import Rotary
from anyformer.families.sizes import sizes
from anyformer.families.tables import Either, merged

_MOE = {"kind": "moe", "expert": {"kind": "gated"}}
_BLOCK = {"attention": {"qk_norm": {"norm": RMS}}, "ffn": Either(dense={"kind": "gated"}, sparse=_MOE)}

FAMILY = Family(
    name="Qwen3-MoE",
    model_type="qwen3_moe",
    stack="decoder",
    spec=merged(SPEC, {"decoder": {"block": _BLOCK}}),
    config=(
        *sizes(max_positions=32768, n_kv_heads=4),
        HEAD_DIM,
        SPARSE_LAYERS,
        Same("intermediate_size", "ffn.dense.d_ff", default=6144),
        Same("moe_intermediate_size", "ffn.sparse.expert.d_ff", default=768),
        Same("num_experts", "ffn.sparse.n_experts", default=128),
        Same("num_experts_per_tok", "ffn.sparse.top_k", default=8),
        Flag("norm_topk_prob", "ffn.sparse.normalise", default=False),
        Named("hidden_act", ("ffn.dense.activation", "ffn.sparse.expert.activation"), default="silu"),
        Same("rms_norm_eps", (*eps("before"), "attention.qk_norm.norm.eps"), default=1e-6),
        BIASES,
        DROPOUT,
        Windows(switch=("use_sliding_window", False), default=4096, types=False),
        Rotary(),
        Tied(default=False),
    ),
    models={**decoders("Qwen3Moe"), **spans("Qwen3Moe", body="transformer.")},
    tensors=(*LLAMA_TENSORS, *QK_NORMS, *EXPERTS),
    aliases={"num_local_experts": "num_experts"},
    ignored=(*IGNORED, "max_window_layers"),
)
