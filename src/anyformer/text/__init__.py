"""Text in, token ids out, and back: tokenizers, incremental decoding, chat templates, corpora."""

from anyformer.text.stream import StopMatcher, TextStream
from anyformer.text.tokenizer import Tokenizer

__all__ = ["StopMatcher", "TextStream", "Tokenizer"]
