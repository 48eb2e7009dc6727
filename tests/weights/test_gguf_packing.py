"""Packing on threads: the same codes as torch's way gives, in the same order, and what fails there fails here."""

import numpy as np
import pytest
import torch

from anyformer.families.family import Interleaved, Joined, Rotated
from anyformer.nn.packing import Parts, packed
from anyformer.nn.quantised import Quantised
from anyformer.weights.forms import to_ours
from anyformer.weights.gguf.blocks import grouped
from anyformer.weights.gguf.layouts import LAYOUTS
from anyformer.weights.gguf.parts import part, rows_of
from anyformer.weights.gguf.types import KEPT, KIND
from anyformer.weights.shapes import Step


def stored(kind: str, rows: int, n: int) -> torch.Tensor:
    """Rows of bytes whose scales are finite, whatever they are."""
    data = torch.randint(0, 256, (rows, KIND[kind].row_bytes(n)), generator=torch.Generator().manual_seed(rows))
    return (data & 0x7B).to(torch.uint8)


@pytest.mark.parametrize("kind", sorted(KEPT))
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_what_is_packed_are_the_codes_of_the_file(kind, rows):
    data, n = stored(kind, rows, 512), 512

    def make(start, stop):
        return part(data[start:stop].numpy(), KIND[kind])

    blocks = packed(Parts((rows, n), LAYOUTS[kind].bits, KEPT[kind], make))
    found, wanted = Quantised(blocks, (rows, n)).codes(), grouped(data, KIND[kind])
    for name in ("codes", "scales", "zeros"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name


@pytest.mark.parametrize(
    ("form", "theirs", "ours"),
    [
        (None, (6, 5), [(6, 5)]),
        (Rotated("n_heads"), (24, 5), [(24, 5)]),
        (Interleaved("n_heads"), (18, 5), [(9, 5), (3, 5), (6, 5)]),
        (Joined(), (9, 5), [(4, 5), (2, 5), (3, 5)]),
        (Joined(), (6, 4, 5), [(2, 4, 5), (4, 4, 5)]),
    ],
)
def test_rows_are_those_that_the_form_gives(form, theirs, ours):
    step = Step(tuple("abc"[: len(ours)]), ("x",), (theirs,), form, groups=3)
    whole = torch.arange(np.prod(theirs)).view(theirs)
    wanted = [each.reshape(-1, 5) for each in to_ours(step, [whole], ours)]
    found = [whole.view(-1, 5).numpy()[rows] for rows in rows_of(step, ours)]
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert np.array_equal(one, other.numpy())
