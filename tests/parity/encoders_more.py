"""Further classes of encoders: every head of every family, heads with matrices of their own, other settings."""

from dataclasses import replace

from encoders import (
    BERT,
    DISTILBERT,
    DISTILBERT_SEQUENCE,
    MODERNBERT,
    ROBERTA,
    ROBERTA_SEQUENCE,
    body,
)
from maps import Rule, chunks, rows
from pairs import Family
from torch import nn


def _without(family: Family, *keys: str) -> dict:
    return {key: value for key, value in family.recipe.items() if key not in keys}


_LABELS: list[Rule] = [("classifier.{p}", "head.{p}")]
_SPANS: list[Rule] = [("qa_outputs.{p}", "head.{p}")]


def _one_bias(model: nn.Module) -> None:
    """One bias under two names, as it was in every file until version 5."""
    model.cls.predictions.decoder.bias = model.cls.predictions.bias


BERT_UNTIED = replace(
    BERT,
    name="bert, head of its own",
    settings={**BERT.settings, "tie_word_embeddings": False, "hidden_act": "gelu_new"},
    recipe={
        **_without(BERT, "tie"),
        "ffn": {"kind": "dense", "activation": "gelu_tanh", "d_ff": 41},
        "head": {
            "kind": "language",
            "bias": True,
            "transform": {"activation": "gelu_tanh", "norm": {"kind": "layer", "eps": 1e-3}},
        },
    },
    rules=[*BERT.rules, ("cls.predictions.decoder.weight", "head.weight")],
    prepare=_one_bias,
)

_ROBERTA_BODY = _without(ROBERTA, "tie", "head")
ROBERTA_STATES = replace(
    ROBERTA,
    name="roberta, states and pooler",
    model="RobertaModel",
    recipe={**_ROBERTA_BODY, "head": "none", "pooler": True},
    rules=body(""),
)
ROBERTA_TOKENS = replace(
    ROBERTA_SEQUENCE,
    name="roberta, tokens",
    model="RobertaForTokenClassification",
    settings={**ROBERTA.settings, "num_labels": 7, "type_vocab_size": 2},
    recipe={
        **_ROBERTA_BODY,
        "embed": {**_ROBERTA_BODY["embed"], "types": 2},
        "head": {"kind": "token", "n_labels": 7},
    },
    rules=[*body("roberta."), *_LABELS],
)
ROBERTA_SPAN = replace(
    ROBERTA,
    name="roberta, answers",
    model="RobertaForQuestionAnswering",
    recipe={**_ROBERTA_BODY, "head": "span"},
    rules=[*body("roberta."), *_SPANS],
)

_DISTIL_BODY = _without(DISTILBERT, "tie", "head")
_DISTIL_RULES = [rule for rule in DISTILBERT.rules if rule[0].startswith("distilbert.")]
DISTILBERT_STATES = replace(
    DISTILBERT,
    name="distilbert, states",
    model="DistilBertModel",
    recipe={**_DISTIL_BODY, "head": "none"},
    rules=[(rule[0].removeprefix("distilbert."), rule[1]) for rule in _DISTIL_RULES],
)
DISTILBERT_TOKENS = replace(
    DISTILBERT_SEQUENCE,
    name="distilbert, tokens",
    model="DistilBertForTokenClassification",
    settings={**DISTILBERT_SEQUENCE.settings, "num_labels": 5, "sinusoidal_pos_embds": True},
    recipe={**_DISTIL_BODY, "head": {"kind": "token", "n_labels": 5}},
    rules=[*_DISTIL_RULES, *_LABELS],
)
DISTILBERT_SPAN = replace(
    DISTILBERT,
    name="distilbert, answers",
    model="DistilBertForQuestionAnswering",
    recipe={**_DISTIL_BODY, "head": "span"},
    rules=[*_DISTIL_RULES, *_SPANS],
)

_BIASED = {"kind": "layer", "eps": 1e-3}
_LOCAL = {"attention": {"mask": {"window": 4}, "position": {"theta": 300.0}}}
MODERNBERT_STATES = Family(
    "modernbert, biased, states",
    "modernbert",
    "ModernBertModel",
    "ModernBertConfig",
    {
        **MODERNBERT.settings,
        "num_hidden_layers": 5,
        "attention_bias": True,
        "mlp_bias": True,
        "norm_bias": True,
        "hidden_activation": "silu",
        "local_attention": 7,
        "layer_types": ["sliding_attention", "full_attention", "full_attention", *["sliding_attention"] * 2],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 2000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    },
    {
        **_without(MODERNBERT, "tie"),
        "n_layers": 5,
        "bias": True,
        "norm": _BIASED,
        "embed": {"norm": _BIASED},
        "ffn": {"kind": "swiglu", "d_ff": 41},
        "pattern": [{**_LOCAL, "norms": {"ffn": {"before": _BIASED}}}, {"repeat": 2}, {"repeat": 2, **_LOCAL}],
        "head": "none",
    },
    [
        ("embeddings.tok_embeddings.weight", "encoder.embed.token.weight"),
        ("embeddings.norm.{p}", "encoder.embed.norm.{p}"),
        ("layers.{i}.attn_norm.{p}", "encoder.blocks.{i}.attention_norms.before.{p}"),
        (
            "layers.{i}.attn.Wqkv.{p}",
            [f"encoder.blocks.{{i}}.attention.{x}.{{p}}" for x in "qkv"],
            rows(30, 30, 30),
        ),
        ("layers.{i}.attn.Wo.{p}", "encoder.blocks.{i}.attention.out.{p}"),
        ("layers.{i}.mlp_norm.{p}", "encoder.blocks.{i}.ffn_norms.before.{p}"),
        (
            "layers.{i}.mlp.Wi.{p}",
            ["encoder.blocks.{i}.ffn.gate.{p}", "encoder.blocks.{i}.ffn.up.{p}"],
            chunks(2),
        ),
        ("layers.{i}.mlp.Wo.{p}", "encoder.blocks.{i}.ffn.down.{p}"),
        ("final_norm.{p}", "encoder.final_norm.{p}"),
    ],
)
MODERNBERT_UNTIED = replace(
    MODERNBERT,
    name="modernbert, head of its own",
    settings={
        **MODERNBERT.settings,
        "tie_word_embeddings": False,
        "decoder_bias": False,
        "classifier_bias": True,
        "classifier_activation": "relu",
    },
    recipe={
        **_without(MODERNBERT, "tie"),
        "head": {
            "kind": "language",
            "bias": False,
            "transform": {"activation": "relu", "norm": {"kind": "layer", "eps": 1e-3, "bias": False}},
        },
    },
    rules=[*MODERNBERT.rules, ("head.dense.bias", "head.transform.bias"), ("decoder.weight", "head.weight")],
)

MORE_ENCODERS = [
    BERT_UNTIED,
    ROBERTA_STATES,
    ROBERTA_TOKENS,
    ROBERTA_SPAN,
    DISTILBERT_STATES,
    DISTILBERT_TOKENS,
    DISTILBERT_SPAN,
    MODERNBERT_STATES,
    MODERNBERT_UNTIED,
]
