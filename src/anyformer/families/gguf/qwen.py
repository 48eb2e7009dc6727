"""Qwen2 and Qwen3, and their mixtures of experts. Files of these rotate halves, as the weights were published."""

from anyformer.families import qwen2, qwen2_moe, qwen3, qwen3_moe
from anyformer.families.family import Rule, Stacked
from anyformer.families.fields import Of, Quotient
from anyformer.families.gguf.common import (
    ATTENTION,
    BLOCK,
    ENDS,
    EXPERTS,
    GATED,
    OURS,
    PRE_NORMS,
    QK_NORMS,
    RMS_EPS,
    SHARE,
    SHARED_EXPERT,
    THETA,
    UNTIED,
    sizes,
)
from anyformer.families.gguf.dialect import Dialect, Implied, Key, Present, Repeated, Whole
from anyformer.families.gguf.rope import RopeScaling

COMMON: tuple[Key, ...] = (RMS_EPS, THETA, RopeScaling(tables=()), Implied("hidden_act", "silu"))
SHARED_HEADS: tuple[Key, ...] = (*sizes(length=False), Repeated("rope.dimension_count", SHARE))
"""Qwen2: a head is always its share of the width."""
DENSE: Key = Whole("feed_forward_length", "intermediate_size")
MIXTURE: tuple[Key, ...] = (
    Whole("feed_forward_length", "intermediate_size", default=None),
    Whole("expert_count", "num_experts"),
    Whole("expert_used_count", "num_experts_per_tok"),
    Whole(
        "expert_feed_forward_length",
        "moe_intermediate_size",
        default=Quotient("feed_forward_length", "expert_used_count"),
    ),
)
SHARED_GATE = f"{BLOCK}.ffn_gate_inp_shexp.weight"
SHARED: tuple[Rule, ...] = (
    *SHARED_EXPERT,
    (SHARED_GATE, f"{OURS}.ffn.shared_gate.weight", Stacked()),
)
"""The gate of the shared expert is a vector there, a matrix of one row here: a stack of one."""
EMBEDDERS = ("pooling_type",)
"""How the hidden states of a text become one vector, in files of embedding models; the model itself is the same."""

QWEN2 = Dialect(
    architecture="qwen2",
    family=qwen2.FAMILY,
    model="Qwen2ForCausalLM",
    keys=(*SHARED_HEADS, DENSE, *COMMON, UNTIED),
    tensors=(*ENDS, *ATTENTION, *GATED, *PRE_NORMS),
    ignored=EMBEDDERS,
)
QWEN2_MOE = Dialect(
    architecture="qwen2moe",
    family=qwen2_moe.FAMILY,
    model="Qwen2MoeForCausalLM",
    keys=(
        *SHARED_HEADS,
        *MIXTURE,
        Whole(
            "expert_shared_feed_forward_length",
            "shared_expert_intermediate_size",
            default=Of("feed_forward_length"),
        ),
        *COMMON,
        Present("qkv_bias", f"{BLOCK.format(i=0)}.attn_q.bias"),
        Implied("norm_topk_prob", False),
        Implied("tie_word_embeddings", False),  # llama.cpp opens no file without an output matrix.
    ),
    tensors=(*ENDS, *ATTENTION, *EXPERTS, *SHARED, *PRE_NORMS),
    vectors=(SHARED_GATE,),
)
QWEN3 = Dialect(
    architecture="qwen3",
    family=qwen3.FAMILY,
    model="Qwen3ForCausalLM",
    keys=(*sizes(), DENSE, *COMMON, UNTIED),
    tensors=(*ENDS, *ATTENTION, *QK_NORMS, *GATED, *PRE_NORMS),
    ignored=EMBEDDERS,
)
QWEN3_MOE = Dialect(
    architecture="qwen3moe",
    family=qwen3_moe.FAMILY,
    model="Qwen3MoeForCausalLM",
    keys=(*sizes(), *MIXTURE, *COMMON, Implied("norm_topk_prob", True), UNTIED),
    tensors=(*ENDS, *ATTENTION, *QK_NORMS, *EXPERTS, *PRE_NORMS),
)
