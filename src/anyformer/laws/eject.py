"""The round trip through an ejected file: run by itself, it is the model that it was written for."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from anyformer.laws.draw import Draw, by_length, longest, outputs
from anyformer.laws.result import Findings, error_of_finite
from anyformer.nn.model import Model
from anyformer.nn.quantised import dequantised_state
from anyformer.weights.carried import here
from anyformer.weights.eject import eject

_CALLED = {"padding": "real", "source_padding": "source_real"}
"""What a file calls an input that the core calls otherwise."""

Pair = tuple[Tensor, Tensor, str]
"""What a file gives, what the core gives, and of which call."""


@dataclass(frozen=True)
class Ejected:
    """A file that was run, and its `Model` with weights.

    Attributes:
        module: what its names stand for.
        model: in evaluation mode.
    """

    module: ModuleType
    model: nn.Module

    def here(self, name: str) -> str:
        """What the file calls a parameter or a module of the core, by its `RENAMED`."""
        return here(name, getattr(self.module, "RENAMED", ()))

    @property
    def padded(self) -> bool:
        """Whether it was made for rows that are padded."""
        return "real" in inspect.signature(self.model.forward).parameters

    def __call__(self, inputs: Mapping[str, Any], **more: Any) -> Tensor:
        """What it says of inputs that have the core's names."""
        said: Tensor = self.model(**{_CALLED.get(name, name): x for name, x in inputs.items()}, **more)
        return said


def run(text: str) -> ModuleType:
    """The module that a file's text makes, which is in no list of modules."""
    module = ModuleType("ejected")
    exec(compile(text, "<ejected>", "exec"), module.__dict__)
    return module


def ejected(model: Model, text: str | None = None) -> Ejected:
    """A model's ejected file, run and given the model's weights, which both then share.

    Args:
        model: the core's.
        text: of the file, where it is at hand.

    Raises:
        RuntimeError: names or shapes that do not fit, and whatever else the file raises.
    """
    module = run(eject(model.spec) if text is None else text)
    with torch.device("meta"):
        file = Ejected(module, module.Model())
    file.model.load_state_dict({file.here(name): x for name, x in dequantised_state(model).items()}, assign=True)
    file.model.eval()
    return file


def check(model: Model, seed: int, findings: Findings) -> None:
    """Ejects a model's specification, runs the file with the model's weights, and compares it with the core.

    Every weight has its place in it; its scores, those of padded rows, those of calls with a cache and the gradients
    of all parameters are the core's on the backend `reference`.
    """
    try:
        file = ejected(model)
        with _reference(model):
            _compare(model, file, seed, findings)
    except Exception as error:  # Whatever a file that we wrote raises is a finding about it.
        said = " ".join(str(error).split())[:300]
        findings.require(False, f"an ejected file runs: {type(error).__name__} {said}")


@contextmanager
def _reference(model: Model) -> Iterator[None]:
    """A model that computes attention by the backend `reference`, and afterwards by what it had."""
    layers = [attention for block in model.layers() for attention in (block.attention, block.cross) if attention]
    before = [attention.backend for attention in layers]
    model.use_backend("reference")
    try:
        yield
    finally:
        for attention, backend in zip(layers, before, strict=True):
            attention.backend = backend


def _compare(core: Model, file: Ejected, seed: int, findings: Findings) -> None:
    draw = Draw(core, seed)
    inputs = draw.inputs(3, longest(draw.stack))
    got, want = file(inputs), outputs(core, inputs)
    _near(findings, got, want, "an ejected file's scores")
    _gradients(core, want, file, got, findings)
    with torch.no_grad():
        pairs = [*padded_rows(core, file, draw, inputs), *cached_calls(core, file, draw)]
    for got, want, where in pairs:
        _near(findings, got, want, f"an ejected file's {where}")


def _near(findings: Findings, got: Tensor, want: Tensor, where: str) -> None:
    """Equal up to rounding; of weights that are no numbers both make numbers in the same places alone."""
    findings.found(error_of_finite(got, want), where)


