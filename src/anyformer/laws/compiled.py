"""The law of the compiler: compiled is eager."""

import copy
import math
import warnings

import torch
from torch import Tensor

from anyformer.laws.draw import Draw, dtype_of, longest, outputs
from anyformer.laws.result import TOLERANCES, Findings, Result
from anyformer.nn.model import Model

NAME = "compile"


def compiled(model: Model, seed: int) -> Result:
    """`torch.compile(model, fullgraph=True)` gives the values and gradients that the model gives, plain and padded.

    In the model's dtype, to 1e-5 in float32: a compiler fuses operations and rounds elsewhere. Compiling takes many
    seconds a model, so that this law is checked only where it is named.
    """
    with warnings.catch_warnings():
        # Torch's compiler calls what torch itself has deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        return _compared(model, seed)


def _compared(model: Model, seed: int) -> Result:
    draw = Draw(model, seed)
    findings = Findings(NAME, TOLERANCES[dtype_of(model)])
    eager = copy.deepcopy(model)
    # Graphs of other models must not fill the compiler's cache, after which it would give up.
    torch.compiler.reset()
    fast = torch.compile(eager.hidden if model.head is None else eager, fullgraph=True, dynamic=False)
    length = longest(draw.stack)
    plain, padded = draw.inputs(2, length), draw.inputs(2, length)
    padded["padding"] = torch.arange(length).expand(2, -1) >= torch.tensor([[0], [3]])
    for words, inputs in (("rows from end to end", plain), ("padded rows", padded)):
        slow = outputs(eager, inputs)
        quick: Tensor = fast(**inputs)
        findings.near(quick, slow, f"values, {words}")
        weights = draw.normal(*slow.shape, dtype=slow.dtype) / math.sqrt(slow.numel())
        names, parameters = zip(*eager.named_parameters(), strict=True)
        one = torch.autograd.grad((quick * weights).sum(), parameters, materialize_grads=True)
        other = torch.autograd.grad((slow * weights).sum(), parameters, materialize_grads=True)
        for name, a, b in zip(names, one, other, strict=True):
            findings.near(a, b, f"the gradient of {name}, {words}")
    return findings.result("values and gradients of the compiled model against the model")
