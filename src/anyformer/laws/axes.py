"""The axes of the space: for each layer of a specification the level of every axis, by name."""

from anyformer.spec.attention import Attention, Grouped, Latent
from anyformer.spec.ffn import FeedForward, MoE
from anyformer.spec.norms import NoNorm, Norm
from anyformer.spec.parts import BlockSpec, BranchNorms, LanguageHead, ModelSpec, Parallel, SequenceHead, StackSpec
from anyformer.spec.positions import Alibi, RelativeBias, Rope

Point = dict[str, str]
"""A level for each axis; "-" where the layer has no place for one."""

NOT_HERE = "-"
_SCORES = ("n_kv_heads", "d_head", "d_value", "clip", "qkv_bias", "qk_norm", "qk_norm.order", "qk_norm.norm")
_LATENT = ("q_rank", "latent.norm", "latent.bias")
_ROPE = ("rope.layout", "rope.width", "rope.scaling")
_BIAS = ("alibi.scale", "sides", "table")
_MIXTURE = (
    "experts.scale",
    "scoring",
    "normalise",
    "top_k",
    "groups",
    "shared",
    "choice_bias",
    "router_bias",
    "balance",
)
_HEAD = ("head.bias", "head.transform", "head.softcap", "head.scale")


def _yes(flag: object) -> str:
    return "yes" if flag else "no"


def _given(value: object) -> str:
    return _yes(value is not None)


def _norm(norm: Norm) -> str:
    return norm.kind if isinstance(norm, NoNorm) else f"{norm.kind}{'' if norm.weight else ', no weight'}"


def _heads(n_heads: int, n_kv_heads: int) -> str:
    if n_kv_heads == n_heads:
        return "one" if n_heads == 1 else "all"
    return "one for all" if n_kv_heads == 1 else "groups"


def _position(attention: Attention) -> Point:
    position = attention.position
    levels = {"position": position.kind, **dict.fromkeys(_ROPE, NOT_HERE), **dict.fromkeys(_BIAS, NOT_HERE)}
    if isinstance(position, Rope):
        width = attention.d_rope if isinstance(attention, Latent) else position.width(attention.d_head)
        levels["rope.layout"] = position.layout
        levels["rope.width"] = "all" if width == attention.d_head else "part"
        levels["rope.scaling"] = position.scaling.kind
    elif isinstance(position, Alibi):
        levels["alibi.scale"] = _yes(position.scale != 1)
        levels["sides"] = "both" if position.symmetric else "one"
    elif isinstance(position, RelativeBias):
        levels["sides"] = "both" if position.bidirectional else "one"
        levels["table"] = "shared" if position.shared else "own"
    return levels


def _grouped(attention: Grouped, d_model: int) -> Point:
    norm = attention.qk_norm
    levels = {
        "n_kv_heads": _heads(attention.n_heads, attention.n_kv_heads),
        "d_head": "follows" if attention.d_head * attention.n_heads == d_model else "free",
        "d_value": "same" if attention.d_value == attention.d_head else "other",
        "clip": _given(attention.clip),
        "qkv_bias": _yes(attention.qkv_bias),
        "qk_norm": "none" if norm is None else f"{norm.over}, {norm.weights}",
        "qk_norm.order": NOT_HERE if norm is None else norm.order,
        "qk_norm.norm": NOT_HERE if norm is None else _norm(norm.norm),
    }
    assert set(levels) == set(_SCORES)
    return levels


def _attention(attention: Attention, d_model: int) -> Point:
    mask = attention.mask
    levels = {
        "attention": attention.kind,
        "mask": mask.kind,
        "window": "none" if mask.window is None else "with sinks" if mask.sinks else "yes",
        "scale": _yes(abs(attention.scale - attention.d_head**-0.5) > 1e-9),
        "softcap": _given(attention.softcap),
        "sink_logit": _yes(attention.sink_logit),
        "out_bias": _yes(attention.out_bias),
        "dropout": _yes(attention.dropout),
        **_position(attention),
    }
    if isinstance(attention, Grouped):
        return {**levels, **_grouped(attention, d_model), **dict.fromkeys(_LATENT, NOT_HERE)}
    own = {
        "q_rank": _given(attention.q_rank),
        "latent.norm": _norm(attention.norm),
        "latent.bias": _yes(attention.bias),
    }
    return {**levels, **dict.fromkeys(_SCORES, NOT_HERE), **own}


def _cross(cross: Grouped | None) -> Point:
    if cross is None:
        return {"cross": "none", "cross.qk_norm": NOT_HERE, "cross.scores": NOT_HERE}
    scores = "softcap" if cross.softcap else "sink_logit" if cross.sink_logit else "plain"
    return {
        "cross": _heads(cross.n_heads, cross.n_kv_heads),
        "cross.qk_norm": _given(cross.qk_norm),
        "cross.scores": scores,
    }


