import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyformer.train.schedule import WSD, Constant, Cosine, Linear, ratio, span


def test_b48_the_numbers_of_warm_up_and_cosine():
    """Warm-up 4, total 10, peak 1, minimum 0.1."""
    schedule = Cosine(warmup=4, min_ratio=0.1)
    wanted = [0.25, 0.5, 0.75, 1, 1, 0.939711, 0.775, 0.55, 0.325, 0.160289, 0.1, 0.1, 0.1]
    assert [ratio(schedule, step, 10) for step in range(13)] == pytest.approx(wanted, abs=1e-6)
    assert ratio(schedule, 3, 10) == 1.0
    assert ratio(schedule, 4, 10) == 1.0


KINDS = {
    "cosine": lambda w, m: Cosine(warmup=w, min_ratio=m),
    "linear": lambda w, m: Linear(warmup=w, min_ratio=m),
    "wsd": lambda w, m: WSD(warmup=w, min_ratio=m, decay=0.3),
    "sqrt": lambda w, m: WSD(warmup=w, min_ratio=m, decay=0.3, shape="sqrt"),
}


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(total=st.integers(1, 60), data=st.data())
def test_b48_every_schedule_starts_above_zero_hits_its_peak_and_keeps_its_minimum(kind, total, data):
    """Warm-up 0 and warm-up = total are fine."""
    warmup = data.draw(st.integers(0, total))
    low = data.draw(st.sampled_from([0.0, 0.1, 0.5]))
    schedule = KINDS[kind](warmup, low)
    values = [ratio(schedule, step, total) for step in range(total)]
    assert values[0] > 0
    assert max(values) == 1.0
    assert all(low <= value <= 1 for value in values)
    if warmup:
        assert values[warmup - 1] == 1.0
        assert values[:warmup] == sorted(values[:warmup])
    assert values[warmup:] == sorted(values[warmup:], reverse=True)
    assert ratio(schedule, total, total) == ratio(schedule, total + 100, total) == low


def test_linear_falls_evenly():
    schedule = Linear(warmup=2, min_ratio=0.2)
    assert [ratio(schedule, s, 10) for s in range(11)] == pytest.approx(
        [0.5, 1, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]
    )


def test_wsd_is_flat_and_then_falls():
    schedule = WSD(warmup=2, decay=4, min_ratio=0.2)
    assert [ratio(schedule, s, 10) for s in range(11)] == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])
    root = WSD(warmup=0, decay=4, shape="sqrt")
    assert [ratio(root, s, 4) for s in range(5)] == pytest.approx(
        [1, 1 - math.sqrt(0.25), 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0]
    )


def test_constant_stays():
    assert [ratio(Constant(warmup=2), s, 4) for s in range(6)] == [0.5, 1, 1, 1, 1, 1]


def test_a_span_below_one_is_a_share():
    assert span(0.02, 1000) == 20
    assert span(1, 1000) == 1
    assert span(150, 1000) == 150
    assert span(0, 1000) == 0


def test_a_negative_step_is_refused():
    with pytest.raises(ValueError, match="at least 0"):
        ratio(Cosine(), -1, 10)
