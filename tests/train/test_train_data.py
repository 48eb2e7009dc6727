import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyformer.errors import UserError
from anyformer.train.data import TrainingData, Windows, fingerprint, whole_split


class Counting:
    """Token i is i, so that a token tells its place; reads by slices alone."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, key):
        return np.arange(*key.indices(self.n), dtype=np.int64)


def data(n, context=5, batch=4, seed=7, documents=None):
    return TrainingData(Counting(n), documents, context=context, batch=batch, seed=seed)


@settings(deadline=None, max_examples=80)
@given(n=st.integers(6, 400), context=st.integers(1, 9), batch=st.integers(1, 9), seed=st.integers(0, 2**63 - 1))
def test_an_epoch_reads_every_window_once_and_nothing_is_dropped_between_epochs(n, context, batch, seed):
    if n < context + 1:
        return
    source = data(n, context, batch, seed)
    rows = [
        row for step in range(3 * source.rows_per_epoch // batch + 2) for row in source.batch(step).targets.tolist()
    ]
    for epoch in range(3):
        own = rows[epoch * source.rows_per_epoch : (epoch + 1) * source.rows_per_epoch]
        seen = [token for row in own for token in row]
        twice = len(seen) - len(set(seen))
        assert twice < context, "only the window at 0 may meet another"
        assert not twice or any(row[0] == 1 for row in own)
        assert min(seen) >= 1
        assert max(seen) < n
        assert n - 1 - len(seen) < context, "a whole window more would have found room"
        for row in own:
            assert row == list(range(row[0], row[0] + context))


def test_inputs_are_the_tokens_before_the_targets():
    batch = data(100).batch(3)
    assert (batch.targets - batch.tokens == 1).all()
    assert batch.tokens.shape == (4, 5)
    assert batch.mask is None
    assert batch.n_targets == 20


def test_b09_a_batch_depends_on_seed_and_step_alone():
    """Reading other steps before, or none, changes nothing; epochs differ in order and phase."""
    straight = data(90)
    hashes = [fingerprint(straight.batch(step)) for step in range(30)]
    assert len(set(hashes)) == 30
    for step in (29, 3, 17, 3, 0):
        assert fingerprint(data(90).batch(step)) == hashes[step]
    backwards = data(90)
    assert [fingerprint(backwards.batch(step)) for step in reversed(range(30))] == hashes[::-1]
    assert fingerprint(data(90, seed=8).batch(0)) != hashes[0]
    assert len({int(straight.order(epoch).min() % 5) for epoch in range(40)}) == 5


def test_large_splits_are_read_row_by_row_alike(monkeypatch):
    whole = data(300)
    monkeypatch.setattr("anyformer.train.data._IN_MEMORY", 10)
    pieces = data(300)
    assert [fingerprint(whole.batch(s)) for s in range(40)] == [fingerprint(pieces.batch(s)) for s in range(40)]


def test_shares_of_processes_make_up_the_batch():
    source = data(100, batch=5)
    whole = source.batch(2).tokens.tolist()
    assert source.batch(2, slice(0, 2)).tokens.tolist() + source.batch(2, slice(2, 5)).tokens.tolist() == whole


def test_text_shorter_than_a_row_is_refused():
    assert data(6).rows_per_epoch == 1
    with pytest.raises(UserError, match="shorter than one row") as caught:
        data(5)
    assert "at least 6" in str(caught.value)


def test_documents_are_kept_apart():
    starts = np.array([0, 3, 3, 11, 12, 60])
    windows = Windows(Counting(100), starts, 8)
    batch = windows.rows(np.array([0, 9, 20], dtype=np.int64))
    assert batch.segments.tolist() == [
        [0, 0, 0, 2, 2, 2, 2, 2],
        [0, 0, 1, 2, 2, 2, 2, 2],
        [0] * 8,
    ]
    # A target is left out exactly where it begins a document.
    assert [t for t, m in zip(batch.targets[0].tolist(), batch.mask[0].tolist(), strict=True) if not m] == [3]
    assert [t for t, m in zip(batch.targets[1].tolist(), batch.mask[1].tolist(), strict=True) if not m] == [11, 12]
    assert batch.mask[2].all()
    assert windows.rows(np.array([20, 40])).segments is None


@settings(deadline=None, max_examples=60)
@given(n=st.integers(0, 90), context=st.integers(1, 20), rows=st.integers(1, 5))
def test_a_whole_split_is_every_token_after_the_first_once(n, context, rows):
    batches = list(whole_split(Windows(Counting(n), None, context), rows))
    seen = []
    for batch in batches:
        assert batch.n_rows <= rows
        mask = np.ones(batch.targets.shape, bool) if batch.mask is None else batch.mask.numpy()
        assert (batch.targets.numpy() - batch.tokens.numpy() == 1)[mask].all()
        seen += batch.targets.numpy()[mask].tolist()
    assert seen == list(range(1, n))
    assert sum(batch.n_targets for batch in batches) == max(0, n - 1)


@pytest.mark.parametrize(("n", "rows"), [(11, 2), (13, 2), (15, 2), (16, 3), (6, 1), (8, 1)])
def test_an_epoch_has_as_many_rows_as_the_text_has_windows(n, rows):
    """2·T + 1 tokens are two rows, not one; every phase comes; a window without room begins at 0."""
    source = data(n)
    assert source.rows_per_epoch == rows
    begins = [np.sort(source.order(epoch)) for epoch in range(80)]
    assert all(len(each) == rows and each.min() >= 0 and each.max() + 5 <= n - 1 for each in begins)
    room = [each for each in begins if each[0] > 0 or rows == 1 or each[1] == 5]
    assert all((np.diff(each) == 5).all() for each in room)
    for each in begins:
        assert (np.diff(each[1:]) == 5).all()
    assert {int(start) % 5 for each in begins for start in each} == set(range(5 if n > 9 else min(5, n - 5)))
