"""What configurations of encoder–decoders say: the same of both stacks, ties of three tables, scaled embeddings."""

import math
from dataclasses import dataclass
from typing import Any

from anyformer.families.choice import Way
from anyformer.families.config import Config
from anyformer.families.fields import ACTIVATIONS, put
from anyformer.families.tables import Tables, View
from anyformer.spec.problems import MISSING

TABLES = ("encoder.embed", "decoder.embed", "head")
BIDIRECTIONAL = {"kind": "bidirectional"}


def both(*paths: str) -> tuple[str, ...]:
    """Places of either stack; `cross` is the decoder's alone."""
    stacks = [(stack, path) for path in paths for stack in ("encoder", "decoder")]
    return tuple(f"{stack}.{path}" for stack, path in stacks if not ("cross" in path and stack == "encoder"))


def feed_forwards(*places: str) -> dict[str, Way]:
    """T5's words for the feed-forwards at some places: an activation, after "gated-" with a gate.

    The gelu of "gated-gelu" is the one with tanh; older configurations say in keys of their own what the word means.
    """
    words = {"gated-gelu": ("gated", "gelu_tanh", "gelu_new")}
    words |= {f"gated-{word}": ("gated", ours, word) for word, ours in ACTIVATIONS.items() if word != "gelu"}
    words |= {word: ("dense", ours, word) for word, ours in ACTIVATIONS.items()}
    return {
        word: Way(
            {place: {"kind": kind, "activation": activation} for place in places},
            fixed={"is_gated_act": (kind == "gated",), "dense_act_fn": (theirs,)},
        )
        for word, (kind, activation, theirs) in words.items()
    }


@dataclass(frozen=True)
class RootWidth:
    """Whether embeddings are multiplied by √d_model (Vaswani et al. 2017, section 3.4)."""

    key: str = "scale_embedding"
    width: str = "d_model"
    paths: tuple[str, ...] = both("embed.scale")

    def read(self, config: Config, tables: Tables) -> None:
        scale = math.sqrt(config.whole(self.width)) if config.flag(self.key, False) else 1.0
        for path in self.paths:
            tables.set(path, scale, self.key)

    def write(self, view: View, config: dict[str, Any]) -> None:
        scale = view.first(self.paths[0])
        if scale is not MISSING:
            put(config, self.key, scale != 1.0)


@dataclass(frozen=True)
class TiedAndScaled:
    """One table for both stacks and the head, whose scores are then multiplied by 1/√d_model, or a head of its own.

    `key` says which; so does `scaled`, which `transformers` 5 writes, and beside which `key` is always true.
    """

    key: str = "tie_word_embeddings"
    scaled: str = "scale_decoder_outputs"
    width: str = "d_model"

    def read(self, config: Config, tables: Tables) -> None:
        tied = config.flag(self.key, True)
        scaled = config.flag(self.scaled, tied)
        if scaled and not tied:
            config.refuse(self.scaled, scaled, f"false, where {self.key} is false")
        language = tables.get("head.kind") == "language"
        tables.set("ties", TABLES if scaled and language else TABLES[:2], self.key)
        if language:
            tables.set("head.scale", config.whole(self.width) ** -0.5 if scaled else 1.0, self.key)

    def write(self, view: View, config: dict[str, Any]) -> None:
        language = view.get("head.kind") == "language"
        put(config, self.key, "head" in view.spec.ties if language else True)


@dataclass(frozen=True)
class SameVocabulary:
    """A size of the decoder's vocabulary, which is the encoder's here."""

    key: str = "decoder_vocab_size"
    other: str = "vocab_size"

    def read(self, config: Config, tables: Tables) -> None:
        size, wanted = config.get(self.key, None), config.whole(self.other)
        if size not in (None, 0, wanted):
            config.refuse(self.key, size, f"{wanted}, like {self.other}: both stacks have one vocabulary here")

    def write(self, view: View, config: dict[str, Any]) -> None:
        put(config, self.key, view.spec.vocab_size)
