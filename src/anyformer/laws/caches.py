"""The law of the cache: a sequence given in parts is the sequence given whole."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anyformer.laws.draw import Draw, by_length, dtype_of, longest, speaks, states
from anyformer.laws.result import TOLERANCES, Findings, Result, exempt
from anyformer.nn.cache import Cache
from anyformer.nn.model import Model
from anyformer.spec.positions import DynamicNTKScaling

NAME = "cache"


def cache(model: Model, seed: int) -> Result:
    """Every split of a sequence into calls with a cache, of every kind, gives what one call without it gives.

    Splits: one token a call; chunks of several sizes with single tokens between; rows of different lengths, padded on
    the left and on the right, of which some are finished while others go on. A prefix comes whole in the first call, a
    source in the first call alone. The head at the last position alone equals the last output.

    Rotary frequencies that depend on the length of a row make it another function at every length. Dynamic scaling is
    held to this law within its `original` length, LongRoPE within it and with every call past it; a single layer, whose
    keys depend on no length, at any length for the last call. An encoder has no cache.
    """
    if model.spec.decoder is None:
        return exempt(NAME, "an encoder keeps no cache")
    draw = Draw(model, seed)
    findings = Findings(NAME, TOLERANCES[dtype_of(model)])
    first, length, said = splits(draw)
    inputs = draw.inputs(3, length)
    if "prefix" in inputs:
        first = max(first, int(inputs["prefix"].max()))
    with torch.no_grad():
        whole = states(model, inputs)
        kinds = ["static", "ring"] if any(b.attention.mask.window for b in draw.stack.blocks) else ["static"]
        for index, kind in enumerate(kinds):
            # One kind begins with single tokens and goes on in chunks, the other the other way round.
            sizes = _sizes(draw, first, length, singles_first=(seed + index) % 2 == 0)
            _split(model, inputs, whole, sizes, kind, findings)
        _ragged(model, draw, inputs, whole, first, kinds[seed % len(kinds)], findings)
        if speaks(draw.spec):
            _last(model, inputs, whole, first, findings)
        if len(draw.stack.blocks) == 1 and by_length(draw.stack):
            _past(model, draw, findings)
    return findings.result(f"prefill, chunks, single steps and padded rows; {' and '.join(kinds)}{said}")


def splits(draw: Draw) -> tuple[int, int, str]:
    """Tokens of the first call and of the whole, so that both forms are one function, and what must be said of them."""
    length, scalings = longest(draw.stack), by_length(draw.stack)
    if not scalings:
        return 1, length, ""
    least, most = min(s.original for s in scalings), max(s.original for s in scalings)
    room = longest(draw.stack, most + 12)
    if any(isinstance(s, DynamicNTKScaling) for s in scalings) or draw.seed % 2 or room < most + 2:
        return 1, min(length, least), f"; rows of at most {least} tokens, at which their frequencies change"
    return most + 1, room, f"; every call past {most} tokens, at which their frequencies change"


def _sizes(draw: Draw, first: int, length: int, *, singles_first: bool) -> list[int]:
    """How many tokens each call has: `first`, then single ones and chunks in turn."""
    sizes, turn = [min(length, first if singles_first else max(first, 5))], 0
    while sum(sizes) < length:
        single = turn % 4 < 2 if singles_first else turn % 3 > 0
        sizes.append(min(length - sum(sizes), 1 if single else draw.number(2, 6)))
        turn += 1
    return sizes


def _part(inputs: dict[str, Any], start: int, stop: int, *, first: bool) -> dict[str, Any]:
    """The inputs of one call: what belongs to the first call alone is left out of the others."""
    made = {name: value[:, start:stop] for name, value in inputs.items() if name in ("tokens", "types", "padding")}
    return made | ({n: inputs[n] for n in ("prefix", "source", "source_padding") if n in inputs} if first else {})


def _calls(model: Model, inputs: dict[str, Any], sizes: Sequence[int], store: Cache, **more: Any) -> list[Tensor]:
    found, start = [], 0
    for index, size in enumerate(sizes):
        part = _part(inputs, start, start + size, first=index == 0)
        found.append(states(model, part, cache=store, **more))
        start += size
    return found


def _split(
    model: Model, inputs: dict[str, Any], whole: Tensor, sizes: list[int], kind: str, findings: Findings
) -> None:
    batch, length = inputs["tokens"].shape
    store = model.new_cache(batch, length + 2, kind)
    parts = torch.cat(_calls(model, inputs, sizes, store), 1)
    findings.near(parts, whole, f"calls of {_said(sizes)} tokens, {kind}")
    findings.require(bool((store.lengths == length).all()), f"the cache counts {length} tokens, {kind}")


def _said(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes[:6])) + (", …" if len(sizes) > 6 else "")


def _last(model: Model, inputs: dict[str, Any], whole: Tensor, first: int, findings: Findings) -> None:
    """The last position's scores alone, in a call that goes on."""
    length = whole.shape[1]
    if first >= length:
        return
    store = model.new_cache(whole.shape[0], length)
    model(**_part(inputs, 0, first, first=True), cache=store)
    last = model(**_part(inputs, first, length, first=False), cache=store, last_only=True)
    findings.near(last, whole[:, -1:], "last_only")


