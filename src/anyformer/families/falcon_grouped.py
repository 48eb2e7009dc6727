"""Falcon 40B and 180B, and 11B with one norm for both branches (Almazrouei et al. 2023): keys for groups of heads."""

from dataclasses import replace

from anyformer.families import falcon
from anyformer.families.fields import Always, Of, Same
from anyformer.families.tables import merged

_TWO = {"kind": "parallel", "shared_norm": False}
_ONE = {"kind": "parallel", "shared_norm": True}

FAMILY = replace(
    falcon.FAMILY,
    name="Falcon of groups",
    spec=merged(falcon.SPEC, {"decoder": {"block": {"wiring": _TWO}}}),
    when={"new_decoder_architecture": True, "num_ln_in_parallel_attn": (2, None)},
    config=(
        *falcon.SIZES,
        Same("num_kv_heads", "attention.n_kv_heads", default=Of("num_attention_heads")),
        Always("parallel_attn", True, default=True),
        *falcon.REST,
    ),
    tensors=(
        ("{body}h.{i}.ln_attn.{p}", "decoder.blocks.{i}.attention_norms.before.{p}"),
        ("{body}h.{i}.ln_mlp.{p}", "decoder.blocks.{i}.ffn_norms.before.{p}"),
        *falcon.BODY,
    ),
    ignored=(*falcon.FAMILY.ignored, "multi_query"),
)
ONE_NORM = replace(
    FAMILY,
    name="Falcon of groups with one norm",
    spec=merged(falcon.SPEC, {"decoder": {"block": {"wiring": _ONE}}}),
    when={"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
    tensors=(falcon.NORM, *falcon.BODY),
)
