"""Mixtures of experts in training: what they add to a step, what a run says of them, and how it goes on."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file
from test_train_parallel import finish, start
from training_runs import RECIPE, table

from anyformer.checkpoint import load
from anyformer.errors import UserError
from anyformer.nn.model import build
from anyformer.nn.moe import Routing, moe_layers
from anyformer.nn.roles import roles
from anyformer.spec import load_spec
from anyformer.train import train
from anyformer.train.evaluate import evaluating
from anyformer.train.loss import batch_loss, make_batch
from anyformer.train.muon import JORDAN, Muon, orthogonalised
from anyformer.train.optim import Optimizer, groups
from anyformer.train.run import AdamW, MuonFields, load_run
from anyformer.train.run import Muon as MuonChoice
from anyformer.train.step import Diverged, accumulate, train_step

MIXTURE = {
    "kind": "moe",
    "n_experts": 4,
    "top_k": 2,
    "expert": {"kind": "gated", "activation": "silu", "d_ff": 10},
    "shared": {"kind": "gated", "activation": "silu", "d_ff": 6},
    "scoring": "sigmoid",
    "choice_bias": True,
    "router_bias": True,
    "balance_loss": 0.3,
    "z_loss": 0.05,
    "bias_rate": 0.01,
}
MOE = {**RECIPE, "ffn": MIXTURE, "vocab_size": 23}
METRICS = {"balance_loss", "z_loss", "expert_load", "idle_experts"}


def rows_of(lengths, width=9, seed=0):
    """Rows of different lengths, padded on the right, in input and target."""
    tokens = torch.randint(23, (len(lengths), width + 1), generator=torch.Generator().manual_seed(seed))
    real = torch.arange(width) < torch.tensor(lengths)[:, None]
    return make_batch(tokens[:, :-1], tokens[:, 1:], real, None, real)


def adamw():
    return AdamW(lr=0.01, eps=1e-3)


def stepped(spec, batches, **arguments):
    model = build(spec, seed=3).train()
    result = train_step(model, batches, Optimizer(model, adamw()), **arguments)
    return result, model


@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_any_split_into_micro_batches_is_the_same_step(clip):
    batch = rows_of([9, 2, 5, 1, 0])
    assert (batch.n_sequences, batch.n_tokens) == (4, 17)
    outcomes = [stepped(load_spec(MOE), batch.micro(rows), clip=clip) for rows in (5, 2, 1, 3)]
    for result, model in outcomes[1:]:
        first, other = outcomes[0]
        assert result.loss == pytest.approx(first.loss, abs=1e-6)
        assert result.grad_norm == pytest.approx(first.grad_norm, rel=1e-5)
        assert result.routing == pytest.approx(first.routing, rel=1e-5)
        for name, mine in model.state_dict().items():
            torch.testing.assert_close(mine, other.state_dict()[name], rtol=0, atol=1e-6)


def test_the_gradient_is_that_of_the_loss_and_what_the_layers_add():
    batch = rows_of([9, 2, 5])
    model = build(load_spec(MOE), seed=3).train()
    routing = Routing(model)
    loss = batch_loss(model, batch, routing=routing) / batch.n_targets
    (loss + routing.loss()).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    result, after = stepped(load_spec(MOE), [batch])
    assert result.loss == pytest.approx(float(loss.detach()), rel=1e-6)
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)
    added = result.routing["balance_loss"] + result.routing["z_loss"]
    assert added == pytest.approx(float(routing.loss().detach()), rel=1e-6)
    assert result.routing.keys() == METRICS
    assert {name: result.routing[name] for name in routing.metrics()} == pytest.approx(routing.metrics())
    for name, layer in moe_layers(after).items():
        load = routing.loads[name].double()
        wanted = 0.01 * (load.mean() - load).sign()
        torch.testing.assert_close(layer.router.choice_bias.double(), wanted, rtol=0, atol=1e-9)


def test_a_model_without_experts_says_nothing_of_them():
    result, _ = stepped(load_spec({**RECIPE, "vocab_size": 23}), [rows_of([4])])
    assert result.routing == {}


def test_a_loss_of_ones_own_has_to_route():
    model = build(load_spec(MOE), seed=3).train()
    with pytest.raises(ValueError, match="routing=routing"):
        train_step(model, [rows_of([4])], Optimizer(model, adamw()), loss=lambda m, b, routing: batch_loss(m, b))


def test_a_step_that_diverged_moves_no_choice_bias():
    model = build(load_spec(MOE), seed=3).train()
    with torch.no_grad():
        model.decoder.final_norm.weight[0] = torch.nan
    with pytest.raises(Diverged):
        train_step(model, [rows_of([4])], Optimizer(model, adamw()))
    assert not any(layer.router.choice_bias.any() for layer in moe_layers(model).values())


def test_bfloat16_autocast_trains_and_stays_close():
    exact, _ = stepped(load_spec(MOE), [rows_of([9, 7])])
    rough, model = stepped(load_spec(MOE), [rows_of([9, 7])], precision="bfloat16")
    assert rough.loss == pytest.approx(exact.loss, rel=0.02)
    assert rough.routing["z_loss"] == pytest.approx(exact.routing["z_loss"], rel=0.05)
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


@pytest.mark.parametrize("choice", [adamw(), MuonChoice(lr=0.01, muon=MuonFields(lr=0.02))])
def test_groups_hold_every_parameter_once_and_experts_and_routers_where_they_belong(choice):
    model = build(load_spec(MOE), seed=0)
    found = {name: group for group in groups(model, choice) for name in group.names}
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, role in roles(model).items():
        by_muon = choice.kind == "muon" and role in ("hidden", "residual")
        assert found[name].optimizer == ("muon" if by_muon else "adamw"), name
        assert (found[name].weight_decay > 0) == (role in ("hidden", "residual", "router", "head")), name


@pytest.mark.parametrize("shape", [(3, 5, 4), (3, 4, 9)])
def test_muon_makes_each_expert_orthogonal_by_itself(shape):
    g = torch.Generator().manual_seed(0)
    stacked, gradient = torch.randn(shape, generator=g), torch.randn(shape, generator=g)
    gradient[1] *= 100
    gradient[2] = 0
    alone = [m.clone() for m in stacked]
    other = torch.randn(*shape[:0:-1], generator=g)
    muon = Muon([("experts", stacked, 0.1), ("other", other, 0.1)], weight_decay=0.2)
    each = Muon([(f"expert {i}", m, 0.1) for i, m in enumerate(alone)], weight_decay=0.2)
    before = stacked.clone()
    for _ in range(2):
        stacked.grad = gradient
        for m, one in zip(alone, gradient, strict=True):
            m.grad = one
        muon.step()
        each.step()
    for mine, theirs in zip(stacked, alone, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(stacked[2], before[2] * (1 - 0.1 * 0.2) ** 2)
    momentum = muon.moments()["experts/momentum"]
    assert momentum.shape == shape
    torch.testing.assert_close(momentum, gradient * (1 - 0.95**2))
    fat = gradient if shape[1] <= shape[2] else gradient.mT
    singular = torch.linalg.svdvals(orthogonalised(fat[:2], JORDAN * 5))
    assert singular.min() > 0.5
    assert singular.max() < 1.3


@pytest.mark.parametrize("choice", [adamw(), MuonChoice(lr=0.01)])
def test_idle_experts_do_not_break_a_step(choice):
    """Every token to expert 0 of the first layer: all is finite, and the others only decay."""
    spec = load_spec({**MOE, "ffn": {**MIXTURE, "top_k": 1, "balance_loss": 0.0}})
    model = build(spec, seed=3).train()
    layer = model.decoder.blocks[0].ffn
    layer.router.choice_bias[0] = 50.0
    before = copy.deepcopy(layer)
    result = train_step(model, [rows_of([9, 4])], Optimizer(model, choice))
    assert result.routing["expert_load"] == 4.0
    assert result.routing["idle_experts"] >= 3 / 8
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())
    moved = layer.experts.up.weight.detach() - before.experts.up.weight * (1 - choice.lr * choice.weight_decay)
    assert moved[0].abs().max() > 1e-4
    torch.testing.assert_close(moved[1:], torch.zeros_like(moved[1:]), rtol=0, atol=1e-6)
    assert torch.equal(layer.router.choice_bias.sign(), torch.tensor([1.0, 1.0, 1.0, 1.0]))


WORKER = """
import sys, json
import torch, torch.distributed as dist
torch.set_num_threads(1)
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
from anyformer.nn.model import build
from anyformer.spec import load_spec
from anyformer.train.loss import make_batch
from anyformer.train.optim import Optimizer
from anyformer.train.parallel import Group
from anyformer.train.run import AdamW
from anyformer.train.step import train_step
model = build(load_spec(json.loads(sys.argv[3])), seed=3).train()
optimizer = Optimizer(model, AdamW(lr=0.01, eps=1e-3))
said = []
for step in range(3):
    parts = torch.load(f"{folder}/step{step}-rank{rank}.pt", weights_only=True)
    batches = [make_batch(tokens, targets, real, None, real) for tokens, targets, real in parts]
    r = train_step(model, batches, optimizer, world=Group(torch.device("cpu")))
    said.append([r.loss, r.grad_norm, *r.routing.values()])
