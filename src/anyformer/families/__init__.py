"""Published families of models, each as data: what its configuration says, and how its tensors are called.

A new family is a file of its own and a line here. The order is that in which a specification looks for a family that
can say it.
"""

from anyformer.families import (
    bart,
    bert,
    bloom,
    deepseek_v2,
    deepseek_v3,
    distilbert,
    falcon,
    falcon_grouped,
    gemma,
    gemma2,
    gemma3,
    gpt2,
    gpt_neox,
    gptj,
    llama,
    marian,
    mistral,
    mixtral,
    modernbert,
    mpt,
    olmo2,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    roberta,
    starcoder2,
    t5,
    t5_encoder,
)
from anyformer.families.family import Family, Variant

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    gemma.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
    phi3.FAMILY,
    olmo2.FAMILY,
    starcoder2.FAMILY,
    gpt2.FAMILY,
    gpt_neox.FAMILY,
    gptj.FAMILY,
    falcon.FAMILY,
    falcon_grouped.FAMILY,
    falcon_grouped.ONE_NORM,
    bloom.FAMILY,
    mpt.FAMILY,
    mixtral.FAMILY,
    qwen2_moe.FAMILY,
    qwen3_moe.FAMILY,
    deepseek_v2.FAMILY,
    deepseek_v3.FAMILY,
    bert.FAMILY,
    roberta.FAMILY,
    distilbert.FAMILY,
    modernbert.FAMILY,
    t5_encoder.FAMILY,
    t5.FAMILY,
    t5.UNSCALED,
    bart.FAMILY,
    marian.FAMILY,
    marian.APART,
)
REMEDIES = {**gemma3.REMEDIES}
"""Model types of which a part is a family, with how to take it out."""

__all__ = ["FAMILIES", "REMEDIES", "Family", "Variant"]
