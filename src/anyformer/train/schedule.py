"""Learning-rate schedules: the share of the peak rate as a pure function of the step.

Step s counts finished updates, so that the first update uses s = 0. Warm-up is linear and never starts from zero:
ratio(s) = (s + 1) / w for s < w (Goyal et al. 2017, section 2.2), which reaches exactly 1 at s = w − 1. What follows is
a function of t = (s − w) / (total − w), and from `total` on the last value holds.
"""

import math
from typing import Annotated, Literal

from pydantic import Field

from anyformer.spec.parts import Part

Span = Annotated[int | float, Field(ge=0)]
"""A number of steps, or below 1 a share of all steps."""
Share = Annotated[float, Field(ge=0, le=1)]


class Constant(Part):
    """The peak rate after warm-up."""

    kind: Literal["constant"] = "constant"
    warmup: Span = 0


class Cosine(Part):
    """m + (1 − m) · (1 + cos πt) / 2 with m = `min_ratio` (Loshchilov & Hutter 2017, eq. 5, one cycle)."""

    kind: Literal["cosine"] = "cosine"
    warmup: Span = 0.02
    min_ratio: Share = 0.1


class Linear(Part):
    """1 − (1 − m) · t with m = `min_ratio` (Vaswani et al. 2017 warm up so; Defazio et al. 2023 on linear decay)."""

    kind: Literal["linear"] = "linear"
    warmup: Span = 0.02
    min_ratio: Share = 0.0


class WSD(Part):
    """Warm-up, the peak rate, then a decay over the last `decay` steps (Hu et al. 2024, MiniCPM, eq. 1).

    `shape` "linear" falls evenly; "sqrt" is 1 − √u, u the share of the decay done (Hägele et al. 2024, section 3).
    """

    kind: Literal["wsd"] = "wsd"
    warmup: Span = 0.02
    decay: Span = 0.2
    min_ratio: Share = 0.0
    shape: Literal["linear", "sqrt"] = "linear"


Schedule = Annotated[Constant | Cosine | Linear | WSD, Field(discriminator="kind")]


def span(value: float, total: int) -> int:
    """A span as a number of steps: a number of 1 or more as it is, a smaller one as that share of `total`, rounded."""
    return round(value * total) if value < 1 else int(value)


def ratio(schedule: Constant | Cosine | Linear | WSD, step: int, total: int) -> float:
    """The share of the peak rate at `step`, in (0, 1] until `total`, and never below the schedule's minimum.

    Args:
        schedule: which curve.
        step: finished updates, 0 or more.
        total: the steps of the whole run, 1 or more.
    """
    if step < 0 or total < 1:
        raise ValueError(f"a schedule is read at a step of at least 0 of at least 1; got {step} of {total}")
    warmup = span(schedule.warmup, total)
    if step < warmup:
        rising = (step + 1) / warmup
        return rising if isinstance(schedule, Constant) else max(rising, schedule.min_ratio)
    if isinstance(schedule, Constant):
        return 1.0
    if step >= total:
        return schedule.min_ratio
    if isinstance(schedule, WSD):
        return _stable_then_decay(schedule, step, total, warmup)
    t = (step - warmup) / (total - warmup)
    falling = (1 + math.cos(math.pi * t)) / 2 if isinstance(schedule, Cosine) else 1 - t
    return schedule.min_ratio + (1 - schedule.min_ratio) * falling


def _stable_then_decay(schedule: WSD, step: int, total: int, warmup: int) -> float:
    decay = min(span(schedule.decay, total), total - warmup)
    begin = total - decay
    if step < begin:
        return 1.0
    u = (step - begin) / decay
    falling = 1 - u if schedule.shape == "linear" else 1 - math.sqrt(u)
    return schedule.min_ratio + (1 - schedule.min_ratio) * falling
