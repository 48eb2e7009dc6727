"""Uses of what a block is made of: norms, position encodings, attention, feed-forward networks."""

from collections.abc import Hashable
from typing import Any

from anyformer.spec.attention import Attention, Grouped, Latent
from anyformer.spec.ffn import Dense, FeedForward, Gated, MoE, SingleFeedForward
from anyformer.spec.norms import LayerNorm, NoNorm, Norm
from anyformer.spec.positions import (
    Alibi,
    LongRopeScaling,
    NoScaling,
    RelativeBias,
    Rope,
    Sinusoidal,
    YarnScaling,
)
from anyformer.weights.eject.uses import SAME, Call, Use

ACTIVATIONS: dict[str, Call] = {
    "relu": Call("F.relu(", ")"),
    "gelu": Call("F.gelu(", ")"),
    "gelu_tanh": Call("F.gelu(", ', approximate="tanh")'),
    "silu": Call("F.silu(", ")"),
    "relu2": Call("F.relu(", ").square()"),
    "quick_gelu": Call("quick_gelu(", ")"),
    "sigmoid": Call("torch.sigmoid(", ")"),
    "tanh": Call("torch.tanh(", ")"),
    "identity": SAME,
}
_SCALING_NUMBERS = {
    "factor": "ROPE_FACTOR",
    "original": "ROPE_ORIGINAL",
    "beta_fast": "ROPE_BETA_FAST",
    "beta_slow": "ROPE_BETA_SLOW",
    "low_freq_factor": "ROPE_LOW",
    "high_freq_factor": "ROPE_HIGH",
    "short": "ROPE_SHORT",
    "long": "ROPE_LONG",
}


def norm(spec: Norm, *, per_head: bool = False) -> Use | None:
    """A norm over the last dimension, with a weight for each head where `per_head`; None for none."""
    if isinstance(spec, NoNorm):
        return None
    numbers = {"NORM_EPS": spec.eps}
    flags: dict[str, Hashable] = {"weight": spec.weight, "bias": spec.bias, "offset": spec.offset}
    centred = isinstance(spec, LayerNorm)
    if centred and not per_head and not spec.offset and (spec.weight or not spec.bias):
        switches = "" if spec.bias else ", bias=False" if spec.weight else ", elementwise_affine=False"
        builtin = ("nn.LayerNorm", f", eps=NORM_EPS{switches})")
        return Use("", "nn.LayerNorm", {}, numbers, builtin=builtin)
    flags["shapeless"] = not (spec.weight or spec.bias)
    numbers["PER_HEAD"] = per_head
    hints = (("Plain", "Offset")[spec.offset], ("", "Weighted")[spec.weight] + ("", "Biased")[spec.bias])
    piece, title = ("nn/layers.py.jinja", "LayerNorm") if centred else ("nn/rms.py.jinja", "RMSNorm")
    return Use(piece, title, flags, numbers, hints=hints)


def give_norm(use: Use, place: str, spec: Norm, eps: str, *, per_head: bool = False) -> bool:
    """Lets a use call a norm at a placeholder, its epsilon under a name of its own; False where there is none."""
    part = norm(spec, per_head=per_head)
    if part is not None:
        use.give(place, part, NORM_EPS=eps, PER_HEAD=f"{eps}_PER_HEAD")
    return part is not None


def rope(spec: Rope, width: int) -> Use:
    """The rotation of heads of which `width` channels turn."""
    scaling = spec.scaling
    numbers: dict[str, Any] = {"D_ROPE": width, "ROPE_THETA": spec.theta}
    for field, name in _SCALING_NUMBERS.items():
        if hasattr(scaling, field):
            numbers[name] = getattr(scaling, field)
    factored = isinstance(scaling, YarnScaling | LongRopeScaling) and scaling.attention_factor != 1.0
    if factored:
        numbers["ROPE_ATTENTION_FACTOR"] = scaling.attention_factor  # type: ignore[union-attr]
    flags: dict[str, Hashable] = {
        "layout": spec.layout,
        "scaling": scaling.kind,
        "factored": factored,
        "truncate": isinstance(scaling, YarnScaling) and scaling.truncate,
    }
    kind = "plain" if isinstance(scaling, NoScaling) else scaling.kind
    return Use("nn/position.py.jinja", "rotate", flags, numbers, hints=(kind, spec.layout, f"{kind}_{spec.layout}"))