torch.save([said, model.state_dict()], f"{folder}/out{rank}.pt")
dist.destroy_process_group()
"""


def test_two_processes_that_use_different_experts_equal_one(tmp_path):
    """No wait for an expert that one of them does not use; weights and choice biases are the same afterwards."""
    recipe = {**MOE, "ffn": {**MIXTURE, "n_experts": 16, "top_k": 1}}
    model = build(load_spec(recipe), seed=3).train()
    optimizer = Optimizer(model, adamw())
    wanted = []
    for step in range(3):
        batch = rows_of([7, 1, 2], width=7, seed=step)
        cuts = {0: [slice(0, 1)], 1: [slice(1, 2), slice(2, 3)]}
        for rank, own in cuts.items():
            parts = [[x[cut].clone() for x in (batch.tokens, batch.targets, batch.padding)] for cut in own]
            torch.save(parts, tmp_path / f"step{step}-rank{rank}.pt")
        result = train_step(model, [batch], optimizer)
        wanted.append([result.loss, result.grad_norm, *result.routing.values()])
        assert result.routing["idle_experts"] > 0
    finish([start(["-c", WORKER, str(rank), str(tmp_path), json.dumps(recipe)]) for rank in (0, 1)])
    outputs = [torch.load(tmp_path / f"out{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert outputs[0][0] == outputs[1][0]
    for mine, other in zip(outputs[0][0], wanted, strict=True):
        assert mine == pytest.approx(other, abs=1e-6, rel=1e-5)
    for name, value in model.state_dict().items():
        assert torch.equal(outputs[0][1][name], outputs[1][1][name])
        torch.testing.assert_close(outputs[0][1][name], value, rtol=0, atol=2e-6)


def records(folder, kind="train"):
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def mixture_run(tmp_path, **train_changes):
    return table(tmp_path, model={"ffn": MIXTURE}, optimizer="muon", train={"steps": 8, **train_changes})


def test_a_run_tells_of_its_experts_and_keeps_their_biases(tmp_path):
    result = train(mixture_run(tmp_path), root=tmp_path / "runs")
    for record in records(result.folder):
        assert record.keys() >= METRICS
        assert 1 <= record["expert_load"] <= 2
        assert 0.29 < record["balance_loss"] < 2.4
        assert record["z_loss"] > 0
        assert 0 <= record["idle_experts"] < 1
    loaded = load(result.folder / "checkpoints" / "last")
    stored = load_file(result.folder / "checkpoints" / "last" / "model.safetensors")
    for name, layer in moe_layers(loaded.model).items():
        bias = layer.router.choice_bias
        assert bias.any()
        assert torch.equal(stored[f"{name}.router.choice_bias"], bias)
    half = load(result.folder / "checkpoints" / "last", dtype="bfloat16").model
    for (_, one), (_, other) in zip(moe_layers(half).items(), moe_layers(loaded.model).items(), strict=True):
        assert one.router.weight.dtype == torch.bfloat16
        assert torch.equal(one.router.choice_bias, other.router.choice_bias)
    with evaluating(half):
        assert torch.isfinite(half(torch.tensor([[1, 2, 3]]))).all()


def test_stopped_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path):
    run = mixture_run(tmp_path, evaluate_every=4, checkpoint_every=4)
    run["schedule"] = "constant"
    whole = train(run, root=tmp_path / "whole", report=False)
    half = {**run, "train": {**run["train"], "steps": 4}}
    train(half, root=tmp_path / "parts", report=False)
    parts = train(run, root=tmp_path / "parts", resume=True, report=False)
    one, other = (load_file(r.folder / "checkpoints" / "last" / "model.safetensors") for r in (whole, parts))
    assert one.keys() == other.keys()
    assert sum(name.endswith("choice_bias") for name in one) == 2
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
    keys = ("step", "loss", "grad_norm", *METRICS)
    a, b = ([[record[key] for key in keys] for record in records(r.folder)] for r in (whole, parts))
    assert a == b


def test_a_run_that_was_begun_before_a_key_existed_goes_on(tmp_path):
    run = mixture_run(tmp_path, steps=2)
    folder = train(run, root=tmp_path / "runs", report=False).folder
    description = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    del description["run"]["optimizer"]["lr_scale"]["router"]
    (folder / "run.json").write_text(json.dumps(description), encoding="utf-8")
    longer = {**run, "train": {**run["train"], "steps": 3}}
    assert train(longer, root=tmp_path / "runs", resume=True, report=False).step == 3
    other = {**longer, "optimizer": {"kind": "muon", "lr_scale": {"router": 0.5}}}
    with pytest.raises(UserError, match=r"lr_scale.router: 1.0 became 0.5"):
        train(other, root=tmp_path / "runs", resume=True, report=False)


def test_a_batch_wide_balance_loss_weighs_micro_batches_by_their_tokens():
    spec = load_spec({**MOE, "ffn": {**MIXTURE, "balance_over": "batch"}})
    batch = rows_of([9, 2, 5])
    parts = batch.micro(2)
    model = build(spec, seed=3)
    alone = []
    for part in parts:
        routing = Routing(model)
        batch_loss(model, part, routing=routing)
        alone.append(float(routing.losses()[0].detach()))
    result, _ = stepped(spec, parts)
    assert result.routing["balance_loss"] == pytest.approx((alone[0] * 11 + alone[1] * 5) / 16, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "encoder"}, "an encoder with a language head"),
        ({"architecture": "encoder-decoder"}, "an encoder and a decoder with a language head"),
        ({"head": "none"}, "a decoder with no head"),
    ],
)
def test_models_that_do_not_generate_are_not_trained(tmp_path, changes, words):
    run = table(tmp_path)
    run["model"] = {**{k: v for k, v in run["model"].items() if k != "tie"}, **changes}
    with pytest.raises(UserError, match="cannot be trained here") as caught:
        load_run(run).spec(256)
    assert words in str(caught.value)
    with pytest.raises(UserError, match="cannot be trained here"):
        train(run, root=tmp_path / "runs")


def test_accumulate_alone_adds_nothing_of_experts():
    """A measurement of how long a step takes needs no tally."""
    model = build(load_spec(MOE), seed=3).train()
    batch = rows_of([4])
    value = accumulate(model, [batch], batch.n_targets)
    assert float(value) == pytest.approx(float(batch_loss(model, batch).detach()) / 4)
