"""GPT-J (Wang & Komatsuzaki 2021): attention and feed-forward side by side on one norm."""

from anyformer.families.classes import classes
from anyformer.families.common import LAYER, eps, norms
from anyformer.families.derived import TurningChannels
from anyformer.families.family import Family
from anyformer.families.fields import Same, Tied
from anyformer.families.gpt2 import ALIASES, IGNORED, SIZES

FAMILY = Family(
    name="GPT-J",
    model_type="gptj",
    stack="decoder",
    spec={
        "decoder": {
            "final_norm": LAYER,
            "block": {
                "attention": {
                    "kind": "grouped",
                    "position": {"kind": "rope", "layout": "interleaved"},
                    "mask": {"kind": "causal"},
                },
                "ffn": {"kind": "dense", "bias": True},
                "norms": norms({"before": LAYER}),
                "wiring": {"kind": "parallel", "shared_norm": True},
            },
        }
    },
    config=(
        *SIZES,
        Same("n_positions", "max_positions", default=2048),
        Same("layer_norm_epsilon", eps("before"), default=1e-5),
        TurningChannels(),
        Same("attn_pdrop", "attention.dropout", default=0.0),
        Same("resid_pdrop", ("attention.out_dropout", "ffn.out_dropout"), default=0.0),
        Same("embd_pdrop", "embed.dropout", default=0.0),
        Tied(default=False),
    ),
    models=classes("GPTJ", "transformer.", head={"kind": "language", "bias": True}, token=None),
    tensors=(
        ("{body}wte.weight", "decoder.embed.token.weight"),
        ("{body}h.{i}.ln_1.{p}", "decoder.blocks.{i}.attention_norms.before.{p}"),
        *((f"{{body}}h.{{i}}.attn.{x}_proj.weight", f"decoder.blocks.{{i}}.attention.{x}.weight") for x in "qkv"),
        ("{body}h.{i}.attn.out_proj.weight", "decoder.blocks.{i}.attention.out.weight"),
        ("{body}h.{i}.mlp.fc_in.{p}", "decoder.blocks.{i}.ffn.up.{p}"),
        ("{body}h.{i}.mlp.fc_out.{p}", "decoder.blocks.{i}.ffn.down.{p}"),
        ("{body}ln_f.{p}", "decoder.final_norm.{p}"),
    ),
    aliases=ALIASES,
    fixed={"rotary": True, "scale_attn_weights": True},
    ignored=IGNORED,
    dropped=("{body}h.{i}.attn.bias",),
)
