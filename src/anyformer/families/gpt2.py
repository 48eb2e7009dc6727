"""GPT-2 (Radford et al. 2019)."""

from anyformer.families.classes import classes
from anyformer.families.common import LAYER, eps, norms
from anyformer.families.derived import HeadWidth, ScoreScale
from anyformer.families.family import Family, Joined
from anyformer.families.fields import Named, Of, Same, Tied, Times

ALIASES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
SIZES = (
    Same("vocab_size", "vocab_size"),
    Same("n_embd", "d_model"),
    Same("n_layer", "n_layers"),
    Same("n_head", ("attention.n_heads", "attention.n_kv_heads")),
    HeadWidth("n_embd", "n_head"),
    Same("n_inner", "ffn.d_ff", default=Times("n_embd", 4)),
    Named("activation_function", "ffn.activation", default="gelu_new"),
)
IGNORED = (
    "n_ctx",  # An older name of n_positions.
    "classifier_dropout",
    "hidden_dropout",
    "summary_type",
    "summary_use_proj",
    "summary_activation",
    "summary_proj_to_labels",
    "summary_first_dropout",
)

FAMILY = Family(
    name="GPT-2",
    model_type="gpt2",
    stack="decoder",
    spec={
        "decoder": {
            "embed": {"position": {"kind": "learned"}},
            "final_norm": LAYER,
            "block": {
                "attention": {
                    "kind": "grouped",
                    "position": {"kind": "none"},
                    "mask": {"kind": "causal"},
                    "qkv_bias": True,
                    "out_bias": True,
                },
                "ffn": {"kind": "dense", "bias": True},
                "norms": norms({"before": LAYER}),
            },
        }
    },
    config=(
        *SIZES,
        Same("n_positions", "max_positions", default=1024),
        Same("layer_norm_epsilon", eps("before"), default=1e-5),
        ScoreScale(),
        Same("attn_pdrop", "attention.dropout", default=0.1),
        Same("resid_pdrop", ("attention.out_dropout", "ffn.out_dropout"), default=0.1),
        Same("embd_pdrop", "embed.dropout", default=0.1),
        Tied(default=True),
    ),
    models=classes(
        "GPT2",
        "transformer.",
        language="LMHeadModel",
        token=(Same("classifier_dropout", "head.dropout", default=Of("hidden_dropout", 0.1)),),
    ),
    tensors=(
        ("{body}wte.weight", "decoder.embed.token.weight"),
        ("{body}wpe.weight", "decoder.embed.position.weight"),
        ("{body}h.{i}.ln_1.{p}", "decoder.blocks.{i}.attention_norms.before.{p}"),
        ("{body}h.{i}.ln_2.{p}", "decoder.blocks.{i}.ffn_norms.before.{p}"),
        (
            "{body}h.{i}.attn.c_attn.{p}",
            tuple(f"decoder.blocks.{{i}}.attention.{x}.{{p}}" for x in "qkv"),
            Joined(transposed=True),
        ),
        ("{body}h.{i}.attn.c_proj.{p}", "decoder.blocks.{i}.attention.out.{p}", Joined(transposed=True)),
        ("{body}h.{i}.mlp.c_fc.{p}", "decoder.blocks.{i}.ffn.up.{p}", Joined(transposed=True)),
        ("{body}h.{i}.mlp.c_proj.{p}", "decoder.blocks.{i}.ffn.down.{p}", Joined(transposed=True)),
        ("{body}ln_f.{p}", "decoder.final_norm.{p}"),
    ),
    aliases=ALIASES,
    ignored=(*IGNORED, "reorder_and_upcast_attn"),
    dropped=("{body}h.{i}.attn.bias",),
    presets=("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "textbook-gpt"),
)
