"""The round trip over a GGUF file: what llama.cpp's format makes of a model that it can say.

It is no law of the space, as `parity` is none: it speaks of models that an architecture of the format is.
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor

from anyformer.checkpoint import Checkpoint, load
from anyformer.errors import UserError
from anyformer.laws.draw import Draw, dtype_of, longest, outputs, wide
from anyformer.laws.result import Findings, Result, exempt
from anyformer.nn.model import Model
from anyformer.weights.gguf.reading import write_place

NAME = "round trip: gguf"
TOLERANCE = 1e-5
"""Of scores, relative to max(1, |value|); 0 for tensors, 1 + w of Gemma's norms aside."""
SHIFT = 2**-24
"""What storing 1 + w loses of w at most, for |w| < 1."""


def gguf(model: Model, seed: int) -> Result:
    """A file of float32 read again: the same specification, the same tensors to the bit, the same scores."""
    try:
        place = write_place(model.spec)
    except UserError:
        return exempt(NAME, "no architecture of GGUF is this model")
    exact = model if dtype_of(model) == torch.float32 else wide(model, torch.float32)
    findings = Findings(NAME, TOLERANCE)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        back = load(Checkpoint(exact.spec, exact).save(Path(folder, "model.gguf"), format="gguf"))
        findings.require(write_place(back.spec).meta == place.meta, "the specification that comes back")
        found = back.model.state_dict()
        for name, value in exact.state_dict().items():
            findings.require(name in found and _same(found[name], value), f"{name} after both directions")
        draw = Draw(exact, seed)
        inputs = draw.inputs(2, longest(draw.stack), prefix=False)
        findings.near(outputs(back.model, inputs), outputs(exact, inputs), "the scores of what was loaded")
    return findings.result(f"written as {place.dialect.architecture} in float32, read again")


def _same(got: Tensor, want: Tensor) -> bool:
    if got.shape != want.shape:
        return False
    want = want.detach().cpu()
    return torch.equal(got, want) or (want.dim() == 1 and bool(((got - want).abs() <= SHIFT * (1 + want.abs())).all()))
