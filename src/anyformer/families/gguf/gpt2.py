"""GPT-2: learned positions, and queries, keys and values in one matrix, which is kept as [out, in].

A file with an output matrix has a head of its own, also where an older converter wrote the token table there again.
"""

from anyformer.families import gpt2
from anyformer.families.gguf.common import (
    DENSE,
    ENDS,
    FUSED_QKV,
    OUT,
    PRE_NORMS,
    SHARE,
    UNTIED,
)
from anyformer.families.gguf.dialect import Dialect, Implied, Real, Repeated, Rows, Whole

GPT2 = Dialect(
    architecture="gpt2",
    family=gpt2.FAMILY,
    model="GPT2LMHeadModel",
    keys=(
        Rows(),
        Whole("embedding_length", "n_embd"),
        Whole("block_count", "n_layer"),
        Whole("context_length", "n_positions"),
        Whole("attention.head_count", "n_head"),
        Repeated("attention.head_count_kv", "attention.head_count", "n_head"),
        Repeated("attention.key_length", SHARE),
        Repeated("attention.value_length", SHARE),
        Whole("feed_forward_length", "n_inner"),
        Real("attention.layer_norm_epsilon", "layer_norm_epsilon"),
        Implied("activation_function", "gelu_new"),
        UNTIED,
    ),
    tensors=(
        *ENDS,
        ("position_embd.weight", "decoder.embed.position.weight"),
        FUSED_QKV,
        OUT,
        *DENSE,
        *PRE_NORMS,
    ),
)
