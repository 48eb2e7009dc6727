"""GPT-NeoX and Pythia (Black et al. 2022; Biderman et al. 2023): the branches side by side on norms of their own."""

from anyformer.families.choice import Choice, Way
from anyformer.families.classes import classes
from anyformer.families.common import LAYER, eps, norms
from anyformer.families.derived import HeadWidth
from anyformer.families.family import Family, Interleaved
from anyformer.families.fields import Named, Same, Tied
from anyformer.families.rotary import Rotary

FAMILY = Family(
    name="GPT-NeoX",
    model_type="gpt_neox",
    stack="decoder",
    spec={
        "decoder": {
            "final_norm": LAYER,
            "block": {
                "attention": {"kind": "grouped", "position": {"kind": "rope"}, "mask": {"kind": "causal"}},
                "ffn": {"kind": "dense", "bias": True},
                "norms": norms({"before": LAYER}),
            },
        }
    },
    config=(
        Same("vocab_size", "vocab_size"),
        Same("hidden_size", "d_model"),
        Same("num_hidden_layers", "n_layers"),
        Same("max_position_embeddings", "max_positions", default=2048),
        Same("num_attention_heads", ("attention.n_heads", "attention.n_kv_heads")),
        HeadWidth(),
        Same("intermediate_size", "ffn.d_ff"),
        Named("hidden_act", "ffn.activation", default="gelu"),
        Same("layer_norm_eps", eps("before"), default=1e-5),
        Same("attention_bias", ("attention.qkv_bias", "attention.out_bias"), default=True),
        Choice(
            "use_parallel_residual",
            {
                True: Way({"wiring": {"kind": "parallel", "shared_norm": False}}),
                False: Way({"wiring": {"kind": "serial"}}),
            },
            default=True,
        ),
        Rotary(key="rotary_emb_base", fraction=("rotary_pct", 0.25)),
        Same("attention_dropout", "attention.dropout", default=0.0),
        Same("hidden_dropout", ("attention.out_dropout", "ffn.out_dropout", "embed.dropout"), default=0.0),
        Tied(default=False),
    ),
    models=classes(
        "GPTNeoX",
        "gpt_neox.",
        scores=("embed_out.{p}", "lm_head.{p}"),
        token=(Same("classifier_dropout", "head.dropout", default=0.1),),
    ),
    tensors=(
        ("{body}embed_in.weight", "decoder.embed.token.weight"),
        ("{body}layers.{i}.input_layernorm.{p}", "decoder.blocks.{i}.attention_norms.before.{p}"),
        ("{body}layers.{i}.post_attention_layernorm.{p}", "decoder.blocks.{i}.ffn_norms.before.{p}"),
        (
            "{body}layers.{i}.attention.query_key_value.{p}",
            tuple(f"decoder.blocks.{{i}}.attention.{x}.{{p}}" for x in "qkv"),
            Interleaved("n_heads"),
        ),
        ("{body}layers.{i}.attention.dense.{p}", "decoder.blocks.{i}.attention.out.{p}"),
        ("{body}layers.{i}.mlp.dense_h_to_4h.{p}", "decoder.blocks.{i}.ffn.up.{p}"),
        ("{body}layers.{i}.mlp.dense_4h_to_h.{p}", "decoder.blocks.{i}.ffn.down.{p}"),
        ("{body}final_layer_norm.{p}", "decoder.final_norm.{p}"),
    ),
    aliases={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    ignored=("is_decoder", "classifier_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob"),
    dropped=("{body}layers.{i}.attention.bias",),
)
