"""Encoders, with every kind of head."""

from typing import Any

from maps import Rule, chunks, rows
from pairs import Family

SIZES = {
    "vocab_size": 37,
    "hidden_size": 30,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "intermediate_size": 41,
    "max_position_embeddings": 48,
    "layer_norm_eps": 1e-3,
}
NORM = {"kind": "layer", "eps": 1e-3}
_TRANSFORM = {"activation": "gelu", "norm": NORM}


def recipe(**over: Any) -> dict[str, Any]:
    """BERT of the sizes above, with changes."""
    return {
        "architecture": "encoder",
        "vocab_size": 37,
        "d_model": 30,
        "n_layers": 2,
        "max_positions": 48,
        "placement": "post",
        "bias": True,
        "norm": NORM,
        "embed": {"position": "learned", "types": 3, "norm": NORM},
        "ffn": {"kind": "dense", "activation": "gelu", "d_ff": 41},
        "attention": {"n_heads": 5, "position": "none"},
        **over,
    }


def body(prefix: str) -> list[Rule]:
    """The embedding and layers of BERT and its kin."""
    layer, block = f"{prefix}encoder.layer.{{i}}", "encoder.blocks.{i}"
    return [
        (f"{prefix}embeddings.word_embeddings.weight", "encoder.embed.token.weight"),
        (f"{prefix}embeddings.position_embeddings.weight", "encoder.embed.position.weight"),
        (f"{prefix}embeddings.token_type_embeddings.weight", "encoder.embed.types.weight"),
        (f"{prefix}embeddings.LayerNorm.{{p}}", "encoder.embed.norm.{p}"),
        *(
            (f"{layer}.attention.self.{name}.{{p}}", f"{block}.attention.{name[0]}.{{p}}")
            for name in ("query", "key", "value")
        ),
        (f"{layer}.attention.output.dense.{{p}}", f"{block}.attention.out.{{p}}"),
        (f"{layer}.attention.output.LayerNorm.{{p}}", f"{block}.attention_norms.residual.{{p}}"),
        (f"{layer}.intermediate.dense.{{p}}", f"{block}.ffn.up.{{p}}"),
        (f"{layer}.output.dense.{{p}}", f"{block}.ffn.down.{{p}}"),
        (f"{layer}.output.LayerNorm.{{p}}", f"{block}.ffn_norms.residual.{{p}}"),
        (f"{prefix}pooler.dense.{{p}}", "pooler.{p}"),
    ]


def bert(name: str, model: str, rules: list[Rule], *, labels: int = 2, **over: Any) -> Family:
    """BERT with some head."""
    settings = {**SIZES, "type_vocab_size": 3, "num_labels": labels}
    return Family(name, "bert", model, "BertConfig", settings, recipe(**over), [*body("bert."), *rules])


_MLM = {"kind": "language", "bias": True, "transform": _TRANSFORM}
BERT = bert(
    "bert",
    "BertForMaskedLM",
    [
        ("cls.predictions.bias", "head.bias"),
        ("cls.predictions.transform.dense.{p}", "head.transform.{p}"),
        ("cls.predictions.transform.LayerNorm.{p}", "head.norm.{p}"),
    ],
    tie=True,
    head=_MLM,
)
BERT_STATES = Family(
    "bert, states and pooler",
    "bert",
    "BertModel",
    "BertConfig",
    {**SIZES, "type_vocab_size": 3},
    recipe(head="none", pooler=True),
    body(""),
)
_CLASSIFIER: list[Rule] = [("classifier.{p}", "head.{p}")]
BERT_SEQUENCE = bert(
    "bert, rows",
    "BertForSequenceClassification",
    _CLASSIFIER,
    labels=3,
    head={"kind": "sequence", "n_labels": 3},
    pooler=True,
)
BERT_TOKENS = bert(
    "bert, tokens", "BertForTokenClassification", _CLASSIFIER, labels=7, head={"kind": "token", "n_labels": 7}
)
BERT_SPAN = bert("bert, answers", "BertForQuestionAnswering", [("qa_outputs.{p}", "head.{p}")], head="span")

