"""OLMo 2: norms after each branch and over the whole of queries and of keys. With a window a file is of OLMo 3."""

from anyformer.families import olmo2
from anyformer.families.family import Rule
from anyformer.families.gguf.common import (
    ATTENTION,
    BLOCK,
    ENDS,
    FUSED_QKV,
    GATED,
    OURS,
    QK_NORMS,
    RMS_EPS,
    SHARE,
    THETA,
    sizes,
)
from anyformer.families.gguf.dialect import Dialect, Implied, Repeated, Whole
from anyformer.families.gguf.rope import RopeScaling

OUTPUT_NORMS: tuple[Rule, ...] = (
    (f"{BLOCK}.post_attention_norm.{{p}}", f"{OURS}.attention_norms.after.{{p}}"),
    (f"{BLOCK}.post_ffw_norm.{{p}}", f"{OURS}.ffn_norms.after.{{p}}"),
)

OLMO2 = Dialect(
    architecture="olmo2",
    family=olmo2.FAMILY,
    model="Olmo2ForCausalLM",
    keys=(
        *sizes(length=False),
        Repeated("rope.dimension_count", SHARE),
        Whole("feed_forward_length", "intermediate_size"),
        RMS_EPS,
        THETA,
        RopeScaling(tables=()),
        Implied("hidden_act", "silu"),
        Implied("tie_word_embeddings", value=False),
    ),
    tensors=(*ENDS, *ATTENTION, FUSED_QKV, *GATED, *OUTPUT_NORMS, *QK_NORMS),
)
