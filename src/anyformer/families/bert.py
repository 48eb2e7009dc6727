"""BERT (Devlin et al. 2018)."""

from anyformer.families.common import LAYER, eps, norms
from anyformer.families.derived import HeadWidth
from anyformer.families.encoder_fields import Whole
from anyformer.families.encoders import ANSWERS, ROWS, STATES, TOKENS, layer_norm, masked
from anyformer.families.family import Family, Rule, Twice, Variant
from anyformer.families.fields import Labels, Named, Of, Same, Tied

SPEC = {
    "encoder": {
        "embed": {"position": {"kind": "learned"}, "norm": LAYER},
        "block": {
            "attention": {
                "kind": "grouped",
                "position": {"kind": "none"},
                "mask": {"kind": "bidirectional"},
                "qkv_bias": True,
                "out_bias": True,
            },
            "ffn": {"kind": "dense", "bias": True},
            "norms": norms({"residual": LAYER}),
        },
    }
}
FIELDS = (
    Same("vocab_size", "vocab_size"),
    Same("hidden_size", "d_model"),
    Same("num_hidden_layers", "n_layers"),
    Same("num_attention_heads", ("attention.n_heads", "attention.n_kv_heads")),
    HeadWidth(),
    Same("intermediate_size", "ffn.d_ff"),
    Named("hidden_act", "ffn.activation", default="gelu"),
    Same("hidden_dropout_prob", ("embed.dropout", "attention.out_dropout", "ffn.out_dropout"), default=0.1),
    Same("attention_probs_dropout_prob", "attention.dropout", default=0.1),
    Same("layer_norm_eps", eps("residual", final=False, embed=True), default=1e-12),
    Whole("type_vocab_size", "embed.types", default=2),
    Tied(True, ("encoder.embed", "head")),
)
TRANSFORM = (Same("hidden_size", "head.transform.width"), Same("layer_norm_eps", "head.transform.norm.eps", 1e-12))
LABELS = (Labels(), Same("classifier_dropout", "head.dropout", default=Of("hidden_dropout_prob", 0.1)))
LAYERS = "{body}encoder.layer.{i}"
BLOCKS = "encoder.blocks.{i}"
TENSORS: tuple[Rule, ...] = (
    *(
        (f"{{body}}embeddings.{theirs}_embeddings.weight", f"encoder.embed.{ours}.weight")
        for theirs, ours in (("word", "token"), ("position", "position"), ("token_type", "types"))
    ),
    *layer_norm("{body}embeddings.LayerNorm", "encoder.embed.norm"),
    *((f"{LAYERS}.attention.self.{x}.{{p}}", f"{BLOCKS}.attention.{x[0]}.{{p}}") for x in ("query", "key", "value")),
    (f"{LAYERS}.attention.output.dense.{{p}}", f"{BLOCKS}.attention.out.{{p}}"),
    *layer_norm(f"{LAYERS}.attention.output.LayerNorm", f"{BLOCKS}.attention_norms.residual"),
    (f"{LAYERS}.intermediate.dense.{{p}}", f"{BLOCKS}.ffn.up.{{p}}"),
    (f"{LAYERS}.output.dense.{{p}}", f"{BLOCKS}.ffn.down.{{p}}"),
    *layer_norm(f"{LAYERS}.output.LayerNorm", f"{BLOCKS}.ffn_norms.residual"),
)
POOLER: tuple[Rule, ...] = (("{body}pooler.dense.{p}", "pooler.{p}"),)
SCORES: tuple[Rule, ...] = (("classifier.{p}", "head.{p}"),)
SPANS: tuple[Rule, ...] = (("qa_outputs.{p}", "head.{p}"),)
MASKED = Variant(
    masked(),
    (
        ("cls.predictions.bias", "head.bias"),
        ("cls.predictions.decoder.bias", "head.bias", Twice()),
        ("cls.predictions.decoder.weight", "head.weight"),
        ("cls.predictions.transform.dense.{p}", "head.transform.{p}"),
        *layer_norm("cls.predictions.transform.LayerNorm", "head.norm"),
    ),
    (*TRANSFORM, Named("hidden_act", "head.transform.activation", default="gelu")),
    "bert.",
)
IGNORED = ("output_past", "classifier_dropout")
POOLING = tuple(f"pooler_{x}" for x in ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type"))

FAMILY = Family(
    name="BERT",
    model_type="bert",
    stack="encoder",
    spec=SPEC,
    config=(*FIELDS, Same("max_position_embeddings", "max_positions", default=512)),
    models={
        "BertForMaskedLM": MASKED,
        "BertForPreTraining": MASKED,  # Its prediction of the next sentence is left out.
        "BertModel": Variant(STATES, POOLER),
        "BertForSequenceClassification": Variant(ROWS, (*POOLER, *SCORES), LABELS, "bert."),
        "BertForTokenClassification": Variant(TOKENS, SCORES, LABELS, "bert."),
        "BertForQuestionAnswering": Variant(ANSWERS, SPANS, body="bert."),
    },
    tensors=TENSORS,
    fixed={"position_embedding_type": "absolute"},
    ignored=(*IGNORED, *POOLING, "directionality", "embedding_size"),
    dropped=("{body}pooler.dense.{p}", "cls.seq_relationship.{p}"),
)