def _alibi(spec: Alibi, n_heads: int) -> Use:
    flags: dict[str, Hashable] = {"symmetric": spec.symmetric, "scaled": spec.scale != 1.0}
    numbers: dict[str, Any] = {"N_HEADS": n_heads, "ALIBI_MAX": spec.max_bias}
    if spec.scale != 1.0:
        numbers["ALIBI_SCALE"] = spec.scale
    hints = (("one_sided", "symmetric")[spec.symmetric], ("plain", "scaled")[spec.scale != 1.0])
    return Use("nn/attend/alibi.py.jinja", "alibi", flags, numbers, hints=hints)


def buckets(spec: RelativeBias, n_heads: int) -> Use:
    """A table of relative positions."""
    numbers = {"N_BUCKETS": spec.n_buckets, "N_HEADS": n_heads, "MAX_DISTANCE": spec.max_distance}
    return Use("nn/attend/buckets.py.jinja", "RelativeBias", {}, numbers | {"TWO_SIDED": spec.bidirectional})


def sinusoids(spec: Sinusoidal, width: int) -> Use:
    """What sinusoidal positions add to embeddings."""
    numbers: dict[str, Any] = {"D_EMBED": width, "SINUSOID_THETA": spec.theta, "SINUSOID_OFFSET": spec.offset}
    return Use("nn/sinusoids.py.jinja", "sinusoids", {"layout": spec.layout}, numbers, hints=(spec.layout,))


def _attend(spec: Attention, *, bias: bool, padded: bool) -> Use:
    scale = "given"
    width = spec.d_head
    if spec.scale == float(width**-0.5):
        scale = "default"
    elif spec.scale == 1.0:
        scale = "one"
    flags: dict[str, Hashable] = {
        "scale": scale,
        "softcap": spec.softcap is not None,
        "sink": spec.sink_logit,
    }
    numbers: dict[str, Any] = {
        "PADDED": padded,
        "GROUPED": spec.n_kv_heads != spec.n_heads,
        "BIAS": True if bias else None,
        "V_APART": spec.d_value != width,
        "DROPOUT": spec.dropout,
    }
    if scale == "given":
        numbers["SCALE"] = spec.scale
    if spec.softcap is not None:
        numbers["SOFTCAP"] = spec.softcap
    words = ("capped", "uncapped")[spec.softcap is None], ("with_sink", "plain")[not spec.sink_logit]
    return Use("nn/attend/attend.py.jinja", "attend", flags, numbers, hints=(*words, scale))


def _positions(use: Use, spec: Attention, width: int) -> bool:
    """Lets an attention call its position encoding; says whether it adds something to the scores."""
    position = spec.position
    use.flags |= {"rope": False, "by_length": False, "alibi": False, "own_bias": False}
    if isinstance(position, Rope):
        part = rope(position, width)
        part.flags["partial"] = isinstance(spec, Grouped) and width < spec.d_head
        part.flags["whole"] = isinstance(spec, Grouped) and width == spec.d_head
        if part.flags["whole"]:
            part.numbers["D_HEAD"] = part.numbers.pop("D_ROPE")  # all of a head turns
        use.give("ROTATE", part)
        use.flags |= {"rope": True, "by_length": position.by_length}
    elif isinstance(position, Alibi):
        use.give("ALIBI", _alibi(position, spec.n_heads))
        use.flags["alibi"] = True
    elif isinstance(position, RelativeBias):
        if not position.shared:
            use.give("RELATIVE_BIAS", buckets(position, spec.n_heads))
        use.flags["own_bias"] = not position.shared
        return True
    return isinstance(position, Alibi)


