"""The law of the plan: what was planned is what there is."""

import copy

import torch
from torch.utils.flop_counter import FlopCounterMode

from anyformer.laws.draw import Draw, dtype_of, longest, outputs
from anyformer.laws.result import Findings, Result
from anyformer.nn.model import Model
from anyformer.nn.roles import roles
from anyformer.planning import buffers, cache_bytes, parameters
from anyformer.planning.flops import Lengths, forward_flops

NAME = "plan"


def plan(model: Model, seed: int) -> Result:
    """Parameters by name, shape, role and order; FLOPs of a forward pass; bytes of a cache: all as planned, exactly.

    FLOPs are counted by torch on the reference backend, which computes the scores of all pairs of tokens.
    """
    draw = Draw(model, seed)
    findings = Findings(NAME, 0.0)
    spec = model.spec
    kinds = roles(model)
    built = [(name, tuple(p.shape), kinds[name]) for name, p in model.named_parameters()]
    planned = [(p.name, p.shape, p.role) for p in parameters(spec)]
    odd = [f"{name} {shape} {role}" for name, shape, role in sorted(set(built) ^ set(planned))]
    findings.require(not odd, f"parameters: {', '.join(odd[:4])}")
    findings.require(built == planned, "the order of the parameters")
    kept = {name: tuple(buffer.shape) for name, buffer in model.named_buffers() if name in model.state_dict()}
    findings.require(kept == {p.name: p.shape for p in buffers(spec)}, "buffers")
    _flops(model, draw, findings)
    if spec.decoder is not None:
        _cache(model, draw, findings)
    return findings.result("parameters, FLOPs and cache bytes, counted against planned")


def _flops(model: Model, draw: Draw, findings: Findings) -> None:
    batch, length = 2, longest(draw.stack)
    inputs = draw.inputs(batch, length)
    source = inputs["source"].shape[1] if draw.crossed else 0
    model = copy.deepcopy(model).use_backend("reference")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        outputs(model, inputs)
    planned = forward_flops(draw.spec, Lengths(length, source))
    counted, expected = counter.get_total_flops(), batch * (planned.products + planned.scores)
    where = f"FLOPs of {batch} rows of {length} tokens: {counted:,} counted, {expected:,} planned"
    findings.found(abs(counted - expected) / max(1, expected), where)


def _cache(model: Model, draw: Draw, findings: Findings) -> None:
    dtype = str(dtype_of(model)).removeprefix("torch.")
    for kind in ("static", "ring"):
        inputs = draw.inputs(2, 3)
        source = inputs["source"].shape[1] if draw.crossed else 0
        store = model.new_cache(2, 11, kind)
        if draw.crossed:
            # The source's keys and values are there once it came.
            with torch.no_grad():
                model.hidden(**inputs, cache=store)
        planned = cache_bytes(draw.spec, 2, 11, kind, source, dtype)
        where = f"bytes of a {kind} cache: {store.nbytes:,} held, {planned:,} planned"
        findings.found(abs(store.nbytes - planned) / max(1, planned), where)
