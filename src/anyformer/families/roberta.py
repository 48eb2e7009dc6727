"""RoBERTa (Liu et al. 2019): BERT with positions from the padding token's number on, and heads of its own."""

from anyformer.families.bert import FIELDS, IGNORED, LABELS, POOLER, SCORES, SPANS, SPEC, TENSORS, TRANSFORM
from anyformer.families.encoder_fields import OffsetPositions
from anyformer.families.encoders import ANSWERS, ROWS, STATES, TOKENS, layer_norm, masked
from anyformer.families.family import Family, Twice, Variant

FAMILY = Family(
    name="RoBERTa",
    model_type="roberta",
    stack="encoder",
    spec=SPEC,
    config=(*FIELDS, OffsetPositions()),
    models={
        "RobertaForMaskedLM": Variant(
            masked(activation="gelu"),
            (
                ("lm_head.bias", "head.bias"),
                ("lm_head.decoder.bias", "head.bias", Twice()),
                ("lm_head.decoder.weight", "head.weight"),
                ("lm_head.dense.{p}", "head.transform.{p}"),
                *layer_norm("lm_head.layer_norm", "head.norm"),
            ),
            TRANSFORM,
            "roberta.",
        ),
        "RobertaModel": Variant(STATES, POOLER),
        "RobertaForSequenceClassification": Variant(
            ROWS,
            (("classifier.dense.{p}", "pooler.{p}"), ("classifier.out_proj.{p}", "head.{p}")),
            LABELS,
            "roberta.",
        ),
        "RobertaForTokenClassification": Variant(TOKENS, SCORES, LABELS, "roberta."),
        "RobertaForQuestionAnswering": Variant(ANSWERS, SPANS, body="roberta."),
    },
    tensors=TENSORS,
    fixed={"position_embedding_type": "absolute"},
    ignored=IGNORED,
    dropped=("{body}pooler.dense.{p}",),
)
