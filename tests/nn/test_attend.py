"""The attention operation: reference against a loop over the equation, fused against reference, masks by their rows."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import anyformer.nn.attend as attend_module
import anyformer.nn.attend.flex as flex
import anyformer.nn.attend.fused as fused
import anyformer.nn.attend.reference as reference
from anyformer.nn.attend import (
    BACKENDS,
    AlibiBias,
    BucketBias,
    DenseBias,
    Unsupported,
    alibi_slopes,
    attend,
    choose,
    masks,
)
from anyformer.nn.attend.call import checked
from anyformer.nn.attend.capabilities import CAPABILITIES, table
from anyformer.nn.attend.reference import mixed
from anyformer.nn.attend.reference import weights as weights_of
from nn import naive

B, T, S, H, G, D, DV = 2, 5, 7, 6, 3, 4, 3
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs(b=B, t=T, s=S, h=H, g=G, d=D, dv=DV, *, seed=0, dtype=torch.float64, grad=False):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((b, t, h, d), (b, s, g, d), (b, s, g, dv))
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [x.requires_grad_(grad) for x in made]


def seeded(*shape, seed=1):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


SEGMENT_IDS = torch.tensor([[3, 3, 3, 1, 1, 1, 1], [0, 0, 4, 4, 4, 4, 2]])
REAL = torch.tensor([[False, True, True, True, True, True, False], [True, True, False, True, True, False, True]])
MASK2 = seeded(T, S) < 0.6
MASK3 = seeded(B, T, S) < 0.6
MASK4 = seeded(B, H, T, S) < 0.6
PREFIXES = torch.tensor([4, 6])
QUERIES = torch.tensor([[0, 3, 1, 9, 2], [5, 5, 6, 0, 4]])
KEYS = torch.tensor([[2, 0, 1, 5, 8, 3, 9], [0, 1, 2, 3, 4, 5, 6]])
OFF = S - T

DESCRIPTIONS = {
    "everything": (masks.Everything(), lambda b, h, i, j: True),
    "causal": (masks.Causal(), lambda b, h, i, j: j <= i + OFF),
    "window": (masks.Causal() & masks.Window(3), lambda b, h, i, j: j <= i + OFF and i + OFF - j < 3),
    "window both sides": (masks.Window(2), lambda b, h, i, j: abs(i + OFF - j) < 2),
    "window and first": (
        masks.Causal() & masks.Window(2, first=2),
        lambda b, h, i, j: j <= i + OFF and (i + OFF - j < 2 or j < 2),
    ),
    "prefix": (masks.Prefix(5), lambda b, h, i, j: j <= i + OFF or j < 5),
    "prefix a row": (masks.Prefix(PREFIXES), lambda b, h, i, j: j <= i + OFF or j < (4, 6)[b]),
    "segments": (
        masks.Causal() & masks.Segments(SEGMENT_IDS[:, OFF:], SEGMENT_IDS),
        lambda b, h, i, j: j <= i + OFF and bool(SEGMENT_IDS[b, i + OFF] == SEGMENT_IDS[b, j]),
    ),
    "padding": (masks.Causal() & masks.Padding(REAL), lambda b, h, i, j: j <= i + OFF and bool(REAL[b, j])),
    "dense [T, S]": (masks.Dense(MASK2), lambda b, h, i, j: bool(MASK2[i, j])),
    "dense [B, T, S]": (masks.Dense(MASK3), lambda b, h, i, j: bool(MASK3[b, i, j])),
    "dense [B, H, T, S]": (masks.Dense(MASK4), lambda b, h, i, j: bool(MASK4[b, h, i, j])),
    "dense and causal": (
        masks.Dense(MASK4) & masks.Causal(),
        lambda b, h, i, j: bool(MASK4[b, h, i, j]) and j <= i + OFF,
    ),
    "at positions": (
        masks.Causal().at(queries=QUERIES, keys=KEYS),
        lambda b, h, i, j: bool(KEYS[b, j] <= QUERIES[b, i]),
    ),
    "at positions of one row": (
        (masks.Causal() & masks.Window(3)).at(queries=QUERIES[0], keys=KEYS[0]),
        lambda b, h, i, j: 0 <= int(QUERIES[0, i] - KEYS[0, j]) < 3,
    ),
    "everything at once": (
        masks.Causal() & masks.Window(5, first=1) & masks.Padding(REAL) & masks.Dense(MASK3),
        lambda b, h, i, j: j <= i + OFF and (i + OFF - j < 5 or j < 1) and bool(REAL[b, j]) and bool(MASK3[b, i, j]),
    ),
}

BIAS = torch.randn(B, H, T, S, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
SINKS = torch.randn(H, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 0.7},
    "bias": {"bias": DenseBias(BIAS)},
    "sinks": {"sinks": SINKS},
    "all": {"scale": 1.7, "softcap": 0.9, "bias": DenseBias(BIAS), "sinks": SINKS},
}


@pytest.mark.parametrize("option", list(OPTIONS))
@pytest.mark.parametrize("name", list(DESCRIPTIONS))
def test_reference_is_the_equation(name, option):
    visible, sees = DESCRIPTIONS[name]
    q, k, v = inputs()
    got = attend(q, k, v, visible=visible, backend="reference", **OPTIONS[option])
    plain = dict(OPTIONS[option])
    if "bias" in plain:
        plain["bias"] = lambda b, h, i, j: float(BIAS[b, h, i, j])
    if "sinks" in plain:
        plain["sinks"] = SINKS.tolist()
    np.testing.assert_allclose(got, naive.attend(q.numpy(), k.numpy(), v.numpy(), sees, **plain), atol=1e-12)


@pytest.mark.parametrize("shape", [(T, S), (B, T, S), (B, H, T, S), (B, 1, T, S), (1, H, 1, S)])
def test_a_dense_bias_broadcasts(shape):
    q, k, v = inputs()
    bias = torch.randn(shape, dtype=torch.float64)
    whole = (bias[:, None] if bias.dim() == 3 else bias).expand(B, H, T, S)
    want = attend(q, k, v, visible=masks.Causal(), bias=DenseBias(whole.contiguous()), backend="reference")
    for backend in ("reference", "tiled", "fused"):
        got = attend(q, k, v, visible=masks.Causal(), bias=DenseBias(bias), backend=backend)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("backend", ["reference", "tiled", "fused"])
def test_gradients_reach_the_bias_and_the_sinks(backend):
    """Against finite differences."""
    q, k, v = inputs()
    bias = torch.randn(T, S, dtype=torch.float64, requires_grad=True)
    sinks = None if backend == "fused" else SINKS.clone().requires_grad_()

    def out(values, logits):
        return attend(q, k, v, visible=masks.Causal(), bias=DenseBias(values), sinks=logits, backend=backend)

    assert torch.autograd.gradcheck(lambda b: out(b, sinks), (bias,))
    if sinks is not None:
        assert torch.autograd.gradcheck(lambda s: out(bias, s), (sinks,))


def both(visible, *, grad=True, lead=None, **shapes):
    """Values and gradients of reference and fused on the same inputs."""
    results = []
    for backend in ("reference", "fused"):
        q, k, v = inputs(grad=grad, **shapes)
        out = attend(q, k, v, visible=visible, backend=backend, **(lead or {}))
        if grad:
            weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=out.dtype)
            (out * weight).sum().backward()
            results.append((out.detach(), q.grad, k.grad, v.grad))
        else:
            results.append((out,))
    for want, got in zip(*results, strict=True):
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got, want, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("option", ["plain", "scale", "bias"])
@pytest.mark.parametrize("name", list(DESCRIPTIONS))
def test_fused_is_reference(name, option):
    both(DESCRIPTIONS[name][0], lead=OPTIONS[option])


@pytest.mark.parametrize("name", list(DESCRIPTIONS))
def test_fused_by_blocks_is_reference(name, monkeypatch):
    """Without gradients a large mask is written out a few queries at a time."""
    monkeypatch.setattr(fused, "MASK_ELEMENTS", 3)
    monkeypatch.setattr(fused, "QUERY_BLOCK", 2)
    both(DESCRIPTIONS[name][0], grad=False)


PACKED = torch.tensor([[5, 5, 5, 5, 2, 2, 9, 9, 9], [1, 2, 2, 2, 2, 2, 2, 2, 3], [5, 5, 5, 5, 2, 2, 9, 9, 9]])
RIGHT = torch.tensor([[True] * 6 + [False] * 3, [True] * 9, [False] * 9])
LEFT = RIGHT.flip(1)
SQUARES = {
    "packed": masks.Causal() & masks.Segments(PACKED),
    "left": masks.Causal() & masks.Padding(LEFT),
    "right": masks.Padding(RIGHT) & masks.Causal(),
    "packed and right": masks.Causal() & masks.Segments(PACKED) & masks.Padding(RIGHT),
    "packed and left": masks.Causal() & masks.Padding(LEFT) & masks.Segments(PACKED) & masks.Everything(),
}


@pytest.mark.parametrize("name", list(SQUARES))
def test_large_documents_and_padding_need_no_mask(name, monkeypatch):
    """They become one causal call for each stretch, with gradients."""
    monkeypatch.setattr(fused, "MASK_ELEMENTS", 3)
    seen = []
    sdpa = fused._sdpa
    monkeypatch.setattr(fused, "_sdpa", lambda *a, **o: (seen.append(o.get("mask")), sdpa(*a, **o))[1])
    both(SQUARES[name], b=3, t=9, s=9)
    assert seen
    assert all(mask is None for mask in seen)


def test_what_large_squares_cannot_say_is_computed_otherwise(monkeypatch):
    """A document that goes on, or a hole in the padding, is no stretch."""
    monkeypatch.setattr(fused, "MASK_ELEMENTS", 3)
    again = torch.tensor([[1, 1, 2, 2, 1]])
    hole = torch.tensor([[True, False, True, True, True]])
    for visible in (masks.Causal() & masks.Segments(again), masks.Causal() & masks.Padding(hole)):
        both(visible, grad=False, b=1, t=5, s=5)
        q, k, v = inputs(b=1, t=5, s=5, grad=True)
        with pytest.raises(Unsupported, match="would take 25 elements in memory"):
            attend(q, k, v, visible=visible, backend="fused")


@pytest.mark.parametrize("name", ["causal", "window", "prefix", "segments", "at positions"])
def test_a_mask_too_large_for_the_backward_pass_is_refused_and_auto_says_so(name, monkeypatch):
    monkeypatch.setattr(fused, "MASK_ELEMENTS", 3)
    q, k, v = inputs(grad=True)
    visible = DESCRIPTIONS[name][0]
    with pytest.raises(Unsupported, match="elements in memory"):
        attend(q, k, v, visible=visible, backend="fused")
    call = checked(q, k, v, visible, None, None, None, None, 0.0)
    assert choose(call)[0] == "reference"
    assert "elements in memory" in choose(call)[1]
    want = attend(q, k, v, visible=visible, backend="reference")
    torch.testing.assert_close(attend(q, k, v, visible=visible), want)
    with torch.no_grad():
        assert choose(call)[0] == "fused"
    monkeypatch.setattr(attend_module, "SCORES", 3)
    assert choose(call)[0] == "tiled"
    torch.testing.assert_close(attend(q, k, v, visible=visible), want)


def test_a_large_causal_square_and_a_given_mask_stay_fused(monkeypatch):
    monkeypatch.setattr(fused, "MASK_ELEMENTS", 3)
    both(masks.Causal(), t=7, s=7)
    both(masks.Everything())
    both(masks.Dense(MASK4))
    both(masks.Causal(), t=1)


@settings(max_examples=60)
@given(st.data())
def test_any_combination_agrees(data):
    """Both backends on random shapes, masks and thresholds."""
    draw = data.draw
    b, s = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    t = s if draw(st.booleans()) else draw(st.integers(1, s))
    g = draw(st.sampled_from([1, 2, 3]))
    h = g * draw(st.sampled_from([1, 2, 3]))
    seed = draw(st.integers(0, 9999))
    generator = torch.Generator().manual_seed(seed)
    ids = (torch.rand(b, s, generator=generator) < 0.3).cumsum(1)
    visible = draw(st.sampled_from([masks.Causal(), masks.Everything(), masks.Prefix(min(2, s))]))
    if draw(st.booleans()):
        visible = visible & masks.Segments(ids[:, s - t :], None if t == s else ids)
    if draw(st.booleans()):
        visible = visible & masks.Padding(torch.rand(b, s, generator=generator) < 0.7)
    if draw(st.booleans()):
        visible = visible & masks.Window(draw(st.integers(1, s)), first=draw(st.integers(0, 2)))
    small = draw(st.booleans())
    before = fused.MASK_ELEMENTS, fused.QUERY_BLOCK
    try:
        if small:
            fused.MASK_ELEMENTS, fused.QUERY_BLOCK = 2, 2
        both(visible, grad=not small, b=b, t=t, s=s, h=h, g=g, seed=seed)
    finally:
        fused.MASK_ELEMENTS, fused.QUERY_BLOCK = before


@pytest.mark.parametrize("backend", ["reference", "tiled", "fused"])
@pytest.mark.parametrize(("t", "rows"), [(2, ["11110", "11111"]), (1, ["11111"]), (5, ["10000", "11000", "11100"])])
def test_fewer_queries_than_keys_stand_at_the_end(backend, t, rows):
    """values that are one-hot by key show what each query sees."""
    q, k = torch.zeros(1, t, 2, 4), torch.zeros(1, 5, 1, 4)
    v = torch.eye(5).reshape(1, 5, 1, 5)
    out = attend(q, k, v, visible=masks.Causal(), backend=backend)
    for index, row in enumerate(rows):
        for head in range(2):
            assert "".join("1" if x > 0 else "0" for x in out[0, index, head]) == row


@pytest.mark.parametrize("backend", ["reference", "tiled", "fused"])
def test_causal_composes_with_padding(backend):
    """neither the flag nor the mask is dropped."""
    real = torch.tensor([[False, True, True, True, True], [True, True, True, False, True]])
    q, k = torch.zeros(2, 3, 1, 4), torch.zeros(2, 5, 1, 4)
    v = torch.eye(5).expand(2, 5, 5).reshape(2, 5, 1, 5)
    out = attend(q, k, v, visible=masks.Causal() & masks.Padding(real), backend=backend)
    seen = [["".join("1" if x > 0 else "0" for x in out[b, i, 0]) for i in range(3)] for b in range(2)]
    assert seen == [["01100", "01110", "01111"], ["11100", "11100", "11101"]]


@pytest.mark.parametrize("backend", ["reference", "tiled", "fused"])
def test_query_heads_share_keys_in_runs(backend):
    """4 query heads on 2 key/value heads whose values are 10 and 20 give 10, 10, 20, 20."""
    q, k, v = inputs(1, 3, 3, 4, 2)
    v = torch.tensor([10.0, 20.0], dtype=v.dtype).reshape(1, 1, 2, 1).expand(1, 3, 2, 5).contiguous()
    out = attend(q, k, v, visible=masks.Causal(), backend=backend)
    torch.testing.assert_close(
        out[0, :, :, 0], torch.tensor([[10.0, 10.0, 20.0, 20.0]] * 3, dtype=out.dtype), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("backend", ["reference", "tiled", "fused"])
@pytest.mark.parametrize(("h", "g"), [(6, 1), (6, 2), (6, 6), (5, 5)])
def test_grouped_heads_are_repeated_heads(backend, h, g):
    """MQA is every head on key head 0; G = H is MHA."""
    q, k, v = inputs(2, 5, 5, h, g)
    out = attend(q, k, v, visible=masks.Causal(), backend=backend)
    for head in range(h):
        one = head // (h // g)
        alone = attend(q[:, :, [head]], k[:, :, [one]], v[:, :, [one]], visible=masks.Causal(), backend="reference")
        torch.testing.assert_close(out[:, :, [head]], alone)


@pytest.mark.parametrize("backend", ["reference", "tiled", "fused"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["padding", "dense"])
def test_queries_that_see_nothing_give_zeros(backend, dtype, kind):
    """an all-pad row, and a left-padded row whose first queries see nothing."""
    real = torch.tensor([[False] * 6, [False, False, True, True, True, True], [True] * 6])
    mask = real[:, None, :].expand(3, 6, 6) & torch.ones(6, 6, dtype=torch.bool).tril()
    visible = masks.Causal() & masks.Padding(real) if kind == "padding" else masks.Dense(mask)
    q, k, v = inputs(3, 6, 6, dtype=dtype, grad=True)
    out = attend(q, k, v, visible=visible, backend=backend)
    assert out.dtype == dtype
    assert (out[0] == 0).all()
    assert (out[1, :2] == 0).all()
    assert (out[1, 2:].abs().amax((1, 2)) > 0).all()
    out.float().square().sum().backward()
    for x in (q, k, v):
        assert torch.isfinite(x.grad).all()
        assert (x.grad[0] == 0).all()
    want = attend(*inputs(3, 6, 6), visible=visible, backend="reference")
    torch.testing.assert_close(out.double(), want, atol={4: 1e-6}.get(dtype.itemsize, 2e-2), rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", ["reference", "tiled", "fused"])
def test_an_empty_row_leaves_the_others_alone(backend, dtype):
    """bit for bit."""
    real = torch.tensor([[False] * 6, [False, True, True, True, True, True]])
    q, k, v = inputs(2, 6, 6, dtype=dtype)
    beside = attend(q, k, v, visible=masks.Causal() & masks.Padding(real), backend=backend)
    alone = attend(q[1:], k[1:], v[1:], visible=masks.Causal() & masks.Padding(real[1:]), backend=backend)
    assert torch.equal(beside[1:], alone)


@pytest.mark.parametrize("backend", ["reference", "tiled", "fused"])
def test_huge_scores_and_a_hidden_infinity_stay_finite(backend):
    """nothing overflows in half precision, and a mask is not a sum of two lowest numbers."""
    q, k, v = inputs(1, 4, 4, dtype=torch.float16)
    out = attend(
        q * 200, k * 200, v, visible=masks.Causal() & masks.Window(2) & masks.Dense(MASK2[:4, :4]), backend=backend
    )
    assert torch.isfinite(out).all()


def test_the_sink_takes_its_share():
    q = torch.zeros(1, 1, 2, 4)
    k, v = torch.zeros(1, 3, 1, 4), torch.ones(1, 3, 1, 1)
    out = attend(q, k, v, visible=masks.Everything(), sinks=torch.tensor([0.0, math.log(3.0)]), backend="reference")
    torch.testing.assert_close(out.flatten(), torch.tensor([3 / 4, 3 / 6]))
    none = attend(q, k, v, visible=masks.Dense(torch.zeros(1, 3, dtype=torch.bool)), sinks=torch.zeros(2))
    assert (none == 0).all()


def test_softcap_by_number():
    """cap 50 turns a score of 100 into 48.20138, before the mask and the bias."""
    q, k = torch.tensor([[[[100.0]]]]), torch.tensor([[[[1.0]], [[0.0]]]])
    v = torch.tensor([[[[1.0]], [[0.0]]]])
    bias = DenseBias(torch.tensor([[-48.20138, 0.0]]))
    out = attend(q, k, v, visible=masks.Everything(), scale=1.0, softcap=50.0, bias=bias)
    assert float(out) == pytest.approx(0.5, abs=1e-5)


@pytest.mark.parametrize(("option", "said"), [("softcap", "no soft-cap"), ("sinks", "no sink logit")])
def test_fused_refuses_what_it_would_drop(option, said):
    """and "auto" takes the backend that computes it, and says why."""
    q, k, v = inputs()
    arguments = OPTIONS[option]
    with pytest.raises(Unsupported, match=said):
        attend(q, k, v, visible=masks.Causal(), backend="fused", **arguments)
    call = checked(q, k, v, masks.Causal(), None, None, arguments.get("softcap"), arguments.get("sinks"), 0.0)
    assert choose(call)[0] == "reference"
    assert said in choose(call)[1]
    got = attend(q, k, v, visible=masks.Causal(), **arguments)
    assert torch.equal(got, attend(q, k, v, visible=masks.Causal(), backend="reference", **arguments))
    assert choose(checked(q, k, v, masks.Causal(), None, None, None, None, 0.0))[0] == "fused"
    assert issubclass(Unsupported, ValueError)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"softcap": 0.0}, "softcap is a finite number above 0, or None; got 0.0"),
        ({"softcap": -1.0}, "softcap is a finite number above 0, or None; got -1.0"),
        ({"softcap": math.nan}, "softcap is a finite number above 0, or None; got nan"),
        ({"softcap": math.inf}, "softcap is a finite number above 0, or None; got inf"),
        ({"scale": math.nan}, "scale is a finite number, or None for 1/√D; got nan"),
        ({"dropout": 1.0}, r"dropout is a rate in \[0, 1\); got 1.0"),
        ({"dropout": -0.1}, r"dropout is a rate in \[0, 1\); got -0.1"),
        ({"dropout": math.nan}, r"dropout is a rate in \[0, 1\); got nan"),
        ({"sinks": torch.zeros(5)}, r"sinks holds one float logit a head, \[6\]; got torch.float32 \[5\]"),
        ({"backend": "flash"}, "unknown backend 'flash'; known: auto, reference, tiled, fused, flex"),
        ({"visible": torch.ones(T, S, dtype=torch.bool)}, "visible is a description from af.masks; got torch.bool"),
        ({"visible": None}, "visible is a description from af.masks; got a NoneType"),
        ({"q": torch.zeros(B, T, D)}, r"attend takes q \[B, T, H, D\].*; got q torch.float32 \[2, 5, 4\]"),
        ({"q": torch.zeros(B, T, 4, D)}, "4 query heads are not a multiple of 3 key/value heads"),
        ({"q": torch.zeros(B + 1, T, H, D)}, "disagree: q and k share B and D, k and v share B, S and G"),
        ({"q": torch.zeros(B, T, H, D + 1)}, "disagree"),
        ({"k": torch.zeros(B, S + 1, G, D)}, "disagree"),
        ({"v": torch.zeros(B, S, G + 1, D)}, "disagree"),
    ],
)
def test_arguments_that_cannot_be_are_refused(change, said):
    """cap 0, negative and NaN."""
    q, k, v = inputs(dtype=torch.float32)
    with pytest.raises(ValueError, match=said):
        attend(**{"q": q, "k": k, "v": v, "visible": masks.Causal(), **change})


LONG = torch.int64


@pytest.mark.parametrize(
    ("visible", "said"),
    [
        (masks.Padding(torch.ones(B, S - 1, dtype=torch.bool)), r"padding is torch.bool \[2, 7\] here; got .*\[2, 6\]"),
        (masks.Padding(torch.ones(1, S, dtype=torch.bool)), r"padding is torch.bool \[2, 7\] here; got .*\[1, 7\]"),
        (masks.Padding(torch.ones(B, S)), r"padding is torch.bool .*; got torch.float32"),
        (masks.Segments(torch.zeros(B, T, dtype=LONG)), r"segments of keys is torch.int64 \[2, 7\] here; got .*2, 5"),
        (masks.Segments(torch.zeros(1, T, dtype=LONG), torch.zeros(B, S, dtype=LONG)), "segments of queries is"),
        (masks.Prefix(torch.ones(3, dtype=LONG)), r"a prefix's length is torch.int64 \[2\] here; got .*\[3\]"),
        (
            masks.Dense(torch.ones(3, T, S, dtype=torch.bool)),
            r"a dense mask .*\[2, 6, 5, 7\].*got \[3, 5, 7\]",
        ),
        (masks.Dense(torch.ones(B, 2, T, S, dtype=torch.bool)), r"got \[2, 2, 5, 7\]"),
        (masks.Dense(torch.ones(S, T, dtype=torch.bool)), r"got \[7, 5\]"),
        (masks.Causal().at(queries=torch.arange(4)), r"at\(queries=…\) is torch.int64 \[5\] here; got .*\[4\]"),
        (masks.Causal().at(keys=torch.zeros(3, S, dtype=LONG)), r"at\(keys=…\) is torch.int64 \[7\] here; got .*3, 7"),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "reference", "tiled", "fused"])
def test_a_description_of_other_scores_is_refused(backend, visible, said, monkeypatch):
    """Where it is written out and where it is lowered to squares alike."""
    q, k, v = inputs()
    with pytest.raises(ValueError, match=said):
        attend(q, k, v, visible=masks.Causal() & visible, backend=backend)
    if isinstance(visible, masks.Padding):
        monkeypatch.setattr(fused, "MASK_ELEMENTS", 3)
        q, k, v = inputs(t=S)
        with pytest.raises(ValueError, match=said):
            attend(q, k, v, visible=masks.Causal() & visible, backend=backend)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (torch.zeros(3, T, S), r"a dense bias is broadcast .*got \[3, 5, 7\]"),
        (torch.zeros(S), r"from \[T, S\] or more; got \[7\]"),
        (torch.zeros(T, S, dtype=torch.bool), "a dense bias is float; got torch.bool: a mask is a Dense"),
    ],
)
def test_a_bias_of_other_scores_is_refused(values, said):
    q, k, v = inputs()
    with pytest.raises(ValueError, match=said):
        attend(q, k, v, visible=masks.Causal(), bias=DenseBias(values))


def test_descriptions_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"bool with True = visible; got torch.float32: .* is a DenseBias"):
        masks.Dense(torch.zeros(T, S))
    with pytest.raises(ValueError, match=r"a dense mask is \[T, S\]"):
        masks.Dense(torch.zeros(T, dtype=torch.bool))
    with pytest.raises(ValueError, match="got size=0, first=0"):
        masks.Window(0)
    with pytest.raises(ValueError, match="first=-1"):
        masks.Window(1, first=-1)
    with pytest.raises(ValueError, match="cannot be joined"):
        _ = masks.Causal().at(queries=QUERIES) & masks.Causal().at(queries=QUERIES)
    joined = masks.Causal().at(queries=QUERIES) & masks.Window(3).at(keys=KEYS)
    assert joined.mask(T, S).shape == (B, 1, T, S)


@pytest.mark.parametrize("backend", ["reference", "tiled", "fused"])
def test_dropout_keeps_the_mean(backend):
    """in training both backends drop the asked share and keep the mean."""
    torch.manual_seed(0)
    q, k = torch.zeros(40, 20, 5, 4), torch.zeros(40, 10, 5, 4)
    v = torch.ones(40, 10, 5, 1)
    out = attend(q, k, v, visible=masks.Everything(), dropout=0.3, backend=backend)
    kept = out * 10 * 0.7
    torch.testing.assert_close(kept, kept.round(), atol=1e-4, rtol=0)
    assert float(out.mean()) == pytest.approx(1.0, abs=0.02)
    assert float(kept.mean()) == pytest.approx(7.0, abs=0.1)
    again = attend(q, k, v, visible=masks.Everything(), backend=backend)
    torch.testing.assert_close(again, torch.ones_like(again))


def test_weights_are_a_distribution():
    q, k, v = inputs()
    call = checked(q, k, v, DESCRIPTIONS["padding"][0], None, None, None, None, 0.0)
    weights = weights_of(call)
    out = mixed(call, weights)
    mask = DESCRIPTIONS["padding"][0].mask(T, S).expand(B, H, T, S)
    assert (weights[~mask] == 0).all()
    assert (weights[mask] > 0).all()
    torch.testing.assert_close(weights.sum(-1), mask.any(-1).double())
    torch.testing.assert_close(torch.einsum("bhts,bshd->bthd", weights, v.repeat_interleave(2, 2)), out)


IDS = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]])
SOLO = torch.tensor([[True] * 5, [False, False, True, True, True]])
CAPABLE = {
    "causal": (masks.Causal(), {}),
    "window": (masks.Causal() & masks.Window(3), {}),
    "window and first keys": (masks.Causal() & masks.Window(2, first=1), {}),
    "segments": (masks.Causal() & masks.Segments(IDS), {}),
    "padding": (masks.Causal() & masks.Padding(SOLO), {}),
    "prefix": (masks.PrefixKeys(~SOLO), {}),
    "dense mask": (masks.Dense(torch.ones(5, 5, dtype=torch.bool)), {}),
    "dense bias": (masks.Causal(), {"bias": DenseBias(torch.zeros(5, 5))}),
    "ALiBi": (masks.Causal(), {"bias": AlibiBias(alibi_slopes(6), True)}),
    "buckets": (masks.Causal(), {"bias": BucketBias(torch.zeros(4, 6), 5, False)}),
    "soft-cap": (masks.Causal(), {"softcap": 2.0}),
    "sink logit": (masks.Causal(), {"sinks": torch.zeros(6)}),
    "dropout": (masks.Causal(), {"dropout": 0.1}),
    "grouped heads": (masks.Causal(), {}),
    "d_value ≠ d_head": (masks.Causal(), {}),
    "gradients": (masks.Causal(), {}),
    "float64": (masks.Causal(), {}),
}


@pytest.mark.parametrize("backend", ["reference", "tiled", "fused", "flex"])
@pytest.mark.parametrize("option", list(CAPABLE))
def test_a_backend_computes_what_the_table_says_and_refuses_the_rest(option, backend, monkeypatch):
    """FlexAttention takes a compiler half a minute a call: here it is asked, and `test_flex.py` computes."""
    visible, options = CAPABLE[option]
    heads = (6, 3) if option == "grouped heads" else (6, 6)
    widths = (4, 3) if option == "d_value ≠ d_head" else (4, 4)
    dtype = torch.float64 if option == "float64" else torch.float32
    q, k, v = inputs(2, 5, 5, *heads, *widths, dtype=dtype, grad=option == "gradients")
    if backend == "flex":
        monkeypatch.setitem(BACKENDS, "flex", lambda call: (flex.refuse(call), reference.attend(call))[1])
    if CAPABILITIES[option][backend] != "yes":
        with pytest.raises(Unsupported):
            attend(q, k, v, visible=visible, backend=backend, **options)
        return
    out = attend(q, k, v, visible=visible, backend=backend, **options)
    assert out.shape == (2, 5, 6, widths[1])
    if option == "gradients":
        out.sum().backward()
        assert all(x.grad is not None for x in (q, k, v))


def test_the_table_has_every_option_and_backend_and_the_book_prints_it():
    assert [*CAPABLE, "memory linear in T"] == list(CAPABILITIES)
    assert all(list(row) == list(BACKENDS) for row in CAPABILITIES.values())
    book = Path(__file__).parent.parent.parent / "docs" / "attention.md"
    assert table() in book.read_text(encoding="utf-8")


@pytest.mark.parametrize("backend", ["reference", "tiled", "fused"])
@pytest.mark.parametrize("name", ["causal", "packed", "padded", "values of another width"])
def test_what_stays_for_the_backward_pass_is_as_the_table_says(backend, name):
    t = 64
    ids = (torch.arange(t)[None] >= 40).long()
    visible = {"packed": masks.Segments(ids), "padded": masks.Padding(ids == 1)}.get(name, masks.Everything())
    q, k, v = inputs(1, t, t, 2, 2, 4, 3 if name == "values of another width" else 4, dtype=torch.float32, grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x.numel()), x)[1], lambda x: x):
        before, fused.MASK_ELEMENTS = fused.MASK_ELEMENTS, 10
        try:
            attend(q, k, v, visible=masks.Causal() & visible, backend=backend)
        finally:
            fused.MASK_ELEMENTS = before
    assert (max(saved) < t * t) == (CAPABILITIES["memory linear in T"][backend] == "yes")


@pytest.mark.parametrize("how", ["dropout", "bias"])
def test_fused_refuses_what_the_kernel_of_the_cpu_would_hold_whole(how, monkeypatch):
    """Torch has no dropout, and no gradient into a mask, in its kernel for the CPU."""
    q, k, v = inputs(grad=True)
    bias = DenseBias(torch.zeros(T, S, dtype=q.dtype, requires_grad=True)) if how == "bias" else None
    options = {"visible": masks.Everything(), "bias": bias, "dropout": 0.1 if how == "dropout" else 0.0}
    attend(q, k, v, backend="fused", **options)
    monkeypatch.setattr(fused, "MASK_ELEMENTS", B * H * T * S - 1)
    with pytest.raises(Unsupported, match="no fused kernel on the CPU: all 420 scores"):
        attend(q, k, v, backend="fused", **options)


def chosen(visible, t, s=None, *, training=False, h=8, **options):
    """The choice for a call of one row, on tensors that hold nothing."""
    s = t if s is None else s
    q, k, v = (torch.empty(1, n, h, 64, device="meta", requires_grad=training) for n in (t, s, s))
    names = ("bias", "scale", "softcap", "sinks")
    return choose(checked(q, k, v, visible, *(options.get(n) for n in names), options.get("dropout", 0.0)))[0]


def test_auto_takes_the_fastest_that_does_not_fill_the_memory():
    """The rule of `choose`, whose measured figures stand beside it."""
    causal, window = masks.Causal(), masks.Causal() & masks.Window(128)
    alibi = AlibiBias(torch.empty(8, device="meta"), False)
    assert chosen(causal, 16384, training=True) == "fused"
    assert chosen(masks.Everything(), 300, 16384) == "fused"
    assert chosen(window, 512, training=True) == "fused"
    assert chosen(window, 2048, training=True) == "tiled"
    assert chosen(window, 8192) == "tiled"
    assert chosen(window, 1, 100_000) == "fused"
    assert chosen(causal, 512, bias=alibi, training=True) == "fused"
    assert chosen(causal, 2048, bias=alibi, training=True) == "tiled"
    assert chosen(causal, 2048, bias=alibi) == "tiled"
    assert chosen(causal, 1, 4096, bias=alibi) == "fused"
    assert chosen(causal, 128, softcap=30.0, training=True) == "reference"
    assert chosen(causal, 1, 4096, softcap=30.0) == "reference"
    assert chosen(causal, 2048, softcap=30.0, training=True) == "tiled"
    assert chosen(causal, 2048, dropout=0.1, training=True) == "tiled"
    assert chosen(masks.Dense(torch.empty(2048, 2048, dtype=torch.bool, device="meta")), 2048, training=True) == "fused"


def test_a_description_is_worked_out_once_for_all_layers(monkeypatch):
    """And anew where a tensor of it has changed since."""
    monkeypatch.setattr(fused, "MASK_ELEMENTS", 3)
    found = []
    squares = fused._squares
    monkeypatch.setattr(fused, "_squares", lambda *a: (found.append(1), squares(*a))[1])
    real = torch.tensor([[True, True, True, False]])
    visible = masks.Causal() & masks.Padding(real)
    q, k, v = inputs(1, 4, 4, grad=True)
    for _ in range(3):
        attend(q, k, v, visible=visible)
    assert len(found) == 1
    real[0, 3] = True
    got = attend(q, k, v, visible=visible)
    assert len(found) == 2
    torch.testing.assert_close(got, attend(q, k, v, visible=masks.Causal(), backend="reference"))
    with torch.inference_mode():
        attend(q, k, v, visible=masks.Causal() & masks.Padding(torch.ones(1, 4, dtype=torch.bool)))
    assert len(found) == 3


@pytest.mark.parametrize("backend", ["reference", "tiled", "fused"])
def test_a_window_is_exact(backend):
    """W = 4: query 10 sees 7, 8, 9, 10; query 2 sees 0, 1, 2; alone it reaches to both sides."""
    q, k = torch.zeros(1, 12, 1, 4), torch.zeros(1, 12, 1, 4)
    v = torch.eye(12).reshape(1, 12, 1, 12)
    out = attend(q, k, v, visible=masks.Causal() & masks.Window(4), backend=backend)[0, :, 0]
    assert out[10].nonzero().flatten().tolist() == [7, 8, 9, 10]
    assert out[2].nonzero().flatten().tolist() == [0, 1, 2]
    assert torch.equal(attend(q, k, v, visible=masks.Causal() & masks.Window(1), backend=backend), v)
    both_sides = attend(q, k, v, visible=masks.Window(3), backend=backend)[0, :, 0]
    assert both_sides[5].nonzero().flatten().tolist() == [3, 4, 5, 6, 7]
    kept = attend(q, k, v, visible=masks.Causal() & masks.Window(2, first=2), backend=backend)[0, :, 0]
    assert kept[9].nonzero().flatten().tolist() == [0, 1, 8, 9]
