"""The tiled backend: the equation for every option and any cut into tiles, gradients, memory, dropout, the compiler."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import anyformer.nn.attend.grid as grid
from anyformer.nn.attend import AlibiBias, BucketBias, DenseBias, alibi_slopes, attend, masks, tiled
from anyformer.nn.attend.coded import code, decode
from anyformer.nn.attend.grid import Grid, Problem, Size
from anyformer.nn.attend.masks import All
from anyformer.nn.attend.shapes import placed
from nn import naive
from nn.test_attend import DESCRIPTIONS, KEYS, MASK4, OPTIONS, QUERIES, REAL, SINKS, B, G, H, S, T, inputs

SIZES = [Size(256, 256, 1 << 20), Size(4, 3, 1 << 20), Size(6, 2, 24), Size(2, 2, 1)]
"""One tile for all; ragged tiles; heads apart; every group of every row by itself."""

WIDE = torch.float64
SLOPES = alibi_slopes(H).double()
TABLE = torch.randn(8, H, generator=torch.Generator().manual_seed(6), dtype=WIDE)
MARKED = torch.tensor([[False, False, True, False, False, True, False], [True] + [False] * 5 + [True]])

MORE = {
    **DESCRIPTIONS,
    "marked keys": (masks.PrefixKeys(MARKED), lambda b, h, i, j: j <= i + 2 or bool(MARKED[b, j])),
    "marked keys in a window": (
        masks.PrefixKeys(MARKED) & masks.Window(3) & masks.Padding(REAL),
        lambda b, h, i, j: (j <= i + 2 or bool(MARKED[b, j])) and abs(i + 2 - j) < 3 and bool(REAL[b, j]),
    ),
}


def alibi(b, h, i, j):
    return -float(SLOPES[h]) * abs(i + 2 - j)


def buckets(b, h, i, j):
    """8 buckets up to 9 for keys before and at the query: 4 by one, 4 by the logarithm."""
    n = max(int(QUERIES[b, i]) - int(KEYS[b, j]), 0)
    bucket = n if n < 4 else min(7, 4 + math.floor(math.log(n / 4) / math.log(9 / 4) * 4))
    return float(TABLE[bucket, h])


CASES = {
    **{name: (options, None) for name, options in OPTIONS.items() if "bias" not in options},
    "ALiBi": ({"bias": AlibiBias(SLOPES, True), "sinks": SINKS}, alibi),
    "buckets": ({"bias": BucketBias(TABLE, 9, False).at(queries=QUERIES, keys=KEYS), "softcap": 0.8}, buckets),
}


@pytest.fixture(params=SIZES, ids=str)
def size(request, monkeypatch):
    monkeypatch.setattr(grid, "CPU", request.param)
    return request.param


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("name", list(MORE))
def test_tiled_is_the_equation(name, case, size):
    """A loop over batch, head, query and key."""
    visible, sees = MORE[name]
    options, bias = CASES[case]
    q, k, v = inputs()
    got = attend(q, k, v, visible=visible, backend="tiled", **options)
    plain = {key: value for key, value in options.items() if key != "bias"}
    if "sinks" in plain:
        plain["sinks"] = SINKS.tolist()
    want = naive.attend(q.numpy(), k.numpy(), v.numpy(), sees, bias=bias, **plain)
    np.testing.assert_allclose(got, want, atol=1e-12)


def leaves_of(options):
    """The options with fresh leaves for the bias and the sinks."""
    made, leaves = dict(options), []
    if "bias" in made:
        leaves.append(made["bias"].tensor.detach().clone().requires_grad_())
        made["bias"] = made["bias"].of(leaves[-1])
    if "sinks" in made:
        leaves.append(made["sinks"].detach().clone().requires_grad_())
        made["sinks"] = leaves[-1]
    return made, leaves


def compare(visible, options, backend="tiled", **shapes):
    """Values and all gradients against reference."""
    results = []
    for name in ("reference", backend):
        q, k, v = inputs(grad=True, **shapes)
        made, leaves = leaves_of(options)
        out = attend(q, k, v, visible=visible, backend=name, **made)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=out.dtype)
        (out * weight).sum().backward()
        results.append((out.detach(), *(x.grad for x in (q, k, v, *leaves))))
    for want, got in zip(*results, strict=True):
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got, want, atol=1e-11, rtol=1e-9)


BIASES = {
    **OPTIONS,
    **{name: options for name, (options, _) in CASES.items()},
    "bias of heads": {"bias": DenseBias(torch.randn(1, H, 1, S, dtype=WIDE)), "softcap": 0.6},
    "bias [T, S] that hides": {
        "bias": DenseBias(torch.randn(T, S, dtype=WIDE).masked_fill(torch.eye(T, S, dtype=torch.bool), -torch.inf))
    },
}


@pytest.mark.parametrize("option", list(BIASES))
@pytest.mark.parametrize("name", list(MORE))
@pytest.mark.parametrize("tiles", [SIZES[1], SIZES[3]], ids=str)
def test_gradients_are_those_of_reference(name, option, tiles, monkeypatch):
    monkeypatch.setattr(grid, "CPU", tiles)
    compare(MORE[name][0], BIASES[option])


@settings(max_examples=80)
@given(st.data())
def test_any_combination_agrees(data):
    """Random shapes (more queries than keys, too), masks, biases and tiles."""
    draw = data.draw
    b, t, s = (draw(st.integers(1, n)) for n in (3, 9, 9))
    g = draw(st.sampled_from([1, 2, 3]))
    h = g * draw(st.sampled_from([1, 2, 3]))
    seed = draw(st.integers(0, 9999))
    generator = torch.Generator().manual_seed(seed)

    def some(*shape):
        return torch.rand(*shape, generator=generator)

    bases = [masks.Causal(), masks.Everything(), masks.Prefix(2), masks.PrefixKeys(some(b, s) < 0.3)]
    visible = draw(st.sampled_from(bases))
    if draw(st.booleans()):
        visible = visible & masks.Segments((some(b, t) * 3).long(), (some(b, s) * 3).long())
    if draw(st.booleans()):
        visible = visible & masks.Padding(some(b, s) < 0.7)
    if draw(st.booleans()):
        visible = visible & masks.Window(draw(st.integers(1, s)), first=draw(st.integers(0, 2)))
    if draw(st.booleans()):
        visible = visible & masks.Dense(some(b, 1, t, s) < 0.8)
    if draw(st.booleans()):
        visible = visible.at(queries=(some(b, t) * 12).long(), keys=(some(1, s) * 12).long())
    options = {}
    kind = draw(st.sampled_from(["none", "dense", "alibi", "buckets"]))
    if kind == "dense":
        options["bias"] = DenseBias(some(b, 1, t, s).double())
    elif kind == "alibi":
        options["bias"] = AlibiBias(alibi_slopes(h).double(), draw(st.booleans()))
    elif kind == "buckets":
        options["bias"] = BucketBias(some(6, h).double(), 8, draw(st.booleans()))
    if draw(st.booleans()):
        options["softcap"] = 0.9
    if draw(st.booleans()):
        options["sinks"] = some(h).double()
    before = grid.CPU
    try:
        grid.CPU = Size(draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(st.integers(1, 200)))
        compare(visible, options, b=b, t=t, s=s, h=h, g=g, seed=seed)
    finally:
        grid.CPU = before


@pytest.mark.parametrize("option", [*CASES, "all", "bias of heads"])
def test_gradients_are_finite_differences(option, monkeypatch):
    monkeypatch.setattr(grid, "CPU", Size(4, 2, 16))
    q, k, v = inputs(1, 3, 4, 4, 2, 3, 2, grad=True)
    options = {key: value for key, value in BIASES[option].items() if key in ("scale", "softcap")}
    bias, sinks = BIASES[option].get("bias"), BIASES[option].get("sinks")
    inner = []
    if isinstance(bias, DenseBias):
        inner.append(bias.values[:1, :4, :3, :4].clone().requires_grad_())
    elif bias is not None:
        inner.append(bias.tensor[..., :4].clone().requires_grad_())
        bias = AlibiBias(inner[0], True) if isinstance(bias, AlibiBias) else BucketBias(inner[0], 9, False)
    if sinks is not None:
        inner.append(sinks[:4].clone().requires_grad_())

    def run(q, k, v, *others):
        others = list(others)
        added = None if bias is None else bias.of(others.pop(0))
        logits = None if sinks is None else others.pop(0)
        visible = masks.Causal() & masks.Window(2)
        return attend(q, k, v, visible=visible, bias=added, sinks=logits, backend="tiled", **options)

    assert torch.autograd.gradcheck(run, (q, k, v, *inner))


def test_the_gradient_of_a_frozen_bias_is_not_made(monkeypatch):
    monkeypatch.setattr(DenseBias, "pull", lambda *_: pytest.fail("a gradient nobody wants"))
    q, k, v = inputs(grad=True)
    attend(q, k, v, visible=masks.Causal(), bias=DenseBias(torch.zeros(T, S)), backend="tiled").sum().backward()
    assert q.grad is not None


def test_a_second_derivative_is_refused():
    q, k, v = inputs(grad=True)
    out = attend(q, k, v, visible=masks.Causal(), backend="tiled")
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r'no second derivative; use backend="reference"'):
        first.sum().backward()


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.untyped_storage().nbytes() // each.element_size())
        return made


MEMORY = {
    "causal": (masks.Causal(), {}),
    "window": (masks.Causal() & masks.Window(7), {}),
    "packed": (masks.Causal() & masks.Segments(torch.arange(200)[None] // 45), {}),
    "ALiBi, soft-cap": (masks.Causal(), {"bias": AlibiBias(alibi_slopes(2), False), "softcap": 5.0}),
    "buckets, sinks": (masks.Causal(), {"bias": BucketBias(torch.randn(8, 2), 40, False), "sinks": torch.zeros(2)}),
    "dropout": (masks.Everything(), {"dropout": 0.2}),
}


@pytest.mark.parametrize("name", list(MEMORY))
def test_nothing_of_the_size_of_the_scores_exists(name, monkeypatch):
    """In either pass, and what stays between them is as large as the inputs."""
    monkeypatch.setattr(grid, "CPU", Size(16, 16, 1 << 10))
    visible, options = MEMORY[name]
    t, saved = 200, []
    q, k, v = inputs(1, t, t, 2, 1, 4, 4, dtype=torch.float32, grad=True)
    if "bias" in options:
        options = {**options, "bias": options["bias"].of(options["bias"].tensor.clone().requires_grad_())}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x.numel()), x)[1], lambda x: x):
        attend(q, k, v, visible=visible, backend="tiled", **options)
    assert saved
    assert max(saved) <= q.numel()
    _, _, bias = code(All.of(visible), options.get("bias"))
    problem = Problem(
        *(x.detach() for x in (q, k, v)),
        All.of(visible),
        None if bias is None else options["bias"].of(bias.detach()),
        1.0,
        options.get("softcap", 0.0),
        options.get("sinks"),
        options.get("dropout", 0.0),
        0,
    )
    with Largest() as largest:
        out, lse = tiled.forward(problem)
        tiled.backward(problem, out, lse, torch.ones_like(out), bias is not None)
    assert largest.elements < t * t / 8


def tiles_of(visible, t, s, b=1):
    """(queries' start, keys' start, masked) of every tile that is computed."""
    q, k = torch.zeros(b, t, 2, 4), torch.zeros(b, s, 1, 4)
    made = Grid(Problem(q, k, k, All.of(visible), None, 1.0, 0.0, None, 0.0, 0))
    return [
        (tile.cut.batch.start, tile.cut.rows.start, tile.cut.columns.start, tile.masked)
        for block in made.blocks()
        for tile in block.tiles
    ]


def test_tiles_that_nobody_sees_are_skipped_and_whole_ones_not_masked(monkeypatch):
    monkeypatch.setattr(grid, "CPU", Size(8, 4, 1 << 20))
    causal = masks.Causal()
    triangle = [(0, i, j, i == j) for i in range(0, 24, 4) for j in range(0, i + 4, 4)]
    assert tiles_of(causal, 24, 24) == triangle
    assert tiles_of(masks.Everything(), 8, 8) == [(0, i, j, False) for i in (0, 4) for j in (0, 4)]
    band = [(0, i, j, True) for i in range(0, 24, 4) for j in (i - 4, i) if j >= 0]
    assert tiles_of(causal & masks.Window(3), 24, 24) == band
    first = [(0, i, 0) for i in range(0, 24, 4)]
    seen = [x[:3] for x in tiles_of(causal & masks.Window(3, first=1), 24, 24)]
    assert all(x in seen for x in first)
    documents = torch.tensor([[0] * 8 + [1] * 16])
    packed = tiles_of(causal & masks.Segments(documents), 24, 24)
    assert packed == [x for x in triangle if (x[1] < 8) == (x[2] < 8)]
    real = torch.ones(1, 24, dtype=torch.bool)
    real[0, :8] = False
    assert [x[2] for x in tiles_of(causal & masks.Padding(real), 24, 24) if x[1] == 12] == [8, 12]
    prefix = tiles_of(masks.PrefixKeys(~real), 24, 24)
    assert [x[2:] for x in prefix if x[1] == 0] == [(0, False), (4, False)]
    assert [x[2] for x in tiles_of(masks.Prefix(torch.tensor([9])), 24, 24) if x[1] == 0] == [0, 4, 8]
    at = causal.at(queries=torch.arange(100, 108), keys=torch.arange(96, 120))
    assert [x[2] for x in tiles_of(at, 8, 24)] == [0, 4, 0, 4, 8]


@pytest.mark.parametrize("size", [(3, 2), (2, 3), (1, 2), (4, 4)])
@pytest.mark.parametrize("name", list(MORE))
def test_the_bounds_of_a_description_hold(name, size):
    """No tile that someone sees is skipped and none that hides something is taken whole; single conditions exactly."""
    visible = All.of(MORE[name][0])
    mask = visible.mask(T, S).expand(B, H, T, S)
    rows, columns = size
    reach = visible.reach(masks.tiles(*placed(visible.queries, visible.keys, T, S, "cpu"), rows, columns))
    for b in range(B):
        for i, t in enumerate(range(0, T, rows)):
            for j, s in enumerate(range(0, S, columns)):
                tile = mask[b, :, t : t + rows, s : s + columns]
                some, whole = (bool(x[b if len(x) > 1 else 0, i, j]) for x in reach)
                assert some or not tile.any()
                assert tile.all() or not whole
                if name in ("causal", "window both sides", "prefix", "prefix a row"):
                    assert (some, whole) == (bool(tile.any()), bool(tile.all()))


def test_rows_of_a_batch_skip_what_each_does_not_see(monkeypatch):
    monkeypatch.setattr(grid, "CPU", Size(8, 4, 1 << 20))
    documents = torch.tensor([[0] * 8 + [1] * 16, [0] * 24])
    packed = tiles_of(masks.Causal() & masks.Segments(documents), 24, 24, b=2)
    assert sum(x[0] == 0 for x in packed) == 3 + 10
    assert sum(x[0] == 1 for x in packed) == 21


def test_dropout_follows_the_generator_and_its_gradient_the_same_choice(monkeypatch):
    """What is dropped in the forward pass is dropped in the backward pass: the output is linear in v."""
    monkeypatch.setattr(grid, "CPU", Size(4, 3, 24))
    q, k, v = inputs(grad=True)

    def run(values):
        torch.manual_seed(5)
        return attend(q, k, values, visible=masks.Causal(), dropout=0.4, backend="tiled")

    out = run(v)
    assert torch.equal(out, run(v))
    assert not torch.equal(out, attend(q, k, v, visible=masks.Causal(), dropout=0.4, backend="tiled"))
    up = torch.randn_like(out)
    out.backward(up)
    torch.testing.assert_close((v.grad * v).sum(), (out * up).sum())
    assert torch.autograd.gradcheck(lambda a, b, c: _seeded(a, b, c), inputs(1, 4, 5, 4, 2, 3, 2, grad=True))


def _seeded(q, k, v):
    torch.manual_seed(3)
    return attend(q, k, v, visible=masks.Causal(), dropout=0.3, sinks=torch.zeros(4), backend="tiled")


def test_every_tile_drops_for_itself(monkeypatch):
    """Tiles of equal scores keep different keys."""
    monkeypatch.setattr(grid, "CPU", Size(8, 8, 64))
    q, k = torch.zeros(2, 16, 2, 4), torch.zeros(2, 16, 1, 4)
    v = torch.eye(16).expand(2, 16, 16).reshape(2, 16, 1, 16).contiguous()
    torch.manual_seed(0)
    kept = attend(q, k, v, visible=masks.Everything(), dropout=0.5, backend="tiled").transpose(1, 2).reshape(-1, 16) > 0
    assert len({tuple(row) for row in kept.tolist()}) == len(kept)
    assert float(kept.float().mean()) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_accumulated_in_float32(dtype):
    """Only the inputs and the output are rounded."""
    q, k, v = inputs(1, 300, 300, dtype=dtype)
    got = attend(q, k, v, visible=masks.Causal(), backend="tiled")
    assert got.dtype == dtype
    want = attend(q.double(), k.double(), v.double(), visible=masks.Causal(), backend="reference")
    assert torch.equal(got, want.to(dtype)) or (got.double() - want).abs().max() <= torch.finfo(dtype).eps
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wide = attend(*(x.float() for x in (q, k, v)), visible=masks.Causal(), backend="tiled")
    torch.testing.assert_close(wide.double(), want, atol=1e-5, rtol=1e-5)


def test_huge_scores_lose_nothing(monkeypatch):
    """The running maximum moves by hundreds from tile to tile."""
    q = torch.tensor([30.0, -30.0]).reshape(1, 2, 1, 1)
    k = torch.arange(-20.0, 20.0).reshape(1, 40, 1, 1)
    v = torch.arange(40.0).reshape(1, 40, 1, 1)
    monkeypatch.setattr(grid, "CPU", Size(2, 3, 1 << 20))
    out = attend(q, k, v, visible=masks.Everything(), scale=1.0, backend="tiled")
    assert out.flatten().tolist() == pytest.approx([39.0, 0.0], abs=1e-12)


def test_a_training_step_compiles_whole():
    """With a trained table, sinks, packed rows and dropout: no break in the graph, the same numbers."""
    table = torch.randn(8, H, requires_grad=True)
    sinks = torch.randn(H, requires_grad=True)
    ids = torch.tensor([[0] * 5 + [1] * 6] * 2)
    q, k, v = inputs(t=11, s=11, dtype=torch.float32, grad=True)

    def step(q, k, v, ids):
        visible = masks.Causal() & masks.Segments(ids) & masks.Window(4, first=1)
        bias = BucketBias(table, 6, False).at(queries=torch.arange(11), keys=torch.arange(11))
        return attend(q, k, v, visible=visible, bias=bias, sinks=sinks, dropout=0.1, backend="tiled")

    results = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(0)
        out = run(q, k, v, ids)
        out.square().sum().backward()
        results.append((out.detach(), *(x.grad.clone() for x in (q, k, v, table, sinks))))
        for x in (q, k, v, table, sinks):
            x.grad = None
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", list(MORE))
def test_a_description_comes_back_from_its_code(name):
    visible = All.of(MORE[name][0])
    for bias in (None, DenseBias(torch.zeros(T, S)), CASES["buckets"][0]["bias"], AlibiBias(SLOPES, False)):
        text, tensors, trained = code(visible, bias)
        again, added = decode(text, tensors, trained)
        assert torch.equal(again.mask(T, S), visible.mask(T, S))
        assert type(added) is type(bias)
        if bias is not None:
            assert torch.equal(added.added(T, S), bias.added(T, S))


def test_a_mask_of_heads_is_read_by_head():
    """One-hot values show what each head sees."""
    q, k = torch.zeros(B, T, H, 4), torch.zeros(B, S, G, 4)
    v = torch.eye(S).reshape(1, S, 1, S).expand(B, S, G, S)
    out = attend(q, k, v, visible=masks.Dense(MASK4), backend="tiled")
    assert torch.equal(out.transpose(1, 2) > 0, MASK4)
