"""Linear maps, norms and activations: known numbers, their equations in numpy, finite differences."""

import math
from typing import get_args

import numpy as np
import pytest
import torch

from anyformer.nn.layers import ACTIVATIONS, Linear, NormLayer, norm_layer
from anyformer.spec.norms import LayerNorm, NoNorm, RMSNorm
from anyformer.spec.part import Activation

ACTIVATION_NUMBERS = {
    "relu": (3.0, 0.0),
    "gelu": (2.9959503, -0.1586553),
    "gelu_tanh": (2.9963626, -0.1588080),
    "silu": (2.8577224, -0.2689414),
    "relu2": (9.0, 0.0),
    "quick_gelu": (2.9819287, -0.1542042),
    "sigmoid": (0.9525741, 0.2689414),
    "tanh": (0.9950548, -0.7615942),
    "identity": (3.0, -1.0),
}
"""At 3 and −1."""


def test_every_activation_of_the_specification_is_there():
    assert set(ACTIVATIONS) == set(get_args(Activation)) == set(ACTIVATION_NUMBERS)


@pytest.mark.parametrize("name", ACTIVATION_NUMBERS)
def test_activations_by_number(name):
    x = torch.tensor([3.0, -1.0], dtype=torch.float64, requires_grad=True)
    want = torch.tensor(ACTIVATION_NUMBERS[name], dtype=torch.float64)
    torch.testing.assert_close(ACTIVATIONS[name](x), want, atol=1e-7, rtol=0)
    assert torch.autograd.gradcheck(ACTIVATIONS[name], (x,))


@pytest.mark.parametrize(("eps", "value"), [(1e-5, 0.301511), (1e-6, 0.707107), (1e-12, 1.0)])
def test_the_epsilon_of_a_norm_is_its_own(eps, value):
    """x = [.001, −.001]; LayerNorm and RMSNorm agree, since the mean is zero."""
    x = torch.tensor([[0.001, -0.001]])
    for spec in (LayerNorm(eps=eps, weight=False, bias=False), RMSNorm(eps=eps, weight=False)):
        torch.testing.assert_close(NormLayer(spec, 2)(x), torch.tensor([[value, -value]]), atol=1e-6, rtol=0)


NORMS = [
    kind(weight=weight, bias=bias, offset=offset, eps=1e-3)
    for kind in (LayerNorm, RMSNorm)
    for weight, offset in ((True, 0), (True, 1), (False, 0))
    for bias in (False, True)
]


def named(spec):
    return f"{spec.kind}{' weight' * spec.weight}{' bias' * spec.bias}{' offset' * spec.offset}"


def filled(spec, width, heads=None, dtype=torch.float64):
    layer = norm_layer(spec, width, heads).to(dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return layer


@pytest.mark.parametrize("heads", [None, 3])
@pytest.mark.parametrize("spec", NORMS, ids=named)
def test_norms_are_their_equations(spec, heads):
    """Values, and gradients of the input and of every parameter; heads with weights of their own."""
    layer = filled(spec, 7, heads)
    x = torch.randn(2, 5, 3, 7, dtype=torch.float64, requires_grad=True)
    parameters = dict(layer.named_parameters())
    for p in parameters.values():
        assert tuple(p.shape) == ((7,) if heads is None else (3, 7))
    assert set(parameters) == {name for name, has in (("weight", spec.weight), ("bias", spec.bias)) if has}
    a = x.detach().numpy()
    if spec.kind == "layer":
        a = a - a.mean(-1, keepdims=True)
    want = a / np.sqrt((a**2).mean(-1, keepdims=True) + 1e-3)
    if spec.weight:
        want = want * (spec.offset + parameters["weight"].detach().numpy())
    if spec.bias:
        want = want + parameters["bias"].detach().numpy()
    np.testing.assert_allclose(layer(x).detach(), want, atol=1e-12)

    def called(x, *values):
        return torch.func.functional_call(layer, dict(zip(parameters, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(called, (x, *parameters.values()))


@pytest.mark.parametrize("spec", NORMS, ids=named)
def test_a_norm_starts_as_its_plain_form(spec):
    """`starts` makes the factor 1 and the bias 0, whatever the offset."""
    layer, x = filled(spec, 6), torch.randn(4, 6, dtype=torch.float64)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            p.fill_(layer.starts[name])
    plain = spec.model_copy(update={"weight": False, "bias": False, "offset": 0})
    torch.testing.assert_close(layer(x), norm_layer(plain, 6)(x))
    assert set(layer.starts) == set(layer.roles) == {"weight", "bias"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("spec", NORMS, ids=named)
def test_norm_statistics_are_float32_in_half_precision(spec, heads, dtype):
    """Squares of 300 overflow float16; the statistics do not, and an offset is not rounded away."""
    x = torch.full((1, 2, 64), 300.0, dtype=dtype)
    x[..., 0] = -300.0
    layer = filled(spec, 64, heads, dtype)
    got, want = layer(x), layer.double()(x.double())
    assert got.dtype == dtype
    torch.testing.assert_close(got, want.to(dtype), atol=2e-3, rtol=2 * torch.finfo(dtype).eps)


def test_a_norm_shows_what_it_is():
    assert repr(norm_layer(RMSNorm(offset=1), 8, heads=3)) == "NormLayer(rms, 3 heads of 8, eps=1e-06, offset=1)"
    assert repr(norm_layer(LayerNorm(), 8)) == "NormLayer(layer, 8, eps=1e-05)"
    assert isinstance(norm_layer(NoNorm(), 8), torch.nn.Identity)


def test_a_linear_map_draws_nothing():
    """Values come from the model's initialisation."""
    state = torch.random.get_rng_state()
    layer = Linear(5, 3, bias=True, role="residual")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert layer.roles == {"weight": "residual", "bias": "bias"}


def test_quick_gelu_is_near_the_exact_one():
    x = torch.linspace(-6, 6, 241, dtype=torch.float64)
    assert 0.015 < (ACTIVATIONS["quick_gelu"](x) - ACTIVATIONS["gelu"](x)).abs().max() < 0.025
    assert float(ACTIVATIONS["quick_gelu"](torch.tensor(2.0))) == pytest.approx(2 / (1 + math.exp(-3.404)))
