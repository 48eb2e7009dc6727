import copy

import pytest
import torch
from training_runs import RECIPE

from anyformer.errors import UserError
from anyformer.nn.model import build
from anyformer.nn.roles import roles
from anyformer.spec import load_spec
from anyformer.train.optim import Optimizer, groups
from anyformer.train.run import AdamW, Muon, MuonFields, RoleRates

BIASED = {**RECIPE, "norm": "layer", "bias": True, "vocab_size": 19}
LEARNED = {**BIASED, "embed": {"position": "learned"}, "max_positions": 8, "tie": False}
CHOICES = [AdamW(lr=0.01, weight_decay=0.3), Muon(lr=0.01, weight_decay=0.3, muon=MuonFields(lr=0.02))]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("recipe", [BIASED, LEARNED])
def test_b48_groups_hold_every_parameter_once(choice, recipe):
    """Group totals are all parameters, a tied weight once."""
    model = build(load_spec(recipe), seed=0)
    made = groups(model, choice)
    names = [name for group in made for name in group.names]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert sum(p.numel() for g in made for p in g.parameters) == sum(p.numel() for p in model.parameters())
    if recipe["tie"]:
        assert "head.weight" not in names


@pytest.mark.parametrize("recipe", [BIASED, LEARNED])
def test_b48_with_zero_gradients_only_matrices_of_blocks_and_head_shrink(recipe):
    """One AdamW step moves them by lr·wd, and norms, biases, positions and embeddings not at all."""
    model = build(load_spec(recipe), seed=0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = Optimizer(model, CHOICES[0])
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step(0.5)
    moved = set()
    for name, p in model.named_parameters():
        if not torch.equal(p, before[name]):
            moved.add(name)
            torch.testing.assert_close(p.detach(), before[name] * (1 - 0.01 * 0.5 * 0.3), rtol=1e-6, atol=0)
    wanted = {name for name, role in roles(model).items() if role in ("hidden", "residual", "head")}
    assert moved == wanted
    assert all(before[name].dim() == 2 for name in wanted)


def test_b33_after_a_step_a_tied_head_is_still_the_embedding():
    """The optimiser holds a tied weight once, and moves it once."""
    model = build(load_spec(BIASED), seed=0)
    optimizer = Optimizer(model, CHOICES[0])
    table = model.decoder.embed.token.weight
    before = table.detach().clone()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.testing.assert_close(table.detach(), before - 0.01, rtol=1e-4, atol=1e-6)
    assert model.head.weight is None
    assert sum(p is table for p in optimizer.parameters) == 1


def fill(model, seed):
    g = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=g)


def test_adamw_equals_torchs_own():
    model = build(load_spec(BIASED), seed=0)
    other = copy.deepcopy(model)
    choice = AdamW(lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
    optimizer = Optimizer(model, choice)
    named = dict(other.named_parameters())
    decayed = [named[n] for n, r in roles(other).items() if r in ("hidden", "residual")]
    rest = [named[n] for n, r in roles(other).items() if r not in ("hidden", "residual")]
    reference = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}],
        lr=0.005,
        betas=(0.8, 0.9),
        eps=1e-6,
        fused=False,
        foreach=False,
    )
    for seed in range(3):
        fill(model, seed)
        fill(other, seed)
        optimizer.step(0.5)
        reference.step()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("choice", CHOICES)
def test_rates_follow_roles(choice):
    chosen = choice.model_copy(update={"lr_scale": RoleRates(embedding=3.0, norm=0.5, hidden=2.0)})
    model = build(load_spec(LEARNED), seed=0)
    rate = {name: (g.optimizer, g.lr) for g in groups(model, chosen) for name in g.names}
    assert rate["decoder.embed.token.weight"] == ("adamw", 0.03)
    assert rate["decoder.final_norm.weight"] == ("adamw", 0.005)
    assert rate["head.weight"] == ("adamw", 0.01)
    matrix = ("muon", 0.04) if isinstance(choice, Muon) else ("adamw", 0.02)
    assert rate["decoder.blocks.0.attention.q.weight"] == matrix


@pytest.mark.parametrize("choice", CHOICES)
def test_state_goes_on_bit_for_bit(choice):
    model = build(load_spec(BIASED), seed=0)
    optimizer = Optimizer(model, choice)
    for seed in range(3):
        fill(model, seed)
        optimizer.step()
    stored = {name: value.clone() for name, value in optimizer.state().items()}
    twin = copy.deepcopy(model)
    fresh = Optimizer(twin, choice)
    fresh.load(stored)
    for seed in range(3, 5):
        fill(model, seed)
        fill(twin, seed)
        optimizer.step(0.7)
        fresh.step(0.7)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert all(torch.equal(value, fresh.state()[name]) for name, value in optimizer.state().items())


@pytest.mark.parametrize("choice", CHOICES)
def test_foreign_state_is_refused(choice):
    model = build(load_spec(BIASED), seed=0)
    optimizer = Optimizer(model, choice)
    fill(model, 0)
    optimizer.step()
    stored = dict(optimizer.state())
    name = next(iter(stored))
    for wrong, words in (
        ({k: v for k, v in stored.items() if k != name}, "missing"),
        ({**stored, "nobody/exp_avg": torch.zeros(1)}, "no parameter"),
        ({**stored, name: torch.zeros(1, 2, 3)}, "should be"),
    ):
        with pytest.raises(UserError, match=words):
            Optimizer(model, choice).load(wrong)


def test_muon_moves_matrices_of_blocks_alone():
    model = build(load_spec(LEARNED), seed=0)
    found = {name: g.optimizer for g in groups(model, CHOICES[1]) for name in g.names}
    for name, role in roles(model).items():
        assert found[name] == ("muon" if role in ("hidden", "residual") else "adamw")