def _reads(use: Use, spec: Attention, stores: bool) -> tuple[str, ...]:
    """What an attention is given beside x."""
    flags = use.flags
    placed = flags["rope"] or flags["alibi"] or flags["own_bias"]
    shared = isinstance(spec.position, RelativeBias) and spec.position.shared
    keyed = stores and bool(flags["by_length"] or flags["alibi"] or flags["own_bias"])
    wanted = {"positions": placed, "keys": keyed, "mask": True, "bias": shared, "store": stores}
    return tuple(name for name, there in wanted.items() if there)


def attention(spec: Attention, d_model: int, *, stores: bool, padded: bool, side: str) -> Use:
    """Self-attention of a layer."""
    if isinstance(spec, Latent):
        return _latent(spec, d_model, stores=stores, padded=padded, side=side)
    use = _grouped(spec, "nn/attention.py.jinja", "Attention", d_model)
    width = spec.position.width(spec.d_head) if isinstance(spec.position, Rope) else 0
    bias = _positions(use, spec, width)
    use.flags |= {"stores": stores}
    use.flags["reads"] = _reads(use, spec, stores)
    use.give("ATTEND", _attend(spec, bias=bias, padded=padded), DROPOUT="ATTENTION_DROPOUT")
    use.hints = (side, "Grouped", _POSITIONS[spec.position.kind], f"{side}{_POSITIONS[spec.position.kind]}")
    return use


_POSITIONS = {"rope": "Rotary", "alibi": "Alibi", "relative": "Relative", "none": "Plain"}


def cross_attention(spec: Grouped, d_model: int, d_source: int) -> Use:
    """Attention over an encoder's output."""
    use = _grouped(spec, "nn/cross.py.jinja", "CrossAttention", d_model)
    use.flags["d_source"] = d_source != d_model
    if d_source != d_model:
        use.numbers["D_SOURCE"] = d_source
    use.flags["reads"] = ("memory", "source_mask", "store")
    use.give("ATTEND", _attend(spec, bias=False, padded=True), DROPOUT="ATTENTION_DROPOUT")
    return use


def _grouped(spec: Grouped, piece: str, title: str, d_model: int) -> Use:
    g_is_h, v_is_d = spec.n_kv_heads == spec.n_heads, spec.d_value == spec.d_head
    numbers: dict[str, Any] = {"D_MODEL": d_model, "N_HEADS": spec.n_heads, "D_HEAD": spec.d_head}
    if not g_is_h:
        numbers["N_KV_HEADS"] = spec.n_kv_heads
    if not v_is_d:
        numbers["D_VALUE"] = spec.d_value
    numbers["OUT_DROPOUT"] = spec.out_dropout
    if spec.clip is not None:
        numbers["CLIP_LIMIT"] = spec.clip
    use = Use(piece, title, {}, numbers)
    qk = spec.qk_norm
    normed = qk is not None and not isinstance(qk.norm, NoNorm)
    use.flags |= {
        "grouped": not g_is_h,
        "d_value": not v_is_d,
        "qkv_bias": spec.qkv_bias,
        "out_bias": spec.out_bias,
        "clip": spec.clip is not None,
        "sink": spec.sink_logit,
        "qk_norm": normed,
        "over": qk.over if qk is not None and normed else "",
        "order": qk.order if qk is not None and normed else "",
        "per_head": normed and qk is not None and qk.weights == "per_head",
    }
    if qk is not None and normed:
        per_head = qk.weights == "per_head"
        give_norm(use, "Q_NORM", qk.norm, "QK_NORM_EPS", per_head=per_head)
        give_norm(use, "K_NORM", qk.norm, "QK_NORM_EPS", per_head=per_head)
    return use


