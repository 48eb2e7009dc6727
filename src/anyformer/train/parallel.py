"""Data parallel training under torchrun: rows are dealt out, gradients summed and divided by all targets together.

Every process holds the whole model. The sum over processes of (summed loss) / (targets of all processes) is the loss of
the whole batch, so that unequal shares weigh as they should, and the norm for clipping is that of the whole gradient.
"""

import os
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anyformer.checkpoint import device_of
from anyformer.errors import UserError


class World(Protocol):
    """The processes that train together."""

    rank: int
    size: int

    def total(self, count: int) -> int:
        """The sum of every process's count."""

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum of every process's tensor, in place."""

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Replaces every gradient by its sum over all processes, an absent one counting as zero."""

    def any(self, flag: int) -> int:
        """The largest of every process's flag, so that all decide alike."""

    def same(self, value: float) -> float:
        """The first process's value, everywhere."""

    def gather(self, tensor: Tensor) -> Tensor:
        """Every process's tensor, stacked: [size, …]."""

    def wait(self) -> None:
        """Until every process is here."""


class Alone:
    """One process."""

    rank, size = 0, 1

    def total(self, count: int) -> int:
        """The count."""
        return count

    def sum_(self, tensor: Tensor) -> Tensor:
        """The tensor."""
        return tensor

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """The gradients."""
        return [p.grad for p in parameters if p.grad is not None]

    def any(self, flag: int) -> int:
        """The flag."""
        return flag

    def same(self, value: float) -> float:
        """The value."""
        return value

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensor, alone in its stack."""
        return tensor[None]

    def wait(self) -> None:
        """Nothing."""


class Group:
    """The processes of torch.distributed's default group, on one device each."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), device

    def total(self, count: int) -> int:
        """The sum of every process's count."""
        return int(self.sum_(torch.tensor(count, dtype=torch.int64, device=self.device)))

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum of every process's tensor, in place."""
        dist.all_reduce(tensor)
        return tensor

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """One message for all gradients: a small model's cost is in their number."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = self.sum_(torch.cat([g.flatten() for g in gradients]))
        summed = [
            part.view_as(g)
            for part, g in zip(torch.split(flat, [g.numel() for g in gradients]), gradients, strict=True)
        ]
        for parameter, gradient in zip(parameters, summed, strict=True):
            parameter.grad = gradient
        return summed

    def any(self, flag: int) -> int:
        """The largest of every process's flag."""
        value = torch.tensor(flag, dtype=torch.int64, device=self.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return int(value)

    def same(self, value: float) -> float:
        """The first process's value."""
        sent = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.broadcast(sent, 0)
        return float(sent)

    def gather(self, tensor: Tensor) -> Tensor:
        """Every process's tensor, stacked."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor)
        return torch.stack(parts)

    def wait(self) -> None:
        """Until every process is here."""
        dist.barrier()


def share(rows: int, rank: int, size: int) -> slice:
    """The rows of an update that process `rank` takes; shares differ by one row at most."""
    return slice(rows * rank // size, rows * (rank + 1) // size)


def join(device: str, batch: int) -> tuple[World, torch.device]:
    """This process's world and device: torchrun's processes where its variables are set, else one.

    Args:
        device: "auto", "cpu", "cuda", or "cuda:N" for one process alone.
        batch: rows of an update, of which every process needs one.

    Raises:
        UserError: a device that is not there or is named for several processes; fewer rows than processes.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1 and ":" in device:
        raise UserError(
            "of several processes each takes its own device",
            where="train.device",
            got=f"{device} for {size} processes",
            expected='"cuda", "cpu" or "auto"',
            remedy='write "cuda"; CUDA_VISIBLE_DEVICES chooses among the devices',
        )
    found = device_of(device, where="train.device")
    if size == 1:
        return Alone(), found
    if batch < size:
        raise UserError(
            "an update has fewer rows than processes", where="train.batch", got=batch, expected=f"at least {size}"
        )
    if found.type == "cuda":
        found = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(found)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if found.type == "cuda" else "gloo")
    return Group(found), found


def leave() -> None:
    """Ends what `join` began; nothing where it began nothing."""
    if dist.is_initialized():
        dist.destroy_process_group()
