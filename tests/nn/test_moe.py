import copy
import itertools
import math

import numpy as np
import pytest
import torch
from helpers import LLAMA
from oracle import mixture
from torch.nn import functional as F

from anyformer.nn import moe
from anyformer.nn.model import build
from anyformer.nn.moe import MoELayer, Router, Routing, update_choice_bias
from anyformer.nn.roles import roles
from anyformer.spec import expand
from anyformer.spec.ffn import Dense, Gated, Groups, MoE

C = 7
MIXTURE = {"kind": "moe", "n_experts": 5, "top_k": 2, "expert": {"kind": "swiglu", "d_ff": 9}}
GATED = Gated(activation="silu", d_ff=5)
LIMITED = Gated(activation="quick_gelu", d_ff=5, bias=True, limit=0.8, up_offset=1.0)
DENSE = Dense(activation="gelu", d_ff=11, bias=True)
SPECS = {
    "mixtral": MoE(n_experts=5, top_k=2, expert=GATED),
    "qwen": MoE(n_experts=5, top_k=3, normalise=False, expert=GATED, shared=DENSE, shared_gate=True),
    "gpt-oss": MoE(n_experts=3, top_k=2, router_bias=True, expert=LIMITED),
    "deepseek-2": MoE(
        n_experts=6,
        top_k=3,
        normalise=False,
        scale=1.5,
        groups=Groups(n_groups=3, top_groups=2),
        expert=GATED,
        shared=GATED,
    ),
    "deepseek-3": MoE(
        n_experts=6,
        top_k=2,
        scoring="sigmoid",
        choice_bias=True,
        scale=2.5,
        groups=Groups(n_groups=2, top_groups=1, score="top2"),
        expert=GATED,
        shared=GATED,
    ),
    "dense": MoE(n_experts=4, top_k=1, scoring="sigmoid", normalise=False, expert=DENSE),
    "all": MoE(n_experts=3, top_k=3, expert=DENSE),
}


def layer_of(spec, seed=0, dtype=torch.float64, spread=0.7):
    layer = MoELayer(spec, C).to(dtype)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in layer.state_dict().values():
            value.copy_(torch.randn(value.shape, generator=g) * spread)
    return layer.eval()


def tokens(*shape, seed=1, dtype=torch.float64):
    return torch.randn(*shape, C, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def router_with(logits, **fields):
    """A router that gives these logits for the input 1."""
    spec = MoE(n_experts=len(logits), expert=GATED, **fields)
    router = Router(spec, 1)
    with torch.no_grad():
        router.weight.copy_(torch.tensor(logits)[:, None])
    return router


ONE = torch.ones(1, 1, 1)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"normalise": True}, [0.731059, 0.268941]),
        ({"normalise": False}, [0.643914, 0.236883]),
        ({"scoring": "sigmoid"}, [0.880797 / 1.611856, 0.731059 / 1.611856]),
        ({"scoring": "sigmoid", "normalise": False, "scale": 2.5}, [2.5 * 0.880797, 2.5 * 0.731059]),
        ({"scoring": "sigmoid", "scale": 2.5}, [2.5 * 0.546449, 2.5 * 0.453551]),
    ],
)
def test_weights_of_the_chosen(fields, wanted):
    choice = router_with([2.0, 1.0, 0.0, -1.0], top_k=2, **fields)(ONE)
    assert choice.experts.tolist() == [[[0, 1]]]
    assert choice.weights.flatten().tolist() == pytest.approx(wanted, abs=3e-6)


def test_choice_bias_changes_the_choice_and_never_the_weights():
    router = router_with([2.0, 1.0, 0.0, -1.0], top_k=2, scoring="sigmoid", choice_bias=True, scale=2.0)
    router.choice_bias.copy_(torch.tensor([0.0, 0.0, 5.0, 0.0]))
    choice = router(ONE)
    assert choice.experts.tolist() == [[[2, 0]]]
    assert choice.weights.flatten().tolist() == pytest.approx([2 * 0.5 / 1.380797, 2 * 0.880797 / 1.380797], abs=1e-6)


