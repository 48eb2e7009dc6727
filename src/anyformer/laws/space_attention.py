"""Drawing attention: masks, positions with their scalings, grouped and latent heads, cross-attention.

Tables are written out in full where one may be laid on another, so that nothing of the other is left that the new one
could not hold.
"""

from collections.abc import Sequence
from typing import Any

from anyformer.laws.choose import Chooser, chance, maybe
from anyformer.laws.space_norms import norm

Table = dict[str, Any]

HEADS = (1, 3, 5, 6, 2)
HEAD_WIDTHS = (4, 3, 6, 5, 7, 8)
WINDOWS = (3, 5, 1)
ORIGINALS = (8, 5, 13)
"""Lengths that scalings were made for, shorter than the sequences of the laws."""
RATES = (0.1, 0.5)


def mask(choose: Chooser, stack: str, kinds: Sequence[str] = ("causal", "prefix")) -> Table:
    """What a token of a stack sees; windows are narrower than the sequences of the laws."""
    table: Table = {"kind": "bidirectional" if stack == "encoder" else choose.pick(kinds)}
    if choose.pick((False, True)):
        table["window"] = choose.pick(WINDOWS)
        table["sinks"] = choose.pick((0, 1, 2))
    return table


def _pairs(choose: Chooser, width: int, options: Sequence[float]) -> list[float]:
    return [choose.pick(options) for _ in range(width // 2)]


def scaling(choose: Chooser, width: int) -> Table:
    """A scaling of `width` channels that turn, made for lengths that the laws go past."""
    stretched = ("dynamic", "yarn", "ntk") * 2 if width >= 4 else ()
    kind = choose.pick(("none", "linear", "llama3", "longrope", *stretched))
    table: Table = {"kind": kind}
    if kind in ("linear", "ntk", "dynamic", "yarn", "llama3"):
        table["factor"] = choose.pick((2.0, 1.5, 4.0))
    if kind in ("dynamic", "yarn", "llama3", "longrope"):
        table["original"] = choose.pick(ORIGINALS)
    if kind == "yarn":
        # Within a short original length few pairs turn even once.
        table["beta_fast"], table["beta_slow"] = choose.pick(((1.0, 0.05), (0.5, 0.1)))
        table["truncate"] = choose.pick((True, False))
        maybe(choose, table, "attention_factor", (1.25,))
    if kind == "llama3":
        table["low_freq_factor"], table["high_freq_factor"] = choose.pick(((1.0, 4.0), (0.25, 1.5)))
    if kind == "longrope":
        table["short"] = _pairs(choose, width, (1.0, 1.1, 1.4))
        table["long"] = _pairs(choose, width, (2.0, 3.5, 1.2))
        maybe(choose, table, "attention_factor", (1.2,))
    return table


def rope(choose: Chooser, d_head: int, *, partial: bool) -> Table:
    """Rotary positions of a head, or of an even number of its channels where they may be `partial`."""
    widths = [2 * pairs for pairs in range(d_head // 2, 0, -1)]
    whole = d_head % 2 == 0 and choose.pick((True, False))
    width = choose.pick(widths) if partial and not whole else d_head
    return {
        "kind": "rope",
        "theta": choose.pick((10000.0, 100.0, 7.0)),
        "fraction": width / d_head,
        "layout": choose.pick(("half", "interleaved")),
        "scaling": scaling(choose, width),
    }


def alibi(choose: Chooser, seen: Table) -> Table:
    """ALiBi; its one-sided form with a causal mask alone."""
    sides = (True, False, False) if seen["kind"] == "causal" else (True,)
    slopes = {"max_bias": choose.pick((8.0, 3.0)), "scale": choose.pick((1.0, 0.5))}
    return {"kind": "alibi", **slopes, "symmetric": choose.pick(sides)}


def relative(choose: Chooser, seen: Table, *, shared: bool) -> Table:
    """T5's buckets, few and near enough that the logarithmic ones are used."""
    sides = (False, False, True) if seen["kind"] == "causal" else (True,)
    return {
        "kind": "relative",
        "n_buckets": choose.pick((6, 8)),
        "max_distance": choose.pick((7, 12)),
        "bidirectional": choose.pick(sides),
        "shared": choose.pick((True, False)) if shared else False,
    }


def position(choose: Chooser, d_head: int, seen: Table, *, shared: bool = True) -> Table:
    """Positions of grouped attention that sees what the mask `seen` says; `shared`: a table for the stack may be."""
    turning = ("rope",) * 3 if d_head >= 2 else ()
    match choose.pick(("none", *turning, "alibi", "relative")):
        case "rope":
            return rope(choose, d_head, partial=True)
        case "alibi":
            return alibi(choose, seen)
        case "relative":
            return relative(choose, seen, shared=shared)
        case kind:
            return {"kind": kind}


def qk_norm(choose: Chooser) -> Table:
    """A norm of queries and keys."""
    over = choose.pick(("head", "projection"))
    return {
        "over": over,
        "weights": choose.pick(("shared", "per_head")) if over == "head" else "shared",
        "order": choose.pick(("before", "after")),
        "norm": norm(choose, none=True),
    }


def _scores(choose: Chooser, table: Table) -> None:
    """What any attention may do with its scores."""
    maybe(choose, table, "scale", (0.4, 1.0))
    maybe(choose, table, "softcap", (2.0, 0.7))
    maybe(choose, table, "sink_logit", (True, False))
    maybe(choose, table, "out_bias", (True, False))
    if chance(choose, 4):
        table["dropout"] = choose.pick(RATES)
        table["out_dropout"] = choose.pick(RATES)


def _heads(choose: Chooser, d_model: int) -> Table:
    n_heads = choose.pick(HEADS)
    widths: Sequence[int] = HEAD_WIDTHS
    if d_model % n_heads == 0 and d_model // n_heads > 2 and chance(choose, 3):
        widths = (d_model // n_heads,)
    table: Table = {
        "kind": "grouped",
        "n_heads": n_heads,
        "n_kv_heads": choose.pick([g for g in range(1, n_heads + 1) if n_heads % g == 0]),
        "d_head": choose.pick(widths),
    }
    maybe(choose, table, "d_value", (3, 5, 1))
    maybe(choose, table, "qkv_bias", (True, False))
    maybe(choose, table, "clip", (1.0, 0.5))
    if choose.pick((False, True)):
        table["qk_norm"] = qk_norm(choose)
    _scores(choose, table)
    return table


def grouped(choose: Chooser, stack: str, d_model: int, *, shared: bool = True) -> Table:
    """Grouped attention of a layer."""
    table = _heads(choose, d_model)
    table["mask"] = mask(choose, stack)
    table["position"] = position(choose, table["d_head"], table["mask"], shared=shared)
    return table


def latent(choose: Chooser, stack: str, *, shared: bool = True) -> Table:
    """Latent attention of a layer: with channels that turn, or with other positions and none."""
    table: Table = {
        "kind": "latent",
        "n_heads": choose.pick(HEADS),
        "kv_rank": choose.pick((5, 9)),
        "d_nope": choose.pick((4, 3, 5)),
        "d_value": choose.pick((4, 3, 6)),
        "norm": norm(choose, none=True),
        "mask": mask(choose, stack),
    }
    maybe(choose, table, "q_rank", (7, 4))
    maybe(choose, table, "bias", (True, False))
    kind = choose.pick(("rope", "none", "rope", "alibi", "relative"))
    table["d_rope"] = choose.pick((2, 4, 6)) if kind == "rope" else 0
    match kind:
        case "rope":
            table["position"] = rope(choose, table["d_rope"], partial=False)
        case "alibi":
            table["position"] = alibi(choose, table["mask"])
        case "relative":
            table["position"] = relative(choose, table["mask"], shared=shared)
        case _:
            table["position"] = {"kind": "none"}
    _scores(choose, table)
    return table


def attention(choose: Chooser, stack: str, d_model: int, *, shared: bool = True) -> Table:
    """Attention of a layer of a stack, "encoder" or "decoder"."""
    if chance(choose, 4):
        return latent(choose, stack, shared=shared)
    return grouped(choose, stack, d_model, shared=shared)


def cross(choose: Chooser, of: Table, d_model: int) -> Table | None:
    """Cross-attention beside the attention `of`; None leaves it to follow from that one where it can."""
    if of["kind"] == "grouped" and choose.pick((True, False)):
        return {"n_kv_heads": 1} if choose.pick((False, True)) else None
    return _heads(choose, d_model)
