"""BART (Lewis et al. 2019): the original Transformer with learned positions and GELU, pre-trained to undo noise."""

from anyformer.families.common import LAYER, norms
from anyformer.families.derived import HeadWidth
from anyformer.families.family import Family, Row, Rule, Twice, Variant
from anyformer.families.fields import Always, Named, Same, Tied
from anyformer.families.seq2seq import BIDIRECTIONAL, TABLES, RootWidth, both

ATTENTION = {"kind": "grouped", "position": {"kind": "none"}, "qkv_bias": True, "out_bias": True}
ENCODER = {
    "block": {
        "attention": {**ATTENTION, "mask": BIDIRECTIONAL},
        "ffn": {"kind": "dense", "bias": True},
        "norms": norms({"residual": LAYER}),
    }
}
DECODER = {
    "block": {
        "attention": {**ATTENTION, "mask": {"kind": "causal"}},
        "cross": {**ATTENTION, "mask": BIDIRECTIONAL},
        "ffn": {"kind": "dense", "bias": True},
        "norms": norms({"residual": LAYER}, cross=True),
    }
}
EMBED = {"embed": {"position": {"kind": "learned", "offset": 2}, "norm": LAYER}}
HEADS = ("attention", "cross")
FIELDS = (
    Always("is_encoder_decoder", True, default=True),
    Same("vocab_size", "vocab_size"),
    Same("d_model", both("d_model")),
    Same("encoder_layers", "encoder.n_layers"),
    Same("decoder_layers", "decoder.n_layers"),
    Same("max_position_embeddings", both("max_positions"), default=1024),
    Same("encoder_attention_heads", ("encoder.attention.n_heads", "encoder.attention.n_kv_heads")),
    Same("decoder_attention_heads", tuple(f"decoder.{x}.{n}" for x in HEADS for n in ("n_heads", "n_kv_heads"))),
    HeadWidth("d_model", "encoder_attention_heads", ("encoder.attention",)),
    HeadWidth("d_model", "decoder_attention_heads", ("decoder.attention", "decoder.cross")),
    Same("encoder_ffn_dim", "encoder.ffn.d_ff"),
    Same("decoder_ffn_dim", "decoder.ffn.d_ff"),
    Named("activation_function", both("ffn.activation"), default="gelu"),
    Same("dropout", both("embed.dropout", "ffn.out_dropout", *(f"{x}.out_dropout" for x in HEADS)), default=0.1),
    Same("attention_dropout", both(*(f"{x}.dropout" for x in HEADS)), default=0.0),
    Same("activation_dropout", both("ffn.dropout"), default=0.0),
    RootWidth(),
)
TENSORS: tuple[Rule, ...] = tuple(
    (f"{{body}}{stack}.{theirs}", f"{stack}.{ours}")
    for stack in ("encoder", "decoder")
    for theirs, ours in (
        ("embed_positions.weight", "embed.position.weight"),
        ("layernorm_embedding.{p}", "embed.norm.{p}"),
        *(
            (f"layers.{{i}}.{theirs}.{x}_proj.{{p}}", f"blocks.{{i}}.{ours}.{x}.{{p}}")
            for theirs, ours in (("self_attn", "attention"), ("encoder_attn", "cross"))
            for x in ("q", "k", "v", "out")
        ),
        ("layers.{i}.self_attn_layer_norm.{p}", "blocks.{i}.attention_norms.residual.{p}"),
        ("layers.{i}.encoder_attn_layer_norm.{p}", "blocks.{i}.cross_norms.residual.{p}"),
        ("layers.{i}.fc1.{p}", "blocks.{i}.ffn.up.{p}"),
        ("layers.{i}.fc2.{p}", "blocks.{i}.ffn.down.{p}"),
        ("layers.{i}.final_layer_norm.{p}", "blocks.{i}.ffn_norms.residual.{p}"),
    )
)
SHARED: tuple[Rule, ...] = (
    ("{body}shared.weight", "encoder.embed.token.weight"),
    ("{body}encoder.embed_tokens.weight", "encoder.embed.token.weight", Twice(untied=True)),
    ("{body}decoder.embed_tokens.weight", "decoder.embed.token.weight", Twice(untied=True)),
)
LANGUAGE = Variant(
    {"head": {"kind": "language", "bias": True}},
    (("lm_head.weight", "head.weight"), ("final_logits_bias", "head.bias", Row())),
    body="model.",
)
TRAINING = ("init_std", "encoder_layerdrop", "decoder_layerdrop", "classifier_dropout", "classif_dropout")
IGNORED = (*TRAINING, "output_past", "_num_labels", "extra_pos_embeddings", "force_bos_token_to_be_generated")
FIXED = {"normalize_before": False, "add_final_layer_norm": False, "add_bias_logits": False}
ALIASES = {"num_hidden_layers": "encoder_layers", "hidden_size": "d_model"}
ALIASES |= {"num_attention_heads": "encoder_attention_heads"}

FAMILY = Family(
    name="BART",
    model_type="bart",
    stack="decoder",
    spec={"encoder": {**ENCODER, **EMBED}, "decoder": {**DECODER, **EMBED}},
    config=(*FIELDS, Tied(True, TABLES, otherwise=TABLES[:2])),
    models={"BartForConditionalGeneration": LANGUAGE, "BartModel": Variant({"head": None})},
    tensors=(*SHARED, *TENSORS),
    aliases=ALIASES,
    fixed={**FIXED, "normalize_embedding": True, "static_position_embeddings": False},
    ignored=IGNORED,
)
