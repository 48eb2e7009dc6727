"""Gemma (Gemma Team 2024): LLaMA with GeGLU, norm weights around 0 and embeddings times √width."""

from anyformer.families.common import LLAMA_TENSORS, decoders, norms
from anyformer.families.family import Family
from anyformer.families.fields import ACTIVATIONS, Named, Same, Tied
from anyformer.families.llama import BIASES, DROPOUT, RMS_EPS, SPEC
from anyformer.families.rotary import Rotary
from anyformer.families.sizes import Again, RootOfWidth, head_dim, sizes
from anyformer.families.tables import merged

OFFSET_RMS = {"kind": "rms", "offset": 1}
HIDDEN_ACT = {**ACTIVATIONS, "gelu": "gelu_tanh"}
"""The first configurations say gelu, and mean its approximation by tanh."""
CAUSAL = {"use_bidirectional_attention": False}

FAMILY = Family(
    name="Gemma",
    model_type="gemma",
    stack="decoder",
    spec=merged(SPEC, {"decoder": {"final_norm": OFFSET_RMS, "block": {"norms": norms({"before": OFFSET_RMS})}}}),
    config=(
        *sizes(max_positions=8192, n_kv_heads=16),
        head_dim(256),
        Same("intermediate_size", "ffn.d_ff"),
        Named("hidden_act", "ffn.activation", default="gelu_pytorch_tanh", names=HIDDEN_ACT),
        Again("hidden_activation", "ffn.activation", ACTIVATIONS, written="gelu_pytorch_tanh"),
        RMS_EPS,
        BIASES,
        DROPOUT,
        RootOfWidth(),
        Rotary(),
        Tied(default=True),
    ),
    models=decoders("Gemma"),
    tensors=LLAMA_TENSORS,
    fixed=CAUSAL,
    presets=("gemma-2b",),
)
