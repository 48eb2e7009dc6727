"""Attention, feed-forward networks and blocks."""

from collections.abc import Mapping, Sequence
from typing import Any

from anyformer.weights.eject.layers import TYPES, BlockUse
from anyformer.weights.eject.parts import Parts, call_of, switch, within
from anyformer.weights.eject.sublayers import ACTIVATIONS
from anyformer.weights.eject.uses import SAME, Call, Kind, Use, kinds_of


def _attend_args(kind: Kind, *, bias: bool) -> str:
    """What an attention gives beside q, k, v and the mask."""
    (attend, _) = kind.first.parts["ATTEND"]
    assert attend.kind is not None
    given = ["bias=bias"] if bias else []
    given += ["sink=self.sink"] if attend.flags["sink"] else []
    if attend.kind.number("DROPOUT").any:
        own = kind.number("ATTENTION_DROPOUT").any
        given.append("dropout=ATTENTION_DROPOUT if self.training else 0.0" if own else "dropout=0.0")
    return ", ".join(given)


def write_attentions(parts: Parts, uses: Sequence[Use]) -> None:
    """Writes the attention modules of some uses."""
    kinds = kinds_of(uses)

    def texts(kind: Kind) -> dict[str, str]:
        flags = kind.first.flags
        reads = flags["reads"]
        assert isinstance(reads, tuple)
        bias = "bias" in reads or bool(flags.get("alibi")) or bool(flags.get("own_bias"))
        heads = {"Q": "N_HEADS", "K": "N_KV_HEADS"}
        shapes = {}
        for which, n in heads.items():
            shape = f"{n} * D_HEAD" if flags.get("over") == "projection" else "D_HEAD"
            shapes[f"{which}_NORM_SHAPE"] = f"{n}, D_HEAD" if flags.get("per_head") else shape
        one = (
            {} if flags.get("grouped", True) else {"N_KV_HEADS": "N_HEADS", "T, G, D": "T, H, D", "S, G, D": "S, H, D"}
        )
        one |= {} if flags.get("d_value", True) else {"D_VALUE": "D_HEAD"}
        one |= {} if flags.get("d_source", True) else {"D_SOURCE": "D_MODEL"}
        if kind.first.piece == "nn/latent.py.jinja" and not flags["turning"]:
            one |= {" * (D_NOPE + D_ROPE)": " * D_NOPE", "D_NOPE + D_ROPE": "D_NOPE", "KV_RANK + D_ROPE": "KV_RANK"}
        return {
            "ATTENTION_NAME": kind.name,
            "ATTENTION_DOC": _attention_doc(kind),
            "KEYS": "keys" if "keys" in reads else "positions",
            "QKV_BIAS": switch(flags.get("qkv_bias")),
            "LATENT_BIAS": switch(flags.get("latent_bias")),
            "OUT_BIAS": switch(flags["out_bias"]),
            "READ_PARAMS": ", ".join(f"{name}: {TYPES[name]}" for name in reads),
            "ATTEND_ARGS": _attend_args(kind, bias=bias),
            **shapes,
            **one,
        }

    def calls(kind: Kind) -> dict[str, Call]:
        flags = kind.first.flags
        clip = Call("", ".clamp(-CLIP_LIMIT, CLIP_LIMIT)") if flags.get("clip") else SAME
        normed = bool(flags.get("norm"))
        return {
            "DROPPED": _dropped(kind, "OUT_DROPOUT"),
            "CLIP": clip,
            "Q_LATENT": Call("self.q_norm(", ")") if normed else SAME,
            "KV_LATENT": Call("self.kv_norm(", ")") if normed else SAME,
        }

    for kind in kinds:
        attend = kind.first.parts["ATTEND"][0].kind
        assert attend is not None
        # Where it takes nothing but q, k, v and a mask: more would not fit in a line.
        bare = texts(kind)["ATTEND_ARGS"] == "" and not attend.fields and not kind.number("OUT_DROPOUT").any
        kind.first.flags["bare"] = bare
        if kind.first.flags.get("qk_norm"):
            parts.choices.rename("q_norm.norm.", "q_norm.")
            parts.choices.rename("k_norm.norm.", "k_norm.")
    parts.render(kinds, texts, calls)


