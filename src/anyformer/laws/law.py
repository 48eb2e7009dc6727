"""The laws by name, and their judgement of a model."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from anyformer.laws import (
    accumulation,
    backends,
    caches,
    causality,
    compiled,
    cross,
    packing,
    padding,
    planned,
    precision,
    roundtrip,
    shift,
)
from anyformer.laws.draw import dtype_of, fresh, unreached, wide
from anyformer.laws.names import SLOW, chosen
from anyformer.laws.result import TOLERANCES, Check, Result
from anyformer.nn.model import Model
from anyformer.nn.moe import moe_layers
from anyformer.spec.parts import ModelSpec

LAWS: dict[str, Check] = {
    causality.NAME: causality.causality,
    caches.NAME: caches.cache,
    padding.PADDING: padding.padding,
    packing.NAME: packing.packing,
    padding.BATCH: padding.batch,
    backends.NAME: backends.backends,
    shift.NAME: shift.shift,
    cross.NAME: cross.cross,
    roundtrip.NAME: roundtrip.round_trip,
    planned.NAME: planned.plan,
    accumulation.NAME: accumulation.accumulation,
    compiled.NAME: compiled.compiled,
    precision.NAME: precision.precision,
}
"""Every law by its name, in the order of the book, which is that of `names.NAMES`."""


def judge(
    spec_or_model: ModelSpec | Model,
    *,
    laws: Sequence[str] | None = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> list[Result]:
    """The results of the laws on a model, in their order.

    Args:
        spec_or_model: a specification, of which a model is built with weights that hide nothing; or a model as it is.
            One in half precision is judged with the same weights in float32, the law of precision aside.
        laws: which; all but the slow ones where None.
        seed: of the weights of a specification's model, and of the inputs.
        progress: is told the name of each law before it is checked.

    Raises:
        UserError: a law that there is not.
    """
    model = fresh(spec_or_model, seed) if isinstance(spec_or_model, ModelSpec) else spec_or_model
    names = chosen(laws)
    exact = model if dtype_of(model) in TOLERANCES else wide(model, torch.float32)
    found: list[Result] = []
    for name in names:
        if progress is not None:
            progress(name)
        result = settled(exact if name != "precision" else model, name, seed)
        found.append(result if result.holds is None else replace(result, why=result.why + unreached(model.spec)))
    return found


def settled(model: Model, name: str, seed: int) -> Result:
    """One law; where it fails in float32, what it says in float64 decides.

    A choice of experts is discontinuous and a deep model may amplify rounding: what float32 breaks, by less than 1e-3
    or in a mixture of experts, and float64 holds to 1e-10, is rounding, and says so.
    """
    result = LAWS[name](model, seed)
    if result.holds is not False or dtype_of(model) != torch.float32 or not math.isfinite(result.error):
        return result
    if result.error > 1e-3 and not moe_layers(model):
        return result
    second = LAWS[name](wide(model), seed)
    if not second.holds:
        return result
    return replace(second, why=f"{second.why}; in float32 rounding makes {result.error:.1e} at {result.where}")


__all__ = ["LAWS", "SLOW", "Check", "Result", "chosen", "fresh", "judge", "settled"]
