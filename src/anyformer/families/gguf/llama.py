"""LLaMA and what is one by its arithmetic: Mistral without a window, SmolLM, TinyLlama, and Mixtral's mixtures."""

from anyformer.families import llama, mixtral
from anyformer.families.family import Rotated, Rule, Stacked
from anyformer.families.gguf.common import (
    BLOCK,
    ENDS,
    EXPERTS,
    GATED,
    OURS,
    OUT,
    PRE_NORMS,
    RMS_EPS,
    THETA,
    UNTIED,
    V,
    sizes,
)
from anyformer.families.gguf.dialect import Dialect, Implied, Key, Present, Whole
from anyformer.families.gguf.rope import RopeScaling

HEADS: tuple[Key, ...] = (
    *sizes(),
    Whole("feed_forward_length", "intermediate_size"),
    RMS_EPS,
    THETA,
    RopeScaling(),
    Implied("hidden_act", "silu"),
    UNTIED,
)
TURNED: tuple[Rule, ...] = (
    (f"{BLOCK}.attn_q.{{p}}", f"{OURS}.attention.q.{{p}}", Rotated("n_heads")),
    (f"{BLOCK}.attn_k.{{p}}", f"{OURS}.attention.k.{{p}}", Rotated("n_kv_heads")),
    V,
    OUT,
)
"""Files of this architecture rotate neighbouring channels, and their rows lie so."""
APART: tuple[Rule, ...] = tuple(
    (f"{BLOCK}.ffn_{x}.{{e}}.weight", f"{OURS}.ffn.experts.{x}.weight", Stacked()) for x in ("gate", "up", "down")
)
"""A tensor for each expert, as older files have them."""

LLAMA = Dialect(
    architecture="llama",
    family=llama.FAMILY,
    model="LlamaForCausalLM",
    when=("expert_count", False),
    keys=(
        *HEADS,
        Present("attention_bias", f"{BLOCK.format(i=0)}.attn_q.bias"),
        Present("mlp_bias", f"{BLOCK.format(i=0)}.ffn_up.bias"),
    ),
    tensors=(*ENDS, *TURNED, *GATED, *PRE_NORMS),
)
MIXTRAL = Dialect(
    architecture="llama",
    family=mixtral.FAMILY,
    model="MixtralForCausalLM",
    when=("expert_count", True),
    keys=(
        *HEADS,
        Whole("expert_count", "num_local_experts"),
        Whole("expert_used_count", "num_experts_per_tok"),
    ),
    tensors=(*ENDS, *TURNED, *EXPERTS, *APART, *PRE_NORMS),
)
