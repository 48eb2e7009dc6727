"""Figures as inline SVG that takes its colours from the page, so that light, dark and print need one drawing.

Each function returns `<svg>…</svg>` without scripts, addresses or metadata; the same data give the same bytes.
"""

import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from anyformer.report.runs import Run, Series

Points = tuple[np.ndarray, np.ndarray]

STRETCHES = 600
"""A wide line is drawn through at most twice as many points: as many as a screen shows, few enough for a light page."""

# A colour that is drawn stands for a variable of page.css, which alone knows what it looks like.
COLOURS = {
    "#000001": "var(--ink)",
    "#000002": "var(--quiet)",
    "#000003": "var(--grid)",
    "#000004": "var(--series-1)",
    "#000005": "var(--series-2)",
    "#000006": "var(--bad)",
    "#000007": "var(--card)",
}
INK, QUIET, GRID, FIRST, SECOND, BAD, CARD = COLOURS

WIDE, SMALL = (10.4, 4.1), (3.9, 2.75)
"""Sizes in inches of 72 units: as wide as the page, and for a third of it or a phone."""

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "anyformer",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 10.0,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": QUIET,
    "axes.labelsize": 10.0,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": GRID,
    "xtick.labelcolor": QUIET,
    "xtick.major.size": 3.0,
    "ytick.color": QUIET,
    "ytick.major.size": 0.0,
    "ytick.minor.size": 0.0,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
}


def smooth(steps: np.ndarray, values: np.ndarray, share: float = 0.03) -> Points:
    """The Gaussian kernel average of `values` [N] at up to `STRETCHES` of their `steps` [N].

    s(t) = Σ k((t - tᵢ)/σ)·vᵢ / Σ k((t - tᵢ)/σ), k(u) = exp(-u²/2) within |u| ≤ 3 (Nadaraya 1964; Watson 1964). σ is
    `share` of the steps so far, so that the first steep fall keeps its shape. Only finite values count.
    """
    finite = np.isfinite(values)
    t, v = steps[finite].astype(np.float64), values[finite].astype(np.float64)
    if len(t) == 0:
        return t, v
    at = t[np.unique(np.linspace(0, len(t) - 1, STRETCHES).round().astype(int))]
    smoothed = np.empty_like(at)
    for index, now in enumerate(at):
        sigma = max(share * (now - t[0]), 1e-9)
        first, last = np.searchsorted(t, (now - 3 * sigma, now + 3 * sigma), side="left")
        near = slice(first, max(last, first + 1))
        weight = np.exp(-0.5 * ((now - t[near]) / sigma) ** 2)
        smoothed[index] = float(weight @ v[near] / weight.sum())
    return at, smoothed


def thin(steps: np.ndarray, values: np.ndarray, size: tuple[float, float] = SMALL) -> Points:
    """The finite `values` [N] at no more points than `size` can show: each stretch keeps its least and its largest."""
    finite = np.isfinite(values)
    t, v = steps[finite].astype(np.float64), values[finite].astype(np.float64)
    most = round(STRETCHES * size[0] / WIDE[0])
    if len(t) <= 2 * most:
        return t, v
    stretches = np.array_split(np.arange(len(t)), most)
    kept = {int(pick(v[part])) + int(part[0]) for part in stretches for pick in (np.argmin, np.argmax)}
    index = np.array(sorted(kept | {0, len(t) - 1}))
    return t[index], v[index]


@contextmanager
def _library_style() -> Iterator[None]:
    """Draws in our style alone, whatever style the user's own matplotlib has."""
    import matplotlib

    style: dict[Any, Any] = {k: v for k, v in matplotlib.rcParamsDefault.items() if not k.startswith("backend")}
    with matplotlib.rc_context(style | _STYLE):
        yield


