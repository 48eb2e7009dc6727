"""Training: the run description, data, optimisers, schedules, loss, step, loop, state, evaluation.

The names below are imported on first use, so that a run can be read and planned without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anyformer.train.evaluate import Score, evaluate_split, score_ids, score_texts
    from anyformer.train.loop import Result, train
    from anyformer.train.loss import Batch, shifted, summed_loss
    from anyformer.train.metrics import Observer
    from anyformer.train.muon import Muon
    from anyformer.train.optim import Optimizer
    from anyformer.train.run import Run, load_run
    from anyformer.train.schedule import ratio
    from anyformer.train.step import Diverged, StepResult, train_step

_HOMES = {
    "Batch": "loss",
    "Diverged": "step",
    "Muon": "muon",
    "Observer": "metrics",
    "Optimizer": "optim",
    "Result": "loop",
    "Run": "run",
    "Score": "evaluate",
    "StepResult": "step",
    "evaluate_split": "evaluate",
    "load_run": "run",
    "ratio": "schedule",
    "score_ids": "evaluate",
    "score_texts": "evaluate",
    "shifted": "loss",
    "summed_loss": "loss",
    "train": "loop",
    "train_step": "step",
}

__all__ = [
    "Batch",
    "Diverged",
    "Muon",
    "Observer",
    "Optimizer",
    "Result",
    "Run",
    "Score",
    "StepResult",
    "evaluate_split",
    "load_run",
    "ratio",
    "score_ids",
    "score_texts",
    "shifted",
    "summed_loss",
    "train",
    "train_step",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'anyformer.train' has no attribute {name!r}")
    value = getattr(import_module(f"anyformer.train.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