def _balance(ffn: MoE) -> str:
    losses = [f"over {ffn.balance_over}"] if ffn.balance_loss else []
    losses += ["rate"] if ffn.bias_rate else []
    return " and ".join(losses) or "none"


def _feed_forward(ffn: FeedForward) -> Point:
    inner = ffn.expert if isinstance(ffn, MoE) else ffn
    levels = {
        "ffn": ffn.kind if inner is ffn else f"{ffn.kind} of {inner.kind}",
        "activation": inner.activation,
        "ffn.bias": _yes(inner.bias),
        "limit": _given(getattr(inner, "limit", None)) if inner.kind == "gated" else NOT_HERE,
        "up_offset": _yes(getattr(inner, "up_offset", 0.0)) if inner.kind == "gated" else NOT_HERE,
        **dict.fromkeys(_MIXTURE, NOT_HERE),
    }
    if isinstance(ffn, MoE):
        levels |= {
            "experts.scale": _yes(ffn.scale != 1),
            "scoring": ffn.scoring,
            "normalise": _yes(ffn.normalise),
            "top_k": "one" if ffn.top_k == 1 else "some",
            "groups": "none" if ffn.groups is None else ffn.groups.score,
            "shared": "none" if ffn.shared is None else "gated" if ffn.shared_gate else "yes",
            "choice_bias": _yes(ffn.choice_bias),
            "router_bias": _yes(ffn.router_bias),
            "balance": _balance(ffn),
        }
    return levels


def _branch(norms: BranchNorms) -> tuple[str, list[Norm]]:
    slots = {name: getattr(norms, name) for name in ("before", "after", "residual")}
    held = {name: norm for name, norm in slots.items() if norm.kind != "none"}
    return " + ".join(held) or "none", list(held.values())


def _norms(block: BlockSpec) -> Point:
    attention, some = _branch(block.norms.attention)
    ffn, more = _branch(block.norms.ffn)
    norm = (some + more)[0] if some + more else NoNorm()
    branches = (block.norms.attention, block.norms.ffn)
    levels = {
        "norms.attention": attention,
        "norms.ffn": ffn,
        "norm": _norm(norm),
        "norm.bias": NOT_HERE if isinstance(norm, NoNorm) else _yes(norm.bias),
        "norm.offset": NOT_HERE if isinstance(norm, NoNorm) else str(norm.offset),
        "alpha": _yes(any(branch.alpha != 1 for branch in branches)),
        "beta": _yes(any(branch.beta != 1 for branch in branches)),
    }
    if isinstance(block.wiring, Parallel):
        return {**levels, "wiring": "parallel, one norm" if block.wiring.shared_norm else "parallel"}
    return {**levels, "wiring": "serial"}


def _embed(stack: StackSpec) -> Point:
    embed = stack.embed
    position = embed.position
    return {
        "embed.position": getattr(position, "layout", position.kind),
        "embed.offset": _yes(getattr(position, "offset", 0)),
        "embed.scale": _yes(embed.scale != 1),
        "embed.norm": _norm(embed.norm),
        "embed.types": _yes(embed.types),
        "embed.factor": _given(embed.factor),
        "final_norm": _norm(stack.final_norm),
        "layers": "one" if stack.n_layers == 1 else "alike" if len(set(stack.blocks)) == 1 else "varied",
        "parameters": "own" if stack.owners is None else "shared",
    }


def _whole(spec: ModelSpec) -> Point:
    head = spec.head
    levels = {
        "architecture": "-".join(spec.stacks),
        "head": "none"
        if head is None
        else f"{head.kind}, {head.pool}"
        if isinstance(head, SequenceHead)
        else head.kind,
        **dict.fromkeys(_HEAD, NOT_HERE),
        "pooler": _given(spec.pooler),
        "ties": ", ".join(sorted(spec.ties)) or "none",
    }
    if isinstance(head, LanguageHead):
        levels["head.bias"] = _yes(head.bias)
        levels["head.transform"] = _given(head.transform)
        levels["head.softcap"] = _given(head.softcap)
        levels["head.scale"] = _yes(head.scale != 1)
    return levels


def axes(spec: ModelSpec, stack: str, layer: int) -> Point:
    """The level of every axis for one layer of a stack: of the layer, its stack and the whole model."""
    made = spec.stacks[stack]
    block = made.blocks[layer]
    return {
        **_whole(spec),
        "stack": stack,
        **_embed(made),
        **_attention(block.attention, made.d_model),
        **_cross(block.cross),
        **_feed_forward(block.ffn),
        **_norms(block),
    }


def points(spec: ModelSpec) -> list[Point]:
    """The levels of every layer that differs from the others of its stack."""
    return [
        axes(spec, name, stack.blocks.index(block))
        for name, stack in spec.stacks.items()
        for block in dict.fromkeys(stack.blocks)
    ]