def _latent(spec: Latent, d_model: int, *, stores: bool, padded: bool, side: str) -> Use:
    numbers: dict[str, Any] = {
        "D_MODEL": d_model,
        "N_HEADS": spec.n_heads,
        "KV_RANK": spec.kv_rank,
        "D_NOPE": spec.d_nope,
        "D_ROPE": spec.d_rope,
        "D_VALUE": spec.d_value,
        "OUT_DROPOUT": spec.out_dropout,
    }
    if spec.q_rank is not None:
        numbers["Q_RANK"] = spec.q_rank
    use = Use("nn/latent.py.jinja", "LatentAttention", {}, numbers)
    bias = _positions(use, spec, spec.d_rope)
    use.flags |= {
        "stores": stores,
        "q_rank": spec.q_rank is not None,
        "turning": spec.d_rope > 0,
        "latent_bias": spec.bias,
        "out_bias": spec.out_bias,
        "sink": spec.sink_logit,
        "norm": give_norm(use, "LATENT_NORM", spec.norm, "LATENT_NORM_EPS"),
    }
    use.flags["reads"] = _reads(use, spec, stores)
    use.give("ATTEND", _attend(spec, bias=bias, padded=padded), DROPOUT="ATTENTION_DROPOUT")
    use.hints = (side, ("Direct", "Compressed")[spec.q_rank is not None], _POSITIONS[spec.position.kind])
    return use


def feed_forward(spec: FeedForward, d_model: int, side: str) -> Use:
    """A layer's feed-forward network or mixture of experts."""
    if isinstance(spec, MoE):
        return _mixture(spec, d_model, side)
    numbers: dict[str, Any] = {
        "D_MODEL": d_model,
        "D_FF": spec.d_ff,
        "FFN_DROPOUT": spec.dropout,
        "FFN_OUT_DROPOUT": spec.out_dropout,
    }
    use = Use("nn/ffn.py.jinja", "FeedForward", _inner(spec, numbers), numbers)
    word = spec.activation.title().replace("_", "")
    use.hints = (("Dense", "Gated")[isinstance(spec, Gated)], word, side)
    return use


def _inner(spec: SingleFeedForward, numbers: dict[str, Any]) -> dict[str, Hashable]:
    """The flags of a feed-forward network, whose numbers are added."""
    limit = spec.limit if isinstance(spec, Gated) else None
    offset = spec.up_offset if isinstance(spec, Gated) else 0.0
    if limit is not None:
        numbers["GATE_LIMIT"] = limit
    if offset:
        numbers["UP_OFFSET"] = offset
    return {
        "gated": not isinstance(spec, Dense),
        "activation": spec.activation,
        "bias": spec.bias,
        "limit": limit is not None,
        "offset": bool(offset),
    }


def _mixture(spec: MoE, d_model: int, side: str) -> Use:
    expert = spec.expert
    numbers: dict[str, Any] = {
        "D_MODEL": d_model,
        "N_EXPERTS": spec.n_experts,
        "TOP_K": spec.top_k,
        "D_EXPERT": expert.d_ff,
        "EXPERT_DROPOUT": expert.dropout,
        "EXPERT_OUT_DROPOUT": expert.out_dropout,
    }
    use = Use("nn/moe.py.jinja", "MixtureOfExperts", _inner(expert, numbers), numbers)
    if spec.scale != 1.0:
        numbers["EXPERT_SCALE"] = spec.scale
    if spec.groups is not None:
        numbers |= {"N_GROUPS": spec.groups.n_groups, "TOP_GROUPS": spec.groups.top_groups}
    use.flags |= {
        "scoring": spec.scoring,
        "normalise": spec.normalise,
        "scaled": spec.scale != 1.0,
        "router_bias": spec.router_bias,
        "choice_bias": spec.choice_bias,
        "groups": "" if spec.groups is None else spec.groups.score,
        "shared": spec.shared is not None,
        "shared_gate": spec.shared_gate,
    }
    if spec.shared is not None:
        shared = feed_forward(spec.shared, d_model, side)
        use.give("SHARED", shared, **{name: f"SHARED_{name}" for name in shared.numbers if name != "D_MODEL"})
    use.hints = (side, spec.scoring.title())
    return use
