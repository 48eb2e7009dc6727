"""AdamW (Loshchilov & Hutter 2019, algorithm 2) over groups of named parameters, by torch's fused kernel.

    m ← β₁·m + (1 − β₁)·g        v ← β₂·v + (1 − β₂)·g²
    w ← (1 − η·λ)·w − η · (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε)

`torch.optim.AdamW` computes the same by the same kernel. Its class adds bookkeeping to each step, and its construction
imports torch's compiler; the function beneath needs neither (benchmarks/optimizers.py).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim.adamw import adamw

_FUSED = ("cpu", "cuda")


@dataclass
class _Group:
    """Parameters with one rate and one decay, and their moments."""

    names: list[str]
    parameters: list[Tensor]
    lr: float
    weight_decay: float
    exp_avg: list[Tensor] = field(default_factory=list)
    exp_avg_sq: list[Tensor] = field(default_factory=list)
    step: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.exp_avg = [torch.zeros_like(p, requires_grad=False) for p in self.parameters]
        self.exp_avg_sq = [torch.zeros_like(p, requires_grad=False) for p in self.parameters]
        self.fused = all(p.device.type in _FUSED for p in self.parameters)
        self.step = [torch.zeros((), device=p.device if self.fused else "cpu") for p in self.parameters]


class AdamW:
    """AdamW. A parameter without a gradient is left alone. The caller clears gradients.

    Args:
        groups: names, parameters, learning rate at the schedule's peak, weight decay.
        betas: β₁ and β₂.
        eps: ε.
    """

    def __init__(
        self,
        groups: Iterable[tuple[Sequence[str], Sequence[Tensor], float, float]],
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        self.betas, self.eps = betas, eps
        self.groups = [_Group(list(names), list(parameters), lr, decay) for names, parameters, lr, decay in groups]

    @torch.no_grad()
    def step(self, ratio: float = 1.0) -> None:
        """One update at `ratio` of every learning rate."""
        for group in self.groups:
            lists: list[list[Tensor]] = [group.parameters, group.exp_avg, group.exp_avg_sq, group.step]
            gradients = [p.grad for p in group.parameters]
            present = [gradient for gradient in gradients if gradient is not None]
            if len(present) < len(gradients):
                there = [gradient is not None for gradient in gradients]
                lists = [[x for x, is_there in zip(each, there, strict=True) if is_there] for each in lists]
            parameters, exp_avg, exp_avg_sq, steps = lists
            adamw(
                parameters,
                present,
                exp_avg,
                exp_avg_sq,
                [],
                steps,
                foreach=not group.fused,
                fused=group.fused,
                amsgrad=False,
                beta1=self.betas[0],
                beta2=self.betas[1],
                lr=group.lr * ratio,
                weight_decay=group.weight_decay,
                eps=self.eps,
                maximize=False,
            )

    def moments(self) -> dict[str, Tensor]:
        """All state as tensors named `PARAMETER/exp_avg`, `/exp_avg_sq` and `/step`, which loading may write to."""
        return {
            f"{name}/{kind}": tensor
            for group in self.groups
            for kind in ("exp_avg", "exp_avg_sq", "step")
            for name, tensor in zip(group.names, getattr(group, kind), strict=True)
        }
