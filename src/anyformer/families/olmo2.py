"""OLMo 2 (OLMo Team 2024): norms after each branch, and on the whole of queries and of keys."""

from anyformer.families.common import ATTENTION, ENDS, GATED, QK_NORMS, RMS, decoders, eps, norms
from anyformer.families.family import Family, Rule
from anyformer.families.fields import Same, Tied
from anyformer.families.llama import BIASES, DROPOUT, GATED_FFN, HEAD_DIM, SIZES
from anyformer.families.rotary import Rotary

OUTPUT_NORMS: tuple[Rule, ...] = (
    ("{body}layers.{i}.post_attention_layernorm.{p}", "decoder.blocks.{i}.attention_norms.after.{p}"),
    ("{body}layers.{i}.post_feedforward_layernorm.{p}", "decoder.blocks.{i}.ffn_norms.after.{p}"),
)

FAMILY = Family(
    name="OLMo 2",
    model_type="olmo2",
    stack="decoder",
    spec={
        "decoder": {
            "final_norm": RMS,
            "block": {
                "attention": {
                    "kind": "grouped",
                    "position": {"kind": "rope"},
                    "mask": {"kind": "causal"},
                    "qk_norm": {"over": "projection", "norm": RMS},
                },
                "ffn": {"kind": "gated"},
                "norms": norms({"after": RMS}),
            },
        }
    },
    config=(
        *SIZES,
        HEAD_DIM,
        *GATED_FFN,
        Same("rms_norm_eps", (*eps("after"), "attention.qk_norm.norm.eps"), default=1e-5),
        BIASES,
        DROPOUT,
        Rotary(),
        Tied(default=False),
    ),
    models=decoders("Olmo2", tokens=False),
    tensors=(*ENDS, *ATTENTION, *GATED, *OUTPUT_NORMS, *QK_NORMS),
)
