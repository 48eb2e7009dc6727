"""DeepSeek-V3 (DeepSeek-AI 2024b): DeepSeek-V2 with sigmoid scores and a bias for the choice alone."""

from anyformer.families.common import decoders
from anyformer.families.deepseek_v2 import BIAS, DERIVED, SIZES, SPEC, TENSORS
from anyformer.families.experts import ACTIVATION, BALANCE, IGNORED, ExpertGroups, SharedExperts
from anyformer.families.family import Family
from anyformer.families.fields import Always, Flag, Same, SparseLayers, Tied
from anyformer.families.latent import Equal, FurtherLayers, LatentScale
from anyformer.families.llama import DROPOUT, RMS_EPS
from anyformer.families.rotary import Rotary
from anyformer.families.tables import merged

_ROUTER = {"scoring": "sigmoid", "choice_bias": True}

FAMILY = Family(
    name="DeepSeek-V3",
    model_type="deepseek_v3",
    stack="decoder",
    spec=merged(SPEC, {"decoder": {"block": {"ffn": {"sparse": _ROUTER}}}}),
    config=(
        *SIZES,
        Same("max_position_embeddings", "max_positions", default=4096),
        SparseLayers(dense_first=("first_k_dense_replace", 3)),
        Always("moe_layer_freq", 1, default=1),
        Same("intermediate_size", "ffn.dense.d_ff", default=18432),
        Same("moe_intermediate_size", "ffn.sparse.expert.d_ff", default=2048),
        SharedExperts("n_shared_experts", default=1),
        Same("n_routed_experts", "ffn.sparse.n_experts", default=256),
        Same("num_experts_per_tok", "ffn.sparse.top_k", default=8),
        Always("scoring_func", "sigmoid", default="sigmoid"),
        Always("topk_method", "noaux_tc", default="noaux_tc"),
        Flag("norm_topk_prob", "ffn.sparse.normalise", default=True),
        Same("routed_scaling_factor", "ffn.sparse.scale", default=2.5),
        ExpertGroups("top2", default=(8, 4)),
        *BALANCE,
        ACTIVATION,
        RMS_EPS,
        BIAS,
        DROPOUT,
        Flag("rope_interleave", "attention.position.layout", default=True, on="interleaved", off="half"),
        Rotary(),
        LatentScale(),
        Equal("head_dim", "qk_rope_head_dim", 64),
        FurtherLayers("num_nextn_predict_layers", default=1),
        Tied(default=False),
    ),
    models=decoders("DeepseekV3"),
    tensors=(
        *TENSORS,
        ("{body}layers.{i}.mlp.gate.e_score_correction_bias", "decoder.blocks.{i}.ffn.router.choice_bias"),
    ),
    aliases={"num_mtp_layers": "num_nextn_predict_layers"},
    ignored=(*IGNORED, *DERIVED),
    presets=("deepseek-v3",),
)
