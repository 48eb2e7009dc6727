"""Architectures of GGUF: one description each, for reading and for writing."""

from collections.abc import Sequence

from anyformer.families.gguf.dialect import Dialect
from anyformer.families.shelf import Shelf

DIALECTS: Sequence[Dialect] = Shelf(
    "anyformer.families.gguf",
    "llama.LLAMA",
    "llama.MIXTRAL",
    "qwen.QWEN2",
    "qwen.QWEN2_MOE",
    "qwen.QWEN3",
    "qwen.QWEN3_MOE",
    "gemma.GEMMA",
    "gemma.GEMMA2",
    "gemma.GEMMA3",
    "phi3.PHI3",
    "gpt2.GPT2",
    "starcoder2.STARCODER2",
    "olmo2.OLMO2",
    "deepseek.DEEPSEEK2",
)

__all__ = ["DIALECTS", "Dialect"]
