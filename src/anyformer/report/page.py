"""The report of a training run: one page that needs nothing but itself."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from anyformer import files
from anyformer.report import words
from anyformer.report.figures import run_figures
from anyformer.report.runs import Evaluation, Run, Sample, count, number, read_run, step_seconds

MOST_SAMPLES = 6
"""Checkpoints whose samples are shown at once; the others are folded away."""

_STATES = {"running": "running, or cut off"}

_PARAMETERS = (
    ("parameters", "in all"),
    ("embedding_parameters", "embedding"),
    ("active_parameters", "active per token"),
)
_FLOPS = (
    ("flops_forward_per_token", "forward, all of T×S"),
    ("flops_forward_per_token_visible", "forward, the visible part of T×S"),
    ("flops_training_per_token", "training, all of T×S"),
)
_MEMORY = {
    "optimizer": "optimiser state",
    "logits": "logits and their loss",
    "working": "gradients inside a block",
}
_MEMORY_TOTALS = {"live": "in use at one time, at most", "peak": "peak of the process"}


class Tile(NamedTuple):
    """A number of the headline: what it is, how it reads, a remark, and its exact value for machines."""

    label: str
    value: str
    note: str = ""
    exact: float | None = None


class Row(NamedTuple):
    """A row of a table of quantities; `share` in percent draws a bar behind the value."""

    label: str
    value: str
    exact: float | None = None
    share: float | None = None


class DataRow(NamedTuple):
    """The size of one part of the corpus."""

    split: str
    tokens: int | None
    bytes: int | None
    documents: int | None


class Score(NamedTuple):
    """A planned quantity beside the measured one."""

    label: str
    planned: str
    measured: str
    ratio: float


def environment() -> Environment:
    """The templates of this room. Every value is escaped, but for style and figures; an unknown name is an error."""
    loader = PackageLoader("anyformer.report")
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters |= {
        "duration": words.duration,
        "fixed": words.fixed,
        "perplexity": words.perplexity,
        "visible": words.visible,
        "whole": words.whole,
    }
    return made


def render(template: str, **values: Any) -> str:
    """A page from `template`, its style sheet inside it."""
    made = environment()
    source = made.loader and made.loader.get_source(made, "page.css")[0]
    return made.get_template(template).render(css=source, **values)


def _loss_tile(run: Run) -> Tile:
    if not run.evaluations:
        steps, losses = run.series["loss"].finite()
        value = float(losses[-1]) if len(steps) else None
        note = "nothing logged yet" if value is None else "of the last step; no evaluation yet"
        return Tile("training loss", words.fixed(value), note, value)
    last, best = run.evaluations[-1], run.best
    note = "nats per token"
    if best is not None and best.step == last.step and len(run.evaluations) > 1:
        note += ", the best of the run"
    elif best is not None and best.step != last.step:
        note += f"; best {words.fixed(best.loss)} at step {best.step:,}"
    return Tile("validation loss", words.fixed(last.loss), note, last.loss)


def tiles(run: Run) -> list[Tile]:
    """The headline's numbers: those of the last evaluation, and how much went into them."""
    last = run.evaluations[-1] if run.evaluations else None
    bits, surprise = (last.bits_per_byte, last.perplexity) if last else (None, None)
    of = f" of {run.total_steps:,}" if run.total_steps else ""
    seen = f"{words.whole(run.step)}{of} steps" if run.step is not None else ""
    speed = run.series["tokens_per_second"].median()
    return [
        _loss_tile(run),
        Tile("perplexity", words.perplexity(surprise), "per token of the validation text", surprise),
        Tile("bits per byte", words.fixed(bits), "of the validation text", bits),
        Tile(
            "parameters",
            words.short(run.parameters),
            words.whole(run.parameters) if run.parameters else "",
            run.parameters,
        ),
        Tile("tokens seen", words.short(run.tokens), seen, run.tokens),
        Tile(
            "time", words.duration(run.seconds), f"median {speed:,.0f} tokens per second" if speed else "", run.seconds
        ),
    ]


def _rows(table: Mapping[str, Any], keys: tuple[tuple[str, str], ...], write: Any, bars: bool = False) -> list[Row]:
    found = [(label, number(table.get(key))) for key, label in keys]
    found = [(label, value) for label, value in found if math.isfinite(value)]
    most = max([value for _, value in found], default=0.0)
    return [Row(label, write(v), v, round(100 * v / most, 2) if bars and most else None) for label, v in found]