def _real(length: int, *spans: tuple[int, int]) -> Tensor:
    """Rows of which those spans are real, bool [rows, length]."""
    places = torch.arange(length)
    return torch.stack([(places >= start) & (places < stop) for start, stop in spans])


def _of(real: Tensor, *said: Tensor) -> list[Tensor]:
    """What is said of real tokens; all of it where rows and not tokens are spoken of. On padding stands anything."""
    return [each[real] if each.dim() == 3 and each.shape[:2] == real.shape else each for each in said]


def padded_rows(core: Model, file: Ejected, draw: Draw, inputs: dict[str, Any]) -> Iterator[Pair]:
    """Sources, and rows where the file takes them, that are padded on the right, on the left and on both sides.

    `inputs` are three rows that are real from end to end.
    """
    length = inputs["tokens"].shape[1]
    if draw.crossed:
        s = inputs["source"].shape[1]
        given = inputs | {"source_padding": _real(s, (0, max(1, s - 3)), (min(2, s - 1), s), (s // 3, s // 2 + 1))}
        yield file(given), outputs(core, given), "scores of padded sources"
    if file.padded:
        real = _real(length, (0, max(1, length - 3)), (min(2, length - 1), length), (length // 3, length // 2 + 1))
        given = inputs | {"padding": real}
        if "prefix" in inputs:
            given["prefix"] = torch.minimum(inputs["prefix"], real.sum(1))
        got, want = _of(real, file(given), outputs(core, given))
        yield got, want, "scores of padded rows"


def cached_calls(core: Model, file: Ejected, draw: Draw) -> Iterator[Pair]:
    """A first call, a chunk and a single token, each against the core's call with its own cache; none of an encoder.

    Where rotary frequencies depend on how long a row is, it grows past the length at which they change: then too both
    say the same, call by call.
    """
    if draw.spec.decoder is None:
        return
    most = max((scaling.original for scaling in by_length(draw.stack)), default=0)
    length = longest(draw.stack, min(max(9, most + 3), 24))
    inputs = draw.inputs(2, length)
    first = min(length, max(2, int(inputs["prefix"].max()) + 1 if "prefix" in inputs else 2))
    stops = sorted({0, first, max(first, length - 1), length})
    ours, theirs = core.new_cache(2, length), file.module.Cache()
    real = _real(length, (1, length), (0, length))
    once = {name: inputs.pop(name) for name in ("prefix", "source") if name in inputs}
    memory = file.model.encode(once["source"]) if draw.crossed else None  # type: ignore[operator]
    for start, stop in pairwise(stops):
        part = {name: x[:, start:stop] for name, x in inputs.items()} | (once if not start else {})
        now = {"padding": real[:, start:stop]} if file.padded else {}
        want = outputs(core, part | now, cache=ours)
        given = part | ({"padding": real[:, :stop]} if file.padded else {})
        if memory is None:
            got = file(given, cache=theirs)
        else:
            given.pop("source", None)
            got = file.model.decode(**given, memory=memory, cache=theirs)  # type: ignore[operator]
        got, want = _of(real[:, start:stop], got, want) if file.padded else (got, want)
        yield got, want, f"call with a cache for tokens {start} to {stop - 1}"


def _gradients(core: Model, want: Tensor, file: Ejected, got: Tensor, findings: Findings) -> None:
    """Of one linear function of what both say, by every parameter. None is as good as zeros."""
    if not want.requires_grad:
        return
    theirs, ours = _by_name(file.model, got), _by_name(core, want)
    for name, right in ours.items():
        _near(findings, theirs[file.here(name)], right, f"an ejected file's gradient of {name}")


def _by_name(model: nn.Module, said: Tensor) -> dict[str, Tensor]:
    weights = torch.randn(said.shape, generator=torch.Generator().manual_seed(1), dtype=said.dtype)
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad((said * weights).sum(), parameters, allow_unused=True, materialize_grads=True)
    return dict(zip(names, found, strict=True))
