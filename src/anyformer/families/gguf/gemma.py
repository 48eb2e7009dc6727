"""Gemma, Gemma 2 and Gemma 3 (text).

Norm weights are stored as 1 + w: exact in float32 for any w of bfloat16 from 2⁻¹⁶ to 2 in magnitude and for 0, within
2⁻²⁴ for any other of magnitude below 1.
"""

from dataclasses import dataclass
from typing import Any

from anyformer.families import gemma, gemma2, gemma3
from anyformer.families.config import Config
from anyformer.families.family import Rule, Shifted
from anyformer.families.fields import Of
from anyformer.families.gguf.common import (
    ATTENTION,
    BLOCK,
    ENDS,
    GATED,
    OURS,
    QK_NORMS,
    RMS_EPS,
    THETA,
    UNTIED,
    sizes,
)
from anyformer.families.gguf.dialect import Dialect, Implied, Key, Made, Real, Repeated, Said, Whole
from anyformer.families.gguf.rope import RopeScaling
from anyformer.families.rotary import FULL, SLIDING
from anyformer.spec.part import MAX_LAYERS


@dataclass(frozen=True)
class LocalLayers:
    """A window of some layers: each but every n-th unless a list says which (llama.cpp's `load_swa_pattern`).

    Args:
        every: n where the file says none; 0 in a file is a window in every layer.
        width: the window where the file says none; None where such a file has no windows at all, as with 0.
    """

    every: int
    width: int | None = None

    def read(self, said: Said, config: dict[str, Any]) -> None:
        meta, layers = said.meta, said.meta.whole("block_count")
        width = meta.get("attention.sliding_window", self.width)
        pattern = meta.get("attention.sliding_window_pattern", self.every)
        if width is not None and (not isinstance(width, int) or isinstance(width, bool)):
            meta.refuse("attention.sliding_window", width, "a whole number, 0 for no windows")
        if layers > MAX_LAYERS:
            return  # Refused as a number of layers, which needs no list of so many.
        if not width and self.width is None:
            config["layer_types"] = [FULL] * layers
            return
        config["sliding_window"] = width
        if isinstance(pattern, list) and all(isinstance(here, int) for here in pattern):
            local = pattern
        elif isinstance(pattern, int) and not isinstance(pattern, bool) and pattern >= 0:
            local = _every(pattern, layers)
        else:
            meta.refuse("attention.sliding_window_pattern", pattern, "a whole number, or true or false for each layer")
        config["layer_types"] = [SLIDING if here else FULL for here in local]

    def write(self, config: Config, made: Made) -> None:
        local = [word == SLIDING for word in config.get("layer_types", [])]
        if not any(local):
            return  # Where the architecture has windows by itself (Gemma 2), llama.cpp opens no file without any.
        made.meta["attention.sliding_window"] = config.get("sliding_window", None)
        if local != _every(self.every, len(local)):
            made.meta["attention.sliding_window_pattern"] = local


def _every(n: int, layers: int) -> list[bool]:
    return [n == 0 or (i + 1) % n != 0 for i in range(layers)]


@dataclass(frozen=True)
class ScoresOver:
    """What scores are divided by the root of: a head's width; in the largest model its share of the width.

    llama.cpp knows that model by its number of layers.
    """

    largest: int
    theirs: str = "query_pre_attn_scalar"

    def read(self, said: Said, config: dict[str, Any]) -> None:
        meta = said.meta
        share = meta.whole("embedding_length") // meta.whole("attention.head_count")
        is_largest = meta.whole("block_count") == self.largest
        config[self.theirs] = share if is_largest else meta.whole("attention.key_length", share)

    def write(self, config: Config, made: Made) -> None:
        """Nothing: what follows is not said."""


def shifted(*names: tuple[str, str]) -> tuple[Rule, ...]:
    """Norms of a block by their names there and here."""
    return tuple((f"{BLOCK}.{theirs}.weight", f"{OURS}.{ours}.weight", Shifted()) for theirs, ours in names)


COMMON: tuple[Key, ...] = (
    *sizes(),
    Whole("feed_forward_length", "intermediate_size"),
    RMS_EPS,
    THETA,
    Implied("hidden_activation", "gelu_pytorch_tanh"),
)
ALWAYS_TIED: Key = Implied("tie_word_embeddings", True)
END_RULES: tuple[Rule, ...] = (
    *(rule for rule in ENDS if rule[0] != "output_norm.{p}"),
    ("output_norm.weight", "decoder.final_norm.weight", Shifted()),
)
TENSORS: tuple[Rule, ...] = (
    *END_RULES,
    *ATTENTION,
    *GATED,
    *shifted(("attn_norm", "attention_norms.before"), ("ffn_norm", "ffn_norms.before")),
)
SANDWICH: tuple[Rule, ...] = (
    *TENSORS,
    *shifted(("post_attention_norm", "attention_norms.after"), ("post_ffw_norm", "ffn_norms.after")),
)
SHIFTED_QK: tuple[Rule, ...] = tuple((rule[0], rule[1], Shifted()) for rule in QK_NORMS)

GEMMA = Dialect(
    architecture="gemma",
    family=gemma.FAMILY,
    model="GemmaForCausalLM",
    keys=(*COMMON, RopeScaling(tables=()), ALWAYS_TIED),
    tensors=TENSORS,
)
GEMMA2 = Dialect(
    architecture="gemma2",
    family=gemma2.FAMILY,
    model="Gemma2ForCausalLM",
    keys=(
        *COMMON,
        RopeScaling(tables=()),
        Repeated("rope.freq_base_swa", Of("rope.freq_base", 10000.0)),
        LocalLayers(every=2, width=4096),
        ScoresOver(largest=46),
        Real("attn_logit_softcapping", "attn_logit_softcapping", 50.0),
        Real("final_logit_softcapping", "final_logit_softcapping", 30.0),
        ALWAYS_TIED,
    ),
    tensors=SANDWICH,
)
GEMMA3 = Dialect(
    architecture="gemma3",
    family=gemma3.FAMILY,
    model="Gemma3ForCausalLM",
    keys=(
        *COMMON,
        RopeScaling(tables=(), local=True),
        Real("rope.freq_base_swa", "rope_local_base_freq", 10000.0),
        LocalLayers(every=6),
        ScoresOver(largest=62),
        Real("final_logit_softcapping", "final_logit_softcapping", None),
        UNTIED,
    ),
    tensors=(*SANDWICH, *SHIFTED_QK),
)
