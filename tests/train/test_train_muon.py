import math

import pytest
import torch

from anyformer.train.muon import JORDAN, Muon, coefficients_of, orthogonalised


def polynomial_of_singular_values(x, coefficients):
    """The oracle: the odd polynomials applied to the singular values in float64."""
    u, s, vh = torch.linalg.svd(x.double() / x.double().norm(), full_matrices=False)
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ vh


@pytest.mark.parametrize("shape", [(7, 7), (6, 9), (5, 13), (3, 40), (1, 8)])
@pytest.mark.parametrize("name", ["jordan", "polar"])
def test_iterations_are_polynomials_of_the_singular_values(shape, name):
    x = torch.randn(4, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for steps in (1, 3, 5):
        coefficients = coefficients_of(name, steps)
        wanted = torch.stack([polynomial_of_singular_values(m, coefficients) for m in x])
        torch.testing.assert_close(orthogonalised(x, coefficients), wanted, rtol=1e-7, atol=1e-7)
        close = orthogonalised(x.float(), coefficients)
        torch.testing.assert_close(close, wanted.float(), rtol=1e-3, atol=1e-4)


def test_the_result_is_nearly_the_polar_factor():
    x = torch.randn(3, 16, 30, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    for name, steps, bound in (("jordan", 5, 0.35), ("polar", 5, 0.2), ("polar", 7, 0.01)):
        found = orthogonalised(x, coefficients_of(name, steps))
        assert (torch.linalg.svdvals(found) - 1).abs().max() < bound
        assert (found - u @ vh).abs().max() < bound


def test_zero_stays_zero_and_finite():
    assert not orthogonalised(torch.zeros(2, 3, 8), JORDAN * 5).any()
    assert not orthogonalised(torch.zeros(2, 5, 5), JORDAN * 5).any()


def matrices(dtype=torch.float32):
    g = torch.Generator().manual_seed(3)
    shapes = [(24, 24), (24, 24), (40, 24), (24, 40), (8, 24), (72, 24)]
    made = [torch.randn(s, generator=g, dtype=dtype).requires_grad_() for s in shapes]
    for m in made:
        m.grad = torch.randn(m.shape, generator=g, dtype=dtype)
    return made


@pytest.mark.parametrize("scale", ["rms", "jordan"])
def test_one_step_equals_torchs_muon(scale):
    """torch iterates in bfloat16, one matrix at a time; the distance is that of bfloat16."""
    ours, theirs = matrices(), matrices()
    settings = {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.9}
    adjust = {"rms": "match_rms_adamw", "jordan": "original"}[scale]
    torch.optim.Muon(theirs, adjust_lr_fn=adjust, **settings).step()
    Muon(
        [(str(i), m, 0.05) for i, m in enumerate(ours)],
        momentum=0.9,
        weight_decay=0.1,
        scale=scale,
        dtype=torch.bfloat16,
    ).step()
    before = matrices()
    for mine, other, start in zip(ours, theirs, before, strict=True):
        step, expected = mine.detach() - start.detach(), other.detach() - start.detach()
        assert (step - expected).norm() / expected.norm() < 0.01
        assert step.norm() > 0.01


def textbook(weights, grads, *, lr, mu, wd, scale, nesterov):
    """Muon from its equations in float64, with NS as polynomials of singular values."""
    moments = [torch.zeros_like(w) for w in weights]
    for step_grads in grads:
        for i, g in enumerate(step_grads):
            moments[i] = mu * moments[i] + (1 - mu) * g
            u = (1 - mu) * g + mu * moments[i] if nesterov else moments[i]
            rows, cols = u.shape
            factor = {
                "rms": 0.2 * math.sqrt(max(rows, cols)),
                "jordan": math.sqrt(max(1, rows / cols)),
                "spectral": math.sqrt(rows / cols),
                "none": 1.0,
            }[scale]
            weights[i] = weights[i] * (1 - lr * wd) - lr * factor * polynomial_of_singular_values(u, JORDAN * 5)
    return weights, moments


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["rms", "jordan", "spectral", "none"])
def test_several_steps_equal_the_equations(scale, nesterov):
    ours = matrices(torch.float64)
    start = [m.detach().clone() for m in ours]
    muon = Muon(
        [(str(i), m, 0.05) for i, m in enumerate(ours)], momentum=0.8, nesterov=nesterov, weight_decay=0.1, scale=scale
    )
    g = torch.Generator().manual_seed(9)
    grads = [[torch.randn(m.shape, generator=g, dtype=torch.float64) for m in ours] for _ in range(3)]
    for step in grads:
        for m, gradient in zip(ours, step, strict=True):
            m.grad = gradient.clone()
        muon.step(ratio=0.5)
    wanted, moments = textbook(start, grads, lr=0.025, mu=0.8, wd=0.1, scale=scale, nesterov=nesterov)
    for i, (mine, other) in enumerate(zip(ours, wanted, strict=True)):
        torch.testing.assert_close(mine.detach(), other, rtol=1e-7, atol=1e-8)
        torch.testing.assert_close(muon.moments()[f"{i}/momentum"], moments[i])


def test_a_vector_is_refused():
    with pytest.raises(ValueError, match="matrices"):
        Muon([("v", torch.zeros(3), 0.1)])


def test_unknown_coefficients_are_refused():
    with pytest.raises(ValueError, match="known: jordan, polar"):
        coefficients_of("jordon", 5)
