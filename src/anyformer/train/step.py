"""One update: micro-batches of any shapes, each weighted by its targets, one global norm, one optimiser step.

With N targets in all micro-batches of all processes, counted before anything is computed, each micro-batch contributes
(its summed loss) / N, so that the gradient is that of the mean over all targets however the rows are grouped.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anyformer.errors import UserError
from anyformer.train.loss import Batch, batch_loss
from anyformer.train.optim import Optimizer
from anyformer.train.parallel import Alone, World

BatchLoss = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class StepResult:
    """What an update did: the mean loss over `n_targets` targets, and the norm of the gradient before clipping."""

    loss: float
    n_targets: int
    grad_norm: float


class Diverged(UserError):
    """The loss or the gradient is no longer a finite number. The parameters are as they were before the step."""


def precision_context(precision: str, device: torch.device) -> torch.autocast | nullcontext[None]:
    """Autocast to bfloat16 around the forward pass, or nothing for float32."""
    if precision == "bfloat16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


def accumulate(
    model: nn.Module,
    batches: Sequence[Batch],
    n_targets: int,
    *,
    precision: str = "float32",
    loss: BatchLoss = batch_loss,
) -> Tensor:
    """Adds the gradients of Σ loss / `n_targets` over `batches`; gives Σ loss / `n_targets`, detached."""
    total: Tensor | None = None
    for batch in batches:
        with precision_context(precision, batch.tokens.device):
            part = loss(model, batch) / max(1, n_targets)
        part.backward()  # type: ignore[no-untyped-call]
        total = part.detach() if total is None else total + part.detach()
    if total is None:
        raise ValueError("an update needs at least one micro-batch")
    return total


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The square root of the sum of all squares, a scalar."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients))))
    return norm


def train_step(
    model: nn.Module,
    batches: Sequence[Batch],
    optimizer: Optimizer,
    *,
    ratio: float = 1.0,
    clip: float = 0.0,
    precision: str = "float32",
    world: World | None = None,
    loss: BatchLoss = batch_loss,
) -> StepResult:
    """Gradients of the mean loss over all targets, clipped to the norm `clip`, then one update.

    Args:
        model: in training mode.
        batches: this process's micro-batches, on the model's device.
        optimizer: over the model's parameters; its gradients are empty before and after.
        ratio: the schedule's share of the peak rates.
        clip: the largest norm of the whole gradient; 0 clips nothing.
        precision: "float32", or "bfloat16" for autocast.
        world: the other processes.
        loss: the summed loss of a batch.

    Raises:
        Diverged: the loss or the norm is not finite; nothing has been updated.
    """
    world = world or Alone()
    n_targets = world.total(sum(batch.n_targets for batch in batches))
    value = accumulate(model, batches, n_targets, precision=precision, loss=loss)
    gradients = [p.grad for p in optimizer.parameters if p.grad is not None]
    if world.size > 1:
        gradients = world.sum_gradients(optimizer.parameters)
        value = world.sum_(value)
    norm = global_norm(gradients)
    # The one wait for the device in a step: the numbers decide whether and how the parameters move.
    mean, length = torch.stack([value.double(), norm.double()]).tolist()
    if not (math.isfinite(mean) and math.isfinite(length)):
        optimizer.zero_grad()
        which = "loss" if not math.isfinite(mean) else "gradient"
        raise Diverged(f"the {which} is not a finite number", got=f"loss {mean}, gradient norm {length}")
    if clip and length > clip:
        torch._foreach_mul_(gradients, clip / length)
    optimizer.step(ratio)
    optimizer.zero_grad()
    return StepResult(mean, n_targets, length)
