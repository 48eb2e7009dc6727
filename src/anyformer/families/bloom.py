"""BLOOM (BigScience 2022): ALiBi, and a norm after the embedding."""

from anyformer.families.classes import classes
from anyformer.families.common import LAYER, eps, norms
from anyformer.families.derived import Follows, HeadWidth
from anyformer.families.family import Family, Interleaved
from anyformer.families.fields import Of, Same, Tied, Times

FAMILY = Family(
    name="BLOOM",
    model_type="bloom",
    stack="decoder",
    spec={
        "decoder": {
            "embed": {"norm": LAYER},
            "final_norm": LAYER,
            "block": {
                "attention": {
                    "kind": "grouped",
                    "position": {"kind": "alibi"},
                    "mask": {"kind": "causal"},
                    "qkv_bias": True,
                    "out_bias": True,
                },
                "ffn": {"kind": "dense", "activation": "gelu_tanh", "bias": True},
                "norms": norms({"before": LAYER}),
            },
        }
    },
    config=(
        Same("vocab_size", "vocab_size"),
        Same("hidden_size", "d_model"),
        Same("n_layer", "n_layers"),
        Same("seq_length", "max_positions", default=None),
        Same("n_head", ("attention.n_heads", "attention.n_kv_heads")),
        HeadWidth("hidden_size", "n_head"),
        Follows("ffn.d_ff", Times("hidden_size", 4)),
        Same("layer_norm_epsilon", eps("before", embed=True), default=1e-5),
        Same("attention_dropout", "attention.dropout", default=0.0),
        Same("hidden_dropout", ("attention.out_dropout", "ffn.out_dropout"), default=0.0),
        Tied(default=True),
    ),
    models=classes(
        "Bloom",
        "transformer.",
        token=(Same("classifier_dropout", "head.dropout", default=Of("hidden_dropout", 0.0)),),
    ),
    tensors=(
        ("{body}word_embeddings.weight", "decoder.embed.token.weight"),
        ("{body}word_embeddings_layernorm.{p}", "decoder.embed.norm.{p}"),
        ("{body}h.{i}.input_layernorm.{p}", "decoder.blocks.{i}.attention_norms.before.{p}"),
        ("{body}h.{i}.post_attention_layernorm.{p}", "decoder.blocks.{i}.ffn_norms.before.{p}"),
        (
            "{body}h.{i}.self_attention.query_key_value.{p}",
            tuple(f"decoder.blocks.{{i}}.attention.{x}.{{p}}" for x in "qkv"),
            Interleaved("n_heads"),
        ),
        ("{body}h.{i}.self_attention.dense.{p}", "decoder.blocks.{i}.attention.out.{p}"),
        ("{body}h.{i}.mlp.dense_h_to_4h.{p}", "decoder.blocks.{i}.ffn.up.{p}"),
        ("{body}h.{i}.mlp.dense_4h_to_h.{p}", "decoder.blocks.{i}.ffn.down.{p}"),
        ("{body}ln_f.{p}", "decoder.final_norm.{p}"),
    ),
    aliases={"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    fixed={"apply_residual_connection_post_layernorm": False, "n_inner": None},
    ignored=(
        "classifier_dropout",
        "pretraining_tp",  # The order of sums.
        "slow_but_exact",
        "attention_softmax_in_fp32",
        "bias_dropout_fusion",
        "masked_softmax_fusion",
        "offset_alibi",
        "skip_bias_add",
        "skip_bias_add_qkv",
    ),
)
