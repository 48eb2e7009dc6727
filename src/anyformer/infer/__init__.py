"""Generation: sampling, the cached decoding loop, and text with stop strings and streaming."""

from anyformer.infer.decode import FinishReason, Step, generate_ids
from anyformer.infer.generation import Generation
from anyformer.infer.sampling import History, LogitsError, Sampling, kept
from anyformer.infer.text import Completion, Delta, encode_prompt, generate, stream

__all__ = [
    "Completion",
    "Delta",
    "FinishReason",
    "Generation",
    "History",
    "LogitsError",
    "Sampling",
    "Step",
    "encode_prompt",
    "generate",
    "generate_ids",
    "kept",
    "stream",
]
