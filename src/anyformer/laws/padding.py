"""The laws of rows: padding is invisible, and rows do not know of each other."""

from typing import Any

import torch
from torch import Tensor

from anyformer.laws.draw import Draw, dtype_of, longest, outputs, rows, states
from anyformer.laws.result import TOLERANCES, Findings, Result
from anyformer.nn.model import Model
from anyformer.spec.parts import SequenceHead

PADDING, BATCH = "padding", "batch"


def padding(model: Model, seed: int) -> Result:
    """A row padded on the left, on the right or on both sides gives on its real tokens what it gives alone.

    All of these stand in one batch with a row that is all padding, which gives finite numbers; so are the gradients of
    all outputs, those on padding included. Padding holds tokens of the vocabulary, so that nothing but the mask says
    what it is.
    """
    draw = Draw(model, seed)
    findings = Findings(PADDING, TOLERANCES[dtype_of(model)])
    length = longest(draw.stack)
    spans = [(0, length), (0, max(1, length - 4)), (min(3, length - 1), length), (length // 3, 2 * length // 3 + 1)]
    spans = [*spans, (0, 0)]
    inputs = draw.inputs(len(spans), length)
    real = torch.zeros(len(spans), length, dtype=torch.bool)
    for row, (start, stop) in enumerate(spans):
        real[row, start:stop] = True
    if "prefix" in inputs:
        inputs["prefix"] = torch.minimum(inputs["prefix"], real.sum(1))
    padded = inputs | {"padding": real}
    said = outputs(model, padded)
    findings.require(bool(torch.isfinite(said).all()), "a batch with a row that is all padding is finite")
    _finite_gradients(model, said, findings)
    with torch.no_grad():
        each = states(model, padded) if isinstance(draw.spec.head, SequenceHead) else said
        for row, (start, stop) in enumerate(spans[:-1]):
            alone = _cut(rows(inputs, slice(row, row + 1)), start, stop)
            findings.near(each[row : row + 1, start:stop], states(model, alone), _where(start, stop, length))
            if isinstance(draw.spec.head, SequenceHead):
                findings.near(
                    said[row : row + 1], outputs(model, alone), f"the row's scores, {_where(start, stop, length)}"
                )
    return findings.result("rows padded on either side, and all padding, against each alone")


def _where(start: int, stop: int, length: int) -> str:
    return f"a row with {start} padding tokens before it and {length - stop} after"


def _cut(inputs: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """The tokens [start, stop) of a row, and what belongs to the row."""
    return {name: value[:, start:stop] if name in ("tokens", "types") else value for name, value in inputs.items()}


def _finite_gradients(model: Model, said: Tensor, findings: Findings) -> None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        return
    gradients = torch.autograd.grad(said.sum(), parameters, allow_unused=True)
    finite = all(bool(torch.isfinite(g).all()) for g in gradients if g is not None)
    findings.require(finite, "gradients of a batch with a row that is all padding are finite")


def batch(model: Model, seed: int) -> Result:
    """A row gives among others what it gives alone, whatever the others are.

    Mixtures of experts are held to it too: no token is dropped because others chose the same expert.
    """
    draw = Draw(model, seed)
    findings = Findings(BATCH, TOLERANCES[dtype_of(model)])
    inputs = draw.inputs(3, longest(draw.stack))
    # Rows that are all alike crowd the same experts.
    inputs["tokens"][2] = inputs["tokens"][2, :1]
    crowded = rows(inputs, [1, 2, 2, 2, 2, 2])
    with torch.no_grad():
        together, beside = outputs(model, inputs), outputs(model, crowded)
        for row in range(3):
            alone = outputs(model, rows(inputs, slice(row, row + 1)))[0]
            findings.near(together[row], alone, f"row {row} of 3")
            if row == 1:
                findings.near(beside[0], alone, "a row beside five that are one token repeated")
    return findings.result("each row among others against the row alone")