def _clean(svg: str, name: str, title: str, description: str) -> str:
    """Matplotlib's SVG file as an element of a page: described, coloured by the page, every id the page's only one."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg[^>]*(viewBox="[^"]*")[^>]*>', rf"<svg \1>@{name}@", svg, count=1)
    svg = svg.replace("xlink:href", "href")
    used = set(re.findall(r"""(?:url\(|href=["'])#([^)"']+)""", svg))
    svg = re.sub(r' id="([^"]*)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r"""(url\(|href=")#""", rf"\g<1>#{name}-", svg)
    svg = re.sub(r"font-family: [^;\"]+;?\s*", "", svg)
    svg = re.sub(r' transform="rotate\(-0 [^"]*\)"', "", svg)
    svg = re.sub(r"\s*\n\s*", " ", svg).replace("> <", "><")
    for drawn, variable in COLOURS.items():
        svg = svg.replace(drawn, variable)
    words = f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-desc">{escape(description)}</desc>'
    head = f'role="img" aria-labelledby="{name}-title {name}-desc">{words}'
    return svg.replace(f">@{name}@", f" {head}", 1).strip()


@contextmanager
def _axes(size: tuple[float, float]) -> Iterator[tuple["Axes", io.StringIO]]:
    """Axes to draw on; when the block ends the buffer holds the figure as SVG."""
    from matplotlib.figure import Figure

    buffer = io.StringIO()
    with _library_style():
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        axes.margins(x=0.01)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.locator_params(axis="x", integer=True, nbins=5 if size is SMALL else 10)
        yield axes, buffer
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})


def _label(axes: "Axes", x: float, y: float, words: str, colour: str, **more: Any) -> None:
    """Words at a point; the page puts a halo around all words of a figure so that they can be read over lines."""
    more = {"xytext": (0, 7), "textcoords": "offset points", "ha": "right", "va": "bottom", "fontsize": 10, **more}
    axes.annotate(words, (x, y), color=colour, **more).set_in_layout(False)


BEGINNING = 0.03
"""The share of the steps whose fall of the loss may leave the frame."""


def _frame(train: Points, smoothed: Points, evaluations: np.ndarray) -> tuple[float, float] | None:
    """Limits for the loss where its first steep fall, or rare spikes, would flatten everything else; None elsewhere."""
    (steps, raw), (at, average) = train, smoothed
    if len(steps) < 10:
        return None
    later = steps[0] + BEGINNING * (steps[-1] - steps[0])
    usual = [float(np.quantile(raw[steps >= later], 0.99)), float(np.quantile(average[at >= later], 0.99))]
    usual += [float(loss) for loss in evaluations if loss <= raw[0]]
    least, most = min(float(raw.min()), *usual), max(usual)
    room = 0.06 * (most - least)
    return (least - room, most + room) if float(raw.max()) - least > 1.2 * (most - least) else None


def loss_curve(run: "Run", size: tuple[float, float] = WIDE, name: str = "loss") -> str:
    """Training loss, smoothed and raw, with every evaluation, in nats per token over steps."""
    train, validation = run.series["loss"].finite(), run.validation.finite()
    smoothed = smooth(*train)
    with _axes(size) as (axes, buffer):
        if len(train[0]):
            axes.plot(*thin(*train, size), color=FIRST, alpha=0.28, linewidth=0.8)
            axes.plot(*smoothed, color=FIRST, label="training")
        if len(validation[0]):
            axes.plot(*validation, color=SECOND, marker="o", markersize=4.5, markeredgecolor=CARD, label="validation")
        if run.diverged_at is not None:
            axes.axvline(run.diverged_at, color=BAD, linewidth=1.2, linestyle=(0, (4, 3)))
            words = f"diverged at step {run.diverged_at:,}"
            _label(
                axes, run.diverged_at, 0.99, words, BAD, xycoords=axes.get_xaxis_transform(), xytext=(-6, 0), va="top"
            )
        frame = _frame(train, smoothed, validation[1])
        if frame is not None:
            axes.set_ylim(frame)
            highest = int(np.argmax(train[1]))
            words = f"↑ up to {train[1][highest]:.4g}, at step {train[0][highest]:,.0f}"
            axes.set_title(words, loc="left", fontsize=10, color=QUIET)
        axes.set(xlabel="step", ylabel="loss, nats per token")
        if axes.get_legend_handles_labels()[0]:
            right = run.diverged_at is None
            axes.legend(frameon=False, loc="upper right" if right else "upper center")
    return _clean(buffer.getvalue(), name, "Loss", _loss_words(run))


def _span(series: "Series") -> str:
    steps, values = series.finite()
    if not len(steps):
        return "no finite values"
    ends = f"from {values[0]:.4g} at step {steps[0]:,.0f} to {values[-1]:.4g} at step {steps[-1]:,.0f}"
    return f"{ends}; least {values.min():.4g}, most {values.max():.4g}"


def _loss_words(run: "Run") -> str:
    ending = "" if run.diverged_at is None else f" The loss stopped being finite at step {run.diverged_at:,}."
    return f"Training loss: {_span(run.series['loss'])}. Validation loss: {_span(run.validation)}.{ending}"


def learning_rates(groups: Mapping[str, "Series"]) -> str:
    """Learning rates over steps; several groups as shares of their peaks, because the peaks may differ widely.

    Groups that follow the same course share one line.
    """
    courses: list[tuple[list[str], np.ndarray, np.ndarray]] = []
    several = len(groups) > 1
    for group, series in groups.items():
        steps, values = series.finite()
        peak = float(values.max()) if len(values) and values.max() > 0 else 1.0
        course = values / peak if several else values
        words = f"{_short_name(group)}, peak {peak:.3g}" if several or group else f"peak {peak:.3g}"
        same = next((c for c in courses if len(c[2]) == len(course) and np.allclose(c[2], course, atol=1e-6)), None)
        if same:
            same[0].append(words)
        else:
            courses.append(([words], steps, course))
    with _axes(SMALL) as (axes, buffer):
        for (names, steps, course), colour in zip(courses, (FIRST, SECOND, INK, QUIET) * len(courses), strict=False):
            axes.plot(*thin(steps, course), color=colour, label="\n".join(names))
        axes.set_ylim(bottom=0)
        axes.set(xlabel="step", ylabel="share of the peak" if several else "learning rate")
        axes.margins(y=0.12)
        if not several:
            axes.ticklabel_format(
                axis="y", style="plain" if _plain(groups) else "sci", scilimits=(0, 0), useOffset=False
            )
        if len(courses) > 1:
            axes.legend(frameon=False, loc="lower center", handlelength=1.4)
        elif courses:
            words = "\n".join(courses[0][0])
            _label(axes, 0.5, 0.06, words, INK, xycoords="axes fraction", xytext=(0, 0), ha="center")
    spans = "; ".join(f"{group or 'all parameters'}: {_span(series)}" for group, series in groups.items())
    return _clean(buffer.getvalue(), "lr", "Learning rate", spans)


def _short_name(name: str) -> str:
    return name if len(name) <= 20 else name[:19] + "…"


def _plain(groups: Mapping[str, "Series"]) -> bool:
    """Whether the rates are large enough to be read without an exponent."""
    return any(len(s.finite()[1]) and s.finite()[1].max() >= 0.001 for s in groups.values())


def throughput(series: "Series") -> str:
    """Tokens per second over steps, with the median."""
    steps, values = series.finite()
    with _axes(SMALL) as (axes, buffer):
        if len(steps):
            axes.plot(*thin(steps, values), color=FIRST, alpha=0.35, linewidth=0.8)
            middle = float(np.median(values))
            axes.axhline(middle, color=FIRST)
            words = f"median {middle:,.0f}"
            _label(axes, 1.0, 0.05, words, INK, xycoords="axes fraction", xytext=(-4, 0))
            top = 1.25 * float(np.quantile(values, 0.99))
            axes.set_ylim(0, top if top > 0 else 1.0)
        axes.yaxis.set_major_formatter(lambda value, _: _short(value))
        axes.set(xlabel="step", ylabel="tokens per second")
    return _clean(buffer.getvalue(), "throughput", "Throughput", f"Tokens per second: {_span(series)}.")


def gradient_norm(series: "Series", clip: float | None = None) -> str:
    """The gradient's norm before clipping over steps, smoothed and raw; a logarithmic axis where it spans decades."""
    steps, values = series.finite()
    with _axes(SMALL) as (axes, buffer):
        if len(steps):
            axes.plot(*thin(steps, values), color=FIRST, alpha=0.28, linewidth=0.8)
            axes.plot(*smooth(steps, values), color=FIRST)
            if values.min() > 0 and values.max() > 30 * values.min():
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            else:
                axes.set_ylim(bottom=0)
            if clip and values.min() <= clip <= values.max():
                axes.axhline(clip, color=QUIET, linewidth=1.0, linestyle=(0, (4, 3)))
                words = f"clipped to {clip:g}"
                _label(axes, 1.0, clip, words, QUIET, xycoords=axes.get_yaxis_transform(), xytext=(-4, 3))
        axes.set(xlabel="step", ylabel="gradient norm")
    return _clean(buffer.getvalue(), "gradient", "Gradient norm", f"Gradient norm before clipping: {_span(series)}.")


def _short(value: float) -> str:
    return f"{value / 1e6:g}M" if value >= 1e6 else f"{value / 1e3:g}k" if value >= 1e3 else f"{value:g}"


def run_figures(run: "Run") -> dict[str, str]:
    """Every figure of a training run that its metrics allow, by name."""
    drawn: dict[str, str] = {}
    if len(run.series["loss"].steps) or len(run.validation.steps):
        drawn["loss"] = loss_curve(run)
        drawn["loss_narrow"] = loss_curve(run, SMALL, name="loss-narrow")
    if run.learning_rates:
        drawn["lr"] = learning_rates(run.learning_rates)
    if len(run.series["tokens_per_second"].finite()[0]):
        drawn["tokens_per_second"] = throughput(run.series["tokens_per_second"])
    if len(run.series["grad_norm"].finite()[0]):
        drawn["grad_norm"] = gradient_norm(run.series["grad_norm"], run.clip)
    return drawn