_ROBERTA_SETTINGS = {**SIZES, "max_position_embeddings": 50, "pad_token_id": 1, "type_vocab_size": 1}
_ROBERTA = {"embed": {"position": {"kind": "learned", "offset": 2}, "types": 1, "norm": NORM}}
ROBERTA = Family(
    "roberta",
    "roberta",
    "RobertaForMaskedLM",
    "RobertaConfig",
    _ROBERTA_SETTINGS,
    recipe(**_ROBERTA, tie=True, head=_MLM),
    [
        *body("roberta."),
        ("lm_head.bias", "head.bias"),
        ("lm_head.dense.{p}", "head.transform.{p}"),
        ("lm_head.layer_norm.{p}", "head.norm.{p}"),
    ],
    first_position=2,
)
ROBERTA_SEQUENCE = Family(
    "roberta, rows",
    "roberta",
    "RobertaForSequenceClassification",
    "RobertaConfig",
    {**_ROBERTA_SETTINGS, "num_labels": 3},
    recipe(**_ROBERTA, pooler=True, head={"kind": "sequence", "n_labels": 3}),
    [*body("roberta."), ("classifier.dense.{p}", "pooler.{p}"), ("classifier.out_proj.{p}", "head.{p}")],
    first_position=2,
)

_DISTIL: list[Rule] = [
    ("distilbert.embeddings.word_embeddings.weight", "encoder.embed.token.weight"),
    ("distilbert.embeddings.position_embeddings.weight", "encoder.embed.position.weight"),
    ("distilbert.embeddings.LayerNorm.{p}", "encoder.embed.norm.{p}"),
    *(
        (f"distilbert.transformer.layer.{{i}}.attention.{x}_lin.{{p}}", f"encoder.blocks.{{i}}.attention.{x}.{{p}}")
        for x in ("q", "k", "v", "out")
    ),
    ("distilbert.transformer.layer.{i}.sa_layer_norm.{p}", "encoder.blocks.{i}.attention_norms.residual.{p}"),
    ("distilbert.transformer.layer.{i}.ffn.lin1.{p}", "encoder.blocks.{i}.ffn.up.{p}"),
    ("distilbert.transformer.layer.{i}.ffn.lin2.{p}", "encoder.blocks.{i}.ffn.down.{p}"),
    ("distilbert.transformer.layer.{i}.output_layer_norm.{p}", "encoder.blocks.{i}.ffn_norms.residual.{p}"),
]
_DISTIL_SETTINGS = {
    "vocab_size": 37,
    "dim": 30,
    "n_layers": 2,
    "n_heads": 5,
    "hidden_dim": 41,
    "max_position_embeddings": 48,
}
_TIGHT = {"kind": "layer", "eps": 1e-12}
_DISTIL_EMBED = {"position": "learned", "norm": _TIGHT}
DISTILBERT = Family(
    "distilbert",
    "distilbert",
    "DistilBertForMaskedLM",
    "DistilBertConfig",
    _DISTIL_SETTINGS,
    recipe(
        norm=_TIGHT,
        embed=_DISTIL_EMBED,
        tie=True,
        head={"kind": "language", "bias": True, "transform": {"activation": "gelu", "norm": _TIGHT}},
    ),
    [
        *_DISTIL,
        ("vocab_transform.{p}", "head.transform.{p}"),
        ("vocab_layer_norm.{p}", "head.norm.{p}"),
        ("vocab_projector.bias", "head.bias"),
    ],
)
DISTILBERT_SEQUENCE = Family(
    "distilbert, rows",
    "distilbert",
    "DistilBertForSequenceClassification",
    "DistilBertConfig",
    {**_DISTIL_SETTINGS, "num_labels": 3},
    recipe(
        norm=_TIGHT,
        embed=_DISTIL_EMBED,
        pooler={"activation": "relu"},
        head={"kind": "sequence", "n_labels": 3},
    ),
    [*_DISTIL, ("pre_classifier.{p}", "pooler.{p}"), ("classifier.{p}", "head.{p}")],
)


def _albert_group(number: int, layer: int) -> list[Rule]:
    """The weights that every layer of a group uses, from its first on."""
    theirs = f"albert.encoder.albert_layer_groups.{number}.albert_layers.0"
    block = f"encoder.blocks.{layer}"
    return [
        *(
            (f"{theirs}.attention.{name}.{{p}}", f"{block}.attention.{name[0]}.{{p}}")
            for name in ("query", "key", "value")
        ),
        (f"{theirs}.attention.dense.{{p}}", f"{block}.attention.out.{{p}}"),
        (f"{theirs}.attention.LayerNorm.{{p}}", f"{block}.attention_norms.residual.{{p}}"),
        (f"{theirs}.ffn.{{p}}", f"{block}.ffn.up.{{p}}"),
        (f"{theirs}.ffn_output.{{p}}", f"{block}.ffn.down.{{p}}"),
        (f"{theirs}.full_layer_layer_norm.{{p}}", f"{block}.ffn_norms.residual.{{p}}"),
    ]