def _ragged(
    model: Model, draw: Draw, inputs: dict[str, Any], whole: Tensor, first: int, kind: str, findings: Findings
) -> None:
    """Rows of different lengths: a first call padded on the left, a second on the right, then steps of some rows.

    By causality the outputs of a shorter row are the first of those of the whole one.
    """
    length = inputs["tokens"].shape[1]
    begins = [min(length, max(first, n)) for n in (5, 2, 3)]
    totals = [min(length, begin + more) for begin, more in zip(begins, (9, 3, 4), strict=True)]
    ends = [min(total, begin + more) for begin, total, more in zip(begins, totals, (4, 0, 4), strict=True)]
    store = model.new_cache(3, length + 1, kind)
    spans = [list(zip([0, 0, 0], begins, strict=True)), list(zip(begins, ends, strict=True))]
    spans += [
        [(min(end + step, total), min(end + step + 1, total)) for end, total in zip(ends, totals, strict=True)]
        for step in range(max(total - end for total, end in zip(totals, ends, strict=True)))
    ]
    gathered: list[list[Tensor]] = [[], [], []]
    for index, span in enumerate(spans):
        part = _aligned(draw, inputs, span, left=index == 0)
        if index == 0:
            part |= {name: inputs[name] for name in ("prefix", "source") if name in inputs}
        out = states(model, part, cache=store)
        for row, kept in enumerate(part["padding"]):
            gathered[row].append(out[row, kept])
    for row, total in enumerate(totals):
        findings.near(torch.cat(gathered[row]), whole[row, :total], f"row {row} of {total} tokens, padded, {kind}")


def _aligned(draw: Draw, inputs: dict[str, Any], span: list[tuple[int, int]], *, left: bool) -> dict[str, Any]:
    """Stretches of rows in one call, padded with tokens drawn anew."""
    width = max(1, max(stop - start for start, stop in span))
    made: dict[str, Any] = {"padding": torch.zeros(3, width, dtype=torch.bool)}
    for name in ("tokens", "types"):
        if name in inputs:
            made[name] = draw.tokens(3, width) if name == "tokens" else torch.zeros(3, width, dtype=torch.int64)
    for row, (start, stop) in enumerate(span):
        n = stop - start
        at = slice(width - n, width) if left else slice(0, n)
        made["padding"][row, at] = True
        for name in ("tokens", "types"):
            if name in inputs:
                made[name][row, at] = inputs[name][row, start:stop]
    return made


def _past(model: Model, draw: Draw, findings: Findings) -> None:
    """The last call of one layer, whose stored keys are turned anew for the length that the row then has."""
    most = max(s.original for s in by_length(draw.stack))
    length = longest(draw.stack, most + 5)
    inputs = draw.inputs(2, length)
    first = max(2, int(inputs["prefix"].max()) if "prefix" in inputs else 2)
    sizes = [first, length - first - 1, 1]
    if min(sizes) < 1:
        return
    last = _calls(model, inputs, sizes, model.new_cache(2, length))[-1]
    findings.near(last, states(model, inputs)[:, -1:], f"the last of calls of {_said(sizes)} tokens, past {most}")
