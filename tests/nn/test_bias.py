"""Biases: published numbers, positions, and gradients against differentiation of the written-out form."""

import math

import pytest
import torch

from anyformer.nn.attend import AlibiBias, BucketBias, DenseBias, alibi_slopes, attend, masks
from anyformer.nn.attend.shapes import Cut


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("n_heads", "want"),
    [
        (8, [2.0**-i for i in range(1, 9)]),
        (6, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]),
        (3, [0.0625, 0.00390625, 0.25]),
        (1, [2.0**-8]),
        (12, [*(2.0**-i for i in range(1, 9)), *(2.0**-i for i in (0.5, 1.5, 2.5, 3.5))]),
    ],
)
def test_slopes_by_number(n_heads, want):
    """Press et al. 2022 for powers of two, and their published code for the others, in their order."""
    torch.testing.assert_close(alibi_slopes(n_heads), torch.tensor(want), rtol=1e-6, atol=0)


def test_slopes_of_another_largest_bias():
    torch.testing.assert_close(alibi_slopes(4, max_bias=4.0), torch.tensor([0.5, 0.25, 0.125, 0.0625]))
    for wrong in ((0, 8.0), (4, 0.0), (4, math.inf)):
        with pytest.raises(ValueError, match=r"n_heads ≥ 1 and max_bias > 0; got n_heads="):
            alibi_slopes(*wrong)


def test_alibi_is_minus_slope_times_distance():
    slopes = torch.tensor([0.5, 0.25, 0.1])
    for symmetric in (True, False):
        got = AlibiBias(slopes, symmetric).added(3, 5)
        assert got.shape == (1, 3, 3, 5)
        for h, slope in enumerate((0.5, 0.25, 0.1)):
            for i in range(3):
                for j in range(5):
                    distance = i + 2 - j
                    want = -slope * (abs(distance) if symmetric else max(distance, 0))
                    assert float(got[0, h, i, j]) == pytest.approx(want)


@pytest.mark.parametrize(
    ("distance", "encoder", "decoder"),
    [(0, 0, 0), (-1, 1, 1), (-7, 7, 7), (-20, 10, 17), (-100, 15, 30), (1, 17, 0), (20, 26, 0)]
    + [(n, 31, 0) for n in (128, 129, 4000)]
    + [(-128, 15, 31), (-4000, 15, 31)],
)
def test_buckets_by_number(distance, encoder, decoder):
    """32 buckets up to 128 of key − query (Raffel et al. 2020)."""
    table = torch.zeros(32, 2)
    at = torch.tensor([distance])
    assert int(BucketBias(table, 128, True).buckets(at)) == encoder
    assert int(BucketBias(table, 128, False).buckets(at)) == decoder


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("n_buckets", "max_distance"), [(6, 20), (9, 100), (32, 128), (5, 33)])
def test_buckets_are_the_formula(n_buckets, max_distance, bidirectional):
    """Against the floor of the logarithm in double numbers, away from its edges."""
    bias = BucketBias(torch.zeros(n_buckets, 1), max_distance, bidirectional)
    side = n_buckets // 2 if bidirectional else n_buckets
    half = side // 2
    for distance in range(-3 * max_distance, 3 * max_distance):
        n = abs(distance) if bidirectional else max(-distance, 0)
        if n < half:
            want = n
        else:
            grown = math.log(n / half) / math.log(max_distance / half) * (side - half)
            if abs(grown - round(grown)) < 1e-5 and n != half:
                continue
            want = min(side - 1, half + math.floor(grown))
        want += side if bidirectional and distance > 0 else 0
        assert int(bias.buckets(torch.tensor(distance))) == want


def test_buckets_do_not_depend_on_the_company():
    """A distance alone, as in decoding, falls into the bucket that it has among many."""
    bias = BucketBias(torch.zeros(32, 1), 128, False)
    distances = -torch.arange(3000)
    alone = torch.cat([bias.buckets(x[None]) for x in distances])
    assert torch.equal(bias.buckets(distances), alone)


def test_a_table_is_read_by_head_and_bucket():
    table = torch.randn(8, 3, generator=generator())
    bias = BucketBias(table, 20, True)
    got = bias.added(4, 6)
    for h in range(3):
        for i in range(4):
            for j in range(6):
                bucket = int(bias.buckets(torch.tensor(j - (i + 2))))
                assert float(got[0, h, i, j]) == float(table[bucket, h])