ALBERT = Family(
    "albert",
    "albert",
    "AlbertForMaskedLM",
    "AlbertConfig",
    {**SIZES, "num_hidden_layers": 5, "num_hidden_groups": 2, "embedding_size": 11, "type_vocab_size": 3},
    recipe(
        n_layers=5,
        share={"distinct": 2, "order": "runs"},
        embed={"position": "learned", "types": 3, "norm": NORM, "factor": {"width": 11, "bias": True}},
        ffn={"kind": "dense", "activation": "gelu_tanh", "d_ff": 41},
        tie=True,
        head={"kind": "language", "bias": True, "transform": {"activation": "gelu_tanh", "norm": NORM}},
    ),
    [
        ("albert.embeddings.word_embeddings.weight", "encoder.embed.token.weight"),
        ("albert.embeddings.position_embeddings.weight", "encoder.embed.position.weight"),
        ("albert.embeddings.token_type_embeddings.weight", "encoder.embed.types.weight"),
        ("albert.embeddings.LayerNorm.{p}", "encoder.embed.norm.{p}"),
        ("albert.encoder.embedding_hidden_mapping_in.{p}", "encoder.embed.factor.{p}"),
        *_albert_group(0, 0),
        *_albert_group(1, 3),
        ("predictions.bias", "head.bias"),
        ("predictions.dense.{p}", "head.transform.{p}"),
        ("predictions.LayerNorm.{p}", "head.norm.{p}"),
    ],
)

_PLAIN = {"kind": "layer", "eps": 1e-3, "bias": False}
_LOCAL = {"repeat": 2, "attention": {"mask": {"window": 5}, "position": {"theta": 100.0}}}
MODERNBERT = Family(
    "modernbert",
    "modernbert",
    "ModernBertForMaskedLM",
    "ModernBertConfig",
    {
        "vocab_size": 37,
        "hidden_size": 30,
        "num_hidden_layers": 4,
        "num_attention_heads": 5,
        "intermediate_size": 41,
        "max_position_embeddings": 48,
        "norm_eps": 1e-3,
        "local_attention": 8,
        "cls_token_id": None,
        "sep_token_id": None,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 2000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    recipe(
        n_layers=4,
        bias=False,
        norm=_PLAIN,
        placement="pre",
        embed={"norm": _PLAIN},
        ffn={"kind": "geglu", "d_ff": 41},
        attention={"n_heads": 5, "position": {"kind": "rope", "theta": 2000.0}},
        pattern=[{"norms": {"ffn": {"before": _PLAIN}}}, _LOCAL, {}],
        tie=True,
        head={"kind": "language", "bias": True, "transform": {"activation": "gelu", "bias": False, "norm": _PLAIN}},
    ),
    [
        ("model.embeddings.tok_embeddings.weight", "encoder.embed.token.weight"),
        ("model.embeddings.norm.weight", "encoder.embed.norm.weight"),
        ("model.layers.{i}.attn_norm.weight", "encoder.blocks.{i}.attention_norms.before.weight"),
        (
            "model.layers.{i}.attn.Wqkv.weight",
            [f"encoder.blocks.{{i}}.attention.{x}.weight" for x in "qkv"],
            rows(30, 30, 30),
        ),
        ("model.layers.{i}.attn.Wo.weight", "encoder.blocks.{i}.attention.out.weight"),
        ("model.layers.{i}.mlp_norm.weight", "encoder.blocks.{i}.ffn_norms.before.weight"),
        (
            "model.layers.{i}.mlp.Wi.weight",
            ["encoder.blocks.{i}.ffn.gate.weight", "encoder.blocks.{i}.ffn.up.weight"],
            chunks(2),
        ),
        ("model.layers.{i}.mlp.Wo.weight", "encoder.blocks.{i}.ffn.down.weight"),
        ("model.final_norm.weight", "encoder.final_norm.weight"),
        ("head.dense.weight", "head.transform.weight"),
        ("head.norm.weight", "head.norm.weight"),
        ("decoder.bias", "head.bias"),
    ],
)

ENCODERS = [
    BERT,
    BERT_STATES,
    BERT_SEQUENCE,
    BERT_TOKENS,
    BERT_SPAN,
    ROBERTA,
    ROBERTA_SEQUENCE,
    DISTILBERT,
    DISTILBERT_SEQUENCE,
    ALBERT,
    MODERNBERT,
]
