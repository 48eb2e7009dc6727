"""Tables in published files that are computed, not learned: they should hold what this package computes."""

import torch
from torch import Tensor

from anyformer.errors import UserError
from anyformer.nn.position import sinusoids
from anyformer.spec.parts import StackSpec
from anyformer.spec.positions import Sinusoidal
from anyformer.weights.config import Reading
from anyformer.weights.shapes import pattern
from anyformer.weights.shards import Shards

TOLERANCE = 5e-3
"""What rounding to bfloat16 leaves of a sine."""


def require_tables(reading: Reading, shards: Shards) -> None:
    """Raises `UserError` for a table of positions in a file that is not the one that the specification computes."""
    for name, stack in reading.family.computed.items():
        place = pattern(name)
        for found in sorted(filter(place.fullmatch, shards.entries)):
            wrong = _unlike(shards.tensor(found), reading.spec.stacks[stack])
            if wrong is not None:
                raise UserError(
                    f"the table {found} is not that of the positions which the configuration describes",
                    where=shards.entries[found].file,
                    got=wrong,
                    expected=f"the sinusoids of {reading.family.name}, {reading.spec.stacks[stack].d_embed} wide",
                    remedy="trained positions have no place in this family",
                )


def _unlike(table: Tensor, stack: StackSpec) -> str | None:
    """How a table differs from a stack's positions, None where it does not."""
    position = stack.embed.position
    assert isinstance(position, Sinusoidal)
    if table.dim() != 2 or table.shape[1] != stack.d_embed or not table.is_floating_point():
        return f"{list(table.shape)} of {table.dtype}"
    wanted = sinusoids(position, stack.d_embed, torch.arange(len(table))[None], torch.float32)[0]
    worst = float((table.float() - wanted).abs().max()) if len(table) else 0.0
    return None if worst <= TOLERANCE else f"numbers that are off by up to {worst:.2g}"
