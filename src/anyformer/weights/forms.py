"""The numbers of a conversion: tensors of a published file made into ours, and ours into theirs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from anyformer.families.family import (
    Heads,
    Interleaved,
    Joined,
    Otherwise,
    Rotated,
    Row,
    Shifted,
    Stacked,
    Twice,
    Where,
)
from anyformer.weights.shapes import Shape, Step


def to_ours(step: Step, theirs: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
    """Our tensors, of `shapes`, as views of theirs where their numbers lie as they should."""
    match step.form:
        case None | Twice() | Where():
            return [theirs[0]]
        case Otherwise():
            return [theirs[0].clone()]  # Another rule's tensor shares its memory with the file.
        case Row():
            return [theirs[0][0]]
        case Rotated():
            return [_regrouped(theirs[0], step.groups, -1, 2)]
        case Shifted():
            return [theirs[0] - 1]
        case Heads(transposed=transposed):
            return [(theirs[0].transpose(1, 2) if transposed else theirs[0]).flatten(0, 1)]
        case Stacked():
            return [torch.stack(list(theirs))]
        case Interleaved():
            whole = theirs[0].reshape(step.groups, -1, *theirs[0].shape[1:])
            parts = torch.split(whole, [shape[0] // step.groups for shape in shapes], 1)
            return [part.flatten(0, 1) for part in parts]
        case Joined(dim=dim, transposed=transposed):
            whole = theirs[0].T if transposed and theirs[0].dim() > 1 else theirs[0]
            dim = min(dim, whole.dim() - 1)
            return list(torch.split(whole, [shape[dim] for shape in shapes], dim))
    raise AssertionError(step.form)


def to_theirs(step: Step, ours: Sequence[Tensor]) -> list[Tensor]:
    """Their tensors, in the order of the step's names: the inverse of `to_ours`."""
    match step.form:
        case None | Where():
            return [ours[0]]
        case Twice():
            return [ours[0].clone()]  # A file holds no memory twice.
        case Row():
            return [ours[0][None]]
        case Rotated():
            return [_regrouped(ours[0], step.groups, 2, -1)]
        case Shifted():
            return [ours[0] + 1]
        case Heads(transposed=transposed):
            heads = ours[0].reshape(step.groups, -1, *ours[0].shape[1:])
            return [heads.transpose(1, 2) if transposed else heads]
        case Stacked():
            return list(ours[0].unbind(0))
        case Interleaved():
            parts = [part.reshape(step.groups, -1, *part.shape[1:]) for part in ours]
            return [torch.cat(parts, 1).flatten(0, 1)]
        case Joined(dim=dim, transposed=transposed):
            whole = torch.cat(list(ours), min(dim, ours[0].dim() - 1))
            return [whole.T if transposed and whole.dim() > 1 else whole]
    raise AssertionError(step.form)


def _regrouped(rows: Tensor, heads: int, *inner: int) -> Tensor:
    """Rows [heads · a · b, …] with the two inner parts of each head swapped."""
    order = torch.arange(len(rows)).view(heads, *inner).transpose(1, 2).flatten()
    return rows.index_select(0, order)  # Copies whole rows, which a transposed copy does not.
