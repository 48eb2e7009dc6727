"""Heads and the model."""

from collections.abc import Mapping, Sequence

from anyformer.spec.parts import ModelSpec
from anyformer.weights.eject.layers import HeadFacts, StackUse
from anyformer.weights.eject.parts import Parts, alone, call_of, switch
from anyformer.weights.eject.sublayers import ACTIVATIONS
from anyformer.weights.eject.uses import SAME, Call, Kind, Use


def write_model(parts: Parts, use: Use, facts: HeadFacts, stacks: Sequence[StackUse]) -> None:
    """Writes the head, where it is more than a product, and the model."""
    spec, last = parts.spec, stacks[-1]
    if facts.use is not None:
        _head(parts, alone(facts.use))
    tied = not last.use.flags["own_table"]
    if tied:
        use.numbers["VOCAB_SIZE"] = spec.vocab_size
        if last.spec.d_embed != last.spec.d_model:
            use.numbers["D_EMBED"] = last.spec.d_embed
    use.numbers.setdefault("HEAD_DROPOUT", 0.0)
    written = "".join(parts.sections)
    biases = "bias=True" in written or "bias = nn.Parameter" in written or bool(use.flags.get("head_bias"))
    use.flags |= {
        "encoder": spec.encoder is not None,
        "decoder": spec.decoder is not None,
        "table": tied,
        "pooler": spec.pooler is not None,
        "head": facts.how,
        "padded": "real" in last.takes and spec.decoder is not None,
        "types": "types" in last.takes,
        "prefix": "prefix" in last.takes,
        "pool": facts.pool,
        "softcap": facts.softcap,
        "biases": biases,
        "per_head": "*shape" in written,
    }
    texts = _texts(parts, use, facts, stacks)
    calls = {"ACT": ACTIVATIONS[spec.pooler.activation]} if spec.pooler is not None else {}
    parts.render([alone(use)], lambda _: texts, lambda _: calls)


def _texts(parts: Parts, use: Use, facts: HeadFacts, stacks: Sequence[StackUse]) -> dict[str, str]:
    """What the placeholders of the model become."""
    spec, last = parts.spec, stacks[-1]
    takes = [name for name in last.takes if name not in ("cache", "memory")]
    cache = ["cache: Cache | None = None"] if spec.decoder is not None else []
    forward = ["source_real", *(name for name in takes if name != "source_real")]
    logits, shape = _width(spec)
    scored = _scored(spec, facts, {each.name: each for each in stacks})
    said = "self.embed({})" if use.flags["table"] else "{}"
    return {
        "MODEL_DOC": _model_doc(spec),
        "POOLER_BIAS": switch(spec.pooler is not None and spec.pooler.bias),
        "HEAD_WIDTH": "N_LABELS" if "N_LABELS" in use.numbers else "VOCAB_SIZE",
        "HEAD_HAS_BIAS": switch(use.flags.get("head_bias")),
        "HEAD()": "HEAD()" if facts.use is None else call_of(facts.use, parts.constants),
        "ENCODER_INPUT": said.format("source"),
        "DECODER_INPUT": said.format("tokens"),
        "DECODE_PARAMS": ", ".join([*map(_optional, takes), *cache]),
        "DECODER_READS": ", ".join(last.takes),
        "FORWARD_PARAMS": ", ".join(map(_optional, forward)),
        "FORWARD_READS": ", ".join(f"{name}={name}" for name in forward),
        "SCORES_DOC": logits,
        "WIDTH_SHAPE": shape,
        "[B, T, WIDTH]": shape,
        "SCORED": scored,
        **({} if "HEAD_SCALE" in use.numbers else {" * HEAD_SCALE": ""}),
        **({} if "D_EMBED" in use.numbers else {"D_EMBED": "D_MODEL"}),
    }


def _optional(name: str) -> str:
    return f"{name}: Tensor | None = None"


def _scored(spec: ModelSpec, facts: HeadFacts, stacks: Mapping[str, StackUse]) -> str:
    """The product that gives logits."""
    table = _table(spec, stacks)
    if facts.how == "tied":
        return f"F.linear(hidden, {table})"
    tied = facts.use is not None and facts.use.flags["tied"]
    return f"self.head(hidden, {table})" if tied else "self.head(hidden)"


def _width(spec: ModelSpec) -> tuple[str, str]:
    """What a call gives, in words and as a shape."""
    own = spec.head
    if own is None:
        return "hidden states", "[B, T, C]"
    return {
        "language": ("logits of the vocabulary", "[B, T, V]"),
        "sequence": ("logits of each row's labels", "[B, labels]"),
        "token": ("logits of each token's labels", "[B, T, labels]"),
        "span": ("logits as first and last of an answer", "[B, T, 2]"),
    }[own.kind]


def _table(spec: ModelSpec, stacks: Mapping[str, StackUse]) -> str:
    """The token table that a tied head reads."""
    if {"encoder.embed", "decoder.embed"} <= spec.ties:
        return "self.embed.weight"
    name = "encoder" if "encoder.embed" in spec.ties else "decoder"
    if name not in stacks:
        return ""
    return f"self.{name}.embed.weight" if stacks[name].embed is None else f"self.{name}.embed.token.weight"


def _head(parts: Parts, kind: Kind) -> None:
    flags = kind.first.flags
    texts = {
        "HEAD_DOC": "Logits of the vocabulary" + (", of transformed states." if flags["transform"] else "."),
        "TRANSFORM_BIAS": switch(flags.get("transform_bias")),
        **({} if "D_TRANSFORM" in kind.first.numbers else {"D_TRANSFORM": "D_MODEL"}),
        "HEAD_TABLE": "table" if flags["tied"] else "self.weight",
        ", HEAD_BIAS": ", self.bias" if flags["bias"] else "",
    }
    calls = {"HEAD_NORMED": Call("self.norm(", ")") if flags["norm"] else SAME}
    if flags["transform"]:
        calls["ACT"] = ACTIVATIONS[str(flags["activation"])]
    parts.render([kind], lambda _: texts, lambda _: calls)


def _model_doc(spec: ModelSpec) -> str:
    names = " and ".join(spec.stacks)
    head = "" if spec.head is None else f", and a head that gives {_width(spec)[0]}"
    return f"{'An' if names[0] in 'ae' else 'A'} {names}{head}."
