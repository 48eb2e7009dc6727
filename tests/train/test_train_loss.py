import pytest
import torch
from training_runs import RECIPE

from anyformer.nn.model import build
from anyformer.spec import load_spec
from anyformer.train.loss import batch_loss, make_batch, shifted, summed_loss


def by_hand(logits, targets, mask):
    total = 0.0
    for b in range(targets.shape[0]):
        for t in range(targets.shape[1]):
            if mask[b, t]:
                row = logits[b, t].double()
                total -= float(row[targets[b, t]] - torch.log(torch.exp(row - row.max()).sum()) - row.max())
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_summed_loss_equals_the_definition(dtype):
    g = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(3, 5, 11, generator=g)).to(dtype)
    targets = torch.randint(11, (3, 5), generator=g)
    mask = torch.rand(3, 5, generator=g) < 0.6
    loss = summed_loss(logits, targets, mask)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert float(loss) == pytest.approx(by_hand(logits, targets, mask), rel=1e-5)
    whole = summed_loss(logits, targets)
    assert float(whole) == pytest.approx(by_hand(logits, targets, torch.ones_like(mask)), rel=1e-5)


def test_b47_nothing_to_learn_gives_zero_and_finite_gradients():
    """A batch without targets."""
    logits = torch.randn(2, 3, 7, requires_grad=True)
    loss = summed_loss(logits, torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.bool))
    loss.backward()
    assert float(loss.detach()) == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_b47_targets_are_masked_by_mask_and_not_by_id():
    """Ids [5, 6, E, E], mask [1, 1, 1, 0], pad = E: targets 6 and E train, the last does not."""
    eos = 9
    batch = shifted(torch.tensor([[5, 6, eos, eos]]), torch.tensor([[True, True, True, False]]))
    assert batch.tokens.tolist() == [[5, 6, eos]]
    assert batch.targets.tolist() == [[6, eos, eos]]
    assert batch.mask.tolist() == [[True, True, False]]
    assert batch.n_targets == 2
    logits = torch.randn(1, 3, 11, requires_grad=True)
    summed_loss(logits, batch.targets, batch.mask).backward()
    assert (logits.grad[0].abs().sum(-1) > 0).tolist() == [True, True, False]
    assert float(logits.grad[0, 1, eos]) < 0


def test_b47_the_first_real_token_of_a_row_is_no_target():
    """Also after padding on the left."""
    batch = shifted(torch.tensor([[0, 0, 5, 6, 7]]), torch.tensor([[False, False, True, True, True]]))
    assert batch.mask.tolist() == [[False, False, True, True]]
    assert batch.padding.tolist() == [[False, False, True, True]]


def test_supervised_tokens_and_document_borders_join():
    tokens = torch.arange(6)[None]
    segments = torch.tensor([[0, 0, 0, 1, 1, 1]])
    supervised = torch.tensor([[True, False, True, True, True, True]])
    batch = shifted(tokens, supervised=supervised, segments=segments)
    assert batch.mask.tolist() == [[False, True, False, True, True]]
    assert batch.segments.tolist() == [[0, 0, 0, 1, 1]]
    assert shifted(tokens).mask is None
    assert shifted(tokens).n_targets == 5


def test_b47_a_row_without_targets_changes_nothing():
    """A mixed batch equals the batch without that row, in loss and gradients."""
    model = build(load_spec({**RECIPE, "vocab_size": 11}), seed=1)
    g = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(11, (3, 6), generator=g), torch.randint(11, (3, 6), generator=g)
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[1] = False
    results = []
    for batch in (
        make_batch(tokens, targets, mask),
        make_batch(tokens[[0, 2]], targets[[0, 2]], mask[[0, 2]]),
    ):
        model.zero_grad()
        loss = batch_loss(model, batch) / batch.n_targets
        loss.backward()
        results.append((loss.detach(), [p.grad.clone() for p in model.parameters()]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-7)


def test_micro_batches_cover_a_batch_in_order():
    batch = make_batch(torch.arange(15).view(5, 3), torch.arange(15).view(5, 3), torch.ones(5, 3, dtype=torch.bool))
    parts = batch.micro(2)
    assert [p.n_rows for p in parts] == [2, 2, 1]
    assert torch.equal(torch.cat([p.tokens for p in parts]), batch.tokens)
    assert sum(p.n_targets for p in parts) == batch.n_targets
