"""Heads and the model."""

from collections.abc import Mapping, Sequence

from anyformer.spec.parts import ModelSpec, Pooler
from anyformer.weights.eject.layers import HeadFacts, StackUse
from anyformer.weights.eject.parts import Parts, alone, call_of, switch
from anyformer.weights.eject.sublayers import ACTIVATIONS
from anyformer.weights.eject.uses import SAME, Call, Kind, Use


def write_model(parts: Parts, use: Use, facts: HeadFacts, stacks: Sequence[StackUse]) -> None:
    """Writes the head, where it is more than a product, and the model."""
    spec, by_name = parts.spec, {each.name: each for each in stacks}
    encoder, decoder = by_name.get("encoder"), by_name.get("decoder")
    last = stacks[-1]
    tied_tables = not last.use.flags["own_table"]
    if facts.use is not None:
        made = alone(facts.use)
        _head(parts, made)
    if tied_tables:
        use.numbers |= {"VOCAB_SIZE": spec.vocab_size}
        if last.spec.d_embed != last.spec.d_model:
            use.numbers["D_EMBED"] = last.spec.d_embed
    takes = [name for name in last.takes if name not in ("cache", "memory")]
    params = [f"{name}: Tensor | None = None" for name in takes]
    params += ["cache: Cache | None = None"] if decoder is not None else []
    use.flags |= {
        "encoder": encoder is not None,
        "decoder": decoder is not None,
        "table": tied_tables,
        "pooler": spec.pooler is not None,
        "head": facts.how,
        "padded": "real" in last.takes and decoder is not None,
        "types": "types" in last.takes,
        "prefix": "prefix" in last.takes,
        "pool": facts.pool,
        "softcap": facts.softcap,
    }
    use.numbers.setdefault("HEAD_DROPOUT", 0.0)
    table = _table(spec, by_name)
    scored = {
        "linear": "self.head(hidden)",
        "tied": f"F.linear(hidden, {table})",
        "own": f"self.head(hidden, {table})"
        if facts.use is not None and facts.use.flags["tied"]
        else "self.head(hidden)",
        "none": "hidden",
    }[facts.how]
    pooler = spec.pooler or Pooler()
    n = _width(spec)
    forward = [name for name in takes if name != "source_real"]
    texts = {
        "MODEL_DOC": _model_doc(spec),
        "POOLER_BIAS": switch(pooler.bias),
        "HEAD_WIDTH": "N_LABELS" if "N_LABELS" in use.numbers else "VOCAB_SIZE",
        "HEAD_HAS_BIAS": switch(use.flags.get("head_bias")),
        "= HEAD()": f"= {call_of(facts.use, parts.constants)}" if facts.use is not None else "= HEAD()",
        "ENCODER_INPUT": "self.embed(source)" if tied_tables else "source",
        "DECODER_INPUT": "self.embed(tokens)" if tied_tables else "tokens",
        "DECODE_PARAMS": ", ".join(params),
        "DECODER_READS": ", ".join(last.takes),
        "FORWARD_PARAMS": ", ".join(
            ["source_real: Tensor | None = None", *(f"{x}: Tensor | None = None" for x in forward)]
        ),
        "FORWARD_READS": ", ".join(f"{x}={x}" for x in ("source_real", *forward)),
        "SCORES_DOC": n[0],
        ", WIDTH_SHAPE": f", {n[1]}",
        "[B, T, WIDTH]": n[1],
        "return SCORED": f"return {scored}",
        "SCORED": scored,
    }
    if "HEAD_SCALE" not in use.numbers:
        texts[" * HEAD_SCALE"] = ""
    if "D_EMBED" not in use.numbers:
        texts["D_EMBED"] = "D_MODEL"
    body = "".join(parts.sections)
    per_head = "*shape" in body
    use.flags["biases"] = "bias=True" in body or "bias = nn.Parameter" in body or bool(use.flags.get("head_bias"))
    texts["for name, parameter in self.named_parameters()"] = "for name, parameter in self.named_parameters()"
    texts["MATRIX"] = 'parameter.dim() > 1 and "norm" not in name' if per_head else "parameter.dim() > 1"
    if not (per_head or use.flags["biases"]):
        texts["for name, parameter in self.named_parameters()"] = "for parameter in self.parameters()"
    kind = alone(use)
    calls = {"ACT": ACTIVATIONS[pooler.activation]} if spec.pooler is not None else {}
    parts.render([kind], lambda _: texts, lambda _: calls)


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
