import copy
import math

import pytest
import torch
from training_runs import RECIPE

from anyformer.nn.model import build
from anyformer.spec import load_spec
from anyformer.train.loss import make_batch
from anyformer.train.optim import Optimizer
from anyformer.train.run import AdamW
from anyformer.train.step import Diverged, accumulate, global_norm, train_step

SPEC = load_spec({**RECIPE, "vocab_size": 23})


def rows_of(lengths, width=9, seed=0):
    """Rows of different lengths, padded on the right."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(23, (len(lengths), width + 1), generator=g)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    return make_batch(tokens[:, :-1], tokens[:, 1:], mask)


def sgd_like():
    return AdamW(lr=0.01, betas=(0.9, 0.95), eps=1e-3)


def test_b08_reported_loss_is_the_mean_over_all_tokens():
    """2 tokens with summed loss 8 and 8 tokens with summed loss 4 give 12 / 10 = 1.2, and not 2.25."""
    model = torch.nn.Linear(1, 1, bias=False)
    first, second = rows_of([2]), rows_of([8])

    def loss(m, batch):
        return m.weight.sum() * 0 + m.weight.sum() * (8.0 if batch.n_targets == 2 else 4.0) / m.weight.detach().sum()

    total = first.n_targets + second.n_targets
    assert total == 10
    value = accumulate(model, [first, second], total, loss=loss)
    assert float(value) == pytest.approx(1.2, abs=1e-6)
    assert float(model.weight.grad) == pytest.approx(1.2 / float(model.weight.detach()), rel=1e-5)


def run_once(model, batches, **arguments):
    optimizer = Optimizer(model, sgd_like())
    result = train_step(model.train(), batches, optimizer, **arguments)
    return result, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_b08_any_split_into_micro_batches_is_the_same_step(clip):
    """1 × 4 rows, 2 × 2 and 4 × 1 of different lengths give equal weights."""
    batch = rows_of([9, 2, 5, 1])
    outcomes = [run_once(build(SPEC, seed=3), batch.micro(rows), clip=clip) for rows in (4, 2, 1, 3)]
    for result, weights in outcomes[1:]:
        assert result.loss == pytest.approx(outcomes[0][0].loss, abs=1e-6)
        assert result.n_targets == 17
        assert result.grad_norm == pytest.approx(outcomes[0][0].grad_norm, rel=1e-5)
        for mine, other in zip(weights, outcomes[0][1], strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


def test_b08_an_incomplete_group_is_normalised_by_its_own_tokens():
    """5 micro-batches by twos are three updates; the last one's gradient is the mean over its own tokens."""
    micro = [rows_of([n], seed=n) for n in (3, 8, 2, 7, 4)]
    model = build(SPEC, seed=3)
    optimizer = Optimizer(model, sgd_like())
    before_last = None
    results = []
    for start in range(0, 5, 2):
        before_last = copy.deepcopy(model)
        results.append(train_step(model.train(), micro[start : start + 2], optimizer))
    assert [r.n_targets for r in results] == [11, 9, 4]
    logits = before_last.double()(micro[4].tokens)[0, :4]
    alone = torch.nn.functional.cross_entropy(logits, micro[4].targets[0, :4])
    assert results[2].loss == pytest.approx(float(alone.detach()), abs=1e-5)
    alone.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in before_last.parameters()))
    assert results[2].grad_norm == pytest.approx(norm, rel=1e-4)


def test_b43_clipping_scales_the_whole_gradient():
    """The norm is that of all parameters together: (3, 4) has norm 5 and becomes (0.6, 0.8)."""
    parts = [torch.tensor([3.0]), torch.tensor([[4.0]])]
    assert float(global_norm(parts)) == 5.0

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1, 1))

    class Keeps:
        """Gives the gradients back and moves nothing."""

        def __init__(self, model):
            self.parameters, self.seen = list(model.parameters()), []

        def step(self, ratio):
            self.seen = [float(p.grad.sum()) for p in self.parameters]

        def zero_grad(self):
            pass

    model = Two()
    keeps = Keeps(model)
    for clip, seen in ((1.0, [0.6, 0.8]), (4.0, [2.4, 3.2]), (5.0, [3, 4]), (6.0, [3, 4]), (0.0, [3, 4])):
        model.zero_grad()
        result = train_step(
            model, [rows_of([1])], keeps, clip=clip, loss=lambda m, batch: 3 * m.a.sum() + 4 * m.b.sum()
        )
        assert result.grad_norm == pytest.approx(5.0)
        assert keeps.seen == pytest.approx(seen)


def test_b47_a_step_without_targets_moves_nothing():
    """Weights stay, decay aside."""
    model = build(SPEC, seed=3)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = Optimizer(model, AdamW(lr=0.01, weight_decay=0.0))
    result = train_step(model.train(), [rows_of([0, 0])], optimizer)
    assert result.loss == 0
    assert result.grad_norm == 0
    assert result.n_targets == 0
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, old)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_moves_nothing_and_says_so(bad):
    model = build(SPEC, seed=3)
    with torch.no_grad():
        model.decoder.final_norm.weight[0] = bad
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = Optimizer(model, sgd_like())
    with pytest.raises(Diverged, match="not a finite number"):
        train_step(model.train(), [rows_of([4])], optimizer)
    for p, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), old, rtol=0, atol=0, equal_nan=True)
        assert p.grad is None


def test_bfloat16_autocast_is_close_to_float32():
    batch = rows_of([9, 7, 9, 9])
    exact, _ = run_once(build(SPEC, seed=3), [batch])
    rough, rough_weights = run_once(build(SPEC, seed=3), [batch], precision="bfloat16")
    assert rough.loss == pytest.approx(exact.loss, rel=0.02)
    assert rough.loss != exact.loss
    assert all(w.dtype == torch.float32 for w in rough_weights)


def test_a_step_without_micro_batches_is_refused():
    model = build(SPEC, seed=3)
    with pytest.raises(ValueError, match="at least one"):
        train_step(model, [], Optimizer(model, sgd_like()))
