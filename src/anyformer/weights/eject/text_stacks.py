"""Embeddings and stacks: the layers in their order, their masks, and the loop over them."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from anyformer.spec.parts import StackSpec
from anyformer.weights.eject.constants import Constants, Raw
from anyformer.weights.eject.layers import TYPES, BlockUse, StackUse, owners
from anyformer.weights.eject.parts import Parts, alone, arguments, call_of, plural, switch
from anyformer.weights.eject.pattern import layers_text, module_list, tuple_text
from anyformer.weights.eject.uses import Kind, Use, kinds_of


def write_embeddings(parts: Parts, stacks: Sequence[StackUse]) -> None:
    """Writes the embeddings that are more than a table."""
    found = [each for each in stacks if each.embed is not None]
    uses = [each.embed for each in found if each.embed is not None]
    for use, each in zip(uses, found, strict=True):
        use.flags["embed_reads"] = each.embed_reads
        use.hints = (each.name.title(),)
    kinds = kinds_of(uses)

    def texts(kind: Kind) -> dict[str, str]:
        flags = kind.first.flags
        reads = flags["embed_reads"]
        assert isinstance(reads, tuple)
        plain = {} if flags["factor"] else {"D_EMBED": "D_MODEL"}
        plain |= {} if flags["scaled"] else {" * EMBED_SCALE": ""}
        plain |= {} if flags.get("offset") else {" + LEARNED_OFFSET": ""}
        return {
            "EMBED_NAME": kind.name,
            "EMBED_DOC": _embed_doc(flags),
            "EMBED_READS": ", ".join(f"{name}: {TYPES[name]}" for name in reads),
            "FACTOR_BIAS": switch(flags.get("factor_bias")),
            **plain,
        }

    for kind in kinds:
        for use in kind.uses:
            use.numbers.setdefault("D_MODEL", use.numbers["D_EMBED"])
    parts.render(kinds, texts)


def _embed_doc(flags: Mapping[str, Any]) -> str:
    """What is added up, normed and projected."""
    said = ["scaled token vectors" if flags["scaled"] else "token vectors"]
    said += ["positions"] if flags["position"] != "none" else []
    said += ["token types"] if flags["types"] else []
    text = " + ".join(said)
    text = f"the norm of {text}" if flags["norm"] else text
    text += ", projected to the width of the model" if flags["factor"] else ""
    return f"{text[0].upper()}{text[1:]}."


def _layer(block: BlockUse, constants: Constants) -> str:
    """The call that makes a block."""
    kind = block.use.kind
    assert kind is not None
    given = [call_of(block.slots[place.upper()], constants) for place in kind.given]
    return f"{kind.name}({', '.join([*given, *arguments(block.use, constants)])})"


def write_stack(parts: Parts, each: StackUse) -> None:
    """Writes an encoder or a decoder."""
    flags, own = each.use.flags, each.spec
    kind = alone(each.use)
    side = each.use.title
    embed = "nn.Embedding(VOCAB_SIZE, D_MODEL)" if each.embed is None else call_of(each.embed, parts.constants)
    tied = not flags["own_table"]
    each.use.numbers["VOCAB_SIZE"] = parts.spec.vocab_size
    first = "x" if tied else "tokens"
    given = [first, *each.embed_reads]
    embeds = not (tied and each.embed is None)
    embedded = f"self.embed({', '.join(given)})" if embeds else ""
    if each.embed is None and own.embed.dropout:
        each.use.numbers["EMBED_DROPOUT"] = own.embed.dropout
        embedded = f"F.dropout({embedded or first}, EMBED_DROPOUT, self.training)"
    masks = _Masks(parts, each)
    where = bool({"positions", "bias"} & set(each.reads)) or masks.positioned or "positions" in each.embed_reads
    flags |= {"where": where, "masks": masks.how, "embeds": embeds, "embedded": bool(embedded)}
    reads = {name: name for name in each.reads}
    if masks.how == "many":
        reads["mask"] = masks.text
    if side == "Encoder":
        reads |= {"store": "{}", "keys": "positions"}
    flags["unstored"] = side == "Encoder" and "store" in each.reads
    loop, owner = _loop(parts, each, masks)
    texts = {
        "STACK_NAME": side,
        "STACK_DOC": _stack_doc(own, side, embeds=embeds),
        "= EMBED\n": f"= {embed}\n",
        "= BLOCKS\n": f"= {_blocks_text(parts, each)}\n",
        "STACK_INPUT": f"{first}: Tensor",
        "STACK_PARAMS": ", ".join(f"{name}: {TYPES[name]}" for name in each.takes),
        "FIRST": first,
        "KEYS": "keys" if side == "Decoder" else "positions",
        "= MASK\n": f"= {masks.text}\n",
        "STACK_READS": ", ".join(reads[name] for name in each.reads),
        "LOOP": loop,
        "OWNER": owner,
        "EMBEDDED": embedded,
    }
    parts.render([kind], lambda _: texts)


def _stack_doc(spec: StackSpec, side: str, *, embeds: bool) -> str:
    said = ["the embedding"] if embeds else []
    said.append(plural(spec.n_layers, "layer"))
    said += ["a final norm"] if spec.final_norm.kind != "none" else []
    return f"The {side.lower()}: {', '.join(said[:-1])}{' and ' if said[1:] else ''}{said[-1]}."


def _blocks_text(parts: Parts, each: StackUse) -> str:
    """The module list of a stack's blocks."""
    own = owners(each.spec)
    blocks = [each.blocks[i] for i in own]
    layers = [_layer(block, parts.constants) for block in blocks]
    count = parts.constants.name("N_LAYERS", each.spec.n_layers, each.use.title)
    if each.spec.owners is not None:
        if list(own) != list(range(len(own))):
            return "nn.ModuleDict({" + ", ".join(f'"{i}": {made}' for i, made in zip(own, layers, strict=True)) + "})"
        return layers_text(layers, str(len(own)))
    if len(set(layers)) == 1:
        return f"nn.ModuleList({layers[0]} for _ in range({count}))"
    return _segments_text(parts, each, blocks) or layers_text(layers, count)


