"""Mixtral (Jiang et al. 2024): Mistral whose feed-forward is a mixture of experts."""

from anyformer.families.common import ATTENTION, ENDS, PRE_NORMS, decoders, eps, spans
from anyformer.families.experts import FUSED, IGNORED
from anyformer.families.family import Family, Rule, Stacked
from anyformer.families.fields import Named, Same, Tied, Windows
from anyformer.families.llama import DROPOUT, HEAD_DIM, SPEC
from anyformer.families.rotary import Rotary
from anyformer.families.sizes import sizes
from anyformer.families.tables import merged

_MOE = "{body}layers.{i}.block_sparse_moe"
_FFN = "decoder.blocks.{i}.ffn"
EXPERTS: tuple[Rule, ...] = (
    (f"{_MOE}.gate.weight", f"{_FFN}.router.weight"),
    ("{body}layers.{i}.mlp.gate.weight", f"{_FFN}.router.weight"),
    (f"{_MOE}.experts.{{e}}.w1.weight", f"{_FFN}.experts.gate.weight", Stacked()),
    (f"{_MOE}.experts.{{e}}.w2.weight", f"{_FFN}.experts.down.weight", Stacked()),
    (f"{_MOE}.experts.{{e}}.w3.weight", f"{_FFN}.experts.up.weight", Stacked()),
    *FUSED,
)

FAMILY = Family(
    name="Mixtral",
    model_type="mixtral",
    stack="decoder",
    spec=merged(SPEC, {"decoder": {"block": {"ffn": {"kind": "moe", "expert": {"kind": "gated"}}}}}),
    config=(
        *sizes(max_positions=131072, n_kv_heads=8),
        HEAD_DIM,
        Same("intermediate_size", "ffn.expert.d_ff", default=14336),
        Same("num_local_experts", "ffn.n_experts", default=8),
        Same("num_experts_per_tok", "ffn.top_k", default=2),
        Named("hidden_act", "ffn.expert.activation", default="silu"),
        Same("rms_norm_eps", eps("before"), default=1e-5),
        DROPOUT,
        Windows(types=False),
        Rotary(theta=1e6),
        Tied(default=False),
    ),
    models={**decoders("Mixtral"), **spans("Mixtral")},
    tensors=(*ENDS, *ATTENTION, *PRE_NORMS, *EXPERTS),
    ignored=IGNORED,
    presets=("mixtral-8x7b",),
)
