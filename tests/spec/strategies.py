"""Recipes over every axis of the specification, at sizes that hide nothing.

Widths that are no powers of two and often odd, heads in threes and fives, key/value heads of every divisor, heads that
are not d_model / n_heads wide, values of another width than keys, odd numbers of layers, windows, buckets and
`original` contexts that short texts exceed.
"""

from hypothesis import strategies as st

from anyformer.spec.idle import without_idle
from spec.axes import (
    ACTIVATIONS,
    attentions,
    crosses,
    default_mask,
    explicit_attention,
    explicit_qk_norm,
    ffns,
    kind_of,
    masks,
    multipliers,
    norms,
    optional,
    positions,
    qk_norms,
    rates,
    shared_experts,
    singles,
    slots,
)

PLACEMENTS = ("pre", "post", "sandwich", "output")
ARCHITECTURES = ("decoder", "encoder", "encoder-decoder")
WIRINGS = {"serial": "serial", "shared": "parallel", "two": {"kind": "parallel", "shared_norm": False}}


@st.composite
def attention_differences(draw, d_model, base, *, wide, side):
    """Another attention, laid on `base`."""
    table = draw(attentions(d_model, wide=wide, side=side))
    if not wide:
        table.setdefault("n_kv_heads", 1)
        table.setdefault("d_head", 4)
        position = draw(positions(table["d_head"]))
        if "fraction" not in position and "rope" in position.values():
            position["fraction"] = 1.0
        return {**table, "position": position}
    if table.get("kind") != "latent":
        # A width that follows from d_model would not follow where the base gives one.
        table.setdefault("d_head", d_model // table["n_heads"])
        table.setdefault("n_kv_heads", 1)
        table.setdefault("d_value", 3)
    elif "d_nope" not in table:
        table["d_nope"] = d_model // table["n_heads"]
    if kind_of(table["position"]) == "relative":
        table["position"]["shared"] = False
    return explicit_attention(table, side)


@st.composite
def mask_differences(draw, base, side):
    """Another window, and another mask where no position depends on it."""
    free = kind_of(base["position"]) not in ("alibi", "relative")
    kind = kind_of(draw(masks(side))) if free else kind_of(base.get("mask", default_mask(side)))
    return {"kind": kind, "window": draw(st.sampled_from([False, 2, 4])), "sinks": 0}


@st.composite
def ffn_differences(draw, base, *, wide):
    if kind_of(base) != "moe" or draw(st.booleans()):
        return draw(ffns(wide=wide) if kind_of(base) != "moe" else singles(wide=True))
    entry = {"top_k": 1, "scale": 2.0}
    optional(draw, entry, "expert", singles(wide=True))
    optional(draw, entry, "shared", shared_experts())
    return entry


@st.composite
def differences(draw, stack, *, wide=False, side="decoder", crossed=False, first=False):
    """What an entry of a pattern may change; the first of a crossed decoder keeps its cross-attention."""
    placement, base, entry = stack.get("placement"), stack["attention"], {}
    kinds = ["none", "attention", "position", "heads", "ffn", "placement", "qk_norm"]
    kind = draw(
        st.sampled_from(
            [*kinds, *(["mask", "multipliers"] if wide else []), *(["cross"] if crossed and not first else [])]
        )
    )
    latent = base.get("kind") == "latent"
    if kind == "attention":
        entry["attention"] = draw(attention_differences(stack["d_model"], base, wide=wide, side=side))
        if crossed and entry["attention"]["kind"] == "latent":
            entry["cross"] = draw(crosses(entry["attention"]))
    elif kind == "position":
        entry["attention"] = {"position": "none", **({"d_rope": 0} if latent else {})}
    elif kind == "heads" and not latent:
        entry["attention"] = {"n_kv_heads": 1}
    elif kind == "ffn":
        entry["ffn"] = draw(ffn_differences(stack["ffn"], wide=wide))
    elif kind == "placement" and placement not in (None, "post"):
        entry["placement"] = draw(st.sampled_from(["pre", "sandwich"]))
    elif kind == "qk_norm" and not latent:
        found = draw(st.one_of(st.just(False), qk_norms(wide=wide)))
        entry["attention"] = {"qk_norm": explicit_qk_norm(found) if wide else found}
    elif kind == "mask":
        entry["attention"] = {"mask": draw(mask_differences(base, side))}
    elif kind == "multipliers" and placement is not None:
        entry["beta"] = draw(multipliers)
    elif kind == "cross" and placement is not None:
        entry["cross"] = draw(st.one_of(st.just(False), crosses({"kind": "latent"})))
    return entry


@st.composite
def embeds(draw, d_model, *, wide=False, types=False):
    """The embedding; learned positions need the stack's max_positions."""
    embed = {}
    if wide and draw(st.integers(0, 3)) == 0:
        width = draw(st.sampled_from([4, 5]))
        embed["factor"] = draw(st.sampled_from([width, {"width": width, "bias": True}]))
    factor = embed.get("factor", d_model)
    width = factor["width"] if isinstance(factor, dict) else factor
    kind = draw(st.sampled_from(["none", "learned", *(["sinusoidal"] if width % 2 == 0 else [])]))
    embed["position"] = kind
    if kind == "sinusoidal" and draw(st.booleans()):
        embed["position"] = {"kind": kind, "layout": draw(st.sampled_from(["interleaved", "halves"])), "theta": 50.0}
    if wide and kind != "none" and draw(st.booleans()):
        embed["position"] = {"kind": kind, "offset": draw(st.sampled_from([0, 2]))}
    optional(draw, embed, "norm", norms(none=True, wide=wide))
    if wide:
        optional(draw, embed, "scale", st.sampled_from(["sqrt_width", 0.5, 1.0]))
    if types:
        optional(draw, embed, "types", st.sampled_from([0, 2, 3]))
    optional(draw, embed, "dropout", rates)
    return embed


def width_of_table(stack):
    factor = stack.get("embed", {}).get("factor", stack["d_model"])
    return factor["width"] if isinstance(factor, dict) else factor


@st.composite
def shares(draw, n_layers, pattern):
    """Layers that use others' parameters, equal ones alone."""
    if pattern:
        period = sum(entry.get("repeat", 1) for entry in pattern)
        return {"distinct": period, "order": "cycle"}
    n = draw(st.integers(1, n_layers))
    choices = ["all", {"distinct": n}, {"distinct": n, "order": "runs"}, [0] * (n_layers - 1) + [n_layers - 1]]
    return draw(st.sampled_from(choices))


@st.composite
def stacks(draw, *, wide=False, side="decoder", crossed=False, types=False, max_layers=5):
    """A stack's table. `crossed` for a decoder beside an encoder."""
    d_model = draw(st.sampled_from([6, 9, 10, 15, 20]))
    n_layers = draw(st.integers(1, max_layers))
    attention = draw(attentions(d_model, wide=wide, side=side))
    table = {"d_model": d_model, "n_layers": n_layers, "attention": attention, "ffn": draw(ffns(wide=wide))}
    wiring = "serial"
    if not crossed and draw(st.booleans()):
        wiring = draw(st.sampled_from(list(WIRINGS)))
        table["wiring"] = WIRINGS[wiring]
    if draw(st.integers(0, 2)) == 0:
        table["norms"] = draw(slots(wiring, wide=wide, cross=crossed))
    else:
        table["norm"] = draw(norms(wide=wide))
        table["placement"] = draw(st.sampled_from([p for p in PLACEMENTS if p != "post" or wiring == "serial"]))
        if wide:
            optional(draw, table, "alpha", multipliers)
            optional(draw, table, "beta", multipliers)
    if crossed and (attention.get("kind") == "latent" or draw(st.booleans())):
        table["cross"] = draw(crosses(attention))
    optional(draw, table, "final_norm", norms(none=True, wide=wide))
    optional(draw, table, "bias", st.booleans())
    optional(draw, table, "dropout", rates)
    table["embed"] = draw(embeds(d_model, wide=wide, types=types))
    if kind_of(table["embed"]["position"]) == "learned" or draw(st.booleans()):
        table["max_positions"] = 33
    if n_layers > 1 and draw(st.booleans()):
        first = draw(st.integers(1, n_layers - 1))
        options = {"wide": wide, "side": side, "crossed": crossed}
        table["pattern"] = [
            {"repeat": first, **draw(differences(table, **options, first=True))},
            draw(differences(table, **options)),
        ]
    if wide and draw(st.integers(0, 3)) == 0:
        table["share"] = draw(shares(n_layers, table.get("pattern")))
    return table


@st.composite
def heads(draw, architecture, *, wide=False, language=None, pooled=False):
    """What a model ends with; None leaves the key out, for a language head."""
    if not language and draw(st.booleans()):
        labelled = ["token", "span", "sequence"] if wide and architecture != "encoder-decoder" else []
        match draw(st.sampled_from(["none", *labelled])):
            case "none":
                return "none"
            case "span":
                return {"kind": "span", "bias": draw(st.booleans())}
            case "token":
                return {"kind": "token", "n_labels": 3, "dropout": draw(rates)}
        pools = ["last", "mean", *(["first"] if architecture == "encoder" else []), *(["pooler"] if pooled else [])]
        return {"kind": "sequence", "n_labels": 3, "pool": draw(st.sampled_from(pools))}
    if draw(st.booleans()):
        return None
    table = {"kind": "language", "bias": draw(st.booleans())}
    if wide:
        optional(draw, table, "transform", transforms())
        optional(draw, table, "scale", st.sampled_from([0.5, 1.0]))
        optional(draw, table, "softcap", st.sampled_from([3.0, 30.0]))
    return table


@st.composite
def transforms(draw):
    table = {}
    optional(draw, table, "width", st.sampled_from([5, 8]))
    optional(draw, table, "activation", st.sampled_from(ACTIVATIONS))
    optional(draw, table, "norm", norms(none=True, wide=True))
    optional(draw, table, "bias", st.booleans())
    return draw(st.sampled_from([True, table]))


@st.composite
def ties(draw, widths, head, d_model):
    """Which tables are one: those of one width.

    Args:
        widths: of each stack's token table, by the table's name.
        head: the head, None for a plain language head.
        d_model: of the stack that the head reads.
    """
    equal = len(set(widths.values())) == 1
    tied = {}
    if head is None or kind_of(head) == "language":
        transform = False if head is None else head.get("transform", False)
        table = transform if isinstance(transform, dict) else {}
        default = list(widths.values())[-1] if transform else d_model
        tied["head"] = table.get("width", default)
    same = [name for name, width in widths.items() if width == tied.get("head")]
    choices = [False]
    if equal and same:
        choices.append(True)
    if len(widths) == 2 and equal:
        choices.append(list(widths))
    choices += [[name, "head"] for name in same if len(widths) == 2]
    return draw(st.sampled_from(choices))


@st.composite
def pairs(draw, *, max_layers):
    """The root and the two tables of an encoder-decoder: each stack by itself, or most of it shared."""
    if draw(st.booleans()):
        encoder = draw(stacks(wide=True, side="encoder", max_layers=max_layers))
        decoder = draw(stacks(wide=True, crossed=True, max_layers=max_layers))
        return {"encoder": encoder, "decoder": decoder}
    root = draw(stacks(wide=True, side="encoder", max_layers=max_layers))
    shared_attention = {key: value for key, value in root["attention"].items() if key != "mask"}
    position = shared_attention["position"]
    if kind_of(position) == "relative":
        shared_attention["position"] = {k: v for k, v in position.items() if k != "bidirectional"}
    own = {key: root.pop(key) for key in ("n_layers", "wiring", "pattern", "share") if key in root}
    if "pattern" in own or own.get("wiring", "serial") != "serial":
        own["attention"] = root["attention"]
    if "norms" in root:
        # A shared norm of parallel wiring, or slots of a branch that only the decoder has, are nothing to share.
        own["norms"] = root.pop("norms")
    root["attention"] = shared_attention
    decoder = {"n_layers": draw(st.integers(1, max_layers))}
    if shared_attention.get("kind") == "latent" or draw(st.booleans()):
        root["cross"] = draw(crosses(shared_attention))
    if draw(st.booleans()):
        decoder["ffn"] = draw(ffn_differences(root["ffn"], wide=True))
    return {**root, "encoder": own, "decoder": decoder}


@st.composite
def recipes(draw, *, head=None, dropout=True, max_layers=5, architectures=("decoder",), wide=False):
    """A legal recipe.

    Args:
        head: True for a language head always, None for any.
        dropout: False for rates of zero everywhere.
        max_layers: the deepest.
        architectures: those to choose from.
        wide: every axis there is, rather than those of a plain decoder.
    """
    architecture = draw(st.sampled_from(architectures))
    both = architecture == "encoder-decoder"
    if both:
        recipe = draw(pairs(max_layers=max_layers))
        tables = {name: {**recipe, **recipe[name]} for name in ("encoder", "decoder")}
    else:
        recipe = draw(stacks(wide=wide, side=architecture, types=wide, max_layers=max_layers))
        tables = {architecture: recipe}
    if architecture != "decoder" or (wide and draw(st.booleans())):
        recipe["architecture"] = architecture
    recipe["vocab_size"] = draw(st.sampled_from([7, 19]))
    if wide and architecture == "encoder" and draw(st.booleans()):
        recipe["pooler"] = draw(st.sampled_from([True, {"activation": "relu", "bias": False}]))
    found = draw(heads(architecture, wide=wide, language=head, pooled="pooler" in recipe))
    if found is not None:
        recipe["head"] = found
    widths = {f"{name}.embed": width_of_table(table) for name, table in tables.items()}
    optional(draw, recipe, "tie", ties(widths, found, list(tables.values())[-1]["d_model"]))
    # A difference may be drawn that is none, as a word for the base's own kind.
    recipe = without_idle(recipe)
    return recipe if dropout else without_dropout(recipe)


def every_recipe(**options):
    """Legal recipes over the whole space."""
    return recipes(**{"architectures": ARCHITECTURES, "wide": True, **options})


def _has_norms(recipe):
    """Whether each branch has a norm somewhere, without which activations grow past all comparison."""
    tables = [recipe, recipe.get("encoder", {}), recipe.get("decoder", {})]
    given = [table["norms"] for table in tables if "norms" in table]
    slots = ("before", "after", "residual")
    return all(any(branch.get(x, "none") != "none" for x in slots) for norms in given for branch in norms.values())


def normed_recipes(**options):
    """Recipes whose activations stay of a size that can be compared."""
    return recipes(**options).filter(_has_norms)


def without_dropout(table):
    """The same tables without any rate."""
    if isinstance(table, dict):
        return {k: without_dropout(v) for k, v in table.items() if k not in ("dropout", "out_dropout")}
    return [without_dropout(x) for x in table] if isinstance(table, list) else table
