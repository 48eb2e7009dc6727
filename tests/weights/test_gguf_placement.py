"""Where tensors of a GGUF file go: the rule that needs no torch agrees with what the modules can do."""

from math import prod

import pytest
import torch

from anyformer.nn.model import build
from anyformer.nn.packed import Packed
from anyformer.nn.packing import Parts, packed
from anyformer.spec import load_spec
from anyformer.weights.gguf.layouts import LAYOUTS
from anyformer.weights.gguf.parts import part
from anyformer.weights.gguf.placement import _MATRICES, _kept_bytes
from anyformer.weights.gguf.types import HALVES, KEPT, KIND

SMALL = ["vocab_size=96"]


@pytest.mark.parametrize(
    "recipe", ["llama-tiny", "gpt2", "mixtral-8x7b", "deepseek-v2-lite", "deepseek-v3", "gemma-3-1b"]
)
def test_what_may_be_kept_by_name_is_what_the_modules_can_keep(recipe):
    model = build(load_spec(recipe, SMALL), device="meta")
    able = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if getattr(module, "keepable", False) and getattr(module, "weight", None) is not None
    }
    assert able == {name for name, _ in model.named_parameters() if _MATRICES.fullmatch(name)}


@pytest.mark.parametrize("kind", sorted(KEPT))
@pytest.mark.parametrize("shape", [(3, 64, 512), (50, 256), (1, 256)])
def test_planned_bytes_are_those_that_are_taken(kind, shape):
    generator = torch.Generator().manual_seed(0)
    rows = prod(shape[:-1])
    data = torch.randint(0, 256, (rows, KIND[kind].row_bytes(shape[-1])), dtype=torch.uint8, generator=generator)
    blocks = data.view(rows, -1, KIND[kind].n_bytes)
    for at in HALVES.get(kind, ()):
        blocks[..., at + 1] = 0x2E  # Scales of about 0.1, whatever their lower bits.
    if kind == "MXFP4":
        blocks[..., 0] = torch.randint(60, 200, blocks.shape[:2], dtype=torch.uint8, generator=generator)

    def make(start, stop):
        return part(data[start:stop].numpy(), KIND[kind])

    assert Packed(packed(Parts(shape, LAYOUTS[kind].bits, KEPT[kind], make))).nbytes == _kept_bytes(
        kind, shape, tied=True
    )
