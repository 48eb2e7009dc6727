"""A run folder as data: `run.json` and `metrics.jsonl`, read with patience for a run that was cut short."""

import json
import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from anyformer.errors import UserError

SERIES = ("loss", "tokens_per_second", "grad_norm", "seconds", "tokens")
"""Numbers of a training record that are read as curves. A record may lack any of them."""

Record = dict[str, Any]


class Series(NamedTuple):
    """A number over the run. steps: [N] float64, values: [N] float64, NaN and infinities kept."""

    steps: np.ndarray
    values: np.ndarray

    def finite(self) -> tuple[np.ndarray, np.ndarray]:
        """The points that can be drawn."""
        keep = np.isfinite(self.values)
        return self.steps[keep], self.values[keep]

    def median(self) -> float | None:
        """The middle of the finite values, None without any."""
        values = self.finite()[1]
        return float(np.median(values)) if len(values) else None


@dataclass(frozen=True)
class Evaluation:
    """The loss over the whole validation split, in nats a token; the tokens and seconds of training before it.

    `bits_per_byte` is None where the text's bytes are unknown.
    """

    step: int
    loss: float
    bits_per_byte: float | None
    tokens: int | None
    seconds: float | None

    @property
    def perplexity(self) -> float:
        """exp(loss), infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700 or math.isnan(self.loss) else math.inf


@dataclass(frozen=True)
class Sample:
    """A text that the model wrote at a step, after its prompt."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True)
class Run:
    """Everything a report shows. Mappings are empty, and single values None, where the run did not say."""

    name: str
    state: str
    reason: str | None
    resume: str | None
    seed: int | None
    seconds: float | None
    tokens: int | None
    step: int | None
    total_steps: int | None
    parameters: int | None
    peak_memory: int | None
    clip: float | None
    plan: Mapping[str, Any]
    description: Mapping[str, Any]
    data: Mapping[str, Any]
    versions: Mapping[str, Any]
    series: Mapping[str, Series]
    learning_rates: Mapping[str, Series]
    evaluations: tuple[Evaluation, ...]
    samples: tuple[Sample, ...]
    diverged_at: int | None
    notes: tuple[str, ...] = field(default=())

    @property
    def validation(self) -> Series:
        """Validation losses over steps."""
        return Series(
            np.array([e.step for e in self.evaluations], dtype=np.float64),
            np.array([e.loss for e in self.evaluations], dtype=np.float64),
        )

    @property
    def best(self) -> Evaluation | None:
        """The evaluation with the least loss, the earliest of equals."""
        finite = [e for e in self.evaluations if math.isfinite(e.loss)]
        return min(finite, key=lambda e: e.loss) if finite else None


def _damaged(path: Path, why: str, got: object = None) -> UserError:
    remedy = "name a folder that `anyformer train` made; its checkpoints stay usable without this file"
    return UserError(f"this run cannot be read: {why}", where=path, got=got, remedy=remedy)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _damaged(path, "the file is not UTF-8 text") from error
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from error


def _settings(path: Path) -> Record:
    text = _read(path)
    try:
        settings = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise _damaged(path, f"not JSON ({error})") from error
    if not isinstance(settings, dict):
        raise _damaged(path, "not a JSON object", type(settings).__name__)
    return settings


def _rewound(records: list[Record]) -> list[Record]:
    """The records of the run's one course: a run resumed from an earlier step takes back what came after that step."""
    kept: list[Record] = []
    for record in records:
        while kept and kept[-1]["step"] > record["step"]:
            kept.pop()
        kept.append(record)
    return kept


def read_metrics(path: Path) -> tuple[list[Record], list[str]]:
    """The records of a metrics file in order of their steps, and what had to be left out, in words.

    Absent file: no records. A line cut short, as a killed process leaves it, is left out. A record whose step is less
    than an earlier one's takes the earlier ones from there on back (the run was resumed). Raises `UserError` when the
    file is not text.
    """
    if not path.exists():
        return [], ["There is no metrics.jsonl in this folder yet."]
    records, lost = [], 0
    for line in _read(path).split("\n"):
        try:
            record = json.loads(line) if line.strip() else None
        except (json.JSONDecodeError, RecursionError):
            lost += 1
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    notes = [f"{lost} damaged line{'s' if lost > 1 else ''} of metrics.jsonl left out."] if lost else []
    return _rewound(records), notes


