"""The law of accumulation: an update does not depend on how its rows were cut into micro-batches."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from anyformer.laws.draw import Draw, longest, speaks
from anyformer.laws.result import TOLERANCES, Findings, Result, exempt
from anyformer.nn.model import Model
from anyformer.nn.moe import Routing, moe_layers
from anyformer.train.loss import Batch, shifted, summed_loss
from anyformer.train.step import Tally, accumulate

NAME = "accumulation"


def accumulation(model: Model, seed: int) -> Result:
    """The loss and the gradients of a whole batch are those of its micro-batches, of whatever shapes.

    In float64, through the trainer's own functions. Rows have different lengths and different numbers of targets; a
    micro-batch of one row is cut to the row. What mixtures of experts add is part of it: their loss over sequences, and
    the z loss. A balance loss over a batch is by its definition another loss when the batch is cut, so that it is
    exempt: it is left out of both sides. The trainer learns a vocabulary, so that other heads are exempt.
    """
    draw = Draw(model, seed)
    if not speaks(draw.spec):
        return exempt(NAME, "the head scores no vocabulary")
    findings = Findings(NAME, TOLERANCES[torch.float64])
    model, left_out = _without_batch_losses(model)
    whole, parts, sources = _batches(draw)

    def loss(inner: nn.Module, batch: Batch, *, routing: Routing | None = None) -> Tensor:
        more: dict[str, Any] = {} if routing is None else {"routing": routing}
        if draw.crossed:
            more["source"] = sources[batch.tokens.data_ptr()]
        scores = inner(batch.tokens, padding=batch.padding, segments=batch.segments, **more)
        return summed_loss(scores, batch.targets, batch.mask)

    one, gradients = _update(model, [whole], loss)
    for words, batches in parts.items():
        value, found = _update(model, batches, loss)
        findings.near(value, one, f"the loss in {words}")
        for name, expected in gradients.items():
            findings.near(found[name], expected, f"the gradient of {name} in {words}")
    said = "; the balance loss over a batch is exempt" if left_out else ""
    return findings.result(f"the whole batch against rows one by one and against unequal parts{said}")


def _without_batch_losses(model: Model) -> tuple[Model, bool]:
    """A copy in float64 that leaves out the balance losses over a batch, and whether there were any."""
    model = copy.deepcopy(model).double()
    found = False
    for layer in moe_layers(model).values():
        if layer.spec.balance_loss and layer.spec.balance_over == "batch":
            layer.spec, found = layer.spec.model_copy(update={"balance_loss": 0.0}), True
    return model, found


def _batches(draw: Draw) -> tuple[Batch, dict[str, list[Batch]], dict[int, Tensor]]:
    """A batch of four rows and two ways to cut it, and each part's source by where its tokens lie."""
    length = longest(draw.stack)
    ends = [length + 1, max(2, length // 2), max(2, length - 3), 3]
    tokens = draw.tokens(4, length + 1)
    real = torch.arange(length + 1)[None] < torch.tensor(ends)[:, None]
    supervised = draw.between(0, 2, 4, length + 1) > 0
    source = draw.tokens(4, draw.source_length()) if draw.crossed else None
    sources: dict[int, Tensor] = {}

    def part(rows: slice, width: int) -> Batch:
        made = shifted(tokens[rows, :width].clone(), real[rows, :width], supervised[rows, :width])
        if source is not None:
            sources[made.tokens.data_ptr()] = source[rows]
        return made

    whole = part(slice(0, 4), length + 1)
    # One token more than the row has, so that its last one is an input here as it is in the whole batch.
    alone = [part(slice(row, row + 1), min(end, length) + 1) for row, end in enumerate(ends)]
    unequal = [part(slice(0, 3), length + 1), part(slice(3, 4), length + 1)]
    return whole, {"rows one by one": alone, "parts of 3 and 1": unequal}, sources


def _update(model: Model, batches: list[Batch], loss: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients of an update, as a step of the trainer computes them."""
    tally = None
    if moe_layers(model):
        rows, tokens = sum(b.n_sequences for b in batches), sum(b.n_tokens for b in batches)
        tally = Tally(model, rows, tokens)
    model.zero_grad(set_to_none=True)
    value = accumulate(model, batches, sum(b.n_targets for b in batches), loss=loss, tally=tally)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return value, gradients
