"""The law of the round trip: what is written down comes back as it was."""

import tempfile
from pathlib import Path

import torch
from torch import Tensor

from anyformer.checkpoint import Checkpoint, load
from anyformer.laws import eject
from anyformer.laws.draw import Draw, dtype_of, longest, outputs
from anyformer.laws.result import TOLERANCES, Findings, Result
from anyformer.nn.model import Model
from anyformer.spec import ModelSpec, condense, expand

NAME = "round trip"


def _same_bits(got: Tensor, want: Tensor) -> bool:
    """Whether two tensors are one, to the bit: what is no number comes back as it was too."""
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return False
    a, b = (x.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for x in (got, want))
    return torch.equal(a, b)


def round_trip(model: Model, seed: int) -> Result:
    """Specification to JSON and back, to a recipe and back; a checkpoint's weights, buffers and scores: bit-equal.

    And out into an ejected file, which gives the scores and gradients of the model, whole and with a cache.
    """
    draw = Draw(model, seed)
    findings = Findings(NAME, TOLERANCES[dtype_of(model)])
    spec = model.spec
    text = spec.to_json()
    findings.require(ModelSpec.from_json(text) == spec, "specification → JSON → specification")
    findings.require(ModelSpec.from_json(text).to_json() == text, "JSON → specification → JSON")
    findings.require(expand(condense(spec)) == spec, "specification → recipe → specification")
    with tempfile.TemporaryDirectory() as place, torch.no_grad():
        folder = Checkpoint(spec, model).save(Path(place) / "checkpoint")
        back = load(folder, dtype="stored")
        findings.require(back.spec == spec, "a checkpoint's specification")
        kept, found = model.state_dict(), back.model.state_dict()
        findings.require(list(kept) == list(found), "a checkpoint's names")
        for name, value in kept.items():
            findings.require(name in found and _same_bits(found[name], value), f"a checkpoint's {name}")
        inputs = draw.inputs(2, longest(draw.stack))
        got, want = outputs(back.model, inputs), outputs(model, inputs)
        findings.require(_same_bits(got, want), "the scores of what was loaded, bit for bit")
        finite = not want.numel() or bool(want.isfinite().any())
    eject.check(model, seed, findings)
    file = "with scores, cache and gradients" if finite else "that runs: the scores are no numbers to compare"
    return findings.result(
        f"JSON, recipe, and a checkpoint folder with its weights and scores, bit for bit; and an ejected file {file}"
    )
