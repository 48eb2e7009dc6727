"""Which optimiser moves which parameter, at which rate: groups by role, asserted to cover every parameter once.

Weight decay falls on the matrices inside blocks, routers included, and on an untied head. Norms, biases, positions and
the embedding (tied or not) are not decayed: a row of the embedding is a vector that few steps touch, and decay would
shrink rare tokens for being rare.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anyformer.errors import UserError
from anyformer.nn.roles import roles
from anyformer.train.adamw import AdamW
from anyformer.train.muon import Muon, coefficients_of
from anyformer.train.run import AdamW as AdamWChoice
from anyformer.train.run import Muon as MuonChoice

DECAYED = ("hidden", "residual", "router", "head")
MATRICES = ("hidden", "residual")


@dataclass(frozen=True)
class Group:
    """Parameters that one optimiser moves at one peak rate `lr` with one decay."""

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    optimizer: str
    lr: float
    weight_decay: float


def _place(choice: AdamWChoice | MuonChoice, role: str, parameter: Tensor) -> tuple[str, float, float]:
    """The optimiser, rate and decay of a parameter with a role."""
    factor: float = getattr(choice.lr_scale, role)
    decays = role in DECAYED and parameter.dim() >= 2
    if isinstance(choice, MuonChoice) and role in MATRICES and parameter.dim() >= 2:
        own = choice.muon
        decay = choice.weight_decay if own.weight_decay is None else own.weight_decay
        return "muon", (own.lr or choice.lr) * factor, decay
    return "adamw", choice.lr * factor, choice.weight_decay if decays else 0.0


def groups(model: nn.Module, choice: AdamWChoice | MuonChoice) -> list[Group]:
    """The model's parameters in groups, every one in exactly one of them; a tied parameter is there once."""
    named = dict(model.named_parameters())
    placed: dict[tuple[str, float, float], list[str]] = {}
    for name, role in roles(model).items():
        if named[name].requires_grad:
            placed.setdefault(_place(choice, role, named[name]), []).append(name)
    made = [Group(tuple(names), tuple(named[name] for name in names), *place) for place, names in placed.items()]
    covered = [id(p) for group in made for p in group.parameters]
    wanted = {id(p) for p in model.parameters() if p.requires_grad}
    assert len(covered) == len(set(covered)), "a parameter is in two groups"
    assert set(covered) == wanted, "a parameter is in no group"
    return made


class Optimizer:
    """AdamW, or Muon and AdamW side by side, with a state of named tensors.

    Args:
        model: gives the parameters and their roles.
        choice: the run's optimiser.
    """

    def __init__(self, model: nn.Module, choice: AdamWChoice | MuonChoice) -> None:
        self.groups = groups(model, choice)
        self.parameters = [p for group in self.groups for p in group.parameters]
        if not self.parameters:
            raise ValueError("the model has no parameter to train")
        by_adamw = [g for g in self.groups if g.optimizer == "adamw"]
        by_muon = [g for g in self.groups if g.optimizer == "muon"]
        self._parts: list[AdamW | Muon] = []
        if by_muon and isinstance(choice, MuonChoice):
            self._parts.append(_muon(by_muon, choice))
        if by_adamw:
            tables = ((g.names, g.parameters, g.lr, g.weight_decay) for g in by_adamw)
            self._parts.append(AdamW(tables, betas=choice.betas, eps=choice.eps))

    def step(self, ratio: float = 1.0) -> None:
        """One update of every parameter at `ratio` of its peak rate."""
        for part in self._parts:
            part.step(ratio)

    def zero_grad(self) -> None:
        """Frees every gradient."""
        for parameter in self.parameters:
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """All state as tensors named `PARAMETER/KIND`: exp_avg, exp_avg_sq and step, or momentum."""
        return {name: tensor for part in self._parts for name, tensor in part.moments().items()}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Takes over what `state` gave. Raises `UserError` when it is not the state of these parameters."""
        own = self.state()
        for name, tensor in own.items():
            if name not in tensors:
                raise _misfit(f"{name} is missing")
            if tensors[name].shape != tensor.shape:
                raise _misfit(f"{name} is {list(tensors[name].shape)} and should be {list(tensor.shape)}")
            if tensors[name].dtype != tensor.dtype:
                raise _misfit(f"{name} is {tensors[name].dtype} and should be {tensor.dtype}")
        foreign = next((name for name in tensors if name not in own), None)
        if foreign is not None:
            raise _misfit(f"{foreign} belongs to no parameter")
        # Into memory of our own: a file's mapping may lie at addresses that change how a kernel rounds.
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def _muon(chosen: list[Group], choice: MuonChoice) -> Muon:
    own = choice.muon
    on_cuda = chosen[0].parameters[0].device.type == "cuda"
    precision = {"auto": "bfloat16" if on_cuda else "float32"}.get(own.precision, own.precision)
    return Muon(
        ((n, p, group.lr) for group in chosen for n, p in zip(group.names, group.parameters, strict=True)),
        momentum=own.momentum,
        nesterov=own.nesterov,
        weight_decay=chosen[0].weight_decay,
        coefficients=coefficients_of(own.coefficients, own.ns_steps),
        scale=own.scale,
        dtype=torch.bfloat16 if precision == "bfloat16" else None,
    )


def _misfit(got: str) -> UserError:
    return UserError("the stored optimiser state does not fit the model", where="optimizer.safetensors", got=got)
