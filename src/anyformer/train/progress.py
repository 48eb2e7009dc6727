"""What a person sees while a model trains: a bar with step, loss, tokens/s and ETA, or plain lines off a terminal."""

import math
import time
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from anyformer.train.metrics import Record

_SMOOTHING = 0.9
_QUIET_SECONDS = 10.0


def duration(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class ConsoleProgress:
    """An observer that shows a run on a console (stderr).

    On a terminal a bar, and a line for each evaluation and sample; elsewhere lines alone, one every 10 seconds.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._steps = 1
        self._loss: float | None = None
        self._speed: float | None = None
        self._said = time.monotonic()
        self._prepares = False

    def __enter__(self) -> "ConsoleProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def preparing(self, done: int, total: int) -> None:
        """Shows how much of a corpus is encoded, in bytes; off a terminal, that it has begun."""
        if not self.console.is_terminal:
            if not self._prepares:
                self._line(f"preparing the text: {total:,} bytes")
                self._prepares = True
            return
        if self._bar is None:
            columns = (TextColumn("encoding the text"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
            self._begin(Progress(*columns, console=self.console, transient=True), total)
        assert self._bar is not None
        self._bar.update(self._task, completed=done)

    def _begin(self, bar: Progress, total: int, **fields: Any) -> None:
        self.end()
        self._bar, self._task = bar, bar.add_task("", total=total, **fields)
        bar.start()

    def start(self, info: Record) -> None:
        """Says what begins."""
        self.end()
        self._steps = info["steps"]
        verb = f"going on after step {info['step']:,} with" if info["step"] else "training"
        self._line(
            f"{verb} {info['name']}: {info['parameters']:,} parameters, {info['steps']:,} steps of "
            f"{info['tokens_per_step']:,} tokens on {info['device']}, in {info['folder']}"
        )
        if not self.console.is_terminal:
            return
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[speed]} tokens/s{task.fields[experts]}  ETA"),
            TimeRemainingColumn(),
        )
        bar = Progress(*columns, console=self.console, transient=True, refresh_per_second=4)
        self._begin(bar, self._steps, loss="…", speed="…", experts="")
        bar.update(self._task, completed=info["step"])

    def record(self, record: Record) -> None:
        """Shows one record."""
        match record["kind"]:
            case "train":
                self._step(record)
            case "eval":
                perplexity = math.inf if record["perplexity"] is None else record["perplexity"]
                self._line(
                    f"step {record['step']:,}/{self._steps:,}  validation loss {record['loss']:.4f}  "
                    f"perplexity {perplexity:.2f}  {record['bits_per_byte']:.3f} bits per byte"
                )
            case "sample":
                self._line(f"step {record['step']:,}  sample: {record['prompt']}{record['text']}")
            case "checkpoint" if record["best"]:
                self._line(f"step {record['step']:,}  saved, the best so far: {record['path']}")

    def _step(self, record: Record) -> None:
        loss, speed = record["loss"], record["tokens_per_second"]
        if self._loss is None or self._speed is None:
            self._loss, self._speed = loss, speed
        keep = _SMOOTHING
        self._loss = keep * self._loss + (1 - keep) * loss
        self._speed = keep * self._speed + (1 - keep) * speed
        experts = f"  busiest expert {record['expert_load']:.1f} × mean" if "expert_load" in record else ""
        if self._bar is not None:
            shown: dict[str, Any] = {"loss": f"{self._loss:.4f}", "speed": f"{self._speed:,.0f}", "experts": experts}
            self._bar.update(self._task, completed=record["step"], **shown)
        elif time.monotonic() - self._said >= _QUIET_SECONDS:
            left = (self._steps - record["step"]) * record["targets"] / max(self._speed, 1e-9)
            self._line(
                f"step {record['step']:,}/{self._steps:,}  loss {self._loss:.4f}  "
                f"{self._speed:,.0f} tokens/s{experts}  ETA {duration(left)}"
            )

    def _line(self, text: str) -> None:
        # A model's text must not steer the terminal that shows it.
        clean = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
        self.console.print(escape(clean), highlight=False, soft_wrap=True)
        self._said = time.monotonic()

    def end(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
