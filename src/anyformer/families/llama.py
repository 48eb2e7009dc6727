"""LLaMA 1, 2 and 3 (Touvron et al. 2023; Grattafiori et al. 2024)."""

from anyformer.families.common import LLAMA_TENSORS, RMS, decoders, eps, norms, spans
from anyformer.families.family import Family
from anyformer.families.fields import Named, Same, Tied
from anyformer.families.rotary import Rotary
from anyformer.families.sizes import Divides, head_dim, sizes

SIZES = sizes(max_positions=2048)
HEAD_DIM = head_dim()
GATED_FFN = (
    Same("intermediate_size", "ffn.d_ff"),
    Named("hidden_act", "ffn.activation", default="silu"),
)
BIASES = Same("attention_bias", ("attention.qkv_bias", "attention.out_bias"), default=False)
DROPOUT = Same("attention_dropout", "attention.dropout", default=0.0)
RMS_EPS = Same("rms_norm_eps", eps("before"), default=1e-6)
SPEC = {
    "decoder": {
        "final_norm": RMS,
        "block": {
            "attention": {"kind": "grouped", "position": {"kind": "rope"}, "mask": {"kind": "causal"}},
            "ffn": {"kind": "gated"},
            "norms": norms({"before": RMS}),
        },
    }
}

FAMILY = Family(
    name="LLaMA",
    model_type="llama",
    stack="decoder",
    spec=SPEC,
    config=(
        *SIZES,
        Divides(),
        HEAD_DIM,
        *GATED_FFN,
        RMS_EPS,
        BIASES,
        Same("mlp_bias", "ffn.bias", default=False),
        DROPOUT,
        Rotary(),
        Tied(default=False),
    ),
    models={**decoders("Llama"), **spans("Llama", body="transformer.")},
    tensors=LLAMA_TENSORS,
    fixed={"is_llama_config": True, "rope_interleaved": False},
    ignored=("pretraining_tp", "max_sequence_length"),
    presets=("llama-1-7b", "llama-2-7b", "llama-3-8b", "llama-3.1-8b", "llama-tiny"),
)
