"""Qwen1.5-MoE and Qwen2-MoE (Yang et al. 2024): Qwen2 with many small experts and a gated shared one."""

from anyformer.families.common import LLAMA_TENSORS, decoders, spans
from anyformer.families.experts import ACTIVATION, EXPERTS, IGNORED, shared
from anyformer.families.family import Family
from anyformer.families.fields import Flag, Same, SparseLayers, Tied, Windows
from anyformer.families.llama import DROPOUT, HEAD_DIM, RMS_EPS, SPEC
from anyformer.families.rotary import Rotary
from anyformer.families.sizes import sizes
from anyformer.families.tables import Either, merged

_MOE = {"kind": "moe", "expert": {"kind": "gated"}, "shared": {"kind": "gated"}, "shared_gate": True}
SPARSE_LAYERS = SparseLayers(every=("decoder_sparse_step", 1), listed="mlp_only_layers")

FAMILY = Family(
    name="Qwen2-MoE",
    model_type="qwen2_moe",
    stack="decoder",
    spec=merged(SPEC, {"decoder": {"block": {"ffn": Either(dense={"kind": "gated"}, sparse=_MOE)}}}),
    config=(
        *sizes(max_positions=32768, n_kv_heads=16),
        HEAD_DIM,
        SPARSE_LAYERS,
        Same("intermediate_size", "ffn.dense.d_ff", default=5632),
        Same("moe_intermediate_size", "ffn.sparse.expert.d_ff", default=1408),
        Same("shared_expert_intermediate_size", "ffn.sparse.shared.d_ff", default=5632),
        Same("num_experts", "ffn.sparse.n_experts", default=60),
        Same("num_experts_per_tok", "ffn.sparse.top_k", default=4),
        Flag("norm_topk_prob", "ffn.sparse.normalise", default=False),
        ACTIVATION,
        RMS_EPS,
        Same("qkv_bias", "attention.qkv_bias", default=True),
        DROPOUT,
        Windows(rule="before", switch=("use_sliding_window", False), default=4096),
        Rotary(),
        Tied(default=False),
    ),
    models={**decoders("Qwen2Moe"), **spans("Qwen2Moe")},
    tensors=(
        *LLAMA_TENSORS,
        *EXPERTS,
        *shared("shared_expert"),
        ("{body}layers.{i}.mlp.shared_expert_gate.weight", "decoder.blocks.{i}.ffn.shared_gate.weight"),
    ),
    ignored=IGNORED,
)
