"""One update: micro-batches of any shapes, each weighted by its targets, one global norm, one optimiser step.

With N targets in all micro-batches of all processes, counted before anything is computed, each micro-batch contributes
(its summed loss) / N, so that the gradient is that of the mean over all targets however the rows are grouped. What
mixtures of experts add is divided likewise, by all sequences and all real tokens; a balance loss over the "batch" is
the mean of the micro-batches' own, weighted by their tokens. The reported loss is the cross-entropy alone.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from anyformer.errors import UserError
from anyformer.nn.moe import LOAD_METRICS, Routing, load_metrics, moe_layers, update_choice_bias
from anyformer.train.loss import Batch, batch_loss
from anyformer.train.optim import Optimizer
from anyformer.train.parallel import Alone, World

BatchLoss = Callable[..., Tensor]
"""(model, batch) -> the summed loss; `routing=` comes with it where the model has mixtures of experts."""


@dataclass(frozen=True)
class StepResult:
    """What an update did.

    Attributes:
        loss: the mean over targets.
        n_targets: their number.
        grad_norm: of the gradient before clipping.
        routing: of mixtures of experts, nothing without: `balance_loss` and `z_loss`, what each adds to the objective;
            `expert_load`, the largest load over the mean load, in the worst layer; `idle_experts`, the share of experts
            that no token chose.
    """

    loss: float
    n_targets: int
    grad_norm: float
    routing: dict[str, float] = field(default_factory=dict)


class Tally:
    """What the mixtures of experts of a model did in the micro-batches of an update.

    Args:
        model: the model itself.
        n_sequences: rows with a real token in the whole update.
        n_tokens: real tokens in the whole update.
    """

    METRICS = ("balance_loss", "z_loss", *LOAD_METRICS)

    def __init__(self, model: nn.Module, n_sequences: int, n_tokens: int) -> None:
        self.model, self.n_sequences, self.n_tokens = model, n_sequences, n_tokens
        self.loads: dict[str, Tensor] = {}
        self._losses: list[Tensor] = []

    def take(self, routing: Routing) -> Tensor:
        """Counts a micro-batch in; gives what it adds to the objective. Raises `ValueError` where it met no layer."""
        if not routing.loads:
            raise ValueError("nothing was routed: a loss for mixtures of experts calls the model with routing=routing")
        for name, load in routing.loads.items():
            self.loads[name] = self.loads[name] + load if name in self.loads else load
        balance, z = routing.losses(self.n_sequences, self.n_tokens)
        place = next(iter(routing.loads.values())).device
        self._losses.append(torch.stack([x.detach().to(place, torch.float64) for x in (balance, z)]))
        return balance + z

    def sum_over(self, world: World) -> None:
        """Makes every process's tally that of all."""
        losses = world.sum_(torch.stack(self._losses).sum(0))
        self._losses = [losses]
        summed = world.sum_(torch.cat(list(self.loads.values())))
        parts = torch.split(summed, [len(load) for load in self.loads.values()])
        self.loads = dict(zip(self.loads, parts, strict=True))

    def numbers(self) -> Tensor:
        """The numbers named in `METRICS`, float64."""
        return torch.cat([torch.stack(self._losses).sum(0), load_metrics(self.loads)])


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
    tally: Tally | None = None,
) -> Tensor:
    """Adds the gradients of Σ loss / `n_targets` over `batches`; gives Σ loss / `n_targets`, detached.

    With a `tally` the gradients are also those of what mixtures of experts add.
    """
    total: Tensor | None = None
    for batch in batches:
        routing = None if tally is None else Routing(tally.model)
        more = {} if routing is None else {"routing": routing}
        with precision_context(precision, batch.tokens.device):
            part = loss(model, batch, **more) / max(1, n_targets)
        whole = part if tally is None or routing is None else part + tally.take(routing)
        whole.backward()  # type: ignore[no-untyped-call]
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

    Choice biases of mixtures of experts move after it by the loads of all micro-batches and processes.

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
    tally = tally_of(model, batches, world)
    value = accumulate(model, batches, n_targets, precision=precision, loss=loss, tally=tally)
    gradients = [p.grad for p in optimizer.parameters if p.grad is not None]
    if world.size > 1:
        gradients = world.sum_gradients(optimizer.parameters)
        value = world.sum_(value)
        if tally is not None:
            tally.sum_over(world)
    norm = global_norm(gradients)
    # The one wait for the device in a step: the numbers decide whether and how the parameters move.
    numbers = [torch.stack([value.double(), norm.double()]), *([] if tally is None else [tally.numbers()])]
    mean, length, *routed = torch.cat(numbers).tolist()
    if not (math.isfinite(mean) and math.isfinite(length)):
        optimizer.zero_grad()
        which = "loss" if not math.isfinite(mean) else "gradient"
        raise Diverged(f"the {which} is not a finite number", got=f"loss {mean}, gradient norm {length}")
    if clip and length > clip:
        torch._foreach_mul_(gradients, clip / length)
    optimizer.step(ratio)
    optimizer.zero_grad()
    if tally is None:
        return StepResult(mean, n_targets, length)
    update_choice_bias(tally.model, tally.loads)
    return StepResult(mean, n_targets, length, dict(zip(Tally.METRICS, routed, strict=True)))


def tally_of(model: nn.Module, batches: Sequence[Batch], world: World) -> Tally | None:
    """An empty tally for the update; None without mixtures of experts."""
    inner: nn.Module = getattr(model, "_orig_mod", model)  # a compiled wrapper calls its layers by other names
    if not moe_layers(inner):
        return None
    n_sequences = world.total(sum(batch.n_sequences for batch in batches))
    return Tally(inner, n_sequences, world.total(sum(batch.n_tokens for batch in batches)))
