"""MPT (MosaicML 2023): ALiBi, and no bias anywhere."""

from anyformer.families.choice import Inner, Unwritten
from anyformer.families.classes import classes
from anyformer.families.common import eps, norms
from anyformer.families.derived import Follows, HeadWidth, Scale
from anyformer.families.family import Family, Joined
from anyformer.families.fields import Of, Same, Tied, Times

_NORM = {"kind": "layer", "bias": False}
_CLASSES = classes(
    "Mpt", "transformer.", token=(Same("classifier_dropout", "head.dropout", default=Of("hidden_dropout", 0.1)),)
)

FAMILY = Family(
    name="MPT",
    model_type="mpt",
    stack="decoder",
    spec={
        "decoder": {
            "final_norm": _NORM,
            "block": {
                "attention": {"kind": "grouped", "position": {"kind": "alibi"}, "mask": {"kind": "causal"}},
                "ffn": {"kind": "dense", "activation": "gelu"},
                "norms": norms({"before": _NORM}),
            },
        }
    },
    config=(
        Same("vocab_size", "vocab_size"),
        Same("d_model", "d_model"),
        Same("n_layers", "n_layers"),
        Same("max_seq_len", "max_positions", default=2048),
        Same("n_heads", ("attention.n_heads", "attention.n_kv_heads")),
        HeadWidth("d_model", "n_heads"),
        Follows("ffn.d_ff", Times("d_model", 4)),
        Same("layer_norm_epsilon", eps("before"), default=1e-5),
        Inner(
            "attn_config",
            (
                Same("clip_qkv", "attention.clip", default=None),
                Scale("softmax_scale"),
                Unwritten(Same("alibi_bias_max", "attention.position.max_bias", default=8)),
                Unwritten(Same("attn_pdrop", "attention.dropout", default=0)),
            ),
            fixed={
                "alibi": True,
                "attn_type": "multihead_attention",
                "prefix_lm": False,
                "qk_ln": False,
                "attn_uses_sequence_id": False,
            },
            ignored=("attn_impl",),
        ),
        Same("resid_pdrop", ("attention.out_dropout", "ffn.out_dropout"), default=0.0),
        Same("emb_pdrop", "embed.dropout", default=0.0),
        Tied(default=True),
    ),
    models={**_CLASSES, "MPTForCausalLM": _CLASSES["MptForCausalLM"]},  # The published files' own name for it.
    tensors=(
        ("{body}wte.weight", "decoder.embed.token.weight"),
        ("{body}blocks.{i}.norm_1.weight", "decoder.blocks.{i}.attention_norms.before.weight"),
        ("{body}blocks.{i}.norm_2.weight", "decoder.blocks.{i}.ffn_norms.before.weight"),
        (
            "{body}blocks.{i}.attn.Wqkv.weight",
            tuple(f"decoder.blocks.{{i}}.attention.{x}.weight" for x in "qkv"),
            Joined(),
        ),
        ("{body}blocks.{i}.attn.out_proj.weight", "decoder.blocks.{i}.attention.out.weight"),
        ("{body}blocks.{i}.ffn.up_proj.weight", "decoder.blocks.{i}.ffn.up.weight"),
        ("{body}blocks.{i}.ffn.down_proj.weight", "decoder.blocks.{i}.ffn.down.weight"),
        ("{body}norm_f.weight", "decoder.final_norm.weight"),
    ),
    aliases={"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"},
    fixed={
        "expansion_ratio": 4,
        "no_bias": True,
        "logit_scale": None,
        "norm_type": ("low_precision_layernorm", "layernorm"),
        "ffn_config": ({"ffn_type": "mptmlp"},),
        "fc_type": "torch",
    },
    ignored=(
        "classifier_dropout",
        "hidden_dropout",
        "learned_pos_emb",  # ALiBi takes its place.
        "embedding_fraction",  # Of the embedding's gradient.
        "init_device",
        "init_config",
        "tokenizer_name",
        "verbose",
    ),
)
