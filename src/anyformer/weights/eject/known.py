"""What of a specification the pieces can say: a part, a field or a word that is not here is refused by name."""

from typing import Any

from anyformer.errors import UserError
from anyformer.spec.part import Part
from anyformer.spec.parts import ModelSpec
from anyformer.weights.eject.sublayers import ACTIVATIONS

_NORM = ("eps", "weight", "bias", "offset")
_MASK = ("window", "sinks")
_SCORES = ("position", "mask", "softcap", "sink_logit", "n_heads", "scale", "out_bias", "dropout", "out_dropout")
_NETWORK = ("activation", "d_ff", "bias", "dropout", "out_dropout")
_YARN = ("factor", "original", "beta_fast", "beta_slow", "truncate", "attention_factor")

KNOWN: dict[str, tuple[str, ...]] = {
    "NoNorm": (),
    "LayerNorm": _NORM,
    "RMSNorm": _NORM,
    "QKNorm": ("over", "weights", "order", "norm"),
    "Causal": _MASK,
    "Bidirectional": _MASK,
    "Prefix": _MASK,
    "NoScaling": (),
    "LinearScaling": ("factor",),
    "NTKScaling": ("factor",),
    "DynamicNTKScaling": ("factor", "original"),
    "YarnScaling": _YARN,
    "Llama3Scaling": ("factor", "original", "low_freq_factor", "high_freq_factor"),
    "LongRopeScaling": ("original", "short", "long", "attention_factor"),
    "Rope": ("theta", "fraction", "layout", "scaling"),
    "Alibi": ("max_bias", "scale", "symmetric"),
    "RelativeBias": ("n_buckets", "max_distance", "bidirectional", "shared"),
    "NoPosition": (),
    "Sinusoidal": ("theta", "layout", "offset"),
    "Learned": ("offset",),
    "Grouped": (*_SCORES, "qk_norm", "clip", "n_kv_heads", "d_head", "d_value", "qkv_bias"),
    "Latent": (*_SCORES, "q_rank", "kv_rank", "norm", "d_nope", "d_rope", "d_value", "bias"),
    "Dense": _NETWORK,
    "Gated": (*_NETWORK, "limit", "up_offset"),
    "Groups": ("n_groups", "top_groups", "score"),
    "MoE": (
        *("n_experts", "top_k", "scoring", "normalise", "scale", "router_bias", "choice_bias", "groups", "shared_gate"),
        *("expert", "shared"),
        # What training adds to its loss is no part of the model.
        *("balance_loss", "balance_over", "z_loss", "bias_rate"),
    ),
    "BranchNorms": ("before", "after", "residual", "alpha", "beta"),
    "Norms": ("attention", "cross", "ffn"),
    "Serial": (),
    "Parallel": ("shared_norm",),
    "BlockSpec": ("attention", "cross", "ffn", "norms", "wiring"),
    "Factor": ("width", "bias"),
    "Embed": ("scale", "position", "types", "norm", "dropout", "factor"),
    "StackSpec": ("d_model", "max_positions", "embed", "blocks", "owners", "final_norm"),
    "Transform": ("width", "activation", "bias", "norm"),
    "LanguageHead": ("bias", "transform", "scale", "softcap"),
    "SequenceHead": ("n_labels", "pool", "bias", "dropout"),
    "TokenHead": ("n_labels", "bias", "dropout"),
    "SpanHead": ("bias",),
    "Pooler": ("activation", "bias"),
    "ModelSpec": ("vocab_size", "encoder", "decoder", "pooler", "head", "ties"),
}
"""The fields of each part that pieces say, `kind` aside."""

WORDS: dict[str, tuple[str, ...]] = {
    "activation": tuple(ACTIVATIONS),
    "layout": ("half", "interleaved", "halves"),
    "over": ("head", "projection"),
    "order": ("before", "after"),
    "weights": ("shared", "per_head"),
    "scoring": ("softmax", "sigmoid"),
    "score": ("max", "top2"),
    "pool": ("first", "last", "mean", "pooler"),
}
"""The words that a field may be."""


def require_known(spec: ModelSpec) -> None:
    """Raises `UserError` naming the first part of a specification that no piece says."""
    _require(spec, "", set())


def _require(part: Part, path: str, seen: set[int]) -> None:
    if id(part) in seen:
        return
    seen.add(id(part))
    name = type(part).__name__
    if name not in KNOWN:
        raise _missing(path or "the model", getattr(part, "kind", name))
    for field in type(part).model_fields:
        value, here = getattr(part, field), f"{path}.{field}" if path else field
        if field == "kind":
            continue
        if field not in KNOWN[name] or (isinstance(value, str) and value not in WORDS.get(field, (value,))):
            raise _missing(here, value)
        for at, inner in _inner(value, here):
            _require(inner, at, seen)


def _inner(value: Any, path: str) -> list[tuple[str, Part]]:
    """The parts that a value is or holds."""
    if isinstance(value, Part):
        return [(path, value)]
    if isinstance(value, tuple):
        return [(f"{path}.{i}", each) for i, each in enumerate(value) if isinstance(each, Part)]
    return []


def _missing(where: str, got: object) -> UserError:
    return UserError(
        "no piece of an ejected file says this part of the specification",
        where=where,
        got=str(got),
        remedy="a piece beside the module of nn that computes it, and a word of it in weights/eject, would say it",
    )
