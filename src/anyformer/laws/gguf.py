"""The round trip over a GGUF file: what llama.cpp's format makes of a model that it can say.

It is no law of the space, as `parity` is none: it speaks of models that an architecture of the format is.
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor

from anyformer.checkpoint import Checkpoint, load
from anyformer.errors import UserError
from anyformer.families.family import Shifted
from anyformer.laws.draw import Draw, dtype_of, longest, outputs, wide
from anyformer.laws.result import Findings, Result, exempt
from anyformer.nn.model import Model
from anyformer.weights.gguf.reading import write_place
from anyformer.weights.mapping import same_bits
from anyformer.weights.shapes import steps

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
        shifted = {name for step in steps(place.reading, "") if isinstance(step.form, Shifted) for name in step.ours}
        for name, value in exact.state_dict().items():
            allowed = SHIFT if name in shifted else 0.0
            same = name in found and _same(found[name], value.detach().cpu(), allowed)
            findings.require(same, f"{name} after both directions")
        draw = Draw(exact, seed)
        inputs = draw.inputs(2, longest(draw.stack), prefix=False)
        findings.near(outputs(back.model, inputs), outputs(exact, inputs), "the scores of what was loaded")
    return findings.result(f"written as {place.dialect.architecture} in float32, read again")


def _same(got: Tensor, want: Tensor, allowed: float) -> bool:
    """Whether two tensors are one to the bit, or as near as 1 + w allows."""
    return same_bits(got, want) or (
        allowed > 0 and got.shape == want.shape and bool(((got - want).abs() <= allowed * (1 + want.abs())).all())
    )
