"""Curves against sums written out, and SVG that a page can hold."""

import math
import re
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from run_files import train_record, usual_records

from anyformer.report.figures import COLOURS, SMALL, learning_rates, loss_curve, run_figures, smooth, thin
from anyformer.report.runs import Series, read_run


def test_smoothing_is_the_kernel_average_of_its_formula():
    rng = np.random.default_rng(0)
    steps = np.sort(rng.choice(5000, 211, replace=False)).astype(float)
    values = rng.normal(size=211)
    values[[3, 100]] = math.nan, math.inf
    at, found = smooth(steps, values, share=0.07)
    finite = [(t, v) for t, v in zip(steps, values, strict=True) if math.isfinite(v)]
    start = finite[0][0]
    assert at.tolist() == [t for t, _ in finite]
    for now, got in zip(at[1:], found[1:], strict=True):
        sigma = 0.07 * (now - start)
        pairs = [(math.exp(-(((now - t) / sigma) ** 2) / 2), v) for t, v in finite if abs(now - t) <= 3 * sigma]
        assert got == pytest.approx(sum(w * v for w, v in pairs) / sum(w for w, _ in pairs), rel=1e-9)
    assert found[0] == finite[0][1]


def test_smoothing_keeps_constants_and_stays_within_the_values():
    steps = np.arange(5000.0)
    assert smooth(steps, np.full(5000, 2.5))[1] == pytest.approx(2.5)
    values = np.sin(steps)
    at, found = smooth(steps, values)
    assert len(at) == 600
    assert found.min() >= values.min()
    assert found.max() <= values.max()


def test_thinning_keeps_ends_extremes_and_every_point_of_short_lines():
    values = np.random.default_rng(1).normal(size=12_345)
    values[[777, 9000]] = 50.0, -50.0
    t, v = thin(np.arange(12_345.0), values)
    assert (t[0], t[-1], v.max(), v.min()) == (0, 12_344, 50.0, -50.0)
    assert len(t) <= 2 * 600 * SMALL[0] / 10.4 + 2
    assert (np.diff(t) > 0).all()
    assert (values[t.astype(int)] == v).all()
    assert len(thin(np.arange(100.0), values[:100])[0]) == 100


@pytest.fixture
def figures(make_run):
    return run_figures(read_run(make_run()))


def test_figures_are_plain_described_svg_in_the_pages_colours(figures):
    assert sorted(figures) == ["grad_norm", "loss", "loss_narrow", "lr", "tokens_per_second"]
    for svg in figures.values():
        root = ElementTree.fromstring(svg)
        assert root.tag == "svg"
        assert root.attrib["role"] == "img"
        ids = [e.attrib["id"] for e in root.iter() if "id" in e.attrib]
        assert len(ids) == len(set(ids))
        assert set(root.attrib["aria-labelledby"].split()) <= set(ids)
        assert set(re.findall(r"""(?:url\(|href=")#([^)"]+)""", svg)) <= set(ids)
        assert "http" not in svg
        assert "<metadata" not in svg
        assert "<style" not in svg
        assert "var(--series-1)" in svg
        assert not set(re.findall(r"#[0-9a-f]{6}", svg)), "a colour that the page does not choose"


def test_ids_of_different_figures_never_meet(figures):
    ids = [found for svg in figures.values() for found in re.findall(r' id="([^"]*)"', svg)]
    assert len(ids) == len(set(ids))


def test_words_stay_words(figures):
    texts = ["".join(e.itertext()) for e in ElementTree.fromstring(figures["loss"]).iter("text")]
    assert {"step", "loss, nats per token", "training", "validation"} <= set(texts)


def test_the_description_holds_the_ends_of_the_curves(figures):
    description = ElementTree.fromstring(figures["loss"]).findtext("desc") or ""
    assert f"from {train_record(1)['loss']:.4g} at step 1 to {train_record(40)['loss']:.4g} at step 40" in description
    assert "from 1.254 at step 20 to 1.274 at step 40" in description


def test_the_users_own_style_changes_nothing_and_is_left_alone(make_run):
    run = read_run(make_run())
    plain = loss_curve(run)
    with matplotlib.rc_context({"lines.linewidth": 9.0, "font.size": 30, "legend.fontsize": 30, "axes.labelpad": 40}):
        assert loss_curve(run) == plain
        assert matplotlib.rcParams["lines.linewidth"] == 9.0


def test_drawing_opens_no_window_manager(figures):
    import sys

    assert figures
    assert "matplotlib.pyplot" not in sys.modules


def test_a_diverged_run_marks_the_step(make_run):
    records = [*usual_records(), {"kind": "diverged", "step": 41, "batch": "a", "got": "loss nan"}]
    svg = loss_curve(read_run(make_run(records, result=None)))
    assert "diverged at step 41" in svg
    assert "var(--bad)" in svg


def test_learning_rates_of_one_course_share_a_line():
    steps = np.arange(1.0, 50.0)
    course = np.minimum(1, steps / 10)
    same = learning_rates({"a": Series(steps, 0.02 * course), "b$x_$": Series(steps, 0.003 * course)})
    other = learning_rates({"a": Series(steps, 0.02 * course), "b": Series(steps, 0.003 / steps)})
    assert "var(--series-2)" not in same
    assert "var(--series-2)" in other
    assert "b$x_$, peak 0.003" in same


@pytest.mark.parametrize("values", [[], [math.nan] * 20, [0.0] * 20, [1e30, 1.0] * 10, [2.0], [-1.0, -2.0]])
def test_curves_that_are_hard_to_frame(make_run, values):
    records = [train_record(s, loss=v, lr=0.0, grad_norm=v, tokens_per_second=v) for s, v in enumerate(values, 1)]
    for svg in run_figures(read_run(make_run(records))).values():
        ElementTree.fromstring(svg)


def test_a_colour_is_one_variable():
    assert len(set(COLOURS.values())) == len(COLOURS)
