"""Published families of models, each as data: what its configuration says, and how its tensors are called.

A new family is a file of its own and a line here. The order is that in which a specification looks for a family that
can say it.
"""

from collections.abc import Sequence

from anyformer.families.family import Family, Variant
from anyformer.families.shelf import Shelf

FAMILIES: Sequence[Family] = Shelf(
    "anyformer.families",
    "llama.FAMILY",
    "mistral.FAMILY",
    "qwen2.FAMILY",
    "qwen3.FAMILY",
    "gemma.FAMILY",
    "gemma2.FAMILY",
    "gemma3.FAMILY",
    "phi3.FAMILY",
    "olmo2.FAMILY",
    "starcoder2.FAMILY",
    "gpt2.FAMILY",
    "gpt_neox.FAMILY",
    "gptj.FAMILY",
    "falcon.FAMILY",
    "falcon_grouped.FAMILY",
    "falcon_grouped.ONE_NORM",
    "bloom.FAMILY",
    "mpt.FAMILY",
    "mixtral.FAMILY",
    "qwen2_moe.FAMILY",
    "qwen3_moe.FAMILY",
    "deepseek_v2.FAMILY",
    "deepseek_v3.FAMILY",
    "bert.FAMILY",
    "roberta.FAMILY",
    "distilbert.FAMILY",
    "modernbert.FAMILY",
    "t5_encoder.FAMILY",
    "t5.FAMILY",
    "t5.UNSCALED",
    "bart.FAMILY",
    "marian.FAMILY",
    "marian.APART",
)

__all__ = ["FAMILIES", "Family", "Variant"]
