"""The law of the backends: each way of computing attention computes the same attention."""

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from anyformer.laws.draw import Draw, longest, states
from anyformer.laws.result import TOLERANCES, Findings, Result
from anyformer.nn.attend import BACKENDS, Backend, Unsupported
from anyformer.nn.model import Model

NAME = "backends"

Gradients = dict[str, Tensor | None]


def backends(model: Model, seed: int) -> Result:
    """Every backend gives what `reference` gives, in float64: values, and gradients of all parameters.

    Two calls: rows from end to end, and rows that are packed and padded; and, for values alone, a call that goes on
    after a cache, with several new tokens and with one. A backend that cannot compute a call says so and is named in
    the result; `tiled` must compute them all.
    """
    draw = Draw(model, seed)
    findings = Findings(NAME, TOLERANCES[torch.float64])
    # A copy, so that the model keeps the backend that it has.
    model = copy.deepcopy(model).double()
    calls = _calls(model, draw)
    wanted = {where: _answer(model, "reference", call) for where, call in calls.items()}
    refused: list[str] = []
    for name in [b for b in BACKENDS if b != "reference"]:
        for where, call in calls.items():
            try:
                value, gradients = _answer(model, name, call)
            except Unsupported as reason:
                findings.require(name != "tiled", f"{name} computes {where}: {reason}")
                if name not in refused:
                    refused.append(name)
                continue
            right, expected = wanted[where]
            findings.near(value, right, f"{name}, {where}")
            _same_gradients(gradients, expected, f"{name}, {where}", findings)
    said = f"; unsupported by {', '.join(refused)}" if refused else ""
    return findings.result(f"values and gradients of every backend against reference{said}")


def _calls(model: Model, draw: Draw) -> dict[str, Callable[[], Tensor]]:
    length = longest(draw.stack)
    plain = draw.inputs(2, length)
    packed = draw.inputs(2, length, prefix=False)
    real = torch.ones(2, length, dtype=torch.bool)
    real[0, : length // 5], real[1, length - length // 4 :] = False, False
    packed["padding"] = real
    packed["segments"] = (torch.arange(length) >= length // 2).long().expand(2, -1).contiguous()
    if draw.prefixed:
        packed["prefix"] = draw.between(0, 3, 2, length) == 0
    if draw.crossed:
        s = packed["source"].shape[1]
        packed["source_padding"] = torch.arange(s).expand(2, -1) < torch.tensor([[s], [max(1, s - 3)]])
        packed["source_segments"] = (torch.arange(s) >= s // 2).long().expand(2, -1).contiguous()
    first = max(length - 5, int(plain["prefix"].max()) if "prefix" in plain else 1)
    calls = {"rows from end to end": _call(model, plain), "rows packed and padded": _call(model, packed)}
    if draw.spec.decoder is not None and length - first >= 3:
        calls["a call that goes on"] = lambda: _goes_on(model, plain, first, length)
    return calls


def _call(model: Model, inputs: dict[str, Any]) -> Callable[[], Tensor]:
    return lambda: states(model, inputs)


def _goes_on(model: Model, inputs: dict[str, Any], first: int, length: int) -> Tensor:
    """Several tokens and then one, after stored ones."""
    store = model.new_cache(2, length, "ring")
    parts = []
    with torch.no_grad():
        for start, stop in ((0, first), (first, length - 1), (length - 1, length)):
            part = {n: x[:, start:stop] for n, x in inputs.items() if n in ("tokens", "types")}
            if not start:
                part |= {n: inputs[n] for n in ("prefix", "source") if n in inputs}
            parts.append(states(model, part, cache=store))
    return torch.cat(parts[1:], 1)


def _answer(model: Model, backend: str, call: Callable[[], Tensor]) -> tuple[Tensor, Gradients]:
    """The values of a call, and the gradients of a fixed linear function of them."""
    model.use_backend(cast(Backend, backend))
    out = call()
    if not out.requires_grad:
        return out, {}
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    gradients = torch.autograd.grad((out * weights).sum(), parameters, allow_unused=True)
    return out.detach(), dict(zip(names, gradients, strict=True))


def _same_gradients(got: Gradients, want: Gradients, words: str, findings: Findings) -> None:
    for name, right in want.items():
        there = got.get(name)
        if right is None or there is None:
            findings.require(right is None and there is None, f"{name} has a gradient, {words}")
        else:
            findings.near(there, right, f"the gradient of {name}, {words}")
