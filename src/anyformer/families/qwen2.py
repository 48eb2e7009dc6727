"""Qwen2 and Qwen2.5 (Yang et al. 2024): LLaMA with biased queries, keys and values, and windows in later layers."""

from anyformer.families.common import LLAMA_TENSORS, decoders, spans
from anyformer.families.family import Family
from anyformer.families.fields import Tied, Windows
from anyformer.families.llama import DROPOUT, GATED_FFN, HEAD_DIM, RMS_EPS, SPEC
from anyformer.families.rotary import Rotary
from anyformer.families.sizes import sizes
from anyformer.families.tables import merged

SIZES = sizes(max_positions=32768, n_kv_heads=32)
WINDOWS = Windows(rule="after", switch=("use_sliding_window", False), default=4096)

FAMILY = Family(
    name="Qwen2",
    model_type="qwen2",
    stack="decoder",
    spec=merged(SPEC, {"decoder": {"block": {"attention": {"qkv_bias": True}}}}),
    config=(*SIZES, HEAD_DIM, *GATED_FFN, RMS_EPS, DROPOUT, WINDOWS, Rotary(), Tied(default=False)),
    models={**decoders("Qwen2"), **spans("Qwen2", body="transformer.")},
    tensors=LLAMA_TENSORS,
    fixed={"use_mrope": False},
    presets=("qwen-2-0.5b", "qwen-2.5-0.5b"),
)
