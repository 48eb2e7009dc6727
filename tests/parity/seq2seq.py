"""Encoders and decoders together."""

from typing import Any

import torch
from maps import Rule
from pairs import Family
from torch import nn

_T5_SETTINGS = {
    "vocab_size": 37,
    "d_model": 24,
    "d_kv": 7,
    "num_heads": 6,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "d_ff": 31,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "layer_norm_epsilon": 1e-3,
    "decoder_start_token_id": 0,
}


def _t5_rules(*, shared: bool) -> list[Rule]:
    """T5's names; with a table of distances for each stack, or one for each layer."""
    rules: list[Rule] = [("shared.weight", "encoder.embed.token.weight"), ("lm_head.weight", "head.weight")]
    for stack, last in (("encoder", 1), ("decoder", 2)):
        layer, block = f"{stack}.block.{{i}}.layer", f"{stack}.blocks.{{i}}"
        table = f"{stack}.relative_bias.weight" if shared else f"{block}.attention.relative_bias.weight"
        rules += [
            (f"{layer}.0.SelfAttention.relative_attention_bias.weight", table),
            *((f"{layer}.0.SelfAttention.{x}.weight", f"{block}.attention.{x}.weight") for x in "qkv"),
            (f"{layer}.0.SelfAttention.o.weight", f"{block}.attention.out.weight"),
            (f"{layer}.0.layer_norm.weight", f"{block}.attention_norms.before.weight"),
            (f"{layer}.{last}.DenseReluDense.wi.weight", f"{block}.ffn.up.weight"),
            (f"{layer}.{last}.DenseReluDense.wi_0.weight", f"{block}.ffn.gate.weight"),
            (f"{layer}.{last}.DenseReluDense.wi_1.weight", f"{block}.ffn.up.weight"),
            (f"{layer}.{last}.DenseReluDense.wo.weight", f"{block}.ffn.down.weight"),
            (f"{layer}.{last}.layer_norm.weight", f"{block}.ffn_norms.before.weight"),
            (f"{stack}.final_layer_norm.weight", f"{stack}.final_norm.weight"),
        ]
    layer, block = "decoder.block.{i}.layer.1", "decoder.blocks.{i}"
    return [
        *rules,
        *((f"{layer}.EncDecAttention.{x}.weight", f"{block}.cross.{x}.weight") for x in "qkv"),
        (f"{layer}.EncDecAttention.o.weight", f"{block}.cross.out.weight"),
        (f"{layer}.layer_norm.weight", f"{block}.cross_norms.before.weight"),
    ]


def _t5(*, shared: bool = True, **over: Any) -> dict[str, Any]:
    position = {"kind": "relative", "n_buckets": 8, "max_distance": 12, "shared": shared}
    return {
        "architecture": "encoder-decoder",
        "vocab_size": 37,
        "d_model": 24,
        "norm": {"kind": "rms", "eps": 1e-3},
        "attention": {"n_heads": 6, "d_head": 7, "scale": 1.0, "position": position},
        "encoder": {"n_layers": 3},
        "decoder": {"n_layers": 2},
        **over,
    }


T5 = Family(
    "t5",
    "t5",
    "T5ForConditionalGeneration",
    "T5Config",
    _T5_SETTINGS,
    _t5(
        ffn={"kind": "dense", "activation": "relu", "d_ff": 31},
        tie=True,
        head={"kind": "language", "scale": 24**-0.5},
    ),
    _t5_rules(shared=True),
)


def _untie(model: nn.Module) -> None:
    """The head of T5 v1.1 is its own; theirs ties it in a model that comes from no file."""
    model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))


_GATED = {
    "ffn": {"kind": "gated", "activation": "gelu_tanh", "d_ff": 31},
    "tie": ["encoder.embed", "decoder.embed"],
}
T5_V1_1 = Family(
    "t5 v1.1",
    "t5",
    "T5ForConditionalGeneration",
    "T5Config",
    {**_T5_SETTINGS, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    _t5(**_GATED),
    _t5_rules(shared=True),
    prepare=_untie,
)
UMT5 = Family(
    "umt5",
    "umt5",
    "UMT5ForConditionalGeneration",
    "UMT5Config",
    {**_T5_SETTINGS, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    _t5(shared=False, **_GATED),
    _t5_rules(shared=False),
    prepare=_untie,
)

_BART_SETTINGS = {
    "vocab_size": 37,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 31,
    "decoder_ffn_dim": 29,
    "max_position_embeddings": 40,
    "scale_embedding": True,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
}


def _bart_rules() -> list[Rule]:
    rules: list[Rule] = [
        ("model.shared.weight", "encoder.embed.token.weight"),
        ("final_logits_bias", ["head.bias"], lambda value: value),
    ]
    for stack in ("encoder", "decoder"):
        layer, block = f"model.{stack}.layers.{{i}}", f"{stack}.blocks.{{i}}"
        rules += [
            (f"model.{stack}.embed_positions.weight", f"{stack}.embed.position.weight"),
            (f"model.{stack}.layernorm_embedding.{{p}}", f"{stack}.embed.norm.{{p}}"),
            *(
                (f"{layer}.{theirs}.{x}_proj.{{p}}", f"{block}.{ours}.{x}.{{p}}")
                for theirs, ours in (("self_attn", "attention"), ("encoder_attn", "cross"))
                for x in ("q", "k", "v", "out")
            ),
            (f"{layer}.self_attn_layer_norm.{{p}}", f"{block}.attention_norms.residual.{{p}}"),
            (f"{layer}.encoder_attn_layer_norm.{{p}}", f"{block}.cross_norms.residual.{{p}}"),
            (f"{layer}.fc1.{{p}}", f"{block}.ffn.up.{{p}}"),
            (f"{layer}.fc2.{{p}}", f"{block}.ffn.down.{{p}}"),
            (f"{layer}.final_layer_norm.{{p}}", f"{block}.ffn_norms.residual.{{p}}"),
        ]
    return rules


def _bart(embed: dict[str, Any], activation: str) -> dict[str, Any]:
    return {
        "architecture": "encoder-decoder",
        "vocab_size": 37,
        "d_model": 24,
        "max_positions": 40,
        "placement": "post",
        "norm": "layer",
        "bias": True,
        "tie": True,
        "embed": {"scale": "sqrt_width", **embed},
        "head": {"kind": "language", "bias": True},
        "attention": {"n_heads": 6, "position": "none"},
        "ffn": {"kind": "dense", "activation": activation, "d_ff": 31},
        "encoder": {"n_layers": 2},
        "decoder": {"n_layers": 3, "attention": {"n_heads": 3}, "ffn": {"d_ff": 29}},
    }


BART = Family(
    "bart",
    "bart",
    "BartForConditionalGeneration",
    "BartConfig",
    _BART_SETTINGS,
    _bart({"position": {"kind": "learned", "offset": 2}, "norm": "layer"}, "gelu"),
    _bart_rules(),
)
MARIAN = Family(
    "marian",
    "marian",
    "MarianMTModel",
    "MarianConfig",
    {**_BART_SETTINGS, "activation_function": "silu", "pad_token_id": 0},
    _bart({"position": {"kind": "sinusoidal", "layout": "halves"}}, "silu"),
    [
        ("model.encoder.embed_positions.weight", [], lambda value: []),
        ("model.decoder.embed_positions.weight", [], lambda value: []),
        *_bart_rules(),
    ],
)

PAIRS = [T5, T5_V1_1, UMT5, BART, MARIAN]
