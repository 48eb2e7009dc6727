"""The law of precision: half precision stays finite and near, because what must not lose any is computed wider."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from anyformer.laws.draw import Draw, longest, outputs
from anyformer.laws.result import Findings, Result
from anyformer.nn.attend import Backend, attend, masks
from anyformer.nn.attention import Scores
from anyformer.nn.layers import NormLayer
from anyformer.nn.model import Model
from anyformer.nn.moe import Router
from anyformer.nn.position import rotation
from anyformer.spec.parts import ModelSpec
from anyformer.spec.positions import Rope

NAME = "precision"
TOLERANCE = 8.0
"""How many times as far off as one rounding of the weights puts the outputs."""
FAR = 100_000
"""A position whose angles bfloat16 and float16 know nothing of."""


def precision(model: Model, seed: int) -> Result:
    """In bfloat16, float16 and under autocast all is finite, and near the same weights computed in float32.

    Near: ‖half − float32‖₂ / ‖float32‖₂ of a token's outputs is in the median over tokens at most 8 times that which
    one rounding makes: the larger of the dtype's epsilon ε and of what the outputs move by in float32 when every weight
    moves by up to ε/2 of itself, since a model that amplifies small changes amplifies roundings. The median, because a
    choice of experts, or a norm of what few ReLUs let through, is discontinuous for some tokens. Gradients under
    autocast are finite.

    The parts that must not lose precision are held to float64 one by one: norms of vectors whose squares no half holds,
    rotary tables at position 100,000, attention with sharp scores, a router's logits and weights.
    """
    draw = Draw(model, seed)
    findings = Findings(NAME, TOLERANCE)
    inputs = draw.inputs(2, longest(draw.stack))
    for half in (torch.bfloat16, torch.float16):
        narrow = copy.deepcopy(model).to(half)
        with torch.no_grad():
            yard = _Yard(copy.deepcopy(narrow).float(), inputs, half, draw)
            yard.near(outputs(narrow, inputs), f"outputs in {_said(half)}", findings)
            for name, module in _kinds(narrow).items():
                _part(name, module, half, draw, findings)
        _tables(draw.spec, half, findings)
    _autocast(copy.deepcopy(model).float(), draw, findings)
    return findings.result(
        "bfloat16, float16 and autocast against float32, in units of one rounding; norms, tables, scores, routers"
    )


class _Yard:
    """Outputs in float32, and how far one rounding of the weights puts them.

    Args:
        model: in float32.
        inputs: of the call.
        half: whose rounding.
        draw: of the roundings.
    """

    def __init__(self, model: Model, inputs: dict[str, Any], half: torch.dtype, draw: Draw) -> None:
        self.right = outputs(model, inputs)
        eps = torch.finfo(half).eps
        moved = copy.deepcopy(model)
        for parameter in moved.parameters():
            parameter.mul_(1 + eps * (torch.rand(parameter.shape, generator=draw.generator) - 0.5))
        self.unit = max(eps, self._distance(outputs(moved, inputs)))

    def _distance(self, got: Tensor) -> float:
        got, want = got.double().flatten(0, -2), self.right.double().flatten(0, -2)
        return float(((got - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-6)).median())

    def near(self, got: Tensor, where: str, findings: Findings) -> None:
        """Outputs that are near, and finite."""
        findings.require(bool(torch.isfinite(got).all()), f"{where} are finite")
        findings.found(self._distance(got) / self.unit, where)


def _said(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kinds(model: Model) -> dict[str, nn.Module]:
    """One module of each kind that must not lose precision, by its name."""
    found: dict[object, tuple[str, nn.Module]] = {}
    for name, module in model.named_modules():
        if isinstance(module, NormLayer):
            found.setdefault((module.extra_repr(), module.weight is None, module.bias is None), (name, module))
        elif isinstance(module, Router):
            found.setdefault(module.spec, (name, module))
        elif isinstance(module, Scores):
            found.setdefault(module.scores, (name, module))
    return dict(found.values())


def _part(name: str, module: nn.Module, half: torch.dtype, draw: Draw, findings: Findings) -> None:
    """One module that must not lose precision, against itself in float64."""
    eps = torch.finfo(half).eps
    if isinstance(module, NormLayer):
        shape = (5, module.width) if module.heads is None else (5, module.heads, module.width)
        x = (300 * draw.normal(*shape)).to(half)
        got, want = module(x), copy.deepcopy(module).double()(x.double())
        _within(got, want, 2 * eps, f"{name} in {_said(half)}", findings)
    elif isinstance(module, Router):
        x = draw.normal(1, 5, module.weight.shape[1]).to(half)
        wide = copy.deepcopy(module).double()
        got, want = module(x), wide(x.double())
        _within(got.logits, want.logits, 1e-5, f"the logits of {name} in {_said(half)}", findings)
        _within(got.scores, want.scores, 1e-5, f"the scores of {name} in {_said(half)}", findings)
    elif isinstance(module, Scores):
        _scores(name, module, half, draw, findings)


def _scores(name: str, module: Scores, half: torch.dtype, draw: Draw, findings: Findings) -> None:
    """Attention with scores of 30 ± 1, whose differences a half does not hold."""
    spec = module.scores
    h, g, d = spec.n_heads, spec.n_kv_heads, spec.d_head
    q, k = (draw.normal(1, 9, n, d) * (spec.scale * d**0.5) ** -0.5 for n in (h, g))
    for x in (q, k):
        x[..., 0] += (30 / spec.scale) ** 0.5
    q, k = q.to(half), k.to(half)
    v = draw.normal(1, 9, g, spec.d_value).to(half)
    sinks = module.sink
    backends: tuple[Backend, ...] = ("reference", "tiled")
    for backend in backends:
        more = {"scale": spec.scale, "softcap": spec.softcap, "visible": masks.Causal()}
        got = attend(q, k, v, sinks=sinks, backend=backend, **more)  # type: ignore[arg-type]
        wide = None if sinks is None else sinks.double()
        want = attend(q.double(), k.double(), v.double(), sinks=wide, backend="reference", **more)  # type: ignore[arg-type]
        _within(got, want, 4 * torch.finfo(half).eps, f"{backend} attention of {name} in {_said(half)}", findings)


def _within(got: Tensor, want: Tensor, bound: float, where: str, findings: Findings) -> None:
    """Largest distance relative to the largest value, in units of the bound, on the law's scale."""
    findings.require(bool(torch.isfinite(got).all()), f"{where} is finite")
    error = float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1e-6))
    findings.found(error / bound * TOLERANCE, where)


