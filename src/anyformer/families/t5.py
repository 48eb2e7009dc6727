"""T5 (Raffel et al. 2020); with a gate and a head of its own T5 1.1 (Shazeer 2020) and Flan-T5 (Chung et al. 2022)."""

from dataclasses import replace

from anyformer.families.choice import Choice
from anyformer.families.common import RMS, norms
from anyformer.families.family import Family, Otherwise, Rule, Variant, Where
from anyformer.families.fields import Always, Of, Same
from anyformer.families.seq2seq import BIDIRECTIONAL, TiedAndScaled, both, feed_forwards

GROUPED = {"kind": "grouped", "scale": 1.0}
RELATIVE = {"kind": "relative", "shared": True, "bidirectional": False}
ENCODER = {
    "final_norm": RMS,
    "block": {
        "attention": {**GROUPED, "position": {**RELATIVE, "bidirectional": True}, "mask": BIDIRECTIONAL},
        "norms": norms({"before": RMS}),
    },
}
DECODER = {
    "final_norm": RMS,
    "block": {
        "attention": {**GROUPED, "position": RELATIVE, "mask": {"kind": "causal"}},
        "cross": {**GROUPED, "position": {"kind": "none"}, "mask": BIDIRECTIONAL},
        "norms": norms({"before": RMS}, cross=True),
    },
}
UP, GATE = "blocks.{i}.ffn.up.weight", "blocks.{i}.ffn.gate.weight"
LAST = (("encoder", 1), ("decoder", 2))
HEADS, POSITION = ("attention", "cross"), "attention.position"
EPS = ("norms.attention.before.eps", "norms.cross.before.eps", "norms.ffn.before.eps", "final_norm.eps")
RATES = ("embed.dropout", "ffn.dropout", "ffn.out_dropout")
ALIASES = {"hidden_size": "d_model", "num_attention_heads": "num_heads"}
ALIASES |= {"num_hidden_layers": "num_layers", "head_dim": "d_kv"}
TENSORS: tuple[Rule, ...] = (
    ("shared.weight", "encoder.embed.token.weight"),
    ("encoder.embed_tokens.weight", "encoder.embed.token.weight"),
    ("decoder.embed_tokens.weight", "decoder.embed.token.weight"),
    *(
        (f"{stack}.block.{{i}}.layer.{last}.DenseReluDense.wi_1.weight", f"{stack}.{UP}", Where(f"{stack}.{GATE}"))
        for stack, last in LAST
    ),
    *(
        (theirs.format(stack=stack, layer=f"{stack}.block.{{i}}.layer", last=last), f"{stack}.{ours}")
        for stack, last in LAST
        for theirs, ours in (
            ("{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", "relative_bias.weight"),
            *((f"{{layer}}.0.SelfAttention.{x}.weight", f"blocks.{{i}}.attention.{x}.weight") for x in "qkv"),
            ("{layer}.0.SelfAttention.o.weight", "blocks.{i}.attention.out.weight"),
            ("{layer}.0.layer_norm.weight", "blocks.{i}.attention_norms.before.weight"),
            *((f"{{layer}}.1.EncDecAttention.{x}.weight", f"blocks.{{i}}.cross.{x}.weight") for x in "qkv"),
            ("{layer}.1.EncDecAttention.o.weight", "blocks.{i}.cross.out.weight"),
            ("{layer}.1.layer_norm.weight", "blocks.{i}.cross_norms.before.weight"),
            ("{layer}.{last}.DenseReluDense.wi_0.weight", GATE),
            ("{layer}.{last}.DenseReluDense.wi.weight", UP),
            ("{layer}.{last}.DenseReluDense.wo.weight", "blocks.{i}.ffn.down.weight"),
            ("{layer}.{last}.layer_norm.weight", "blocks.{i}.ffn_norms.before.weight"),
            ("{stack}.final_layer_norm.weight", "final_norm.weight"),
        )
    ),
)

FAMILY = Family(
    name="T5",
    model_type="t5",
    stack="decoder",
    spec={"encoder": ENCODER, "decoder": DECODER},
    config=(
        Always("is_encoder_decoder", True, default=True),
        Same("vocab_size", "vocab_size"),
        Same("d_model", both("d_model")),
        Same("num_layers", "encoder.n_layers"),
        Same("num_decoder_layers", "decoder.n_layers", default=Of("num_layers")),
        Same("n_positions", both("max_positions"), default=None),
        Same("num_heads", both(*(f"{x}.{n}" for x in HEADS for n in ("n_heads", "n_kv_heads")))),
        Same("d_kv", both(*(f"{x}.{n}" for x in HEADS for n in ("d_head", "d_value"))), default=64),
        Same("relative_attention_num_buckets", both(f"{POSITION}.n_buckets"), default=32),
        Same("relative_attention_max_distance", both(f"{POSITION}.max_distance"), default=128),
        Choice("feed_forward_proj", feed_forwards(*both("ffn")), default="relu"),
        Same("d_ff", both("ffn.d_ff")),
        Same("layer_norm_epsilon", both(*EPS), default=1e-6),
        Same("dropout_rate", both(*RATES, *(f"{x}.{y}dropout" for x in HEADS for y in ("", "out_"))), default=0.1),
        TiedAndScaled(),
    ),
    models={
        "T5ForConditionalGeneration": Variant({"head": {"kind": "language"}}, (("lm_head.weight", "head.weight"),)),
        "T5Model": Variant({"head": None}),
    },
    tensors=TENSORS,
    when={"scale_decoder_outputs": (None, True)},
    aliases=ALIASES,
    ignored=("initializer_factor", "classifier_dropout", "output_past"),
    dropped=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    presets=("t5-small", "t5-base", "t5-v1.1-base"),
)
UNSCALED = replace(
    FAMILY,
    when={"scale_decoder_outputs": False},
    tensors=(*TENSORS, ("shared.weight", "head.weight", Otherwise())),
    presets=(),
)
"""As `transformers` 5 writes T5 1.1: the head is the token table unless the file has one."""