MADE = {
    "ALiBi": lambda: AlibiBias(torch.rand(6, generator=generator(1), dtype=torch.float64), True),
    "ALiBi before": lambda: AlibiBias(torch.rand(6, generator=generator(1), dtype=torch.float64), False),
    "buckets": lambda: BucketBias(torch.randn(8, 6, generator=generator(1), dtype=torch.float64), 9, True),
    "buckets before": lambda: BucketBias(torch.randn(7, 6, generator=generator(1), dtype=torch.float64), 5, False),
    "dense": lambda: DenseBias(torch.randn(2, 6, 5, 7, generator=generator(1), dtype=torch.float64)),
    "dense of heads": lambda: DenseBias(torch.randn(1, 6, 1, 7, generator=generator(1), dtype=torch.float64)),
    "dense of queries": lambda: DenseBias(torch.randn(5, 1, generator=generator(1), dtype=torch.float64)),
}
QUERIES = torch.tensor([[0, 3, 1, 9, 2], [5, 5, 6, 0, 4]])
KEYS = torch.tensor([[2, 0, 1, 5, 8, 3, 9], [0, 1, 2, 3, 4, 5, 6]])


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", list(MADE))
def test_a_gradient_is_that_of_the_whole(name, rows):
    """Tile by tile, heads and rows of the batch apart: the sum is what differentiation gives."""
    bias = MADE[name]()
    leaf = bias.tensor.clone().requires_grad_()
    q, k = QUERIES[:rows, None, :, None], KEYS[:rows, None, None, :]
    up = torch.randn(2, 6, 5, 7, generator=generator(2), dtype=torch.float64)
    (bias.of(leaf).between(q, k).expand(2, 6, 5, 7) * up).sum().backward()
    gathered = bias.of(torch.zeros_like(leaf.detach()))
    for batch in (slice(0, 1), slice(1, 2)) if rows == 2 else (slice(0, 2),):
        for heads in (slice(0, 4), slice(4, 6)):
            for rows_at in (slice(0, 3), slice(3, 5)):
                for columns in (slice(0, 2), slice(2, 7)):
                    cut = Cut(batch, heads, rows_at, columns)
                    part = gathered.part(cut)
                    at = batch if rows == 2 else slice(None)
                    grad = up[batch, heads, rows_at, columns]
                    part.tensor.add_(part.pull(q[at][:, :, rows_at], k[at][..., columns], grad))
    torch.testing.assert_close(gathered.tensor, leaf.grad)


@pytest.mark.parametrize("name", list(MADE))
def test_a_part_is_a_part_of_the_whole(name):
    bias = MADE[name]()
    q, k = QUERIES[:, None, :, None], KEYS[:, None, None, :]
    whole = bias.between(q, k).expand(2, 6, 5, 7)
    cut = Cut(slice(1, 2), slice(2, 5), slice(1, 4), slice(3, 7))
    part = bias.part(cut).between(q[1:2, :, 1:4], k[1:2, ..., 3:7])
    assert torch.equal(part.expand(1, 3, 3, 4), whole[tuple(cut)])


@pytest.mark.parametrize("name", ["ALiBi", "buckets before"])
@pytest.mark.parametrize("backend", ["reference", "tiled", "fused"])
def test_decoding_reads_what_the_whole_pass_reads(name, backend):
    """The last query alone, and the keys from the middle on at their own positions."""
    bias = MADE[name]()
    q, k, v = (torch.randn(1, 7, 6, 4, generator=generator(s), dtype=torch.float64) for s in range(3))
    whole = attend(q, k, v, visible=masks.Causal() & masks.Window(4), bias=bias, backend="reference")
    last = attend(q[:, 6:], k, v, visible=masks.Causal() & masks.Window(4), bias=bias, backend=backend)
    torch.testing.assert_close(last, whole[:, 6:])
    places = {"queries": torch.tensor([5, 6]), "keys": torch.arange(2, 7)}
    visible = (masks.Causal() & masks.Window(4)).at(**places)
    late = attend(q[:, 5:], k[:, 2:], v[:, 2:], visible=visible, bias=bias.at(**places), backend=backend)
    torch.testing.assert_close(late, whole[:, 5:])


def test_positions_are_given_once_and_checked():
    bias = AlibiBias(alibi_slopes(6), True).at(queries=torch.arange(5))
    bias = bias.at(keys=torch.arange(7))
    bias.check((2, 6, 5, 7))
    with pytest.raises(ValueError, match="says already where"):
        bias.at(queries=torch.arange(5))
    with pytest.raises(ValueError, match=r"at\(queries=…\) is torch.int64 \[4\] here; got .*\[5\]"):
        bias.check((2, 6, 4, 7))
    with pytest.raises(ValueError, match=r"one float slope a head, \[5\] here; got torch.float32 \[6\]"):
        bias.check((2, 5, 5, 7))
    with pytest.raises(ValueError, match=r"a table of buckets is torch.float32 \[8, 6\] here; got .*\[8, 3\]"):
        BucketBias(torch.zeros(8, 3), 20, True).check((2, 6, 5, 7))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: BucketBias(torch.zeros(3, 6), 20, True), r"n_buckets ≥ 4; got torch.float32 \[3, 6\]"),
        (lambda: BucketBias(torch.zeros(1, 6), 20, False), r"n_buckets ≥ 2; got torch.float32 \[1, 6\]"),
        (lambda: BucketBias(torch.zeros(8), 20, False), r"float \[n_buckets, H\]"),
        (lambda: BucketBias(torch.zeros(8, 6).long(), 20, False), "got torch.int64"),
        (lambda: BucketBias(torch.zeros(32, 6), 16, False), "max_distance=16 leaves no room .* at least 17"),
    ],
)
def test_tables_that_cannot_be_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()
