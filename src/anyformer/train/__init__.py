"""Training: the run description, data, optimisers, schedules, loss, step, loop, state, evaluation."""

from anyformer.train.evaluate import Score, evaluate_split, score_ids, score_texts
from anyformer.train.loop import Result, train
from anyformer.train.loss import Batch, shifted, summed_loss
from anyformer.train.metrics import Observer
from anyformer.train.muon import Muon
from anyformer.train.optim import Optimizer
from anyformer.train.run import Run, load_run
from anyformer.train.schedule import ratio
from anyformer.train.step import Diverged, StepResult, train_step

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