def _attention_doc(kind: Kind) -> str:
    """One line on how heads share keys and values."""
    if not kind.first.flags.get("grouped"):
        return "Multi-head attention (Vaswani et al. 2017, section 3.2.2)."
    if kind.number("N_KV_HEADS").values == [1] * len(kind.uses):
        return "Multi-query attention (Shazeer 2019): all query heads share one head of keys and values."
    return "Grouped-query attention (Ainslie et al. 2023): H query heads share G heads of keys and values."


def _dropped(kind: Kind, rate: str) -> Call:
    """Dropout on what a kind gives, where a use has it."""
    return Call("F.dropout(", f", {rate}, self.training)") if kind.number(rate).any else SAME


_SAID = {
    "relu": "ReLU",
    "gelu": "GELU (Hendrycks & Gimpel 2016)",
    "gelu_tanh": "GELU by its tanh form",
    "silu": "SiLU",
    "relu2": "ReLU² (So et al. 2021)",
    "quick_gelu": "GELU by its sigmoid form",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "identity": "without an activation",
}
_GATED = {
    "silu": "SwiGLU",
    "gelu": "GEGLU",
    "gelu_tanh": "GEGLU",
    "relu": "ReGLU",
    "sigmoid": "GLU",
    "identity": "bilinear",
}


_PLAIN = ("relu", "silu", "sigmoid", "tanh")
"""Activations whose name says all."""


def _applied(function: str, inner: str) -> str:
    return f"{function}({inner})" if function else inner


def _network_texts(kind: Kind) -> dict[str, str]:
    flags = kind.first.flags
    act = str(flags["activation"])
    called, said = (act, "") if act in _PLAIN else ("act", f"; act is {_SAID[act]}")
    if act == "identity":
        called, said = "", f", {_SAID[act]}"
    gated = f"{_GATED[act]}: " if act in _GATED else ""
    plain = {} if flags["offset"] else {"(up + UP_OFFSET)": "up", "(self.up(x) + UP_OFFSET)": "self.up(x)"}
    return {
        "FFN_NAME": kind.name,
        "MOE_NAME": kind.name,
        "GATED_DOC": f"{gated}down({_applied(called, 'gate(x)')} · up(x)) (Shazeer 2020, eq. 6){said}.",
        "DENSE_DOC": f"down({_applied(called, 'up(x)')}) (Vaswani et al. 2017, eq. 2){said}.",
        "FFN_BIAS": switch(flags["bias"]),
        "ROUTER_BIAS": switch(flags.get("router_bias")),
        "LOGITS_BIAS": "upcast(self.router.bias)" if flags.get("router_bias") else "",
        **{
            f"{word.upper()}_BIAS": f"self.{word}_bias[expert]" if flags["bias"] else ""
            for word in ("up", "gate", "down")
        },
        **plain,
    }


def write_networks(parts: Parts, uses: Sequence[Use]) -> None:
    """Writes feed-forward networks, then the mixtures of experts, which may call them."""
    dense = [use for use in uses if use.piece == "nn/ffn.py.jinja"]
    mixtures = [use for use in uses if use.piece == "nn/moe.py.jinja"]
    dense += within(mixtures)

    def calls(kind: Kind) -> dict[str, Call]:
        rate = "FFN_OUT_DROPOUT" if kind.first.piece == "nn/ffn.py.jinja" else "EXPERT_OUT_DROPOUT"
        return {"ACT": ACTIVATIONS[str(kind.first.flags["activation"])], "DROPPED": _dropped(kind, rate)}

    for group in (dense, mixtures):
        kinds = kinds_of(group)
        parts.render(kinds, _network_texts, calls)
    if mixtures:
        for word in ("gate", "up", "down"):
            parts.choices.rename(f"experts.{word}.weight", word)
            if any(use.flags["bias"] for use in mixtures):
                parts.choices.rename(f"experts.{word}.bias", f"{word}_bias")
        if any(use.flags["choice_bias"] for use in mixtures):
            parts.choices.rename("router.choice_bias", "choice_bias")


