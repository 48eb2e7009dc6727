"""Falcon (Almazrouei et al. 2023): 7B with one key head, RW with ALiBi."""

from anyformer.families.choice import Choice, Way
from anyformer.families.classes import classes
from anyformer.families.common import LAYER, eps, norms
from anyformer.families.derived import HeadWidth, MultiQuery, SlopeScale
from anyformer.families.family import Family, Interleaved, Rule
from anyformer.families.fields import Named, Of, Same, Tied, Times
from anyformer.families.rotary import Rotary

SIZES = (
    Same("vocab_size", "vocab_size"),
    Same("hidden_size", "d_model"),
    Same("num_hidden_layers", "n_layers"),
    Same("max_position_embeddings", "max_positions", default=2048),
    Same("num_attention_heads", "attention.n_heads"),
    HeadWidth(),
    Same("layer_norm_epsilon", eps("before"), default=1e-5),
)
_ROPE = ("rope_parameters", "rope_scaling", "rope_theta")
REST = (
    Same("ffn_hidden_size", "ffn.d_ff", default=Times("hidden_size", 4)),
    Named("activation", "ffn.activation", default="gelu"),
    Same("bias", ("attention.qkv_bias", "attention.out_bias", "ffn.bias"), default=False),
    Choice(
        "alibi",
        {
            False: Way({"attention.position": {"kind": "rope"}}, (Rotary(),)),
            True: Way({"attention.position": {"kind": "alibi"}}, (SlopeScale(),), ignored=_ROPE),
        },
        default=False,
    ),
    Same("attention_dropout", "attention.dropout", default=0.0),
    Same("hidden_dropout", ("attention.out_dropout", "ffn.out_dropout"), default=0.0),
    Tied(default=True),
)
SPEC = {
    "decoder": {
        "final_norm": LAYER,
        "block": {
            "attention": {"kind": "grouped", "mask": {"kind": "causal"}},
            "ffn": {"kind": "dense"},
            "norms": norms({"before": LAYER}),
        },
    }
}
NORM: Rule = ("{body}h.{i}.input_layernorm.{p}", "decoder.blocks.{i}.attention_norms.before.{p}")
BODY: tuple[Rule, ...] = (
    ("{body}word_embeddings.weight", "decoder.embed.token.weight"),
    (
        "{body}h.{i}.self_attention.query_key_value.{p}",
        tuple(f"decoder.blocks.{{i}}.attention.{x}.{{p}}" for x in "qkv"),
        Interleaved("n_kv_heads"),
    ),
    ("{body}h.{i}.self_attention.dense.{p}", "decoder.blocks.{i}.attention.out.{p}"),
    ("{body}h.{i}.mlp.dense_h_to_4h.{p}", "decoder.blocks.{i}.ffn.up.{p}"),
    ("{body}h.{i}.mlp.dense_4h_to_h.{p}", "decoder.blocks.{i}.ffn.down.{p}"),
    ("{body}ln_f.{p}", "decoder.final_norm.{p}"),
)

FAMILY = Family(
    name="Falcon",
    model_type="falcon",
    stack="decoder",
    spec=SPEC,
    when={"new_decoder_architecture": (False, None)},
    config=(
        *SIZES,
        MultiQuery(),
        Choice(
            "parallel_attn",
            {
                True: Way(
                    {"wiring": {"kind": "parallel", "shared_norm": True}}, fixed={"num_ln_in_parallel_attn": (1,)}
                ),
                False: Way({"wiring": {"kind": "serial"}}, ignored=("num_ln_in_parallel_attn",)),
            },
            default=True,
        ),
        *REST,
    ),
    models=classes(
        "Falcon",
        "transformer.",
        token=(Same("classifier_dropout", "head.dropout", default=Of("hidden_dropout", 0.0)),),
    ),
    tensors=(
        NORM,
        ("{body}h.{i}.post_attention_layernorm.{p}", "decoder.blocks.{i}.ffn_norms.before.{p}"),
        *BODY,
    ),
    aliases={"n_embed": "hidden_size"},
    fixed={"apply_residual_connection_post_layernorm": False, "ff_factor": 4},
    ignored=("classifier_dropout",),
    peer="sdpa",  # The other one adds the bias of ALiBi twice.
)
