"""The law of packing: documents packed into a row are the documents apart."""

from typing import Any

import torch
from torch import Tensor

from anyformer.laws.draw import Draw, longest, speaks, states, wide
from anyformer.laws.result import TOLERANCES, Findings, Result
from anyformer.nn.model import Model
from anyformer.train.loss import summed_loss

NAME = "packing"


def packing(model: Model, seed: int) -> Result:
    """Documents in one row, told apart by segments, give what each gives in a row of its own.

    Compared in float64: values, each document's loss, the gradients of all parameters. One row is packed full, another
    is padded on both sides. With cross-attention the sources are packed too. Where the head scores no
    vocabulary, the loss is a random linear function of the outputs.
    """
    draw = Draw(model, seed)
    findings = Findings(NAME, TOLERANCES[torch.float64])
    model = wide(model)
    packed, apart = _documents(draw)
    targets = draw.tokens(*packed["tokens"].shape)
    out = states(model, packed)
    weights = draw.normal(*out.shape)
    together: list[Tensor] = []
    alone: list[Tensor] = []
    for document, row, at in apart:
        here, there = out[row : row + 1, at], states(model, document)
        findings.near(here, there, f"a document of {document['tokens'].shape[1]} tokens")
        for part, losses in ((here, together), (there, alone)):
            if speaks(draw.spec):
                losses.append(summed_loss(part, targets[row : row + 1, at]))
            else:
                losses.append((part * weights[row : row + 1, at]).sum())
    one, other = torch.stack(together), torch.stack(alone)
    findings.near(one, other, "the loss of a document")
    compare_gradients(model, one.sum(), other.sum(), findings, "packed and apart")
    return findings.result("values, loss and gradients of packed documents against the documents apart")


def _documents(draw: Draw) -> tuple[dict[str, Any], list[tuple[dict[str, Any], int, slice]]]:
    """A packed batch of two rows, and its documents one by one, each with its row and place."""
    length = longest(draw.stack)
    sizes = [[4, length // 2, length], [1, 6, length // 3]]
    inputs = draw.inputs(2, length, prefix=False)
    inputs["segments"] = torch.zeros(2, length, dtype=torch.int64)
    inputs["padding"] = torch.ones(2, length, dtype=torch.bool)
    if draw.prefixed:
        inputs["prefix"] = torch.zeros(2, length, dtype=torch.bool)
    if draw.crossed:
        inputs |= {"source_segments": torch.zeros_like(inputs["source"]), "source_padding": inputs["source"] >= 0}
    apart: list[tuple[dict[str, Any], int, slice]] = []
    for row in range(2):
        # The second row is padded on both sides.
        start = 2 * row
        inputs["padding"][row, :start] = False
        inputs["segments"][row, :start] = 98
        for number, size in enumerate(sizes[row]):
            stop = min(start + size, length)
            if stop > start:
                at = slice(start, stop)
                apart.append((_document(draw, inputs, row, at, number, len(sizes[row])), row, at))
            start = stop
        if start < length:
            inputs["padding"][row, start:] = False
            inputs["segments"][row, start:] = 99
    return inputs, apart


def _document(draw: Draw, inputs: dict[str, Any], row: int, at: slice, number: int, count: int) -> dict[str, Any]:
    """Marks a document in the packed inputs, and gives it by itself."""
    name = 7 - 3 * number  # ids are names: neither consecutive nor in order
    inputs["segments"][row, at] = name
    made: dict[str, Any] = {key: inputs[key][row : row + 1, at] for key in ("tokens", "types") if key in inputs}
    if draw.prefixed:
        n = min(1 + number, at.stop - at.start)
        inputs["prefix"][row, at.start : at.start + n] = True
        made["prefix"] = torch.tensor([n])
    if draw.crossed:
        s = inputs["source"].shape[1]
        there = slice(number * s // count, (number + 1) * s // count)
        inputs["source_segments"][row, there] = name
        made["source"] = inputs["source"][row : row + 1, there]
    return made


def compare_gradients(model: Model, one: Tensor, other: Tensor, findings: Findings, words: str) -> None:
    """The gradients of two losses by every parameter, each relative to the largest of that parameter."""
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    pairs = zip(
        names,
        torch.autograd.grad(one, parameters, allow_unused=True),
        torch.autograd.grad(other, parameters, allow_unused=True),
        strict=True,
    )
    for name, a, b in pairs:
        findings.require((a is None) == (b is None), f"{name} has a gradient, {words}")
        if a is not None and b is not None:
            findings.near(a, b, f"the gradient of {name}, {words}")
