"""What must hold between the parts of a whole model: stacks, tables that are one, the head."""

from collections.abc import Iterator
from typing import Any

from anyformer.spec.problems import Problem
from anyformer.spec.reader import Reader, Rule, Unknown, within
from anyformer.spec.rules_attention import offset_needs_weight

_TABLES = ("encoder.embed", "decoder.embed")


def _stacks(read: Reader) -> list[str]:
    return [name for name in ("encoder", "decoder") if getattr(read.part, name) is not None]


def _each(rule: Rule) -> Rule:
    """A rule of stacks, for each stack."""

    def judge(read: Reader) -> Iterator[Problem]:
        for name in _stacks(read):
            yield from within(rule, read, name)

    judge.__doc__ = rule.__doc__
    return judge


def there_is_a_stack(read: Reader) -> Iterator[Problem]:
    """A model is at least an encoder or a decoder."""
    if not _stacks(read):
        yield Problem("decoder", "a model has an encoder, a decoder, or both", remedy="one stack would do")


def learned_positions_have_a_length(read: Reader) -> Iterator[Problem]:
    """A learned table needs its number of rows."""
    if read("embed.position").kind == "learned" and read("max_positions") is None:
        yield Problem(
            "max_positions",
            "learned positions need the length of their table",
            remedy="max_positions = 1024, say, would do",
        )


def sinusoids_come_in_pairs(read: Reader) -> Iterator[Problem]:
    """Each frequency fills two channels."""
    if read("embed.position").kind != "sinusoidal":
        return
    factor = read("embed.factor")
    name, width = ("d_model", read("d_model")) if factor is None else ("embed.factor.width", factor.width)
    if width % 2:
        yield Problem(
            name,
            f"sinusoidal positions fill pairs of channels and {name.rpartition('.')[2]}={width} is odd",
            width,
            f"{max(2, width - 1)} or {width + 1} would do",
        )


def stack_norms_have_what_their_offset_moves(read: Reader) -> Iterator[Problem]:
    """The offset of a norm is added to its weight."""
    yield from offset_needs_weight(read, "embed.norm")
    yield from offset_needs_weight(read, "final_norm")


def _distinct(read: Reader, stack: str) -> Iterator[tuple[str, Reader, Any]]:
    """The known attention of each block of a stack, and where the block is."""
    for place, block in read.blocks(stack):
        try:
            yield place, block, block("attention")
        except Unknown:
            continue


def masks_fit_the_stack(read: Reader) -> Iterator[Problem]:
    """An encoder reads a whole text; a decoder must not see what it predicts."""
    for name in _stacks(read):
        for place, block in read.blocks(name):
            try:
                mask = block("attention.mask")
            except Unknown:
                continue
            if name == "encoder" and mask.kind != "bidirectional":
                why = "an encoder's tokens see both sides"
                yield Problem(f"{place}.attention.mask", why, mask.kind, '"bidirectional", or a decoder, would do')
            if name == "decoder" and mask.kind == "bidirectional":
                why = "a decoder's token would see the tokens that it predicts"
                remedy = '"causal", "prefix", or an encoder, would do'
                yield Problem(f"{place}.attention.mask", why, mask.kind, remedy)


def cross_attention_has_an_encoder(read: Reader) -> Iterator[Problem]:
    """A decoder beside an encoder reads it, and nothing else can."""
    both = len(_stacks(read)) == 2
    reads = False
    for name in _stacks(read):
        for place, block in read.blocks(name):
            try:
                cross = block("cross")
            except Unknown:
                reads = True
                continue
            reads = reads or (name == "decoder" and cross is not None)
            if cross is not None and not (both and name == "decoder"):
                why = "an encoder attends to itself alone" if name == "encoder" else "there is no encoder to attend to"
                remedy = "cross = false" + ("" if both else ', or architecture = "encoder-decoder",') + " would do"
                yield Problem(f"{place}.cross", why, remedy=remedy)
    if both and not reads:
        why = "no layer of the decoder attends to the encoder, whose output then goes nowhere"
        yield Problem("decoder.blocks.0.cross", why, remedy='cross = true, or architecture = "decoder", would do')


def shared_tables_are_one(read: Reader) -> Iterator[Problem]:
    """The layers of a stack that share a table of relative positions describe the same one."""
    for name in _stacks(read):
        first: tuple[Any, int] | None = None
        for place, _, attention in _distinct(read, name):
            position = attention.position
            if position.kind != "relative" or not position.shared:
                continue
            if first is None:
                first = (position, attention.n_heads)
            elif attention.n_heads != first[1]:
                why = f"layers share one table of relative positions, and the first's has n_heads={first[1]}"
                remedy = f"{first[1]}, or position.shared = false, would do"
                yield Problem(f"{place}.attention.n_heads", why, attention.n_heads, remedy)
            elif position != first[0]:
                why = "layers share one table of relative positions and describe two"
                yield Problem(f"{place}.attention.position", why, remedy="shared = false would do")


