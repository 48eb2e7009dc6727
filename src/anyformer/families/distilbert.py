"""DistilBERT (Sanh et al. 2019): BERT without token types, and under names of its own."""

from anyformer.families.bert import SCORES, SPANS, SPEC
from anyformer.families.common import norms
from anyformer.families.derived import Follows, HeadWidth
from anyformer.families.encoders import ANSWERS, TOKENS, layer_norm, masked
from anyformer.families.family import Family, Rule, Variant
from anyformer.families.fields import Labels, Named, Of, Same, Tied
from anyformer.families.tables import merged

NORM = {"kind": "layer", "eps": 1e-12}
LAYERS = "{body}transformer.layer.{i}"
BLOCKS = "encoder.blocks.{i}"
TENSORS: tuple[Rule, ...] = (
    ("{body}embeddings.word_embeddings.weight", "encoder.embed.token.weight"),
    ("{body}embeddings.position_embeddings.weight", "encoder.embed.position.weight"),
    *layer_norm("{body}embeddings.LayerNorm", "encoder.embed.norm"),
    *((f"{LAYERS}.attention.{x}_lin.{{p}}", f"{BLOCKS}.attention.{x}.{{p}}") for x in ("q", "k", "v", "out")),
    *layer_norm(f"{LAYERS}.sa_layer_norm", f"{BLOCKS}.attention_norms.residual"),
    (f"{LAYERS}.ffn.lin1.{{p}}", f"{BLOCKS}.ffn.up.{{p}}"),
    (f"{LAYERS}.ffn.lin2.{{p}}", f"{BLOCKS}.ffn.down.{{p}}"),
    *layer_norm(f"{LAYERS}.output_layer_norm", f"{BLOCKS}.ffn_norms.residual"),
)
MASKED: tuple[Rule, ...] = (
    ("vocab_projector.{p}", "head.{p}"),
    ("vocab_transform.{p}", "head.transform.{p}"),
    *layer_norm("vocab_layer_norm", "head.norm"),
)

FAMILY = Family(
    name="DistilBERT",
    model_type="distilbert",
    stack="encoder",
    spec=merged(SPEC, {"encoder": {"embed": {"norm": NORM}, "block": {"norms": norms({"residual": NORM})}}}),
    config=(
        Same("vocab_size", "vocab_size"),
        Same("dim", "d_model"),
        Same("n_layers", "n_layers"),
        Same("n_heads", ("attention.n_heads", "attention.n_kv_heads")),
        HeadWidth("dim", "n_heads"),
        Same("hidden_dim", "ffn.d_ff"),
        Same("max_position_embeddings", "max_positions", default=512),
        Named("activation", "ffn.activation", default="gelu"),
        Same("dropout", ("embed.dropout", "ffn.out_dropout"), default=0.1),
        Same("attention_dropout", "attention.dropout", default=0.1),
        Tied(True, ("encoder.embed", "head")),
    ),
    models={
        "DistilBertForMaskedLM": Variant(
            masked(NORM),
            MASKED,
            (Same("dim", "head.transform.width"), Named("activation", "head.transform.activation", default="gelu")),
            "distilbert.",
        ),
        "DistilBertModel": Variant({"head": None}),
        "DistilBertForSequenceClassification": Variant(
            {"head": {"kind": "sequence"}, "pooler": {"activation": "relu"}},
            (("pre_classifier.{p}", "pooler.{p}"), *SCORES),
            (Labels(), Same("seq_classif_dropout", "head.dropout", default=0.2)),
            "distilbert.",
        ),
        "DistilBertForTokenClassification": Variant(
            TOKENS, SCORES, (Labels(), Follows("head.dropout", Of("dropout", 0.1))), "distilbert."
        ),
        "DistilBertForQuestionAnswering": Variant(ANSWERS, SPANS, body="distilbert."),
    },
    tensors=TENSORS,
    aliases={"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
    # Sinusoidal positions are a table in the file as well.
    ignored=("sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout", "tie_weights_", "output_past"),
)