def number(value: object) -> float:
    """`value` as a float; NaN for None, for words other than "NaN" or "Infinity", and for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def count(value: object) -> int | None:
    """`value` as a whole number, None where it is none."""
    found = number(value)
    return int(found) if math.isfinite(found) else None


def _finite(value: object) -> float | None:
    found = number(value)
    return found if math.isfinite(found) else None


def _words(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _table(value: object) -> Record:
    return value if isinstance(value, dict) else {}


def _series(records: list[Record], key: str) -> Series:
    points = {r["step"]: number(r[key]) for r in records if key in r}
    array = np.array(list(points.items()), dtype=np.float64).reshape(-1, 2)
    return Series(array[:, 0], array[:, 1])


def _learning_rates(records: list[Record]) -> dict[str, Series]:
    """Learning rates by parameter group; the name of the only one is empty."""
    flat = [
        {"step": r["step"], **(r["lr"] if isinstance(r["lr"], dict) else {"": r["lr"]})} for r in records if "lr" in r
    ]
    groups = dict.fromkeys(key for record in flat for key in record if key != "step")
    return {str(group): _series(flat, group) for group in groups}


def _at(series: Series, step: int) -> float | None:
    """The newest value up to a step."""
    steps, values = series.finite()
    before = int(np.searchsorted(steps, step, side="right"))
    return float(values[before - 1]) if before else None


def _newest(series: Series, otherwise: object) -> float | None:
    values = series.finite()[1]
    return float(values[-1]) if len(values) else _finite(otherwise)


def _evaluation(record: Record, series: Mapping[str, Series]) -> Evaluation:
    step, loss, bits = record["step"], number(record.get("loss")), _finite(record.get("bits_per_byte"))
    n_tokens, n_bytes = _finite(record.get("n_tokens")), _finite(record.get("n_bytes"))
    if bits is None and n_tokens and n_bytes and math.isfinite(loss):
        bits = loss / math.log(2) * n_tokens / n_bytes
    return Evaluation(step, loss, bits, count(_at(series["tokens"], step)), _at(series["seconds"], step))


def _samples(records: list[Record]) -> tuple[Sample, ...]:
    found = {
        (r["step"], str(r.get("prompt") or "")): Sample(r["step"], str(r.get("prompt") or ""), str(r["text"]))
        for r in records
        if isinstance(r.get("text"), str)
    }
    return tuple(found.values())


def _diverged_at(records: list[Record], state: str, loss: Series) -> int | None:
    """The step at which the run stopped because of a loss or gradient that was no finite number."""
    if records:
        return int(records[-1]["step"])
    if state != "diverged":
        return None
    steps = loss.steps[~np.isfinite(loss.values)]
    return int(steps[-1]) if len(steps) else int(loss.steps[-1]) if len(loss.steps) else None


def _state(settings: Record, diverged: list[Record]) -> str:
    """How the run stands: finished, stopped, diverged, running (or killed), or whatever word it left itself."""
    given, result = _words(settings.get("state")), settings.get("result")
    if given:
        return given
    if isinstance(result, dict) and "finished" in result:
        return "finished" if result["finished"] else "stopped"
    return "diverged" if diverged else "running"


def _reason(settings: Record, result: Record, diverged: list[Record]) -> str | None:
    """Why the run ended before its time, in its own words where it left some."""
    given, signum = _words(settings.get("reason")), count(result.get("signum"))
    if given:
        return given
    if signum is not None:
        return f"Stopped by {signal.Signals(signum).name if signum in set(signal.Signals) else f'signal {signum}'}."
    if not diverged:
        return None
    last = diverged[-1]
    batch = f", batch {last['batch']}" if last.get("batch") else ""
    return f"Not a finite number at step {last['step']:,}{batch}: {last.get('got', 'loss or gradient')}."


def step_seconds(seconds: Series) -> Series:
    """Seconds of one step: the differences of the running time [N] over those of the steps, [N-1]."""
    steps, values = seconds.finite()
    return Series(steps[1:], np.diff(values) / np.diff(steps))


def read_run(folder: Path) -> Run:
    """The run in `folder`. Raises `UserError` when there is none or its `run.json` is damaged."""
    folder = Path(folder)
    if not folder.is_dir():
        raise _damaged(folder, "there is no such folder")
    settings = _settings(folder / "run.json")
    records, notes = read_metrics(folder / "metrics.jsonl")
    kinds: dict[str, list[Record]] = {kind: [] for kind in ("train", "eval", "sample", "checkpoint", "diverged")}
    for record in records:
        kinds.get(str(record.get("kind")), []).append(record)
    series = {key: _series(kinds["train"], key) for key in SERIES}
    plan, description = _table(settings.get("plan")), _table(settings.get("run"))
    result = _table(settings.get("result"))
    state = _state(settings, kinds["diverged"])
    peaks = [number(table.get("peak_memory_bytes")) for table in (settings, result, *kinds["train"])]
    evaluations = {r["step"]: _evaluation(r, series) for r in kinds["eval"]}
    return Run(
        name=_words(settings.get("name")) or _words(description.get("name")) or folder.resolve().name,
        state=state,
        reason=_reason(settings, result, kinds["diverged"]),
        resume=_words(settings.get("resume")),
        seed=count(settings.get("seed", description.get("seed"))),
        seconds=_newest(series["seconds"], result.get("seconds")),
        tokens=count(_newest(series["tokens"], result.get("tokens"))),
        step=count(_newest(Series(series["loss"].steps, series["loss"].steps), result.get("step"))),
        total_steps=count(settings.get("steps", _table(description.get("train")).get("steps"))),
        parameters=count(settings.get("parameters", plan.get("parameters"))),
        peak_memory=int(max(p for p in peaks if math.isfinite(p))) if any(map(math.isfinite, peaks)) else None,
        clip=_finite(_table(description.get("train")).get("clip")),
        plan=plan,
        description=description,
        data=_table(settings.get("data")),
        versions={
            **_table(settings.get("versions")),
            **{k: settings[k] for k in ("device", "processes") if k in settings},
        },
        series=series,
        learning_rates=_learning_rates(kinds["train"]),
        evaluations=tuple(evaluations.values()),
        samples=_samples(kinds["sample"]),
        diverged_at=_diverged_at(kinds["diverged"], state, series["loss"]),
        notes=tuple(notes),
    )