def _tables(spec: ModelSpec, half: torch.dtype, findings: Findings) -> None:
    """Rotary tables far out, where float32 knows an angle to 1e-2 and halves not at all."""
    places = torch.tensor([[FAR, FAR + 1]])
    for block in [block for stack in spec.stacks.values() for block in stack.blocks]:
        position, d = block.attention.position, block.attention.d_head
        if not isinstance(position, Rope):
            continue
        d = block.attention.d_rope if block.attention.kind == "latent" else d
        lengths = torch.tensor([[FAR + 2]]) if position.by_length else None
        got = rotation(position, d, places, half, lengths)
        want = rotation(position, d, places, torch.float64, lengths)
        for a, b in zip(got, want, strict=True):
            _within(a, b, 5e-2, f"rotary tables at position {FAR:,} in {_said(half)}", findings)
        return


def _autocast(model: Model, draw: Draw, findings: Findings) -> None:
    inputs = draw.inputs(2, longest(draw.stack))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = outputs(model, inputs)
    with torch.no_grad():
        _Yard(model, inputs, torch.bfloat16, draw).near(out, "outputs under autocast", findings)
    gradients = torch.autograd.grad(out.float().sum(), list(model.parameters()), allow_unused=True)
    finite = all(bool(torch.isfinite(g).all()) for g in gradients if g is not None)
    findings.require(finite, "gradients under autocast are finite")
