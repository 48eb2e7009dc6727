"""ModernBERT (Warner et al. 2024): rotary positions, GeGLU, windows to both sides in all layers but each third."""

from anyformer.families.derived import HeadWidth
from anyformer.families.encoder_fields import FirstLayer, HalfWindows, LayerThetas
from anyformer.families.family import Family, Joined, Rule, Variant
from anyformer.families.fields import Named, Same, Tied
from anyformer.families.sizes import PadWithin
from anyformer.families.tables import Either

NORM = {"kind": "layer"}
BEFORE = Either(none={"kind": "none"}, normed=NORM)
"""The embedding is normed already, and goes as it is into the first layer's attention."""
BRANCHES = ("norms.attention.before.normed", "norms.ffn.before", "final_norm", "embed.norm")
LAYERS = "{body}layers.{i}"
BLOCKS = "encoder.blocks.{i}"
TENSORS: tuple[Rule, ...] = (
    ("{body}embeddings.tok_embeddings.weight", "encoder.embed.token.weight"),
    ("{body}embeddings.norm.{p}", "encoder.embed.norm.{p}"),
    (f"{LAYERS}.attn_norm.{{p}}", f"{BLOCKS}.attention_norms.before.{{p}}"),
    (f"{LAYERS}.attn.Wqkv.{{p}}", tuple(f"{BLOCKS}.attention.{x}.{{p}}" for x in "qkv"), Joined()),
    (f"{LAYERS}.attn.Wo.{{p}}", f"{BLOCKS}.attention.out.{{p}}"),
    (f"{LAYERS}.mlp_norm.{{p}}", f"{BLOCKS}.ffn_norms.before.{{p}}"),
    (f"{LAYERS}.mlp.Wi.{{p}}", (f"{BLOCKS}.ffn.gate.{{p}}", f"{BLOCKS}.ffn.up.{{p}}"), Joined()),
    (f"{LAYERS}.mlp.Wo.{{p}}", f"{BLOCKS}.ffn.down.{{p}}"),
    ("{body}final_norm.{p}", "encoder.final_norm.{p}"),
)
HEAD = ("classifier_pooling", "classifier_dropout", "classifier_bias", "classifier_activation", "decoder_bias")
SPARSE = ("sparse_prediction", "sparse_pred_ignore_index", "repad_logits_with_grad")
RUN = ("deterministic_flash_attn", "reference_compile", "initializer_cutoff_factor")

FAMILY = Family(
    name="ModernBERT",
    model_type="modernbert",
    stack="encoder",
    spec={
        "encoder": {
            "embed": {"norm": NORM},
            "final_norm": NORM,
            "block": {
                "attention": {"kind": "grouped", "position": {"kind": "rope"}, "mask": {"kind": "bidirectional"}},
                "ffn": {"kind": "gated"},
                "norms": {"attention": {"before": BEFORE}, "ffn": {"before": NORM}},
            },
        }
    },
    config=(
        Same("vocab_size", "vocab_size"),
        PadWithin(50283),
        Same("hidden_size", "d_model"),
        Same("num_hidden_layers", "n_layers"),
        Same("max_position_embeddings", "max_positions", default=8192),
        Same("num_attention_heads", ("attention.n_heads", "attention.n_kv_heads")),
        HeadWidth(),
        Same("intermediate_size", "ffn.d_ff"),
        Named("hidden_activation", "ffn.activation", default="gelu"),
        Same("attention_bias", ("attention.qkv_bias", "attention.out_bias"), default=False),
        Same("mlp_bias", "ffn.bias", default=False),
        Same("embedding_dropout", "embed.dropout", default=0.0),
        Same("attention_dropout", ("attention.dropout", "attention.out_dropout"), default=0.0),
        Same("mlp_dropout", "ffn.dropout", default=0.0),
        FirstLayer("norms.attention.before", "none", "normed"),
        Same("norm_eps", tuple(f"{path}.eps" for path in BRANCHES), default=1e-5),
        Same("norm_bias", tuple(f"{path}.bias" for path in BRANCHES), default=False),
        HalfWindows(),
        LayerThetas(),
        Tied(True, ("encoder.embed", "head")),
    ),
    models={
        "ModernBertForMaskedLM": Variant(
            {"head": {"kind": "language", "transform": {"norm": NORM}}},
            (("decoder.{p}", "head.{p}"), ("head.dense.{p}", "head.transform.{p}"), ("head.norm.{p}", "head.norm.{p}")),
            (
                Same("hidden_size", "head.transform.width"),
                Same("classifier_bias", "head.transform.bias", default=False),
                Named("classifier_activation", "head.transform.activation", default="gelu"),
                Same("norm_eps", "head.transform.norm.eps", default=1e-5),
                Same("norm_bias", "head.transform.norm.bias", default=False),
                Same("decoder_bias", "head.bias", default=True),
            ),
            "model.",
        ),
        "ModernBertModel": Variant({"head": None}),
    },
    tensors=TENSORS,
    ignored=(*HEAD, *SPARSE, *RUN, "layer_norm_eps", "position_embedding_type"),
    presets=("modernbert-base",),
)
