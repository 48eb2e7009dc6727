"""Mistral (Jiang et al. 2023): LLaMA with a window."""

from anyformer.families.common import LLAMA_TENSORS, decoders, spans
from anyformer.families.family import Family
from anyformer.families.fields import Tied, Windows
from anyformer.families.llama import DROPOUT, GATED_FFN, HEAD_DIM, RMS_EPS, SPEC
from anyformer.families.rotary import Rotary
from anyformer.families.sizes import sizes

FAMILY = Family(
    name="Mistral",
    model_type="mistral",
    stack="decoder",
    spec=SPEC,
    config=(
        *sizes(max_positions=131072, n_kv_heads=8),
        HEAD_DIM,
        *GATED_FFN,
        RMS_EPS,
        DROPOUT,
        Windows(default=4096, types=False),
        Rotary(),
        Tied(default=False),
    ),
    models={**decoders("Mistral"), **spans("Mistral")},
    tensors=LLAMA_TENSORS,
    presets=("mistral-7b",),
)
