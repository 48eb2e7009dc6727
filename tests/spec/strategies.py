"""Recipes over every axis of the specification, at sizes that hide nothing.

Widths that are no powers of two and often odd, heads in threes and fives, key/value heads of every divisor, heads that
are not d_model / n_heads wide, values of another width than keys, odd numbers of layers.
"""

from hypothesis import strategies as st

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "relu2")
PLACEMENTS = ("pre", "post", "sandwich", "output")


def optional(draw, table, key, strategy):
    """Sets a key, or leaves it out for the default to hold."""
    if draw(st.booleans()):
        table[key] = draw(strategy)


def norms(*, none=False):
    layer = st.fixed_dictionaries(
        {"kind": st.just("layer")},
        optional={"eps": st.sampled_from([1e-3, 1e-5]), "weight": st.booleans(), "bias": st.booleans()},
    )
    rms = st.fixed_dictionaries(
        {"kind": st.just("rms")}, optional={"eps": st.sampled_from([1e-2, 1e-6]), "weight": st.booleans()}
    )
    words = ["rms", "layer", "none"] if none else ["rms", "layer"]
    return st.one_of(layer, rms, st.sampled_from(words))


@st.composite
def positions(draw, d_head):
    """Of attention: none, or rotary with an even number of turning channels."""
    if d_head < 2 or draw(st.integers(0, 3)) == 0:
        return {"kind": "none"}
    rope = {"kind": "rope"}
    width = draw(st.integers(1, d_head // 2)) * 2
    if width < d_head:
        rope["fraction"] = width / d_head
    optional(draw, rope, "theta", st.sampled_from([100.0, 500000.0]))
    optional(draw, rope, "layout", st.sampled_from(["half", "interleaved"]))
    return rope


@st.composite
def qk_norms(draw):
    if draw(st.integers(0, 3)) == 0:
        return draw(st.booleans())
    table = {"over": draw(st.sampled_from(["projection", "head"]))}
    optional(draw, table, "order", st.sampled_from(["before", "after"]))
    optional(draw, table, "norm", norms(none=True))
    return table


rates = st.sampled_from([0.0, 0.1, 0.5])


@st.composite
def attentions(draw, d_model):
    n_heads = draw(st.sampled_from([1, 2, 3, 5, 6]))
    table = {"n_heads": n_heads}
    follows = d_model % n_heads == 0 and draw(st.booleans())
    d_head = d_model // n_heads if follows else draw(st.sampled_from([2, 3, 4, 6, 7]))
    if not follows:
        table["d_head"] = d_head
    table["position"] = draw(positions(d_head))
    optional(draw, table, "n_kv_heads", st.sampled_from([g for g in range(1, n_heads + 1) if n_heads % g == 0]))
    optional(draw, table, "d_value", st.sampled_from([1, 3, 4, 5]))
    optional(draw, table, "qk_norm", qk_norms())
    for key in ("qkv_bias", "out_bias"):
        optional(draw, table, key, st.booleans())
    for key in ("dropout", "out_dropout"):
        optional(draw, table, key, rates)
    return table


@st.composite
def ffns(draw):
    if draw(st.integers(0, 3)) == 0:
        return draw(st.sampled_from(["swiglu", "geglu", "reglu"]))
    kind = draw(st.sampled_from(["dense", "gated", "swiglu", "geglu", "reglu"]))
    table = {"kind": kind}
    if kind in ("dense", "gated"):
        table["activation"] = draw(st.sampled_from(ACTIVATIONS))
    optional(draw, table, "d_ff", st.sampled_from([5, 16, 27]))
    table["multiple_of"] = draw(st.sampled_from([1, 8, 7]))
    optional(draw, table, "bias", st.booleans())
    optional(draw, table, "dropout", rates)
    optional(draw, table, "out_dropout", rates)
    return table


@st.composite
def slots(draw, wiring):
    """Every norm slot by itself, in a way that the wiring allows."""
    names = ["before", "after"] if wiring != "serial" else ["before", "after", "residual"]
    branches = {
        branch: {name: draw(norms(none=True)) for name in names if draw(st.booleans())}
        for branch in ("attention", "ffn")
    }
    if wiring == "shared":
        branches["ffn"].pop("before", None)
        if "before" in branches["attention"]:
            branches["ffn"]["before"] = branches["attention"]["before"]
    return branches


WIRINGS = {"serial": "serial", "shared": "parallel", "two": {"kind": "parallel", "shared_norm": False}}


@st.composite
def differences(draw, d_model, placement):
    """What an entry of a pattern may change."""
    entry = {}
    kind = draw(st.sampled_from(["none", "attention", "position", "heads", "ffn", "placement", "qk_norm"]))
    if kind == "attention":
        entry["attention"] = draw(attentions(d_model))
        entry["attention"].setdefault("n_kv_heads", 1)
        entry["attention"].setdefault("d_head", 4)
        position = draw(positions(entry["attention"]["d_head"]))
        if "fraction" not in position and "rope" in position.values():
            position["fraction"] = 1.0
        entry["attention"]["position"] = position
    elif kind == "position":
        entry["attention"] = {"position": "none"}
    elif kind == "heads":
        entry["attention"] = {"n_kv_heads": 1}
    elif kind == "ffn":
        entry["ffn"] = draw(ffns())
    elif kind == "placement" and placement not in (None, "post"):
        entry["placement"] = draw(st.sampled_from(["pre", "sandwich"]))
    elif kind == "qk_norm":
        entry["attention"] = {"qk_norm": draw(st.one_of(st.just(False), qk_norms()))}
    return entry


@st.composite
def recipes(draw, *, head=None, dropout=True, max_layers=5):
    """A legal recipe.

    Args:
        head: True for a language head always, None for either.
        dropout: False for rates of zero everywhere.
        max_layers: the deepest.
    """
    d_model = draw(st.sampled_from([6, 9, 10, 15, 20]))
    n_layers = draw(st.integers(1, max_layers))
    wiring = draw(st.sampled_from(list(WIRINGS)))
    recipe = {
        "vocab_size": draw(st.sampled_from([7, 19])),
        "d_model": d_model,
        "n_layers": n_layers,
        "attention": draw(attentions(d_model)),
        "ffn": draw(ffns()),
    }
    if draw(st.booleans()):
        recipe["wiring"] = WIRINGS[wiring]
    else:
        wiring = "serial"
    placement = None
    if draw(st.integers(0, 2)) == 0:
        recipe["norms"] = draw(slots(wiring))
    else:
        placement = draw(st.sampled_from([p for p in PLACEMENTS if p != "post" or wiring == "serial"]))
        recipe["norm"] = draw(norms())
        recipe["placement"] = placement
    optional(draw, recipe, "final_norm", norms(none=True))
    optional(draw, recipe, "bias", st.booleans())
    if dropout:
        optional(draw, recipe, "dropout", rates)
    embed = {}
    kinds = ["none", "learned", *(["sinusoidal"] if d_model % 2 == 0 else [])]
    kind = draw(st.sampled_from(kinds))
    embed["position"] = kind
    if kind == "sinusoidal" and draw(st.booleans()):
        embed["position"] = {"kind": kind, "layout": draw(st.sampled_from(["interleaved", "halves"])), "theta": 50.0}
    if kind == "learned" or draw(st.booleans()):
        recipe["max_positions"] = 33
    optional(draw, embed, "norm", norms(none=True))
    if dropout:
        optional(draw, embed, "dropout", rates)
    recipe["embed"] = embed
    has_head = head or draw(st.booleans())
    if not has_head:
        recipe["head"] = "none"
    else:
        optional(draw, recipe, "head", st.fixed_dictionaries({"kind": st.just("language"), "bias": st.booleans()}))
        optional(draw, recipe, "tie", st.booleans())
    if n_layers > 1 and draw(st.booleans()):
        first = draw(st.integers(1, n_layers - 1))
        entries = [draw(differences(d_model, placement)) for _ in range(2)]
        recipe["pattern"] = [{"repeat": first, **entries[0]}, entries[1]]
    return recipe if dropout else without_dropout(recipe)


def _has_norms(recipe):
    """Whether each branch has a norm somewhere, without which activations grow past all comparison."""
    slots = recipe.get("norms")
    return slots is None or all(any(x != "none" for x in branch.values()) for branch in slots.values())


def normed_recipes(**options):
    """Recipes whose activations stay of a size that can be compared."""
    return recipes(**options).filter(_has_norms)


def without_dropout(table):
    """The same tables without any rate."""
    if isinstance(table, dict):
        return {k: without_dropout(v) for k, v in table.items() if k not in ("dropout", "out_dropout")}
    return [without_dropout(x) for x in table] if isinstance(table, list) else table
