"""StarCoder2 (Lozhkov et al. 2024): LayerNorm, biases, a dense feed-forward, and a window."""

from anyformer.families.common import ATTENTION, ENDS, LAYER, PRE_NORMS, decoders, eps, norms
from anyformer.families.family import Family
from anyformer.families.fields import Named, Same, Tied, Windows
from anyformer.families.llama import DROPOUT, HEAD_DIM
from anyformer.families.rotary import Rotary
from anyformer.families.sizes import sizes

FAMILY = Family(
    name="StarCoder2",
    model_type="starcoder2",
    stack="decoder",
    spec={
        "decoder": {
            "final_norm": LAYER,
            "block": {
                "attention": {"kind": "grouped", "position": {"kind": "rope"}, "mask": {"kind": "causal"}},
                "ffn": {"kind": "dense"},
                "norms": norms({"before": LAYER}),
            },
        }
    },
    config=(
        *sizes(max_positions=4096, n_kv_heads=2),
        HEAD_DIM,
        Same("intermediate_size", "ffn.d_ff"),
        Named("hidden_act", "ffn.activation", default="gelu_pytorch_tanh"),
        Same("norm_epsilon", eps("before"), default=1e-5),
        Same("use_bias", ("attention.qkv_bias", "attention.out_bias", "ffn.bias"), default=True),
        DROPOUT,
        Same("residual_dropout", ("attention.out_dropout", "ffn.out_dropout"), default=0.0),
        Same("embedding_dropout", "embed.dropout", default=0.0),
        Windows(types=False),
        Rotary(),
        Tied(default=True),
    ),
    models=decoders("Starcoder2"),
    tensors=(
        *ENDS,
        *ATTENTION,
        *PRE_NORMS,
        ("{body}layers.{i}.mlp.c_fc.{p}", "decoder.blocks.{i}.ffn.up.{p}"),
        ("{body}layers.{i}.mlp.c_proj.{p}", "decoder.blocks.{i}.ffn.down.{p}"),
    ),
    fixed={"mlp_type": "default", "norm_type": "layer_norm"},
)
