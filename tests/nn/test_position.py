"""Rotations, their scalings and sinusoids: known numbers, and formulas of the papers in float64 numpy."""

import math

import numpy as np
import pytest
import torch

from anyformer.nn.position import inverse_frequencies, rotate, rotation, sinusoids
from anyformer.spec.positions import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NoScaling,
    NTKScaling,
    Rope,
    Sinusoidal,
    YarnScaling,
)

LONG = LongRopeScaling(
    original=12,
    short=(1.0, 1.1, 1.25, 1.5, 2.0),
    long=(1.0, 3.0, 7.5, 11.0, 30.0),
    attention_factor=math.sqrt(1 + math.log(4) / math.log(12)),
)
SCALINGS = [
    NoScaling(),
    LinearScaling(factor=3.0),
    NTKScaling(factor=2.5),
    DynamicNTKScaling(factor=2.7, original=12),
    YarnScaling(factor=4.0, original=512),
    Llama3Scaling(factor=4.0, original=256),
    LONG,
]


def kind(value):
    return value.kind


def frequencies(scaling, width, lengths=None, theta=10000.0, dtype=torch.float64):
    lengths = None if lengths is None else torch.tensor(lengths)
    return inverse_frequencies(Rope(theta=theta, scaling=scaling), width, lengths, torch.device("cpu"), dtype)


