"""Uses of blocks, stacks, embeddings, heads and the model: how what a block is made of is put together."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from anyformer.spec.attention import Prefix
from anyformer.spec.parts import (
    BlockSpec,
    BranchNorms,
    Embed,
    LanguageHead,
    ModelSpec,
    NoPosition,
    Parallel,
    SequenceHead,
    SpanHead,
    StackSpec,
)
from anyformer.spec.positions import Learned, Sinusoidal
from anyformer.weights.eject.sublayers import attention, buckets, cross_attention, feed_forward, give_norm, sinusoids
from anyformer.weights.eject.uses import Use

READS = ("positions", "keys", "mask", "bias", "memory", "source_mask", "store")
"""What layers may be given beside x, in the order in which they are."""
TYPES = {
    "positions": "Tensor",
    "mask": "Tensor",
    "bias": "Tensor",
    "memory": "Tensor",
    "source_mask": "Tensor",
    "store": "dict[str, Tensor]",
    "keys": "Tensor",
    "types": "Tensor",
    "cache": "Cache",
    "prefix": "Tensor",
    "real": "Tensor",
    "source_real": "Tensor",
}
_SLOTS = ("before", "after", "residual")


@dataclass
class Branch:
    """What stands around a branch, as a piece asks for it."""

    before: bool
    after: bool
    residual: bool
    plain: bool
    """Whether the branch is x + f(before(x))."""


@dataclass
class BlockUse:
    """A layer: the use of its block, and those of what is in it."""

    use: Use
    slots: dict[str, Use]


@dataclass
class StackUse:
    """A stack: its blocks, embedding, masks, and what its layers are given."""

    name: str
    spec: StackSpec
    use: Use
    blocks: list[BlockUse]
    embed: Use | None
    masks: list[Use | None]
    prefixed: list[bool]
    reads: tuple[str, ...]
    takes: tuple[str, ...] = ()
    embed_reads: tuple[str, ...] = ()


@dataclass
class Choices:
    """What the whole file is made for."""

    padded: bool
    """Whether a decoder is told which of its tokens are real."""
    stores: bool
    """Whether the file keeps what it has computed of earlier tokens."""
    encoder_stores: bool = False
    """Whether an encoder's attention is the decoder's class, which is given a store."""
    renamed: list[tuple[str, str]] = field(default_factory=list)

    def rename(self, stored: str, here: str) -> None:
        """Notes that a name of a checkpoint is another in the file."""
        if (stored, here) not in self.renamed:
            self.renamed.append((stored, here))


def _branch(use: Use, prefix: str, norms: BranchNorms, place: str, choices: Choices) -> Branch:
    """Lets a block call the norms of a branch, its multipliers under names with `prefix`."""
    there = {}
    for slot in _SLOTS:
        eps = {"before": "NORM_EPS", "after": "AFTER_NORM_EPS", "residual": "RESIDUAL_NORM_EPS"}[slot]
        there[slot] = give_norm(use, f"{prefix}_{slot.upper()}_NORM", getattr(norms, slot), f"{place.upper()}_{eps}")
        if there[slot]:
            here = {"before": "_norm.", "after": "_after_norm.", "residual": "_residual_norm."}[slot]
            choices.rename(f"_norms.{slot}.", here)
    use.numbers |= {f"{place.upper()}_ALPHA": norms.alpha, f"{place.upper()}_BETA": norms.beta}
    plain = not there["after"] and not there["residual"] and norms.alpha == norms.beta == 1.0
    return Branch(there["before"], there["after"], there["residual"], plain)


def block(spec: BlockSpec, stack: StackSpec, side: str, d_source: int | None, choices: Choices) -> BlockUse:
    """A layer of a stack."""
    order = "First" if spec is stack.blocks[0] else "Later"
    c = stack.d_model
    stores = choices.stores if side == "Decoder" else choices.encoder_stores
    padded = side == "Encoder" or choices.padded
    slots = {"ATTENTION": attention(spec.attention, c, stores=stores, padded=padded, side=side)}
    if spec.cross is not None:
        assert d_source is not None
        slots["CROSS"] = cross_attention(spec.cross, c, d_source)
    slots["FFN"] = feed_forward(spec.ffn, c, side)
    for each in slots.values():
        each.hints = (*each.hints, order)
    use = Use("nn/block.py.jinja", "Block", {}, {"D_MODEL": c})
    branches = {"attention": ("A", spec.norms.attention), "ffn": ("F", spec.norms.ffn)}
    if spec.cross is not None:
        branches["cross"] = ("C", spec.norms.cross)
    parallel = isinstance(spec.wiring, Parallel)
    shared = isinstance(spec.wiring, Parallel) and spec.wiring.shared_norm
    for place, (prefix, norms) in branches.items():
        found = _branch(use, prefix, norms, place, choices)
        use.flags |= {f"{place}_{key}": value for key, value in vars(found).items()}
        for key, value in (("alpha", norms.alpha), ("beta", norms.beta)):
            use.flags[f"{place}_{key}_is_1"] = value == 1.0
    use.flags |= {"parallel": parallel, "shared_norm": shared, "cross": spec.cross is not None}
    use.flags["reads"] = tuple(
        name for name in READS if any(name in _reads(slots, place) for place in ("ATTENTION", "CROSS"))
    )
    use.flags |= {f"{place.lower()}_reads": _reads(slots, place) for place in ("ATTENTION", "CROSS")}
    use.hints = (side, ("Serial", "Parallel")[parallel], _place(spec), ("", "Crossed")[spec.cross is not None], order)
    return BlockUse(use, slots)


def _reads(slots: dict[str, Use], place: str) -> tuple[str, ...]:
    if place not in slots:
        return ()
    found = slots[place].flags["reads"]
    assert isinstance(found, tuple)
    return found


def _place(spec: BlockSpec) -> str:
    """Where the norms of a layer stand, in a word."""
    norms = spec.norms.ffn
    there = [
        word
        for word, slot in (("Pre", norms.before), ("After", norms.after), ("Post", norms.residual))
        if slot.kind != "none"
    ]
    return "".join(there) + "Norm" if there else "Unnormed"


def embedding(stack: StackSpec, vocab_size: int, *, tied: bool) -> tuple[Use | None, tuple[str, ...]]:
    """The embedding of a stack and what it is given beside tokens; None where it is the table and nothing else."""
    embed: Embed = stack.embed
    reads = []
    if not isinstance(embed.position, NoPosition):
        reads.append("positions")
    if embed.types:
        reads.append("types")
    numbers: dict[str, Any] = {"D_EMBED": stack.d_embed, "EMBED_DROPOUT": embed.dropout}
    flags: dict[str, Hashable] = {
        "own_table": not tied,
        "position": embed.position.kind,
        "types": bool(embed.types),
        "scaled": embed.scale != 1.0,
        "factor": embed.factor is not None,
    }
    if not tied:
        numbers["VOCAB_SIZE"] = vocab_size
    if embed.scale != 1.0:
        numbers["EMBED_SCALE"] = embed.scale
    if embed.types:
        numbers["N_TYPES"] = embed.types
    if isinstance(embed.position, Learned):
        numbers |= {"MAX_POSITIONS": stack.max_positions, "LEARNED_OFFSET": embed.position.offset}
        flags["offset"] = bool(embed.position.offset)
    if embed.factor is not None:
        numbers["D_MODEL"] = stack.d_model
        flags["factor_bias"] = embed.factor.bias
    use = Use("nn/embed.py.jinja", "Embedding", flags, numbers)
    if isinstance(embed.position, Sinusoidal):
        use.give("SINUSOIDS", sinusoids(embed.position, stack.d_embed))
        flags["offset"] = bool(embed.position.offset)
    flags["norm"] = give_norm(use, "EMBED_NORM", embed.norm, "EMBED_NORM_EPS")
    trivial = not (reads or flags["scaled"] or flags["factor"] or flags["norm"])
    return (None if trivial else use), tuple(reads)


def _mask(spec: BlockSpec, side: str, choices: Choices, *, prefixed: bool) -> Use:
    """The mask of a layer."""
    mask = spec.attention.mask
    causal = side == "Decoder"
    numbers = {"WINDOW": mask.window, "SINKS": mask.sinks}
    flags: dict[str, Hashable] = {"causal": causal, "prefix": prefixed, "real": not causal or choices.padded}
    title = "causal_mask" if causal else "window_mask"
    return Use("nn/attend/masks.py.jinja", title, flags, numbers)


def stack(name: str, spec: ModelSpec, choices: Choices) -> StackUse:
    """A stack of the model."""
    own: StackSpec = spec.stacks[name]
    side = name.title()
    both = spec.encoder is not None and spec.decoder is not None
    d_source = spec.encoder.d_model if both and spec.encoder is not None and side == "Decoder" else None
    made = {id(each): block(each, own, side, d_source, choices) for each in own.blocks}
    blocks = [made[id(each)] for each in own.blocks]
    prefixed = [isinstance(each.attention.mask, Prefix) for each in own.blocks]
    windowed = any(each.attention.mask.window is not None for each in own.blocks)
    described = windowed or any(prefixed) or (side == "Decoder" and choices.padded)
    masks = [_mask(each, side, choices, prefixed=any(prefixed)) if described else None for each in own.blocks]
    tied = {"encoder.embed", "decoder.embed"} <= spec.ties
    embed, embed_reads = embedding(own, spec.vocab_size, tied=tied)
    if embed is None and not tied:
        choices.rename(f"{name}.embed.token.", f"{name}.embed.")
    if tied:
        choices.rename("encoder.embed.token.", "embed.")
    use = Use("nn/stack.py.jinja", side, {}, {"D_MODEL": own.d_model})
    reads = tuple(each for each in READS if any(each in x.use.flags["reads"] for x in blocks))  # type: ignore[operator]
    for each_block in blocks:
        each_block.use.flags["reads"] = reads
    shared = own.shared_bias
    if shared is not None:
        use.give("RELATIVE_BIAS", buckets(*shared))
    crossed = any("CROSS" in each.slots for each in blocks)
    use.flags |= {
        "own_table": not tied,
        "trivial": embed is None,
        "shared_bias": shared is not None,
        "final_norm": give_norm(use, "FINAL_NORM", own.final_norm, "FINAL_NORM_EPS"),
        "cross": crossed,
        "padded": side == "Encoder" or choices.padded,
        "owners": own.owners,
        "caches": side == "Decoder",
    }
    takes = []
    if side == "Decoder":
        takes.append("cache")
    if own.embed.types:
        takes.append("types")
    if any(prefixed):
        takes.append("prefix")
    if use.flags["padded"]:
        takes.append("real")
    if crossed:
        takes += ["memory", "source_real"]
    return StackUse(name, own, use, blocks, embed, masks, prefixed, reads, tuple(takes), embed_reads)


def owners(spec: StackSpec) -> Sequence[int]:
    """The layers that have parameters of their own."""
    return sorted({spec.owner(i) for i in range(spec.n_layers)})


@dataclass
class HeadFacts:
    """How the scores are made: `use` of a Head class, or none where one product is all."""

    how: str
    use: Use | None
    pool: str
    softcap: bool


def head(spec: ModelSpec, use: Use) -> HeadFacts:
    """The head of a model, whose use is given its numbers."""
    own, c = spec.head, spec.last.d_model
    if own is None:
        return HeadFacts("none", None, "", False)
    if not isinstance(own, LanguageHead):
        use.numbers["N_LABELS"] = 2 if isinstance(own, SpanHead) else own.n_labels
        use.numbers["HEAD_DROPOUT"] = 0.0 if isinstance(own, SpanHead) else own.dropout
        use.flags["head_bias"] = own.bias
        return HeadFacts("linear", None, own.pool if isinstance(own, SequenceHead) else "", False)
    tied = "head" in spec.ties
    if own.scale != 1.0:
        use.numbers["HEAD_SCALE"] = own.scale
    if own.softcap is not None:
        use.numbers["HEAD_SOFTCAP"] = own.softcap
    capped = own.softcap is not None
    if own.transform is None and not (tied and own.bias):
        use.numbers["VOCAB_SIZE"] = spec.vocab_size
        use.flags["head_bias"] = own.bias
        return HeadFacts("tied" if tied else "linear", None, "", capped)
    width = c if own.transform is None else own.transform.width
    numbers: dict[str, Any] = {"VOCAB_SIZE": spec.vocab_size, "D_MODEL": c}
    if width != c:
        numbers["D_TRANSFORM"] = width
    flags: dict[str, Hashable] = {"transform": own.transform is not None, "tied": tied, "bias": own.bias, "norm": False}
    made = Use("nn/heads.py.jinja", "Head", flags, numbers)
    if own.transform is not None:
        flags |= {"activation": own.transform.activation, "transform_bias": own.transform.bias}
        flags["norm"] = give_norm(made, "HEAD_NORM", own.transform.norm, "HEAD_NORM_EPS")
    return HeadFacts("own", made, "", capped)