@pytest.mark.parametrize("n", [4, 40])
def test_of_equal_scores_the_lower_number_is_chosen(n):
    router = router_with([0.0, *[1.0] * (n - 1)], top_k=3)
    assert router(torch.ones(2, 9, 1)).experts.unique(dim=1).tolist() == [[[1, 2, 3]]] * 2


def test_groups_limit_the_choice():
    logits = [3.0, -9.0, 2.0, 2.9, 0.0, 1.0]
    for score, wanted in (("max", [0, 3]), ("top2", [3, 2])):
        groups = Groups(n_groups=3, top_groups=2 if score == "max" else 1, score=score)
        choice = router_with(logits, top_k=2, groups=groups, scoring="sigmoid")(ONE)
        assert choice.experts.flatten().tolist() == wanted


def test_groups_of_negative_scores_are_still_the_only_ones():
    """Scores of closed groups are not 0, which would beat a negative one."""
    router = router_with([1.0, 0.9, -3.0, -3.0], top_k=2, choice_bias=True, groups=Groups(n_groups=2, top_groups=1))
    router.choice_bias.copy_(torch.tensor([-2.0, -4.0, -3.0, -3.0]))
    assert router(ONE).experts.flatten().tolist() == [0, 1]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("together", [False, True])
def test_equals_a_loop_over_tokens(name, together, monkeypatch):
    layer = layer_of(SPECS[name])
    if together:
        monkeypatch.setattr(moe.Experts, "one_by_one", None)
        monkeypatch.setattr(moe.Experts, "forward", moe.Experts.together)
    weights = {f"ffn.{key}": value.numpy() for key, value in layer.state_dict().items()}
    x = tokens(3, 5)
    wanted = [[mixture(SPECS[name], weights, "ffn", token) for token in row] for row in x.numpy()]
    np.testing.assert_allclose(layer(x).detach().numpy(), np.array(wanted), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["qwen", "gpt-oss", "deepseek-3", "dense"])
@pytest.mark.parametrize("together", [False, True])
def test_gradients_are_finite_differences(name, together, monkeypatch):
    if together:
        monkeypatch.setattr(moe.Experts, "forward", moe.Experts.together)
    layer = layer_of(SPECS[name])
    names = [key for key, _ in layer.named_parameters()]

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    x = tokens(2, 3).requires_grad_()
    values = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    assert torch.autograd.gradcheck(run, (x, *values), eps=1e-6, atol=1e-6, fast_mode=True)


def only_expert_0(spec):
    layer = layer_of(spec, dtype=torch.float32)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.bias.zero_()
        layer.router.bias[0] = 50.0
    return layer


@pytest.mark.parametrize("together", [False, True])
def test_all_tokens_to_one_expert(together, monkeypatch):
    if together:
        monkeypatch.setattr(moe.Experts, "forward", moe.Experts.together)
    layer = only_expert_0(MoE(n_experts=4, top_k=1, router_bias=True, expert=DENSE))
    x = tokens(3, 5, dtype=torch.float32)
    out = layer(x)
    hidden = F.gelu(F.linear(x, layer.experts.up.weight[0], layer.experts.up.bias[0]))
    torch.testing.assert_close(out, F.linear(hidden, layer.experts.down.weight[0], layer.experts.down.bias[0]))
    out.square().sum().backward()
    for name, p in layer.named_parameters():
        assert p.grad is None or torch.isfinite(p.grad).all(), name
        if name.startswith("experts."):
            assert p.grad[0].abs().max() > 0
            assert not p.grad[1:].any()
    before = copy.deepcopy(layer)
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    assert not torch.equal(layer.experts.up.weight[0], before.experts.up.weight[0])
    assert torch.equal(layer.experts.up.weight[1:], before.experts.up.weight[1:])


@pytest.mark.parametrize("name", SPECS)
def test_a_token_does_not_depend_on_its_companions(name):
    layer = layer_of(SPECS[name], dtype=torch.float32)
    x = tokens(4, 9, dtype=torch.float32)
    whole = layer(x)
    torch.testing.assert_close(layer(x[2:3, 4:5]), whole[2:3, 4:5], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer(x[1:3]), whole[1:3], rtol=1e-5, atol=1e-5)
    padding = torch.ones(4, 9, dtype=torch.bool)
    padding[0], padding[1, 3:] = False, False
    other = torch.where(padding[..., None], x, 1e3)
    torch.testing.assert_close(layer(other, padding)[padding], whole[padding], rtol=1e-5, atol=1e-5)


