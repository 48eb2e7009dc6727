"""Qwen3 (Yang et al. 2025): LLaMA with norms on each head's queries and keys, and windows in later layers."""

from anyformer.families.common import LLAMA_TENSORS, QK_NORMS, RMS, decoders, eps, spans
from anyformer.families.family import Family
from anyformer.families.fields import Same, Tied
from anyformer.families.llama import BIASES, DROPOUT, GATED_FFN, SPEC
from anyformer.families.qwen2 import SIZES, WINDOWS
from anyformer.families.rotary import Rotary
from anyformer.families.sizes import head_dim
from anyformer.families.tables import merged

FAMILY = Family(
    name="Qwen3",
    model_type="qwen3",
    stack="decoder",
    spec=merged(SPEC, {"decoder": {"block": {"attention": {"qk_norm": {"over": "head", "norm": RMS}}}}}),
    config=(
        *SIZES,
        head_dim(128),
        *GATED_FFN,
        Same("rms_norm_eps", (*eps("before"), "attention.qk_norm.norm.eps"), default=1e-6),
        BIASES,
        DROPOUT,
        WINDOWS,
        Rotary(),
        Tied(default=False),
    ),
    models={**decoders("Qwen3"), **spans("Qwen3", body="transformer.")},
    tensors=(*LLAMA_TENSORS, *QK_NORMS),
    presets=("qwen-3-0.6b",),
)
