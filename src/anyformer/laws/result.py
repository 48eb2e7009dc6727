"""What a law says of a model, and how two tensors are compared."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from anyformer.nn.model import Model

TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-10}
"""The largest error relative to max(1, |value|) that rounding may make, by dtype."""


@dataclass(frozen=True)
class Result:
    """What came of one law on one model.

    Attributes:
        law: its name.
        holds: None where it does not apply.
        error: the worst one found, relative to max(1, |value|) unless the law says otherwise.
        tolerance: what it may be.
        where: the comparison that was worst, or failed.
        why: what was compared, or why the law does not apply.
    """

    law: str
    holds: bool | None
    error: float
    tolerance: float
    where: str
    why: str


Check = Callable[["Model", int], Result]
"""A law: a model in evaluation mode, in float32 or float64, and a seed for its inputs."""


def exempt(law: str, why: str) -> Result:
    """The result of a law that has nothing to say about a model."""
    return Result(law, None, 0.0, 0.0, "", why)


def error_of(got: Tensor, want: Tensor) -> float:
    """max |got − want| / max(1, max |want|); infinite for other shapes or what is not finite; 0 for nothing."""
    if got.shape != want.shape:
        return inf
    if not want.numel():
        return 0.0
    with torch.no_grad():
        got, want = got.double(), want.double()
        error = float((got - want).abs().max() / want.abs().max().clamp(min=1.0))
    return error if isfinite(error) else inf


def distance(got: Tensor, want: Tensor) -> Tensor:
    """|got − want| in float64; where one is no finite number infinite, and where neither is 0.

    Which of NaN and infinity comes out may depend on the order of operations, but the sign of an infinity does not.
    """
    got, want = got.double(), want.double()
    neither = ~(got.isfinite() | want.isfinite()) & ~(got.isinf() & (got == -want))
    return (got - want).abs().nan_to_num(nan=inf, posinf=inf).masked_fill(neither, 0.0)


def error_of_finite(got: Tensor, want: Tensor) -> float:
    """`error_of` for weights that are no numbers: places at which neither is a finite number count nothing."""
    if got.shape != want.shape or not want.numel():
        return error_of(got, want)
    with torch.no_grad():
        largest = want.double().nan_to_num(0.0, 0.0, 0.0).abs().max().clamp(min=1.0)
        return float(distance(got, want).max() / largest)


class Findings:
    """The comparisons of one law, of which the worst counts.

    Args:
        law: its name.
        tolerance: the largest error that holds.
    """

    def __init__(self, law: str, tolerance: float) -> None:
        self.law, self.tolerance = law, tolerance
        self._seen: list[tuple[float, str]] = []

    def near(self, got: Tensor, want: Tensor, where: str) -> None:
        """Two tensors that the law says are equal up to rounding."""
        self.found(error_of(got, want), where)

    def require(self, holds: bool, where: str) -> None:
        """Something that is true or not."""
        self.found(0.0 if holds else inf, where)

    def found(self, error: float, where: str) -> None:
        """An error measured elsewhere, in units of the tolerance."""
        self._seen.append((error, where))

    def result(self, why: str) -> Result:
        """The worst of all; the first of equals."""
        if not self._seen:
            return exempt(self.law, f"nothing to compare: {why}")
        error, where = max(self._seen, key=lambda found: found[0])
        return Result(self.law, error <= self.tolerance, error, self.tolerance, where if error else "", why)
