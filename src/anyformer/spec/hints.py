"""Keys that people look for in the wrong place: why they are not there, and where they are."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from anyformer.spec.problems import Problem

_MOE_KEYS = (
    "n_experts", "top_k", "expert", "shared", "scoring", "normalise", "router_bias", "choice_bias", "groups",
    "shared_gate", "balance_loss", "balance_over", "z_loss", "bias_rate",
)  # fmt: skip
_OF_MOE = dict.fromkeys(_MOE_KEYS, ("it belongs to a mixture of experts", 'kind = "moe" would do'))
_OF_MASKS = {key: ("it belongs to the mask", f"mask = {{ {key} = … }} would do") for key in ("window", "sinks")}
_OF_POSITIONS = {
    key: ("it belongs to the position", f"position.{key} would do")
    for key in ("theta", "fraction", "layout", "scaling", "max_bias", "symmetric", "n_buckets", "max_distance")
}
_OF_LATENTS = dict.fromkeys(
    ("q_rank", "kv_rank", "d_nope", "d_rope"), ("it belongs to latent attention", 'kind = "latent" would do')
)
_ROOT = {
    **{
        key: ("it belongs to the attention", f"attention.{key} would do")
        for key in ("n_heads", "n_kv_heads", "d_head", "d_value", "position", "mask", "qk_norm", "clip", "sink_logit")
    },
    **{key: ("it belongs to a mask", f"attention.mask.{key} would do") for key in ("window", "sinks")},
    "theta": ("it belongs to a position", "attention.position.theta would do"),
    "d_ff": ("it belongs to the feed-forward", "ffn.d_ff would do"),
    "activation": ("it belongs to the feed-forward", "ffn.activation would do"),
    **{key: ("it belongs to a mixture of experts", f"ffn.{key} would do") for key in ("n_experts", "top_k")},
    "types": ("it belongs to the embedding", "embed.types would do"),
    "softcap": ("it belongs to scores", "attention.softcap or head.softcap would do"),
    "transform": ("it belongs to the head", "head.transform would do"),
}
_WHOLE = ("vocab_size", "architecture", "tie", "head", "pooler")

_HINTS: dict[tuple[str, str], dict[str, tuple[str, str]]] = {
    ("attention", "grouped"): {**_OF_MASKS, **_OF_POSITIONS, **_OF_LATENTS},
    ("cross", "grouped"): {**_OF_MASKS, **_OF_POSITIONS},
    ("attention", "latent"): {
        **_OF_MASKS,
        **_OF_POSITIONS,
        "n_kv_heads": ("latent attention unfolds keys and values for every head", "leave it out"),
        "d_head": ("d_nope + d_rope make the width of a head", "d_nope and d_rope would do"),
        "qkv_bias": ("the projections down to the latents have `bias`", "bias would do"),
        "qk_norm": ("the latents are normed by `norm`", "norm would do"),
        "clip": ("it belongs to grouped attention, which projects q, k and v at once", "leave it out"),
    },
    ("ffn", "gated"): _OF_MOE,
    ("ffn", "dense"): {
        **_OF_MOE,
        **dict.fromkeys(
            ("limit", "up_offset", "multiple_of"), ("it belongs to a gated feed-forward", 'kind = "gated" would do')
        ),
    },
    ("ffn", "moe"): {
        key: ("it belongs to its experts", f"expert.{key} would do")
        for key in ("d_ff", "activation", "bias", "dropout", "out_dropout", "limit", "up_offset", "multiple_of")
    },
    ("head", "language"): {
        "n_labels": ("it belongs to a head that scores labels", 'kind = "sequence" or "token" would do'),
        "tie": ("it is the whole model's", "tie at the root would do"),
    },
    **{
        (name, ""): {key: ("it is the whole model's", f"{key} at the root would do") for key in _WHOLE}
        for name in ("encoder", "decoder")
    },
    ("", ""): _ROOT,
}


def misplaced(path: Sequence[str], table: Any) -> tuple[str, str] | None:
    """Why the key at the end of `path` is not one of `table`'s, and what would do, where it is known to mislead.

    Args:
        path: the key's, from the recipe's root.
        table: the table that holds it.
    """
    name = path[-2] if len(path) > 1 else ""
    if len(path) > 1 and name.isdigit():
        name = ""
    kind = table.get("kind", "") if isinstance(table, dict) else ""
    if name in ("attention", "cross"):
        kind = kind or "grouped"
    if name in ("expert", "shared"):
        name = "ffn"
    found = _HINTS.get((name, kind), {}).get(path[-1]) if isinstance(kind, str) else None
    return None if found is None else (f"unknown key `{path[-1]}`: {found[0]}", found[1])


def misshapen(problem: Problem) -> Problem:
    """A problem of what is no table, where shorter forms than a table are known."""
    key = problem.path.rpartition(".")[2]
    if problem.why != "should be a table" or key not in ("share", "shared"):
        return problem
    if key == "shared":
        why = "a shared expert is a table, or the number n, at least 1, for one of n times the expert's width"
        return replace(problem, why=why, remedy="1, or false for none, would do")
    count = problem.got
    distinct = count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else 2
    remedy = f'"all", or {{ distinct = {distinct} }}, would do'
    return replace(
        problem, why='is "all", a number of `distinct` layers in a table, or a list of owners', remedy=remedy
    )