def test_dropout_falls_on_experts_in_training_alone():
    spec = MoE(n_experts=3, top_k=2, expert=DENSE.model_copy(update={"dropout": 0.5, "out_dropout": 0.5}))
    layer = layer_of(spec)
    x = tokens(2, 40)
    assert torch.equal(layer(x), layer_of(MoE(n_experts=3, top_k=2, expert=DENSE))(x))
    torch.manual_seed(0)
    layer.train()
    # Both of a token's experts lose a channel of the output in a quarter of the cases.
    assert float((layer(x) == 0).double().mean()) == pytest.approx(0.25, abs=0.08)
    drawn = torch.stack([layer(x).detach() for _ in range(400)])
    deviations = (drawn.mean(0) - layer.eval()(x).detach()) / (drawn.std(0) / 20)
    assert float(deviations.square().mean().sqrt()) == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_router_is_float32_in_half_precision_and_under_autocast(dtype):
    spec = MoE(n_experts=5, top_k=2, choice_bias=True, router_bias=True, expert=GATED, shared=DENSE, shared_gate=True)
    layer = layer_of(spec, dtype=torch.float32)
    x = tokens(2, 6, dtype=torch.float32)
    exact = layer.router(x)
    with torch.autocast("cpu", dtype=dtype):
        under = layer.router(x)
        assert layer(x).dtype == dtype
    for a, b in zip(under, exact, strict=True):
        assert torch.equal(a, b)
    half = copy.deepcopy(layer).to(dtype)
    assert half.router.weight.dtype == dtype
    assert torch.equal(half.router.choice_bias, layer.router.choice_bias)
    choice = half.router(x.to(dtype))
    assert choice.logits.dtype == choice.weights.dtype == torch.float32
    wanted = F.linear(x.to(dtype).double(), half.router.weight.double(), half.router.bias.double())
    torch.testing.assert_close(choice.logits.double(), wanted, rtol=1e-5, atol=1e-5)
    assert half(x.to(dtype)).dtype == dtype
    torch.testing.assert_close(half(x.to(dtype)).float(), layer(x), rtol=0.1, atol=0.3)


def balance(scores, chosen, top_k):
    """E / K · Σ f·P of tokens: scores [N, E] that sum to 1, chosen a list of K experts each."""
    n, e = scores.shape
    f = np.array([sum(expert in own for own in chosen) / n for expert in range(e)])
    return e / top_k * float((f * scores.mean(0)).sum())


def judged(spec, real=None):
    layer = layer_of(spec)
    x = tokens(4, 6)
    routing = Routing(layer)
    layer(x, real, routing)
    choice = layer.router(x)
    scores = choice.scores / choice.scores.sum(-1, keepdim=True)
    return routing, scores.detach().numpy(), choice.experts.numpy(), choice.logits.detach().numpy()


