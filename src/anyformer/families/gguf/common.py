"""What architectures of GGUF have in common: keys, names of tensors, metadata without effect."""

from dataclasses import dataclass
from typing import Any

from anyformer.families.config import Config
from anyformer.families.family import Joined, Rule, Twice
from anyformer.families.fields import Of, Quotient, put
from anyformer.families.gguf.dialect import Key, Made, Present, Real, Repeated, Rows, Said, Whole

BLOCK, OURS = "blk.{i}", "decoder.blocks.{i}"
SHARE = Quotient("embedding_length", "attention.head_count")
"""A head's share of the width."""
UNTIED: Key = Present("tie_word_embeddings", "output.weight", on=False, off=True)
THETA: Key = Real("rope.freq_base", "rope_theta", 10000.0)
RMS_EPS: Key = Real("attention.layer_norm_rms_epsilon", "rms_norm_eps")


@dataclass(frozen=True)
class TurningShare:
    """The number of a head's channels that turn, all where a file says none; in the configuration their share."""

    theirs: str

    def read(self, said: Said, config: dict[str, Any]) -> None:
        width = said.meta.whole(SHARE.key) // said.meta.whole(SHARE.by)
        turning = said.meta.whole("rope.dimension_count", width)
        if turning > width or turning % 2:
            said.meta.refuse("rope.dimension_count", turning, f"an even number of a head's {width} channels")
        put(config, self.theirs, turning / width)

    def write(self, config: Config, made: Made) -> None:
        width = config.whole("hidden_size") // config.whole("num_attention_heads")
        made.meta["rope.dimension_count"] = round(config.number(self.theirs, 1.0) * width)


def sizes(*, length: bool = True) -> tuple[Key, ...]:
    """Vocabulary, width, layers, context and heads; with `length`, the width of a head as a key of its own."""
    head: tuple[Key, ...] = (
        Whole("attention.key_length", "head_dim", default=SHARE),
        Repeated("attention.value_length", Of("attention.key_length", SHARE), "head_dim"),
        Repeated("rope.dimension_count", Of("attention.key_length", SHARE), "head_dim"),
    )
    plain: tuple[Key, ...] = (
        Repeated("attention.key_length", SHARE),
        Repeated("attention.value_length", SHARE),
    )
    return (
        Rows(),
        Whole("embedding_length", "hidden_size"),
        Whole("block_count", "num_hidden_layers"),
        Whole("context_length", "max_position_embeddings"),
        Whole("attention.head_count", "num_attention_heads"),
        Whole("attention.head_count_kv", "num_key_value_heads", default=Of("attention.head_count")),
        *(head if length else plain),
    )


ENDS: tuple[Rule, ...] = (
    ("token_embd.weight", "decoder.embed.token.weight"),
    ("output_norm.{p}", "decoder.final_norm.{p}"),
    ("output.weight", "head.weight"),
)
TIED_TWICE: Rule = ("output.weight", "head.weight", Twice(untied=True))
"""The output matrix again where it is the token table."""
OUT: Rule = (f"{BLOCK}.attn_output.{{p}}", f"{OURS}.attention.out.{{p}}")
V: Rule = (f"{BLOCK}.attn_v.{{p}}", f"{OURS}.attention.v.{{p}}")
QKV: tuple[Rule, ...] = (*((f"{BLOCK}.attn_{x}.{{p}}", f"{OURS}.attention.{x}.{{p}}") for x in "qk"), V)
ATTENTION: tuple[Rule, ...] = (*QKV, OUT)
FUSED_QKV: Rule = (f"{BLOCK}.attn_qkv.{{p}}", tuple(f"{OURS}.attention.{x}.{{p}}" for x in "qkv"), Joined())
"""Queries, keys and values of all heads, one after another."""
QK_NORMS: tuple[Rule, ...] = tuple(
    (f"{BLOCK}.attn_{x}_norm.weight", f"{OURS}.attention.{x}_norm.norm.weight") for x in "qk"
)
UP: Rule = (f"{BLOCK}.ffn_up.{{p}}", f"{OURS}.ffn.up.{{p}}")
DOWN: Rule = (f"{BLOCK}.ffn_down.{{p}}", f"{OURS}.ffn.down.{{p}}")
DENSE: tuple[Rule, ...] = (UP, DOWN)
GATED: tuple[Rule, ...] = ((f"{BLOCK}.ffn_gate.{{p}}", f"{OURS}.ffn.gate.{{p}}"), *DENSE)
ROUTER: Rule = (f"{BLOCK}.ffn_gate_inp.weight", f"{OURS}.ffn.router.weight")
EXPERTS: tuple[Rule, ...] = (
    ROUTER,
    *((f"{BLOCK}.ffn_{x}_exps.weight", f"{OURS}.ffn.experts.{x}.weight") for x in ("gate", "up", "down")),
)
"""All experts of a layer in one tensor."""
SHARED_EXPERT: tuple[Rule, ...] = tuple(
    (f"{BLOCK}.ffn_{x}_shexp.weight", f"{OURS}.ffn.shared.{x}.weight") for x in ("gate", "up", "down")
)
PRE_NORMS: tuple[Rule, ...] = (
    (f"{BLOCK}.attn_norm.{{p}}", f"{OURS}.attention_norms.before.{{p}}"),
    (f"{BLOCK}.ffn_norm.{{p}}", f"{OURS}.ffn_norms.before.{{p}}"),
)