def plan_groups(plan: Mapping[str, Any]) -> list[tuple[str, list[Row]]]:
    """The plan as titled groups of rows. What it does not hold is left out."""
    facts, roles, memory = (
        plan[k] if isinstance(plan.get(k), dict) else {} for k in ("facts", "parameters_by_role", "memory")
    )
    where = f"batch {words.whole(plan.get('batch'))} × {words.whole(plan.get('context'))} tokens"
    cache = (("cache_bytes_per_token", "per token"), ("cache_bytes", where))
    role_keys = tuple((role, role) for role in roles)
    parts = tuple((key, _MEMORY.get(key, key)) for key in memory if key not in _MEMORY_TOTALS)
    totals = _rows(memory, tuple(_MEMORY_TOTALS.items()), words.size)
    groups = [
        ("Model", [Row(str(key), str(value)) for key, value in facts.items()]),
        ("Parameters", _rows(plan, _PARAMETERS, words.whole)),
        ("Parameters by role", _rows(roles, role_keys, words.whole, bars=True)),
        ("FLOPs per token", _rows(plan, _FLOPS, words.short)),
        (f"KV cache, {plan.get('dtype', '')}".rstrip(", "), _rows(plan, cache, words.size)),
        (f"Training memory, {where}", _rows(memory, parts, words.size, bars=True) + totals),
    ]
    return [(title, rows) for title, rows in groups if rows]


_PEAK = "peak memory of training (measured with corpus and libraries)"


def scores(run: Run) -> list[Score]:
    """What was planned beside what was measured, for what the run measured."""
    memory = run.plan.get("memory")
    planned = number(memory.get("peak")) if isinstance(memory, dict) else math.nan
    if run.peak_memory is None or not planned > 0:
        return []
    ratio = run.peak_memory / planned
    return [Score(_PEAK, words.size(planned), words.size(run.peak_memory), ratio)]


def speed_rows(run: Run) -> list[Row]:
    """How fast the run was, and what its planned FLOPs make of that."""
    step, speed = step_seconds(run.series["seconds"]).median(), run.series["tokens_per_second"].median()
    flops = number(run.plan.get("flops_training_per_token"))
    rows = []
    if step is not None:
        rows.append(Row("time of a step, median", words.duration(step), step))
    if speed is not None:
        rows.append(Row("tokens per second, median", words.whole(speed), speed))
    if math.isfinite(flops) and run.tokens:
        rows.append(
            Row(
                f"training FLOPs of {words.short(run.tokens)} tokens",
                words.short(flops * run.tokens),
                flops * run.tokens,
            )
        )
    if math.isfinite(flops) and speed:
        rows.append(Row("FLOPs per second, median", words.short(flops * speed), flops * speed))
    return rows


def data_rows(data: Mapping[str, Any]) -> list[DataRow]:
    """The sizes of the training and validation text."""
    found = [(name, data[key]) for key, name in (("train", "training"), ("val", "validation")) if key in data]
    return [
        DataRow(name, *(count(split.get(key)) for key in ("tokens", "bytes", "documents")))
        for name, split in found
        if isinstance(split, dict)
    ]


class Shown(NamedTuple):
    """The samples of one checkpoint, and the evaluation that was current when it wrote them."""

    step: int
    evaluation: Evaluation | None
    samples: list[Sample]


def sample_groups(run: Run) -> tuple[list[Shown], list[Shown]]:
    """Samples by checkpoint: those to show, evenly spread from the first to the last, and the others."""
    steps = list(dict.fromkeys(s.step for s in run.samples))
    groups = [
        Shown(
            step,
            next((e for e in reversed(run.evaluations) if e.step <= step), None),
            [s for s in run.samples if s.step == step],
        )
        for step in steps
    ]
    if len(groups) <= MOST_SAMPLES:
        return groups, []
    chosen = {round(i * (len(groups) - 1) / (MOST_SAMPLES - 1)) for i in range(MOST_SAMPLES)}
    return [g for i, g in enumerate(groups) if i in chosen], [g for i, g in enumerate(groups) if i not in chosen]


def report_page(run: Run) -> str:
    """The whole report of `run` as HTML."""
    shown, folded = sample_groups(run)
    speed = speed_rows(run)
    return render(
        "run.html.j2",
        run=run,
        state=_STATES.get(run.state, run.state),
        tiles=tiles(run),
        figures=run_figures(run),
        groups=[*plan_groups(run.plan), *([("Speed, measured", speed)] if speed else [])],
        data=data_rows(run.data),
        scores=scores(run),
        shown=shown,
        folded=folded,
        description=words.toml(run.description),
    )


def write_report(run_folder: Path) -> Path:
    """Writes `report.html` into a run folder from its `run.json` and `metrics.jsonl`, and returns its path.

    The same files give the same bytes. Works at any moment of a run: what is not there yet is left out or said.

    Raises:
        UserError: no such folder, a `run.json` that is absent or damaged, or a folder that cannot be written to.
    """
    path = Path(run_folder) / "report.html"
    files.write_text(path, report_page(read_run(Path(run_folder))))
    return path
