"""Our own backward passes: against finite differences, once and twice, under torch.func, autocast and a compiler."""

import pytest
import torch

import anyformer as af
from anyformer.nn.attend import DenseBias, attend, masks
from anyformer.nn.layers import relu2
from anyformer.nn.position import rotate, rotation
from anyformer.nn.rms import rms_norm
from anyformer.spec.parts import Rope
from nn.helpers import GPT, LLAMA, PARALLEL, ids, made


def functions():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    w = torch.randn(5, dtype=torch.float64)
    q = torch.randn(2, 3, 2, 8, dtype=torch.float64)
    cases = {
        "rms": (lambda x, w: rms_norm(x, w, 1e-3), (x, w)),
        "rms without weight": (lambda x: rms_norm(x, None, 1e-3), (x,)),
        "relu2": (relu2, (x,)),
    }
    for layout in ("half", "interleaved"):
        rope = Rope(layout=layout, fraction=0.5)
        tables = rotation(rope, 8, torch.arange(3)[None], torch.float64)
        cases[f"rotation {layout}"] = (lambda q, t=tables, layout=layout: rotate(q, t, layout), (q,))
    return cases


@pytest.mark.parametrize("name", list(functions()))
def test_gradients_once_and_twice_equal_finite_differences(name):
    function, inputs = functions()[name]
    inputs = tuple(x.clone().requires_grad_() for x in inputs)
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("name", list(functions()))
def test_without_gradients_the_same_numbers_come_out(name):
    """To the bit: what is skipped is the bookkeeping alone."""
    function, inputs = functions()[name]
    with_gradients = function(*(x.clone().requires_grad_() for x in inputs))
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            got = function(*inputs)
        torch.testing.assert_close(got, with_gradients.detach(), rtol=0, atol=0)
        assert got.grad_fn is None
    assert with_gradients.grad_fn is not None


def test_the_second_derivative_through_a_chain_is_exact():
    """relu2(x·x) is x⁴: its second derivative at 3 is 12·9."""
    x = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(relu2(x * x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert first.item() == pytest.approx(108)
    assert second.item() == pytest.approx(108)


def test_torch_func_differentiates_a_whole_model():
    model = made({**LLAMA, "ffn": {"kind": "dense", "activation": "relu2", "d_ff": 24}}, dtype="float64")
    tokens = ids(2, 5, 19)
    parameters = dict(model.named_parameters())

    def loss(values):
        return torch.func.functional_call(model, values, (tokens,)).square().sum()

    found = torch.func.grad(loss)({name: p.detach() for name, p in parameters.items()})
    model(tokens).square().sum().backward()
    for name, p in parameters.items():
        torch.testing.assert_close(found[name], p.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["reference", "tiled", "fused"])
def test_autocast_changes_neither_softmax_precision_nor_what_works(backend, dtype):
    """The reference keeps its own precision; pattern taps, soft-caps and sinks work under autocast."""
    model = made(LLAMA).use_backend(backend)
    tokens = ids(2, 6, 19)
    tap = af.Tap(record=["blocks.*.pattern"])
    with torch.autocast("cpu", dtype=dtype), torch.no_grad():
        out = model(tokens)
        tapped = model(tokens, tap=tap)
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out.float(), model(tokens), atol=0.15, rtol=0.1)
    torch.testing.assert_close(tapped.float(), out.float(), atol=0.15, rtol=0.1)
    assert all(p.dtype == torch.float32 for p in tap.values.values())
    sums = tap.values["blocks.0.pattern"].sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums))


@pytest.mark.parametrize("backend", ["reference", "tiled", "fused"])
def test_a_bias_of_minus_infinity_hides_like_a_mask(backend):
    """A row whose every visible key is at −inf is zero, with finite gradients."""
    q, k, v = (torch.randn(1, 4, 2, 8, requires_grad=True) for _ in range(3))
    bias = torch.zeros(4, 4)
    bias[1] = float("-inf")
    bias[3, 2] = float("-inf")
    out = attend(q, k, v, visible=masks.Causal(), bias=DenseBias(bias), backend=backend)
    out.square().sum().backward()
    assert torch.equal(out[0, 1], torch.zeros(2, 8))
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))
    hidden = masks.Causal() & masks.Dense(bias == 0)
    torch.testing.assert_close(out, attend(q, k, v, visible=hidden, backend="reference"))


@pytest.mark.parametrize("recipe", [LLAMA, GPT, PARALLEL], ids=["llama", "gpt", "parallel"])
def test_a_compiler_takes_the_model_as_one_graph(recipe):
    """Values and gradients, without a graph break and without a second compilation for the same shapes."""
    torch._dynamo.reset()
    model = made(recipe, dtype="float64")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    tokens = ids(2, 6, 19)
    out = compiled(tokens)
    torch.testing.assert_close(out, model(tokens))
    out.square().sum().backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model(tokens).square().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(got[name], p.grad)
    torch._dynamo.reset()


def test_explain_says_which_backend_and_why():
    spec = af.load_spec(LLAMA)
    model = af.build(spec)
    assert {(c.layer, c.backend) for c in model.explain(context=64)} == {
        (f"blocks.{i}", "fused") for i in range(spec.decoder.n_layers)
    }
    large = model.explain(batch=64, context=2048, cached=2048, training=True)
    assert all(c.backend == "tiled" for c in large)
    model.use_backend("reference")
    assert model.explain(context=8)[0] == ("blocks.0", "reference", "asked for")


def test_explain_says_where_a_named_backend_would_refuse():
    spec = af.load_spec({**LLAMA, "attention": {**LLAMA["attention"], "sink_logit": True}})
    model = af.build(spec).use_backend("fused")
    why = model.explain(context=8)[0].why
    assert why == "asked for, but a call raises Unsupported: fused kernels have no sink logit"
    with pytest.raises(ValueError, match="no sink logit"):
        model(ids(1, 8, spec.vocab_size))
