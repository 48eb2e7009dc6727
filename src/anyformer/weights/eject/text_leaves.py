"""Norms, position encodings, masks and the attention operation: what calls nothing else of the file."""

from collections.abc import Sequence

from anyformer.weights.eject.layers import HeadFacts, StackUse
from anyformer.weights.eject.parts import Parts, alone, within
from anyformer.weights.eject.uses import Kind, Use, kinds_of


def write_leaves(parts: Parts, stacks: Sequence[StackUse], facts: HeadFacts) -> None:
    """Norms and functions: what calls nothing else."""
    above = [use for s in stacks for b in s.blocks for use in (b.use, *b.slots.values())]
    above += [use for s in stacks for use in (s.use, s.embed) if use is not None]
    above += [facts.use] if facts.use is not None else []
    inner = within(above)
    masks = [mask for s in stacks for mask in s.masks if mask is not None]
    order = ("rms", "layers", "position", "sinusoids", "alibi", "buckets", "masks", "attend")
    for word in order:
        uses = [use for use in [*inner, *masks] if use.piece.endswith(f"{word}.py.jinja") and use.builtin is None]
        kinds = kinds_of(uses)
        parts.render(kinds, _leaf_texts)


def write_pool(parts: Parts, pool: str) -> None:
    """The one vector of a row."""
    use = Use("nn/pool.py.jinja", "pooled", {"pool": "first" if pool == "pooler" else pool})
    parts.render([alone(use)], lambda _: {})


def _leaf_texts(kind: Kind) -> dict[str, str]:
    use = kind.first
    flags = use.flags
    match use.piece.rpartition("/")[2]:
        case "rms.py.jinja" | "layers.py.jinja":
            many = kind.number("PER_HEAD").any
            weight = " * (1 + upcast(self.weight))" if flags["offset"] else " * self.weight"
            gain = weight if flags["weight"] else ""
            bare = {"return (normed * GAIN).to": "return normed.to"} if not flags["weight"] else {}
            said = "" if not flags["weight"] else " · (1 + weight)" if flags["offset"] else " · weight"
            said += " + bias" if flags["bias"] else ""
            return bare | {
                "GAIN_SAID": said,
                "NORM_NAME": kind.name,
                "SHAPE_READ": "*shape" if many else "width",
                "SHAPE": "" if flags["shapeless"] else "*shape: int" if many else "width: int",
                "ONES_OF": "zeros" if flags["offset"] else "ones",
                " * GAIN": gain,
            }
        case "position.py.jinja":
            half = "channels i and i + D/2" if flags["layout"] == "half" else "channels 2i and 2i + 1"
            whole = {"D_ROPE": "D_HEAD"} if flags["whole"] else {}
            return {"ROTATE_NAME": kind.name, "TURNED_CHANNELS": half, **whole}
        case "sinusoids.py.jinja":
            offset = kind.number("SINUSOID_OFFSET")
            plain = {"(positions + SINUSOID_OFFSET)": "positions"} if not offset.any else {}
            return {"SINUSOIDS_NAME": kind.name, **plain}
        case "alibi.py.jinja":
            return {"ALIBI_NAME": kind.name}
        case "buckets.py.jinja":
            return {"BIAS_NAME": kind.name}
        case "masks.py.jinja":
            params = ["real: Tensor"] if flags["real"] else []
            params += ["prefix: Tensor"] if flags["prefix"] else []
            return {"MASK_NAME": kind.name, "VISIBLE_PARAMS": ", ".join(params)}
    return _attend_texts(kind)


def _attend_texts(kind: Kind) -> dict[str, str]:
    flags, bias = kind.first.flags, kind.number("BIAS")
    params = ["bias: Tensor"] if bias.any and not bias.some else []
    params += ["sink: Tensor"] if flags["sink"] else []
    params += ["dropout: float"] if kind.number("DROPOUT").any else []
    late = ["bias: Tensor | None = None"] if bias.some else []
    scale = {"default": " * q.shape[-1] ** -0.5", "one": "", "given": " * SCALE"}[str(flags["scale"])]
    scores = {"default": "q·kᵀ / √D", "one": "q·kᵀ", "given": "scale · q·kᵀ"}[str(flags["scale"])]
    return {
        "ATTEND_NAME": kind.name,
        "ATTEND_PARAMS, PARAMS": ", ".join([*params, "PARAMS", *late]),
        " * SCALE": scale,
        "SCALED_SCORES": f"softcap({scores})" if flags["softcap"] else scores,
        " PLUS_BIAS": " + bias" if bias.any else "",
        "Dv]": "Dv]" if kind.number("V_APART").any else "D]",
    }
