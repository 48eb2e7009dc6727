"""DeepSeek-V2 and -V3 and their kin (Moonlight): latent attention, many small experts beside shared ones.

One architecture says both. llama.cpp scores groups of experts by their best two however experts are scored, which is
V3's way; so does a file read here, and V2's own way with several groups is not written.
"""

from dataclasses import replace

from anyformer.families import deepseek_v2, deepseek_v3
from anyformer.families.experts import ACTIVATION, ExpertGroups, SharedExperts
from anyformer.families.family import Heads, Interleaved, Joined, Rule
from anyformer.families.fields import Flag, Named, Same, SparseLayers, Tied
from anyformer.families.gguf.common import (
    BLOCK,
    ENDS,
    EXPERTS,
    GATED,
    OURS,
    OUT,
    PRE_NORMS,
    RMS_EPS,
    SHARED_EXPERT,
    THETA,
    UNTIED,
)
from anyformer.families.gguf.dialect import Dialect, Implied, Real, Rows, Switch, Whole
from anyformer.families.gguf.latent import (
    CHOICE_BIAS,
    ChoiceBias,
    DenseLayers,
    QueryRank,
    Scoring,
    UsedGroups,
    Widths,
)
from anyformer.families.gguf.rope import RopeScaling
from anyformer.families.latent import LatentScale
from anyformer.families.llama import RMS_EPS as EPS
from anyformer.families.rotary import Rotary

FAMILY = replace(
    deepseek_v3.FAMILY,
    spec=deepseek_v2.SPEC,
    config=(
        *deepseek_v2.SIZES,
        Same("max_position_embeddings", "max_positions"),
        SparseLayers(dense_first=("first_k_dense_replace", 0)),
        Same("intermediate_size", "ffn.dense.d_ff"),
        Same("moe_intermediate_size", "ffn.sparse.expert.d_ff"),
        SharedExperts("n_shared_experts", default=1),
        Same("n_routed_experts", "ffn.sparse.n_experts"),
        Same("num_experts_per_tok", "ffn.sparse.top_k"),
        Named("scoring_func", "ffn.sparse.scoring", names={"softmax": "softmax", "sigmoid": "sigmoid"}),
        Flag("choice_bias", "ffn.sparse.choice_bias", default=False),
        Flag("norm_topk_prob", "ffn.sparse.normalise", default=False),
        Same("routed_scaling_factor", "ffn.sparse.scale", default=1.0),
        ExpertGroups("top2", default=(1, 1)),
        ACTIVATION,
        EPS,
        Rotary(),
        LatentScale(),
        Tied(default=False),
    ),
)
"""Both families as llama.cpp computes them."""
_EXPERTS = f"{OURS}.ffn.experts"
LATENT: tuple[Rule, ...] = (
    (f"{BLOCK}.attn_q.weight", f"{OURS}.attention.q.weight"),
    (f"{BLOCK}.attn_q_a.weight", f"{OURS}.attention.q_down.weight"),
    (f"{BLOCK}.attn_q_a_norm.weight", f"{OURS}.attention.q_norm.weight"),
    (f"{BLOCK}.attn_q_b.weight", f"{OURS}.attention.q_up.weight"),
    (f"{BLOCK}.attn_kv_a_mqa.weight", f"{OURS}.attention.kv_down.weight"),
    (f"{BLOCK}.attn_kv_a_norm.weight", f"{OURS}.attention.kv_norm.weight"),
    (f"{BLOCK}.attn_k_b.weight", f"{OURS}.attention.k_up.weight", Heads("n_heads", transposed=True)),
    (f"{BLOCK}.attn_v_b.weight", f"{OURS}.attention.v_up.weight", Heads("n_heads")),
    (
        f"{BLOCK}.attn_kv_b.weight",
        (f"{OURS}.attention.k_up.weight", f"{OURS}.attention.v_up.weight"),
        Interleaved("n_heads"),
    ),
    OUT,
)
MIXTURE: tuple[Rule, ...] = (
    *EXPERTS,
    (f"{BLOCK}.{CHOICE_BIAS}", f"{OURS}.ffn.router.choice_bias"),
    (f"{BLOCK}.ffn_gate_up_exps.weight", (f"{_EXPERTS}.gate.weight", f"{_EXPERTS}.up.weight"), Joined(1)),
    *SHARED_EXPERT,
)

DEEPSEEK2 = Dialect(
    architecture="deepseek2",
    family=FAMILY,
    model="DeepseekV3ForCausalLM",
    keys=(
        Rows(),
        Whole("embedding_length", "hidden_size"),
        Whole("block_count", "num_hidden_layers"),
        Whole("context_length", "max_position_embeddings"),
        Widths(),
        QueryRank(),
        Whole("feed_forward_length", "intermediate_size"),
        DenseLayers(),
        Whole("expert_feed_forward_length", "moe_intermediate_size"),
        Whole("expert_count", "n_routed_experts"),
        Whole("expert_used_count", "num_experts_per_tok"),
        Whole("expert_shared_count", "n_shared_experts"),
        Real("expert_weights_scale", "routed_scaling_factor", 1.0),
        Switch("expert_weights_norm", "norm_topk_prob", default=False),
        Scoring(),
        ChoiceBias(),
        UsedGroups(),
        RMS_EPS,
        THETA,
        RopeScaling(log_multiplier=True, tables=()),
        Implied("hidden_act", "silu"),
        UNTIED,
    ),
    tensors=(*ENDS, *LATENT, *GATED, *MIXTURE, *PRE_NORMS),
)
