"""The axes of a layer: norms, positions, masks, attention, feed-forwards, one strategy each."""

from hypothesis import strategies as st

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "relu2")
MORE_ACTIVATIONS = (*ACTIVATIONS, "quick_gelu", "sigmoid", "tanh", "identity")
BRANCHES = ("attention", "cross", "ffn")


def optional(draw, table, key, strategy):
    """Sets a key, or leaves it out for the default to hold."""
    if draw(st.booleans()):
        table[key] = draw(strategy)


@st.composite
def norms(draw, *, none=False, wide=False):
    kind = draw(st.sampled_from(["rms", "layer", "none"] if none else ["rms", "layer"]))
    if kind == "none" or draw(st.integers(0, 2)) == 0:
        return kind
    table = {"kind": kind}
    optional(draw, table, "eps", st.sampled_from([1e-2, 1e-6] if kind == "rms" else [1e-3, 1e-5]))
    optional(draw, table, "weight", st.booleans())
    if kind == "layer" or wide:
        optional(draw, table, "bias", st.booleans())
    if wide and table.get("weight", True):
        optional(draw, table, "offset", st.sampled_from([0, 1]))
    return table


@st.composite
def scalings(draw, width):
    """Of rotary frequencies, for a number of channels that turn; short texts exceed `original`."""
    kinds = ["none", "linear", "llama3", "longrope", *(["ntk", "dynamic", "yarn"] if width >= 4 else [])]
    kind = draw(st.sampled_from(kinds))
    table = {"kind": kind}
    if kind not in ("none", "longrope"):
        table["factor"] = draw(st.sampled_from([1.0, 2.5, 4]))
    if kind in ("dynamic", "yarn", "llama3", "longrope"):
        table["original"] = draw(st.sampled_from([5, 8]))
    if kind == "yarn":
        optional(draw, table, "beta_fast", st.sampled_from([2.0, 32.0]))
        optional(draw, table, "beta_slow", st.sampled_from([0.5, 1.0]))
        optional(draw, table, "truncate", st.booleans())
    if kind == "llama3":
        optional(draw, table, "high_freq_factor", st.sampled_from([2.0, 4.0]))
    if kind == "longrope":
        for name in ("short", "long"):
            table[name] = draw(st.lists(st.sampled_from([1.0, 1.5, 4.0]), min_size=width // 2, max_size=width // 2))
    if kind in ("yarn", "longrope"):
        optional(draw, table, "attention_factor", st.sampled_from([1.0, 1.2]))
    return kind if kind == "none" else table


@st.composite
def ropes(draw, d_head, *, wide=False, whole=False):
    """Rotary with an even number of turning channels, all of them with `whole`."""
    rope = {"kind": "rope"}
    width = d_head if whole else draw(st.integers(1, d_head // 2)) * 2
    if width < d_head:
        rope["fraction"] = width / d_head
    optional(draw, rope, "theta", st.sampled_from([100.0, 500000.0]))
    optional(draw, rope, "layout", st.sampled_from(["half", "interleaved"]))
    if wide:
        optional(draw, rope, "scaling", scalings(width))
    return rope


@st.composite
def alibis(draw, mask):
    table = {"kind": "alibi"}
    optional(draw, table, "max_bias", st.sampled_from([8.0, 3.0]))
    optional(draw, table, "scale", st.sampled_from([0.5, 2.0]))
    optional(draw, table, "symmetric", st.booleans() if mask == "causal" else st.just(True))
    return table


@st.composite
def relatives(draw, mask):
    """Few buckets that reach not far, so that short texts fill the logarithmic ones."""
    table = {"kind": "relative"}
    optional(draw, table, "n_buckets", st.sampled_from([4, 8, 10]))
    if table.get("n_buckets") != 10 or draw(st.booleans()):
        table["max_distance"] = draw(st.sampled_from([9, 20] if "n_buckets" in table else [20, 128]))
    optional(draw, table, "shared", st.booleans())
    optional(draw, table, "bidirectional", st.booleans() if mask == "causal" else st.just(True))
    return table


@st.composite
def positions(draw, d_head, *, wide=False, mask="causal"):
    """Of attention: none, rotary, or a bias on the scores."""
    kinds = ["none", *(["rope"] * 3 if d_head >= 2 else []), *(["alibi", "relative"] if wide else [])]
    match draw(st.sampled_from(kinds)):
        case "rope":
            return draw(ropes(d_head, wide=wide))
        case "alibi":
            return draw(alibis(mask))
        case "relative":
            return draw(relatives(mask))
    return {"kind": "none"}


@st.composite
def qk_norms(draw, *, wide=False):
    if draw(st.integers(0, 3)) == 0:
        return draw(st.booleans())
    table = {"over": draw(st.sampled_from(["projection", "head"]))}
    if wide and table["over"] == "head":
        optional(draw, table, "weights", st.sampled_from(["shared", "per_head"]))
    optional(draw, table, "order", st.sampled_from(["before", "after"]))
    optional(draw, table, "norm", norms(none=True, wide=wide))
    return table


rates = st.sampled_from([0.0, 0.1, 0.5])


@st.composite
def masks(draw, side):
    """What a token sees, with windows that short texts exceed."""
    kind = draw(st.sampled_from(["bidirectional"] if side == "encoder" else ["causal", "causal", "prefix"]))
    table = {"kind": kind}
    if draw(st.booleans()):
        table["window"] = draw(st.sampled_from([1, 3, 5]))
        optional(draw, table, "sinks", st.sampled_from([0, 1, 2]))
    return kind if len(table) == 1 and draw(st.booleans()) else table


def kind_of(word_or_table):
    return word_or_table if isinstance(word_or_table, str) else word_or_table["kind"]


@st.composite
def scores(draw, side):
    """What every kind of attention may do with its scores."""
    table = {}
    optional(draw, table, "mask", masks(side))
    optional(draw, table, "softcap", st.sampled_from([2.0, 30.0]))
    optional(draw, table, "sink_logit", st.booleans())
    optional(draw, table, "scale", st.sampled_from([1.0, 0.3]))
    return table


def default_mask(side):
    return "bidirectional" if side == "encoder" else "causal"


@st.composite
def groupeds(draw, d_model, *, wide=False, side="decoder"):
    n_heads = draw(st.sampled_from([1, 2, 3, 5, 6]))
    table = {"n_heads": n_heads}
    follows = d_model % n_heads == 0 and draw(st.booleans())
    d_head = d_model // n_heads if follows else draw(st.sampled_from([2, 3, 4, 6, 7]))
    if not follows:
        table["d_head"] = d_head
    if wide:
        table |= draw(scores(side))
        optional(draw, table, "clip", st.sampled_from([0.5, 3.0]))
        optional(draw, table, "kind", st.just("grouped"))
    table["position"] = draw(positions(d_head, wide=wide, mask=kind_of(table.get("mask", default_mask(side)))))
    optional(draw, table, "n_kv_heads", st.sampled_from([g for g in range(1, n_heads + 1) if n_heads % g == 0]))
    optional(draw, table, "d_value", st.sampled_from([1, 3, 4, 5]))
    optional(draw, table, "qk_norm", qk_norms(wide=wide))
    for key in ("qkv_bias", "out_bias"):
        optional(draw, table, key, st.booleans())
    for key in ("dropout", "out_dropout"):
        optional(draw, table, key, rates)
    return table


@st.composite
def latents(draw, d_model, *, side="decoder"):
    table = {"kind": "latent", "n_heads": draw(st.sampled_from([1, 2, 3, 5])), "kv_rank": draw(st.sampled_from([3, 8]))}
    table |= draw(scores(side))
    optional(draw, table, "q_rank", st.sampled_from([5, 6]))
    if d_model % table["n_heads"] or draw(st.booleans()):
        table["d_nope"] = draw(st.sampled_from([1, 3, 4]))
    optional(draw, table, "d_value", st.sampled_from([2, 5]))
    optional(draw, table, "norm", norms(none=True, wide=True))
    if draw(st.integers(0, 2)):
        table["d_rope"] = draw(st.sampled_from([2, 4]))
        table["position"] = draw(ropes(table["d_rope"], wide=True, whole=True))
    else:
        table["position"] = draw(positions(1, wide=True, mask=kind_of(table.get("mask", default_mask(side)))))
    for key in ("bias", "out_bias"):
        optional(draw, table, key, st.booleans())
    for key in ("dropout", "out_dropout"):
        optional(draw, table, key, rates)
    return table


def attentions(d_model, *, wide=False, side="decoder"):
    several = groupeds(d_model, wide=wide, side=side)
    return several if not wide else st.one_of(several, several, latents(d_model, side=side))


_DEFAULTS = {
    "rope": {"theta": 10000.0, "fraction": 1.0, "layout": "half", "scaling": "none"},
    "alibi": {"max_bias": 8.0, "scale": 1.0, "symmetric": True},
    "relative": {"n_buckets": 32, "max_distance": 128, "shared": True, "bidirectional": True},
    "none": {},
}


def explicit_qk_norm(value):
    """With every key said, so that nothing remains of what it is laid on."""
    if isinstance(value, bool):
        return value
    return {"weights": "shared", **value, "norm": explicit_norm(value.get("norm", "rms"))}


def explicit_norm(norm):
    table = {"kind": norm} if isinstance(norm, str) else norm
    return table if table["kind"] == "none" else {"weight": True, "offset": 0, **table}


def explicit_attention(table, side):
    """An attention with every key said that what it is laid on might contradict."""
    table = {"kind": "grouped", "scale": False, "softcap": False, **table}
    mask = table.get("mask", default_mask(side))
    mask = {"kind": mask} if isinstance(mask, str) else mask
    table["mask"] = {"window": False, "sinks": 0, **mask}
    table["position"] = {**_DEFAULTS[kind_of(table["position"])], **table["position"]}
    if table["kind"] == "latent":
        return {"d_nope": 4, "d_rope": 0, **table, "norm": explicit_norm(table.get("norm", "rms"))}
    return {
        "n_kv_heads": 1,
        "d_head": 4,
        "clip": False,
        **table,
        "qk_norm": explicit_qk_norm(table.get("qk_norm", False)),
    }


@st.composite
def crosses(draw, attention):
    """Cross-attention: what the layer's attention gives, or other heads."""
    table = {}
    if attention.get("kind") == "latent" or draw(st.booleans()):
        n_heads = draw(st.sampled_from([1, 2, 3, 6]))
        kv_heads = draw(st.sampled_from([g for g in range(1, n_heads + 1) if n_heads % g == 0]))
        table = {"n_heads": n_heads, "n_kv_heads": kv_heads, "d_head": draw(st.sampled_from([2, 3, 5]))}
        optional(draw, table, "d_value", st.sampled_from([1, 4]))
    optional(draw, table, "sink_logit", st.booleans())
    optional(draw, table, "softcap", st.sampled_from([2.0, 30.0]))
    optional(draw, table, "qk_norm", qk_norms(wide=True).map(explicit_qk_norm))
    optional(draw, table, "qkv_bias", st.booleans())
    return table


@st.composite
def singles(draw, *, wide=False):
    """A dense or gated feed-forward."""
    if draw(st.integers(0, 3)) == 0:
        return draw(st.sampled_from(["swiglu", "geglu", "reglu"]))
    kind = draw(st.sampled_from(["dense", "gated", "swiglu", "geglu", "reglu"]))
    table = {"kind": kind}
    if kind in ("dense", "gated"):
        table["activation"] = draw(st.sampled_from(MORE_ACTIVATIONS if wide else ACTIVATIONS))
    optional(draw, table, "d_ff", st.sampled_from([5, 16, 27]))
    if kind != "dense":
        table["multiple_of"] = draw(st.sampled_from([1, 8, 7]))
    if wide and kind != "dense":
        optional(draw, table, "limit", st.sampled_from([0.5, 7.0]))
        optional(draw, table, "up_offset", st.sampled_from([0.0, 1.0]))
    optional(draw, table, "bias", st.booleans())
    optional(draw, table, "dropout", rates)
    optional(draw, table, "out_dropout", rates)
    return table


@st.composite
def shared_experts(draw):
    """What lays on the expert: a multiple, other keys, or another kind."""
    return draw(st.one_of(st.sampled_from([1, 2]), st.fixed_dictionaries({"d_ff": st.just(7)}), singles(wide=True)))


@st.composite
def moes(draw):
    n_experts = draw(st.sampled_from([3, 4, 6]))
    table = {"kind": "moe", "n_experts": n_experts, "expert": draw(singles(wide=True))}
    most = n_experts
    if n_experts != 3 and draw(st.booleans()):
        n_groups = draw(st.sampled_from([g for g in range(1, n_experts + 1) if n_experts % g == 0]))
        top_groups = draw(st.integers(1, n_groups))
        table["groups"] = {"n_groups": n_groups, "top_groups": top_groups}
        most = n_experts // n_groups * top_groups
        if n_groups < n_experts:
            optional(draw, table["groups"], "score", st.sampled_from(["max", "top2"]))
    table["top_k"] = draw(st.integers(1, min(most, 3)))
    optional(draw, table, "shared", shared_experts())
    optional(draw, table, "scoring", st.sampled_from(["softmax", "sigmoid"]))
    for key in ("normalise", "router_bias", "choice_bias"):
        optional(draw, table, key, st.booleans())
    if "shared" in table:
        optional(draw, table, "shared_gate", st.booleans())
    optional(draw, table, "scale", st.sampled_from([1.0, 2.5]))
    optional(draw, table, "balance_loss", st.sampled_from([0.0, 0.01]))
    optional(draw, table, "balance_over", st.sampled_from(["sequence", "batch"]))
    optional(draw, table, "z_loss", st.sampled_from([0.0, 0.001]))
    if table.get("choice_bias"):
        optional(draw, table, "bias_rate", st.sampled_from([0.0, 0.01]))
    return table


def ffns(*, wide=False):
    single = singles(wide=wide)
    return single if not wide else st.one_of(single, moes())


multipliers = st.sampled_from([0.5, 1.0, 1.5])


@st.composite
def slots(draw, wiring, *, wide=False, cross=False):
    """Every norm slot by itself, in a way that the wiring allows."""
    names = ["before", "after"] if wiring != "serial" else ["before", "after", "residual"]
    branches = {
        branch: {name: draw(norms(none=True, wide=wide)) for name in names if draw(st.booleans())}
        for branch in BRANCHES
        if branch != "cross" or cross
    }
    if wiring == "shared":
        branches["ffn"].pop("before", None)
        if "before" in branches["attention"]:
            branches["ffn"]["before"] = branches["attention"]["before"]
    if wide:
        for branch in branches.values():
            optional(draw, branch, "beta", multipliers)
            if wiring == "serial":
                optional(draw, branch, "alpha", multipliers)
    return branches
