"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al. 2024): LLaMA with its projections in two tables, and LongRoPE."""

from anyformer.families.common import ATTENTION, ENDS, GATED, PRE_NORMS, decoders, eps
from anyformer.families.derived import HeadWidth
from anyformer.families.family import Family, Joined
from anyformer.families.fields import Same, Tied, Windows
from anyformer.families.llama import DROPOUT, GATED_FFN, SPEC
from anyformer.families.rotary import Rotary
from anyformer.families.sizes import Again, PadWithin, sizes

FAMILY = Family(
    name="Phi-3",
    model_type="phi3",
    stack="decoder",
    spec=SPEC,
    config=(
        *sizes(max_positions=4096),
        HeadWidth(),
        Again("head_dim", "attention.d_head"),
        *GATED_FFN,
        Same("rms_norm_eps", eps("before"), default=1e-5),
        DROPOUT,
        Same("resid_pdrop", ("attention.out_dropout", "ffn.out_dropout"), default=0.0),
        Same("embd_pdrop", "embed.dropout", default=0.0),
        Windows(types=False),
        Rotary(
            fraction=("partial_rotary_factor", 1.0),
            outer=4096,
            words={"default": "none", "longrope": "longrope", "su": "longrope", "yarn": "longrope"},
            label="type",
        ),
        Tied(default=False),
        PadWithin(32000),
    ),
    models=decoders("Phi3"),
    tensors=(
        *ENDS,
        *ATTENTION[3:],
        *PRE_NORMS,
        *GATED[2:],
        (
            "{body}layers.{i}.self_attn.qkv_proj.weight",
            tuple(f"decoder.blocks.{{i}}.attention.{x}.weight" for x in "qkv"),
            Joined(),
        ),
        (
            "{body}layers.{i}.mlp.gate_up_proj.weight",
            tuple(f"decoder.blocks.{{i}}.ffn.{x}.weight" for x in ("gate", "up")),
            Joined(),
        ),
    ),
    fixed={
        "attention_bias": False,
        "mlp_bias": False,
        "lm_head_bias": False,
        "full_attn_mod": 1,
        "interpolate_factor": 1,
    },
)
