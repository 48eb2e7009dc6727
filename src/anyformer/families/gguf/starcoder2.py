"""StarCoder2: LayerNorm, biases everywhere, a dense feed-forward; llama.cpp knows no window of it."""

from anyformer.families import starcoder2
from anyformer.families.gguf.common import (
    ATTENTION,
    DENSE,
    ENDS,
    FUSED_QKV,
    PRE_NORMS,
    SHARE,
    THETA,
    UNTIED,
    sizes,
)
from anyformer.families.gguf.dialect import Dialect, Implied, Real, Repeated, Whole
from anyformer.families.gguf.rope import RopeScaling

STARCODER2 = Dialect(
    architecture="starcoder2",
    family=starcoder2.FAMILY,
    model="Starcoder2ForCausalLM",
    keys=(
        *sizes(length=False),
        Repeated("rope.dimension_count", SHARE),
        Whole("feed_forward_length", "intermediate_size"),
        Real("attention.layer_norm_epsilon", "norm_epsilon"),
        THETA,
        RopeScaling(tables=()),
        Implied("hidden_act", "gelu_pytorch_tanh"),
        Implied("use_bias", value=True),
        UNTIED,
    ),
    tensors=(*ENDS, *ATTENTION, FUSED_QKV, *DENSE, *PRE_NORMS),
)