def owners_come_first(read: Reader) -> Iterator[Problem]:
    """A layer uses its own parameters or those of an earlier layer that is described alike."""
    owners, blocks = read("owners"), read("blocks")
    if owners is None:
        return
    if len(owners) != len(blocks):
        why = f"names {len(owners)} owners for {len(blocks)} layers"
        yield Problem("owners", why, remedy=f"a list of {len(blocks)}, or none, would do")
        return
    if owners == tuple(range(len(blocks))):
        why = "every layer has its own parameters, which is what leaving it out says"
        yield Problem("owners", why, remedy="leaving it out would do")
    for layer, owner in enumerate(owners):
        if not 0 <= owner <= layer:
            yield Problem(
                f"owners.{layer}", "a layer uses its own parameters or an earlier one's", owner, f"{layer} would do"
            )
        elif owners[owner] != owner:
            why = f"layer {owner} has no parameters of its own; it uses layer {owners[owner]}'s"
            yield Problem(f"owners.{layer}", why, owner, f"{owners[owner]} would do")
        elif blocks[owner] != blocks[layer]:
            why = f"layers {owner} and {layer} would share parameters and are described differently"
            yield Problem(f"owners.{layer}", why, owner, f"{layer}, or equal layers, would do")


def types_are_of_one_stack(read: Reader) -> Iterator[Problem]:
    """Token types are those of the one text that a model reads."""
    if len(_stacks(read)) < 2:
        return
    for name in _stacks(read):
        types = read(f"{name}.embed.types")
        if types:
            why = "a model with two stacks reads two texts, and its call gives types for none"
            yield Problem(f"{name}.embed.types", why, types, "0 would do")


def first_tokens_have_seen_the_text(read: Reader) -> Iterator[Problem]:
    """A vector for a text is taken of its first token, which only in an encoder has seen the others."""
    alone = _stacks(read) == ["encoder"]
    pooler, head = read("pooler"), read("head")
    why = (
        "it reads a row's first token, which in a decoder has seen only itself"
        if "encoder" not in _stacks(read)
        else "it reads the decoder, whose first token has seen only itself"
    )
    if pooler is not None and not alone:
        yield Problem("pooler", why, remedy='pooler = false, or architecture = "encoder", would do')
    if head is not None and head.kind == "sequence":
        if head.pool == "first" and not alone:
            yield Problem("head.pool", why, "first", '"last" or "mean" would do')
        if head.pool == "pooler" and pooler is None:
            near = '"first", "mean", or pooler = true,' if alone else '"last" or "mean"'
            yield Problem("head.pool", "there is no pooler", "pooler", f"{near} would do")


def two_stacks_predict_tokens(read: Reader) -> Iterator[Problem]:
    """An encoder-decoder writes a text."""
    head = read("head")
    if len(_stacks(read)) == 2 and head is not None and head.kind != "language":
        why = "an encoder-decoder answers with a text; labels of its source are an encoder's"
        yield Problem("head", why, head.kind, '"language", "none", or architecture = "encoder", would do')


def head_norm_has_what_its_offset_moves(read: Reader) -> Iterator[Problem]:
    """The offset of a norm is added to its weight."""
    if getattr(read("head"), "transform", None) is not None:
        yield from offset_needs_weight(read, "head.transform.norm")


def ties_join_what_exists(read: Reader) -> Iterator[Problem]:
    """A tie joins two tables that are both there."""
    ties, head = read("ties"), read("head")
    if len(ties) == 1:
        yield Problem("ties", "one table alone is not tied", sorted(ties), "name two or none")
    for name in sorted(ties & set(_TABLES)):
        if name.partition(".")[0] not in _stacks(read):
            near = " and ".join(f"{stack}.embed" for stack in _stacks(read))
            yield Problem("ties", f"there is no {name} to tie", sorted(ties), f"{near} and head would do")
    if "head" in ties and head is None:
        yield Problem("tie", "there is no head to tie to the embedding", remedy="tie = false would do")
    elif "head" in ties and head.kind != "language":
        why = f"a {head.kind} head scores labels, and the embedding holds the vocabulary"
        yield Problem("tie", why, remedy="tie = false would do")


def _d_embed(read: Reader, stack: str) -> int:
    factor = read(f"{stack}.embed.factor")
    return int(read(f"{stack}.d_model") if factor is None else factor.width)


def tied_tables_are_of_one_width(read: Reader) -> Iterator[Problem]:
    """One table has one width."""
    ties, head, stacks = read("ties"), read("head"), _stacks(read)
    widths = {name: _d_embed(read, name) for name in stacks if f"{name}.embed" in ties}
    if len(set(widths.values())) > 1:
        both = " and ".join(f"{name}.embed is {width} wide" for name, width in widths.items())
        yield Problem("ties", f"tied tables are one, but {both}", remedy="equal widths, or tie = false, would do")
        return
    if "head" not in ties or not widths or head is None or head.kind != "language":
        return
    width = next(iter(widths.values()))
    if head.transform is not None:
        if head.transform.width != width:
            why = f"the tied table is {width} wide"
            remedy = f"{width}, or tie = false, would do"
            yield Problem("head.transform.width", why, head.transform.width, remedy)
        return
    d_model = read(f"{stacks[-1]}.d_model")
    if d_model != width:
        yield Problem(
            "tie",
            f"the head reads d_model={d_model} channels and the tied table is {width} wide",
            remedy=f"head.transform = {{ width = {width} }}, or tie = false, would do",
        )


MODEL_RULES: tuple[Rule, ...] = (
    there_is_a_stack,
    _each(learned_positions_have_a_length),
    _each(sinusoids_come_in_pairs),
    _each(stack_norms_have_what_their_offset_moves),
    masks_fit_the_stack,
    cross_attention_has_an_encoder,
    shared_tables_are_one,
    _each(owners_come_first),
    types_are_of_one_stack,
    first_tokens_have_seen_the_text,
    two_stacks_predict_tokens,
    head_norm_has_what_its_offset_moves,
    ties_join_what_exists,
    tied_tables_are_of_one_width,
)