_MOST_SEGMENTS, _MOST_COLUMNS = 4, 3
"""Beyond these, layers are clearer one by one."""


def _segments_text(parts: Parts, each: StackUse, blocks: Sequence[BlockUse]) -> str:
    """Stretches of layers of one make, what differs within one listed as constants; nothing where it would not help."""
    stretches = [list(group) for _, group in groupby(blocks, key=_make)]
    if len(stretches) > _MOST_SEGMENTS:
        return ""
    lines: list[str] = []
    for stretch in stretches:
        columns: dict[str, str] = {}
        made = _call_of_all(parts, each, stretch, columns)
        if len(columns) > _MOST_COLUMNS:
            return ""
        names, places = ", ".join(columns), ", ".join(columns.values())
        if len(stretch) == 1:
            lines.append(made)
        elif not columns:
            lines.append(f"*({made} for _ in range({len(stretch)}))")
        else:
            lines.append(f"*({made} for {names} in {places if len(columns) == 1 else f'zip({places}, strict=True)'})")
    if len(lines) == 1:
        return f"nn.ModuleList{lines[0].removeprefix('*')}"
    return module_list(lines)


def _make(block: BlockUse) -> tuple[int, ...]:
    """What classes a layer is made of."""
    return (id(block.use.kind), *(id(use.kind) for use in block.slots.values()))


def _call_of_all(parts: Parts, each: StackUse, blocks: Sequence[BlockUse], columns: dict[str, str]) -> str:
    """The call that makes layers of one make; `columns` learns the names and places of what differs."""
    kind = blocks[0].use.kind
    assert kind is not None
    slots = [[block.slots[place.upper()] for block in blocks] for place in kind.given]
    given = [_call_with(parts, each, uses, columns) for uses in slots]
    return _call_with(parts, each, [block.use for block in blocks], columns, given)


def _call_with(
    parts: Parts, each: StackUse, uses: Sequence[Use], columns: dict[str, str], given: Sequence[str] = ()
) -> str:
    """The call that makes uses of one kind, in which what differs has a name; `columns` learns of it."""
    kind = uses[0].kind
    assert kind is not None
    said = list(given)
    for argument, name in zip(arguments(uses[0], parts.constants), kind.fields, strict=True):
        values, word = [use.numbers[name] for use in uses], name.lower()
        if all(value == values[0] for value in values):
            said.append(argument)
            continue
        listed = parts.constants.name(_plural(name), Raw(tuple_text(values)), each.use.title)
        own = word if columns.get(word, listed) == listed else f"{kind.name.lower()}_{word}"
        columns[own] = listed
        said.append(f"{word}={own}")
    return f"{kind.name}({', '.join(said)})"


def _plural(name: str) -> str:
    """The name of a constant that holds a number for each layer."""
    return f"{name}_OF_LAYERS" if name[-1] in "SD" else f"{name}S"


class _Masks:
    """How a stack makes the masks of its layers."""

    def __init__(self, parts: Parts, each: StackUse) -> None:
        first = each.masks[0]
        self.columns: list[tuple[str, str]] = []
        self.positioned = first is not None or each.use.title == "Decoder"
        if first is None:
            causal = "keys[:, None, None, :] <= positions[:, None, :, None]  # what came before, and itself"
            self.how, self.text = "one", causal if self.positioned else "real[:, None, None, :]"
            return
        assert first.kind is not None
        kind = first.kind
        given = ["positions", "keys" if each.use.title == "Decoder" else "positions"]
        given += ["real"] if first.flags["real"] else []
        if first.flags["prefix"]:
            given.append(self._column(parts, each, "prefixed", each.prefixed, "prefix", "prefix * prefixed"))
        for name in kind.fields:
            values = [mask.numbers[name] for mask in each.masks if mask is not None]
            word, same = name.lower(), parts.constants.name(name, values[0], each.use.title)
            given.append(f"{word}={self._column(parts, each, word, values, same, word)}")
        self.text = f"{kind.name}({', '.join(given)})"
        self.how = "many" if self.columns else "one"

    def _column(self, parts: Parts, each: StackUse, word: str, values: Sequence[Any], same: str, differs: str) -> str:
        if all(value == values[0] for value in values):
            return same
        name = parts.constants.name(_plural(word.upper()), Raw(tuple_text(values)), each.use.title)
        self.columns.append((word, name))
        return differs


def _loop(parts: Parts, each: StackUse, masks: _Masks) -> tuple[str, str]:
    """The head of the loop over layers, and the place of a layer's block where layers share them."""
    columns = [("block", "self.blocks")]
    owner = ""
    if each.spec.owners is not None:
        own = list(owners(each.spec))
        name = parts.constants.name("OWNERS", Raw(tuple_text(each.spec.owners)), each.use.title)
        columns = [("owner", name)]
        owner = "owner" if own == list(range(len(own))) else "str(owner)"
    if "store" in each.reads and each.use.flags["caches"]:
        columns.append(("store", "cache.stores"))
    columns += masks.columns
    if len(columns) == 1:
        return f"{columns[0][0]} in {columns[0][1]}", owner
    names, places = (", ".join(part) for part in zip(*columns, strict=True))
    return f"{names} in zip({places}, strict=True)", owner
