"""A first layer that begins by looking back."""

import pytest
import torch
from wide import block, decoder, latent_block, tokens, translator

from anyformer.nn.init import Init
from anyformer.nn.model import build
from anyformer.nn.tap import Tap
from anyformer.spec.attention import Grouped
from anyformer.spec.ffn import Dense
from anyformer.spec.parts import BlockSpec
from anyformer.spec.positions import DynamicNTKScaling, LinearScaling, NoScaling, Rope, YarnScaling

BIASES_ALONE = Init(embedding=0.0, look_back=3.0)
SCALINGS = [
    NoScaling(),
    LinearScaling(factor=3.0),
    YarnScaling(factor=4.0, original=64),
    DynamicNTKScaling(factor=2.0, original=64),
]


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling.kind)
def test_head_h_of_the_first_layer_looks_h_plus_one_back(scaling, layout):
    """Embeddings of zeros leave the biases alone to decide; grouped keys, and heads of which a part turns."""
    position = Rope(theta=100.0, fraction=0.75, layout=layout, scaling=scaling)
    attention = Grouped(n_heads=4, n_kv_heads=2, d_head=16, d_value=3, position=position, qkv_bias=True)
    layer = BlockSpec(attention=attention, ffn=Dense(activation="gelu", d_ff=5))
    tap = Tap(["blocks.*.pattern"])
    build(decoder(layer, layer), init=BIASES_ALONE, dtype="float64").hidden(tokens(), tap=tap)
    first, second = (tap.values[f"blocks.{i}.pattern"] for i in (0, 1))
    for head in range(4):
        assert first[0, head, 6:].argmax(-1).tolist() == [i - head - 1 for i in range(6, 17)]
    torch.testing.assert_close(second[0, :, 16], torch.full((4, 17), 1 / 17, dtype=torch.float64))


@pytest.mark.parametrize(
    "spec",
    [decoder(latent_block()), decoder(block("alibi", qkv_bias=True)), decoder(block("rope")), translator("rope")],
    ids=["latent", "no rotation", "no biases", "cross-attention"],
)
def test_nothing_else_can_look_back(spec):
    with pytest.raises(ValueError, match="it needs grouped attention, a rope and qkv_bias = true in every layer"):
        build(spec, init=Init(look_back=3.0))