def as_trained(width, theta=10000.0):
    return theta ** (-2 * np.arange(width // 2) / width)


def turn(x, layout, **options):
    at = torch.tensor([[1]])
    return rotate(x, rotation(Rope(layout=layout, **options), x.shape[-1], at, x.dtype), layout).flatten()


def test_the_two_rotary_layouts_by_number():
    """x = [1, 2, 3, 4] at position 1, base 10,000."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
    half, interleaved = turn(x, "half"), turn(x, "interleaved")
    torch.testing.assert_close(half, torch.tensor([-1.984111, 1.959901, 2.462378, 4.019800]), atol=1e-6, rtol=0)
    torch.testing.assert_close(interleaved, torch.tensor([-1.142640, 1.922076, 2.959851, 4.029800]), atol=1e-6, rtol=0)
    permutation = [0, 2, 1, 3]
    torch.testing.assert_close(turn(x[..., permutation], "interleaved"), half[permutation])


@pytest.mark.parametrize("scaling", [NoScaling(), YarnScaling(factor=4.0, original=64)], ids=kind)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_partial_rotation_changes_only_the_first_channels(layout, scaling):
    x = torch.randn(1, 3, 2, 10)
    rope = Rope(fraction=0.4, layout=layout, scaling=scaling)
    turned = rotate(x, rotation(rope, 10, torch.arange(3)[None], x.dtype), layout)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert (turned[:, 1:, :, :4] - x[:, 1:, :, :4]).abs().min() > 0
    whole = Rope(layout=layout, scaling=scaling)
    alone = rotate(x[..., :4], rotation(whole, 4, torch.arange(3)[None], x.dtype), layout)
    assert torch.equal(turned[..., :4], alone)


TABLES = [
    *(Rope(layout=layout, scaling=s) for layout in ("half", "interleaved") for s in (*SCALINGS[:3], *SCALINGS[4:6])),
    Sinusoidal(),
    Sinusoidal(layout="halves"),
    Sinusoidal(offset=3),
]


def table(spec, positions, dtype):
    """What a model of `dtype` uses at `positions`, as [T, width] of cosines then sines in float64."""
    if isinstance(spec, Sinusoidal):
        values = sinusoids(spec, 32, positions[None], dtype)[0]
        values = values[:, [*range(1, 32, 2), *range(0, 32, 2)]] if spec.layout == "interleaved" else values.roll(16, 1)
        return values.double()
    cos, sin = (x[0, :, 0] for x in rotation(spec, 32, positions[None], dtype))
    if spec.layout == "half":
        assert torch.equal(cos[:, :16], cos[:, 16:])
        assert torch.equal(sin[:, :16], -sin[:, 16:])
        return torch.cat([cos[:, :16], sin[:, 16:]], 1).double()
    assert torch.equal(cos[:, ::2], cos[:, 1::2])
    assert torch.equal(sin[:, ::2], -sin[:, 1::2])
    return torch.cat([cos[:, ::2], sin[:, 1::2]], 1).double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", TABLES, ids=lambda s: f"{s.kind}-{s.layout}")
def test_position_tables_are_exact_whatever_the_models_dtype(spec, dtype):
    """To position 8191; a sinusoid is rounded once, when it is added."""
    positions = torch.arange(8192)
    if isinstance(spec, Rope):
        turns, factor = frequencies(spec.scaling, 32), getattr(spec.scaling, "attention_factor", 1.0)
        angles = positions[:, None] * turns
    else:
        angles, factor = (positions[:, None] + spec.offset) * torch.from_numpy(as_trained(32)), 1.0
    exact = factor * torch.cat([angles.cos(), angles.sin()], 1)
    assert (table(spec, positions, dtype) - exact).abs().max() < 4e-3
    if isinstance(spec, Rope):
        assert (table(spec, positions, dtype) - exact).abs().max() < 1e-3
        one, two = table(spec, torch.tensor([256, 257]), dtype)
        assert (one - two).abs().max() > 0.1


def test_a_known_angle():
    """Width 32, base 10,000, pair 1, position 1857: angle 1044.2678, cosine 0.306693."""
    cos, _ = rotation(Rope(), 32, torch.tensor([[1857]]), torch.bfloat16)
    assert cos.dtype == torch.float32
    assert float(cos[0, 0, 0, 1]) == pytest.approx(0.306693, abs=2e-4)


@pytest.mark.parametrize("scaling", SCALINGS, ids=kind)
def test_a_half_precision_model_has_the_tables_of_a_single_precision_one(scaling):
    rope, at, lengths = Rope(scaling=scaling), torch.arange(300)[None], torch.tensor([11, 300])
    single = rotation(rope, 10, at, torch.float32, lengths)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = rotation(rope, 10, at, dtype, lengths)
        for one, two in zip(single, half, strict=True):
            assert two.dtype == torch.float32
            assert torch.equal(one, two)


def test_linear_scaling_divides_positions():
    at = torch.tensor([[0, 3, 30]])
    scaled = rotation(Rope(scaling=LinearScaling(factor=3.0)), 8, at, torch.float64)
    torch.testing.assert_close(scaled, rotation(Rope(), 8, at // 3, torch.float64))


def test_ntk_scaling_changes_the_base():
    """The slowest pair is interpolated by the factor, the fastest kept (bloc97 2023)."""
    got = frequencies(NTKScaling(factor=2.5), 10)
    np.testing.assert_allclose(got, as_trained(10, 10000 * 2.5 ** (10 / 8)), rtol=1e-12)
    assert float(got[0]) == 1.0
    assert float(got[-1]) == pytest.approx(as_trained(10)[-1] / 2.5, rel=1e-12)


@pytest.mark.parametrize(("length", "base"), [(1, 1e4), (16, 1e4), (24, 25198.421), (32, 43267.487)])
def test_the_base_of_dynamic_ntk_by_number(length, base):
    """Width 8, base 10,000, factor 2, trained length 16."""
    got = frequencies(DynamicNTKScaling(factor=2.0, original=16), 8, [length])
    assert float(got[0, 1]) ** -4 == pytest.approx(base, abs=1e-3)
    if length <= 16:
        assert torch.equal(got[0], frequencies(NoScaling(), 8))


@pytest.mark.parametrize("scaling", [DynamicNTKScaling(factor=2.7, original=12), LONG], ids=kind)
def test_every_row_turns_by_its_own_length(scaling):
    """A short row beside a long one, and after one, is the short row alone, bit for bit."""
    rope, at = Rope(scaling=scaling), torch.arange(40)[None]
    alone = rotation(rope, 10, at, torch.float32, torch.tensor([12]))
    both = rotation(rope, 10, at, torch.float32, torch.tensor([40, 12, 13]))
    after = rotation(rope, 10, at, torch.float32, torch.tensor([12]))
    for one, two, three in zip(alone, both, after, strict=True):
        assert two.shape == (3, 40, 1, 10)
        assert torch.equal(one[0], two[1])
        assert torch.equal(one, three)
        assert not torch.equal(two[0], two[1])
        assert not torch.equal(two[2], two[1])


@pytest.mark.parametrize("scaling", [DynamicNTKScaling(factor=2.7, original=12), LONG], ids=kind)
def test_lengths_may_differ_within_a_row(scaling):
    """Packed documents: each token by the length of its own."""
    rope, lengths = Rope(scaling=scaling), torch.tensor([[30] * 30 + [8] * 8, [19] * 19 + [19] * 19])
    at = torch.tensor([[*range(30), *range(8)], [*range(19), *range(19)]])
    packed = rotation(rope, 10, at, torch.float64, lengths)
    for row, first, n in ((0, 0, 30), (0, 30, 8), (1, 0, 19), (1, 19, 19)):
        apart = rotation(rope, 10, torch.arange(n)[None], torch.float64, torch.tensor([n]))
        for one, two in zip(packed, apart, strict=True):
            assert torch.equal(one[row, first : first + n], two[0])


@pytest.mark.parametrize("scaling", [DynamicNTKScaling(factor=2.0, original=12), LONG], ids=kind)
def test_scaling_by_length_needs_lengths(scaling):
    with pytest.raises(ValueError, match=rf"{scaling.kind} scaling turns by the length of each row; got no lengths"):
        rotation(Rope(scaling=scaling), 10, torch.arange(3)[None], torch.float32)


def yarn(scaling, width, theta):
    """Peng et al. 2023, section 3.2, with the ramp over pair numbers; its ends where ln(turns) meets ln(beta)."""
    plain = as_trained(width, theta)
    log_turns = np.log(scaling.original * plain / (2 * np.pi))
    slope = log_turns[1] - log_turns[0]
    low, high = ((np.log(beta) - log_turns[0]) / slope for beta in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = np.clip((np.arange(width // 2) - low) / max(high - low, 0.001), 0, 1)
    return (1 - ramp) * plain + ramp * plain / scaling.factor


YARNS = [
    (YarnScaling(factor=4.0, original=4096), 64, 1e4),
    (YarnScaling(factor=40.0, original=4096, attention_factor=1.0), 64, 1e4),
    (YarnScaling(factor=32.0, original=4096, truncate=False), 64, 150000.0),
    (YarnScaling(factor=2.5, original=700, beta_fast=20.0, beta_slow=2.0), 26, 5e5),
    (YarnScaling(factor=2.0, original=64), 10, 1e4),
    (YarnScaling(factor=8.0, original=16, truncate=False), 6, 1e4),
]


@pytest.mark.parametrize(("scaling", "width", "theta"), YARNS)
def test_yarn_is_its_paper(scaling, width, theta):
    got = frequencies(scaling, width, theta=theta).numpy()
    np.testing.assert_allclose(got, yarn(scaling, width, theta), rtol=1e-12)
    plain = as_trained(width, theta)
    turns = scaling.original * plain / (2 * np.pi)
    np.testing.assert_allclose(got[turns > scaling.beta_fast], plain[turns > scaling.beta_fast], rtol=1e-12)
    slow = turns < scaling.beta_slow / theta ** (2 / width)
    np.testing.assert_allclose(got[slow], plain[slow] / scaling.factor, rtol=1e-12)


def test_yarn_by_number():
    """Width 64, base 10,000, original 4096, factor 4: pairs to 10 are kept, from 23 on a quarter, a line between."""
    ratio = frequencies(YarnScaling(factor=4.0, original=4096), 64).numpy() / as_trained(64)
    np.testing.assert_allclose(ratio[:11], 1.0)
    np.testing.assert_allclose(ratio[23:], 0.25)
    np.testing.assert_allclose(ratio[10:24], 1 - 0.75 * np.arange(14) / 13)


def test_the_attention_factor_is_in_both_tables():
    """0.1·ln(40) + 1 = 1.368888 (Peng et al. 2023, eq. 22), and LongRoPE's own on both sides of `original`."""
    at = torch.arange(7)[None]
    for layout in ("half", "interleaved"):
        cos, sin = rotation(Rope(layout=layout, scaling=YarnScaling(factor=40.0, original=64)), 8, at, torch.float64)
        torch.testing.assert_close(cos.square() + sin.square(), torch.full_like(cos, 1.368888**2), atol=1e-5, rtol=0)
    for length in (5, 500):
        cos, sin = rotation(Rope(scaling=LONG), 10, at, torch.float64, torch.tensor([length]))
        torch.testing.assert_close(cos.square() + sin.square(), torch.full_like(cos, 1 + math.log(4) / math.log(12)))


def test_llama3_frequencies_by_number():
    """Width 16, base 10,000, factor 4, low 1, high 4, original 256; and Llama 3.1's own at width 64."""
    got = frequencies(Llama3Scaling(factor=4.0, original=256), 16)
    want = [1, 0.31622777, 0.1, 0.01018592, 0.0025, 0.00079057, 0.00025, 0.00007906]
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-9)
    ratio = frequencies(Llama3Scaling(factor=8.0, original=8192), 64, theta=5e5).numpy() / as_trained(64, 5e5)
    np.testing.assert_allclose(ratio[:15], 1.0, rtol=1e-14)
    np.testing.assert_allclose(ratio[15:18], [0.643743, 0.371122, 0.190211], atol=1e-6)
    np.testing.assert_allclose(ratio[18:], 0.125, rtol=1e-12)


def test_longrope_is_its_paper():
    """Divisors of their own for each pair, `short` up to `original` tokens and `long` past it (Ding et al. 2024)."""
    got = frequencies(LONG, 10, [1, 12, 13, 400])
    for row, divisors in enumerate((LONG.short, LONG.short, LONG.long, LONG.long)):
        np.testing.assert_allclose(got[row], as_trained(10) / np.array(divisors), rtol=1e-12)


@pytest.mark.parametrize("scaling", SCALINGS, ids=kind)
def test_a_compiler_takes_the_rotation_as_one_graph(scaling):
    torch._dynamo.reset()
    rope, x = Rope(fraction=0.5, scaling=scaling), torch.randn(2, 9, 3, 20, dtype=torch.float64)

    def turned(x, positions, lengths):
        return rotate(x, rotation(rope, 20, positions, x.dtype, lengths), rope.layout)

    at, lengths = torch.arange(9)[None], torch.tensor([5, 17])
    compiled = torch.compile(turned, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, at, lengths), turned(x, at, lengths))
    assert turned(x.to("meta"), at.to("meta"), lengths.to("meta")).shape == x.shape
    torch._dynamo.reset()


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_sinusoids_by_number(layout):
    """Position 3 read two further on, width 6: sines and cosines of 5, 5/21.544 and 5/464.159."""
    got = sinusoids(Sinusoidal(layout=layout, offset=2), 6, torch.tensor([[3]]), torch.float64).flatten()
    sines, cosines = [-0.958924, 0.230002, 0.010772], [0.283662, 0.973190, 0.999942]
    want = (
        [x for pair in zip(sines, cosines, strict=True) for x in pair] if layout == "interleaved" else sines + cosines
    )
    np.testing.assert_allclose(got, want, atol=1e-6)
