"""The law of shift: relative positions know distances alone."""

import torch
from torch import Tensor

from anyformer.laws.draw import Draw, by_length, longest, states, wide
from anyformer.laws.result import Findings, Result, exempt
from anyformer.nn.model import Model
from anyformer.spec.attention import Grouped
from anyformer.spec.parts import StackSpec
from anyformer.spec.positions import NoPosition, Rope

NAME = "shift"
TOLERANCE = 1e-8
"""In float64, where the angle of a large position is exact to 1e-13 or so."""


def shift(model: Model, seed: int) -> Result:
    """Adding a number to all positions of a row changes nothing; without positions order itself says nothing.

    In float64, every row by a number of its own, and the source of an encoder–decoder by another. An encoder without
    any position or window gives permuted outputs for permuted tokens.

    Exempt: positions on the embeddings; a norm on queries and keys after their rotation, whose weights tell channels
    apart; rotary frequencies that follow the length of a row, which shifted positions seem to lengthen.
    """
    draw = Draw(model, seed)
    findings = Findings(NAME, TOLERANCE)
    model = wide(model)
    said = []
    with torch.no_grad():
        if (reason := absolute(draw.stack)) is None:
            _shifted(model, draw, findings)
            said.append("positions shifted by a number a row")
        else:
            said.append(reason)
        if draw.spec.encoder is not None and absolute(draw.spec.encoder) is None and draw.crossed:
            _shifted_source(model, draw, findings)
            said.append("the source's shifted too")
        if draw.spec.encoder is not None and not draw.crossed and _unordered(draw.spec.encoder):
            _permuted(model, draw, findings)
            said.append("permuted tokens of an encoder without positions")
    result = findings.result("; ".join(said))
    return exempt(NAME, said[0]) if result.holds is None else result


def absolute(stack: StackSpec) -> str | None:
    """Why a stack's outputs may depend on positions themselves, or None where they depend on distances alone."""
    if not isinstance(stack.embed.position, NoPosition):
        return "positions on the embeddings are absolute"
    if by_length(stack):
        return "rotary frequencies follow the length of the row"
    for block in stack.blocks:
        attention = block.attention
        late = isinstance(attention, Grouped) and attention.qk_norm is not None and attention.qk_norm.order == "after"
        if late and isinstance(attention.position, Rope):
            return "a norm on queries and keys after their rotation tells channels apart"
    return None


def _shifted(model: Model, draw: Draw, findings: Findings) -> None:
    length = longest(draw.stack)
    inputs = draw.inputs(2, length)
    places = torch.arange(length).expand(2, -1)
    moved = places + torch.tensor([[37], [1]])
    findings.near(states(model, inputs, positions=moved), states(model, inputs), "positions moved by 37 and by 1")


def _shifted_source(model: Model, draw: Draw, findings: Findings) -> None:
    inputs = draw.inputs(2, longest(draw.stack))
    source = inputs.pop("source")
    places = torch.arange(source.shape[1]).expand(2, -1)
    plain, moved = model.encode(source), model.encode(source, positions=places + torch.tensor([[5], [29]]))
    findings.near(moved, plain, "the source's positions moved by 5 and by 29")
    findings.near(
        states(model, inputs, memory=moved), states(model, inputs, memory=plain), "what is read of that source"
    )


def _unordered(stack: StackSpec) -> bool:
    """Whether nothing in an encoder says in which order tokens stand."""
    blocks = [block.attention for block in stack.blocks]
    positions = all(isinstance(a.position, NoPosition) for a in blocks) and isinstance(stack.embed.position, NoPosition)
    return positions and all(a.mask.kind == "bidirectional" and a.mask.window is None for a in blocks)


def _permuted(model: Model, draw: Draw, findings: Findings) -> None:
    length = longest(draw.stack)
    inputs = draw.inputs(1, length)
    order: Tensor = torch.randperm(length, generator=draw.generator)
    mixed = {name: value[:, order] for name, value in inputs.items()}
    findings.near(states(model, mixed), states(model, inputs)[:, order], "permuted tokens")
