"""The law of causality: a token depends on what its layers' masks let it see, and on nothing else."""

from typing import Any

import torch
from torch import Tensor

from anyformer.laws.draw import Draw, dtype_of, longest, states, wide
from anyformer.laws.result import TOLERANCES, Findings, Result
from anyformer.nn.model import Model
from anyformer.spec.attention import Grouped, Mask
from anyformer.spec.parts import StackSpec

NAME = "causality"


def causality(model: Model, seed: int) -> Result:
    """Changing token j changes no output before j, nor any other that cannot see j; those gradients are exactly 0.

    What output i can see is worked out from the masks of all layers, composed: causality, the prefix, windows, the
    first tokens that a window keeps. Gradients of output i by the embeddings, in float64, are exactly 0 for the tokens
    that it cannot see, and where nothing clips not 0 for those that it can. In an encoder without windows all is seen
    by all.

    Tokens of a prefix are seen by all, so that nothing is asked of changes there.
    """
    draw = Draw(model, seed)
    findings = Findings(NAME, TOLERANCES[dtype_of(model)])
    length = longest(draw.stack)
    inputs = draw.inputs(1, length)
    seen = influence(draw.stack, length, int(inputs["prefix"]) if "prefix" in inputs else 0)
    _values(model, draw, inputs, seen, findings)
    _gradients(model, draw, inputs, seen, findings)
    return findings.result("what each token sees, by changed tokens and by gradients, against the masks of all layers")


def influence(stack: StackSpec, length: int, prefix: int) -> Tensor:
    """Which tokens reach which through all layers, bool [T of outputs, T of inputs]."""
    total = torch.eye(length, dtype=torch.bool)
    for block in stack.blocks:
        layer = _sees(block.attention.mask, length, prefix) | torch.eye(length, dtype=torch.bool)
        total = (layer.float() @ total.float()) > 0
    return total


def _sees(mask: Mask, length: int, prefix: int) -> Tensor:
    """Written out from the definition, so that it shares nothing with what attention uses."""
    seen = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        for j in range(length):
            past = j <= i or mask.kind == "bidirectional" or (mask.kind == "prefix" and j < prefix)
            near = mask.window is None or abs(i - j) <= mask.window - 1 or j < mask.sinks
            seen[i, j] = past and near
    return seen


def _repeated(inputs: dict[str, Any], times: int) -> dict[str, Any]:
    return {name: value.repeat_interleave(times, 0) for name, value in inputs.items()}


def _values(model: Model, draw: Draw, inputs: dict[str, Any], seen: Tensor, findings: Findings) -> None:
    """One row as it is, and copies of it with a token changed in each."""
    length, vocabulary = seen.shape[0], draw.spec.vocab_size
    if vocabulary == 1:
        return
    places = sorted({0, 1 % length, length // 2, length - 1, draw.number(0, length - 1)})
    changed = _repeated(inputs, 1 + len(places))
    for row, place in enumerate(places, 1):
        changed["tokens"][row, place] = (changed["tokens"][row, place] + draw.number(1, vocabulary - 1)) % vocabulary
    with torch.no_grad():
        out = states(model, changed)
    for row, place in enumerate(places, 1):
        blind = ~seen[:, place]
        findings.near(out[row, blind], out[0, blind], f"outputs that cannot see token {place}, when it is changed")


def _gradients(model: Model, draw: Draw, inputs: dict[str, Any], seen: Tensor, findings: Findings) -> None:
    """A row of the batch for each output, so that one backward pass gives all gradients."""
    model = wide(model)
    length = seen.shape[0]
    table: Any = model.token_table(list(draw.spec.stacks)[-1])
    vectors = table[inputs["tokens"]].detach().repeat(length, 1, 1).requires_grad_()
    rest = {name: value.repeat_interleave(length, 0) for name, value in inputs.items() if name != "tokens"}
    out = states(model, {"embeddings": vectors, **rest})
    own = out[torch.arange(length), torch.arange(length)]
    (gradient,) = torch.autograd.grad((own * draw.normal(*own.shape)).sum(), vectors)
    size = gradient.abs().amax(-1)
    for i in range(length):
        blind = size[i][~seen[i]]
        if blind.numel():
            findings.require(float(blind.max()) == 0.0, f"the gradient of output {i} by a token that it cannot see")
    findings.require(bool(torch.isfinite(size).all()), "gradients are finite")
    # What is clipped on both sides passes no gradient, whatever is seen.
    clipped = any(isinstance(b.attention, Grouped) and b.attention.clip for b in draw.stack.blocks)
    for i in () if clipped else (length // 2, length - 1):
        # A head of few ReLUs may let nothing through at all.
        missed = seen[i] & (size[i] == 0) & (size[i, i] > 0)
        first = int(missed.long().argmax())
        findings.require(not bool(missed.any()), f"the gradient of output {i} by token {first}, which it sees, is 0")
