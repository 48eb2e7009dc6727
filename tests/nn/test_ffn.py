"""Feed-forward networks: against their equations in numpy, with every option; gradients; dropout."""

import math

import numpy as np
import pytest
import torch

from anyformer.nn.ffn import DenseFeedForward, GatedFeedForward, feed_forward, inner
from anyformer.nn.roles import roles
from anyformer.spec.ffn import Dense, Gated

C = 7
NUMPY = {
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * np.vectorize(lambda a: (1 + math.erf(a / math.sqrt(2))) / 2)(x),
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "identity": lambda x: x,
}
DENSE = [Dense(activation=name, d_ff=9, bias=bias) for name in ("relu", "gelu", "relu2") for bias in (False, True)]
GATED = [
    Gated(activation=name, d_ff=5, bias=bias, limit=limit, up_offset=offset)
    for name, limit, offset in (
        ("silu", None, 0.0),
        ("gelu", 0.7, 0.0),
        ("relu", None, -0.5),
        ("quick_gelu", 0.9, 1.0),
        ("identity", 0.6, 0.25),
    )
    for bias in (False, True)
]


def made(spec, dtype=torch.float64):
    layer = feed_forward(spec, C).to(dtype).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return layer


def textbook(layer, x):
    spec, w = layer.spec, {name: p.detach().numpy() for name, p in layer.named_parameters()}

    def linear(name, x):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    act, up = NUMPY[spec.activation], linear("up", x)
    if spec.kind == "dense":
        return linear("down", act(up))
    gate = linear("gate", x)
    if spec.limit is not None:
        assert (gate > spec.limit).any()
        assert (gate < -spec.limit).any()
        assert (up > spec.limit).any()
        assert (up < -spec.limit).any()
        gate, up = np.minimum(gate, spec.limit), np.minimum(np.maximum(up, -spec.limit), spec.limit)
    return linear("down", act(gate) * (up + spec.up_offset))


@pytest.mark.parametrize("spec", [*DENSE, *GATED], ids=str)
def test_every_network_is_its_equation(spec):
    layer, x = made(spec), torch.randn(2, 5, C, dtype=torch.float64)
    np.testing.assert_allclose(layer(x).detach(), textbook(layer, x.numpy()), atol=1e-12)


@pytest.mark.parametrize("spec", [*DENSE, *GATED], ids=str)
def test_gradients_are_finite_differences(spec):
    layer = made(spec)
    names = [name for name, _ in layer.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    x = torch.randn(1, 3, C, dtype=torch.float64, requires_grad=True)

    def called(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(called, (x, *values))


def test_a_limit_by_number():
    """gpt-oss: gate 9 → 7, up −8 → −7: quick_gelu(7)·(−7 + 1) = −41.99972; a gate of −20 is not raised."""
    spec = Gated(activation="quick_gelu", d_ff=2, limit=7.0, up_offset=1.0)
    gate, up = torch.tensor([9.0, -20.0], dtype=torch.float64), torch.tensor([-8.0, 8.0], dtype=torch.float64)
    got = inner(spec, gate=gate, up=up)
    assert float(got[0]) == pytest.approx(-6 * 7 / (1 + math.exp(-1.702 * 7)), rel=1e-12)
    assert float(got[0]) == pytest.approx(-41.99972, abs=1e-5)
    assert float(got[1]) == pytest.approx(-20 / (1 + math.exp(34.04)) * 8, rel=1e-9)


def test_names_shapes_and_roles():
    gated = feed_forward(Gated(activation="silu", d_ff=5, bias=True), C)
    found = {name: (tuple(p.shape), roles(gated)[name]) for name, p in gated.named_parameters()}
    assert found == {
        "gate.weight": ((5, C), "hidden"),
        "gate.bias": ((5,), "bias"),
        "up.weight": ((5, C), "hidden"),
        "up.bias": ((5,), "bias"),
        "down.weight": ((C, 5), "residual"),
        "down.bias": ((C,), "bias"),
    }
    assert isinstance(gated, GatedFeedForward)
    dense = feed_forward(Dense(activation="relu", d_ff=5), C)
    assert isinstance(dense, DenseFeedForward)
    assert [name for name, _ in dense.named_parameters()] == ["up.weight", "down.weight"]


@pytest.mark.parametrize("kind", [Dense, Gated])
def test_dropout_falls_in_training_alone_after_the_activation_and_after_down(kind):
    x = torch.randn(1, 400, C, dtype=torch.float64)
    torch.manual_seed(0)
    plain = made(kind(activation="silu", d_ff=5))
    for options in ({"dropout": 0.25}, {"out_dropout": 0.25}):
        layer = made(kind(activation="silu", d_ff=5, **options))
        assert torch.equal(layer(x), plain(x))
        layer.train()
        reads = []
        layer.down.register_forward_hook(lambda module, inputs, output: reads.append(inputs[0]))
        out = layer(x)
        dropped = {"dropout": (reads[0] == 0), "out_dropout": (out == 0)}
        for name, zeros in dropped.items():
            assert abs(float(zeros.double().mean()) - options.get(name, 0.0)) < 0.05
        kept = out != 0
        if "out_dropout" in options:
            torch.testing.assert_close(out[kept], plain(x)[kept] / 0.75)