REAL = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0], [0] * 6, [1, 0, 0, 0, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize("name", ["mixtral", "deepseek-3"])
@pytest.mark.parametrize("real", [None, REAL])
def test_losses_equal_loops_over_tokens(name, real):
    extra = {"balance_loss": 0.3, "z_loss": 0.02}
    spec = SPECS[name].model_copy(update=extra)
    routing, scores, chosen, logits = judged(spec, real)
    kept = np.ones((4, 6), bool) if real is None else real.numpy()
    rows = [row for row in range(4) if kept[row].any()]
    by_row = [balance(scores[r][kept[r]], chosen[r][kept[r]], spec.top_k) for r in rows]
    z = np.mean([math.log(np.exp(logit).sum()) ** 2 for logit in logits[kept]])
    assert [float(x.detach()) for x in routing.losses()] == pytest.approx([0.3 * np.mean(by_row), 0.02 * z], rel=1e-9)
    assert float(routing.loss().detach()) == pytest.approx(0.3 * np.mean(by_row) + 0.02 * z, rel=1e-9)
    assert routing.loads[""].tolist() == [(chosen[kept] == e).sum() for e in range(spec.n_experts)]
    whole, *_ = judged(spec.model_copy(update={"balance_over": "batch"}), real)
    wanted = 0.3 * balance(scores[kept], chosen[kept], spec.top_k)
    assert float(whole.losses()[0].detach()) == pytest.approx(wanted, rel=1e-9)


def test_an_even_choice_has_a_balance_loss_of_one_and_an_uneven_one_more():
    for coefficients, wanted in (([0.0] * 4, None), ([60.0, 0.0, 0.0, 0.0], 4.0)):
        router = router_with(coefficients, top_k=1, balance_loss=1.0)
        layer = MoELayer(router.spec, 1)
        layer.router = router
        for p in layer.experts.parameters():
            torch.nn.init.zeros_(p)
        routing = Routing(layer)
        layer(torch.ones(2, 3, 1), None, routing)
        assert float(routing.loss().detach()) == pytest.approx(1.0 if wanted is None else wanted, rel=1e-6)


def test_losses_without_coefficients_are_zero():
    routing, *_ = judged(SPECS["mixtral"])
    assert float(routing.loss()) == 0
    assert sum(routing.loads[""].tolist()) == 4 * 6 * 2


def test_a_call_of_nothing_but_padding_counts_nothing():
    spec = SPECS["mixtral"].model_copy(update={"balance_loss": 0.3, "z_loss": 0.02})
    layer = layer_of(spec)
    routing = Routing(layer)
    layer(tokens(2, 3), torch.zeros(2, 3, dtype=torch.bool), routing)
    assert float(routing.loss().detach()) == 0
    assert not routing.loads[""].any()
    routing.loss().backward()
    assert torch.isfinite(layer.router.weight.grad).all()


def test_micro_batches_of_any_shapes_add_up_to_the_whole_batch():
    """Sums over rows and tokens: losses and gradients, with padding and without."""
    spec = SPECS["deepseek-3"].model_copy(update={"balance_loss": 0.3, "z_loss": 0.02})
    x, layer = tokens(4, 6), layer_of(spec)
    n_sequences, n_tokens = 3, int(REAL.sum())
    outcomes = []
    for cuts in ([0, 4], [0, 1, 4], [0, 2, 3, 4]):
        layer.zero_grad()
        total = 0.0
        for start, stop in itertools.pairwise(cuts):
            routing = Routing(layer)
            width = 6 if start == 0 else 5
            layer(x[start:stop, :width], REAL[start:stop, :width], routing)
            part = sum(routing.losses(n_sequences, n_tokens))
            part.backward()
            total += float(part.detach())
        outcomes.append((total, layer.router.weight.grad.clone()))
    for total, gradient in outcomes[1:]:
        assert total == pytest.approx(outcomes[0][0], rel=1e-10)
        torch.testing.assert_close(gradient, outcomes[0][1], rtol=1e-9, atol=1e-12)


def test_metrics_are_those_of_the_worst_layer():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = layer_of(SPECS["dense"]), layer_of(SPECS["mixtral"], seed=4)

    model = Two()
    routing = Routing(model)
    routing.loads = {"one": torch.tensor([0, 8, 2, 2]), "two": torch.tensor([4, 4, 4, 8, 0])}
    assert routing.metrics() == pytest.approx({"expert_load": 8 / 3, "idle_experts": 2 / 9})
    assert Routing(model).metrics() == {}


def test_a_layer_that_runs_twice_is_counted_under_its_one_name():
    spec = SPECS["mixtral"].model_copy(update={"balance_loss": 0.3})
    layer = layer_of(spec)
    model = torch.nn.ModuleDict({"first": layer, "again": layer})
    one, two = Routing(model), Routing(model)
    layer(tokens(2, 3), None, one)
    layer(tokens(2, 3), None, two)
    layer(tokens(2, 3), None, two)
    assert list(two.loads) == ["first"]
    assert torch.equal(two.loads["first"], 2 * one.loads["first"])
    assert float(two.loss().detach()) == pytest.approx(2 * float(one.loss().detach()))


def test_the_choice_bias_raises_idle_experts_and_lowers_busy_ones():
    spec = MoE(n_experts=4, top_k=1, scoring="sigmoid", choice_bias=True, bias_rate=0.01, expert=GATED)
    layer = layer_of(spec)
    layer.router.choice_bias.zero_()
    update_choice_bias(layer, {"": torch.tensor([6, 2, 0, 4]), "elsewhere": torch.tensor([1, 2, 3, 4])})
    assert layer.router.choice_bias.tolist() == pytest.approx([-0.01, 0.01, 0.01, -0.01])
    update_choice_bias(layer, {"": torch.tensor([3, 3, 3, 3])})
    assert layer.router.choice_bias.tolist() == pytest.approx([-0.01, 0.01, 0.01, -0.01])


def test_an_expert_that_nobody_chose_is_chosen_after_some_updates_of_its_bias():
    spec = MoE(
        n_experts=4, top_k=1, scoring="sigmoid", choice_bias=True, router_bias=True, bias_rate=0.02, expert=GATED
    )
    layer = layer_of(spec, spread=0.3)
    layer.router.choice_bias.zero_()
    with torch.no_grad():
        layer.router.bias.copy_(torch.tensor([1.0, 1.0, 1.0, -3.0]))
    x = tokens(8, 16)
    loads = []
    for _ in range(60):
        routing = Routing(layer)
        layer(x, None, routing)
        loads.append(routing.loads[""].tolist())
        update_choice_bias(layer, routing.loads)
    assert loads[0][3] == 0
    assert min(loads[-1]) > 5
    assert layer.router.choice_bias[3] > 0.2


def test_roles_names_and_shapes():
    layer = layer_of(SPECS["deepseek-3"].model_copy(update={"router_bias": True, "shared": DENSE, "shared_gate": True}))
    found = {name: (role, tuple(layer.get_parameter(name).shape)) for name, role in roles(layer).items()}
    assert found == {
        "router.weight": ("router", (6, C)),
        "router.bias": ("bias", (6,)),
        "experts.gate.weight": ("hidden", (6, 5, C)),
        "experts.up.weight": ("hidden", (6, 5, C)),
        "experts.down.weight": ("residual", (6, C, 5)),
        "shared.up.weight": ("hidden", (11, C)),
        "shared.up.bias": ("bias", (11,)),
        "shared.down.weight": ("residual", (C, 11)),
        "shared.down.bias": ("bias", (C,)),
        "shared_gate.weight": ("router", (1, C)),
    }
    assert list(found) == [name for name, _ in layer.named_parameters()]
    assert [name for name, _ in layer.named_buffers()] == ["router.choice_bias"]


def test_a_broken_choice_bias_is_named():
    model = build(expand({**LLAMA, "ffn": {**MIXTURE, "choice_bias": True}}))
    assert model.trace_nonfinite(torch.tensor([[1, 2]])) is None
    model.decoder.blocks[1].ffn.router.choice_bias[2] = torch.nan
    assert model.trace_nonfinite(torch.tensor([[1, 2]])) == "parameter decoder.blocks.1.ffn.router.choice_bias"


def test_the_meta_device_knows_shapes():
    with torch.device("meta"):
        layer = MoELayer(SPECS["deepseek-3"], C).to(torch.bfloat16)
    assert layer.router.choice_bias.dtype == torch.float32
    assert layer(torch.empty(2, 3, C, device="meta", dtype=torch.bfloat16)).shape == (2, 3, C)


def test_compiled_equals_eager_in_one_graph():
    spec = SPECS["deepseek-3"].model_copy(update={"balance_loss": 0.3, "z_loss": 0.02, "shared_gate": True})
    layer = layer_of(spec, dtype=torch.float32).train()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for seed in range(2):
        x = tokens(3, 5, seed=seed, dtype=torch.float32)
        outcomes = []
        for run in (layer, compiled):
            layer.zero_grad()
            routing = Routing(layer)
            out = run(x, None, routing)
            (out.square().sum() + routing.loss()).backward()
            outcomes.append([out, routing.loss(), routing.loads[""], *(p.grad.clone() for p in layer.parameters())])
        for a, b in zip(*outcomes, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