def write_blocks(parts: Parts, blocks: Sequence[BlockUse]) -> None:
    """Writes the blocks of all stacks."""
    kinds = kinds_of([each.use for each in blocks])
    by_use = {id(each.use): each for each in blocks}
    for kind in kinds:
        _block(parts, kind, [by_use[id(use)] for use in kind.uses])


def _block(parts: Parts, kind: Kind, blocks: Sequence[BlockUse]) -> None:
    flags = kind.first.flags
    texts: dict[str, str] = {}
    given: list[str] = []
    for place in ("ATTENTION", "CROSS", "FFN"):
        made = dict.fromkeys(call_of(each.slots[place], parts.constants) for each in blocks if place in each.slots)
        if not made:
            continue
        if len(made) == 1:
            texts[f"= {place}\n"] = f"= {next(iter(made))}\n"
            continue
        classes = dict.fromkeys(each.slots[place].kind.name for each in blocks)  # type: ignore[union-attr]
        texts[f"= {place}\n"] = f"= {place.lower()}\n"
        given.append(f"{place.lower()}: {' | '.join(classes)}")
    kind.given = tuple(each.partition(":")[0] for each in given)
    reads = flags["reads"]
    assert isinstance(reads, tuple)
    for place in ("ATTENTION", "CROSS"):
        own = blocks[0].slots[place].flags["reads"] if place in blocks[0].slots else ()
        assert isinstance(own, tuple)
        texts[f"{place}_READS"] = ", ".join(own)
    texts |= {
        "BLOCK_NAME": kind.name,
        "BLOCK_DOC": _block_doc(flags),
        "BLOCK_PARTS": ", ".join(given),
        "BLOCK_READS": ", ".join(f"{name}: {TYPES[name]}" for name in reads),
    }
    for prefix, branch in (("A", "attention"), ("C", "cross"), ("F", "ffn")):
        for key in ("alpha", "beta"):
            one = flags.get(f"{branch}_{key}_is_1", True)
            name = f"{branch}_{key}".upper()
            texts[f"{prefix}_{key.upper()} * "] = "" if one else f"{name} * "
    parts.render([kind], lambda _: texts, lambda _: _branch_calls(flags))


def _branch_calls(flags: Mapping[str, Any]) -> dict[str, Call]:
    calls = {}
    for prefix, branch in (("A", "attention"), ("C", "cross"), ("F", "ffn")):
        for slot, name in (("before", "norm"), ("after", "after_norm"), ("residual", "residual_norm")):
            there = flags.get(f"{branch}_{slot}")
            calls[f"{prefix}_{slot.upper()}"] = Call(f"self.{branch}_{name}(", ")") if there else SAME
    return calls


_NORMED = ("before", "after", "residual")
_NORMED_SAID = {
    ("before",): "a norm before each (Xiong et al. 2020)",
    ("residual",): "a norm on each sum (Vaswani et al. 2017)",
    ("before", "after"): "a norm before and after each",
    ("after",): "a norm after each",
    (): "without norms",
}
"""Where norms stand around a branch, in words."""


def _block_doc(flags: Mapping[str, Any]) -> str:
    """One line on the wiring and on where the norms are."""
    branches = [branch for branch in ("attention", "cross", "ffn") if f"{branch}_before" in flags]
    scaled = not all(flags[f"{branch}_{key}_is_1"] for branch in branches for key in ("alpha", "beta"))
    deep = "\n\n    The sums are weighted (Wang et al. 2022).\n    " if scaled else ""
    if flags["parallel"]:
        return f"Attention and feed-forward side by side (Wang & Komatsuzaki 2021).{deep}"
    places = {tuple(slot for slot in _NORMED if flags[f"{branch}_{slot}"]) for branch in branches}
    said = _NORMED_SAID.get(next(iter(places)), "with norms") if len(places) == 1 else "with norms"
    third = ", cross-attention" if flags["cross"] else ""
    return f"Attention{third} and feed-forward, each added to x, {said}.{deep}"
