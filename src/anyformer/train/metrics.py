"""Metrics: one JSON object a line in metrics.jsonl, always; TensorBoard when asked.

    {"kind": "train", "step": 1, "loss": …, "lr": …, "grad_norm": …, "targets": …, "tokens": …, "tokens_per_second": …,
     "seconds": …, "batch": "…", "balance_loss": …, "z_loss": …, "expert_load": …, "idle_experts": …}
    {"kind": "eval", "step": 100, "loss": …, "perplexity": …, "bits_per_byte": …, "n_tokens": …, "n_bytes": …,
     "evaluation_seconds": …}
    {"kind": "sample", "step": 100, "prompt": "…", "text": "…"}
    {"kind": "checkpoint", "step": 100, "path": "checkpoints/step-000100", "best": true}
    {"kind": "diverged", "step": 101, "batch": "…", "starts": […], "got": "…"}

`step` counts updates: the train record of step s holds the loss that update s was made from. `tokens` counts targets so
far, `seconds` the time in steps so far, evaluation excluded, across resumptions. The last four of a train record are
there for mixtures of experts alone: what `balance_loss` and `z_loss` add to the objective beside `loss`; the largest
load of an expert over the mean load, in the worst layer; the share of experts that no token chose.
"""

import json
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Protocol

from anyformer.errors import UserError
from anyformer.files import storage_errors, write_text
from anyformer.report.runs import read_metrics

Record = dict[str, Any]


class Observer(Protocol):
    """Sees every record of a run as it happens. `start` comes first and `end` last, whatever happens between."""

    def start(self, info: Record) -> None:
        """The run begins or goes on: name, folder, step, steps, tokens per step, parameters."""

    def record(self, record: Record) -> None:
        """One line of the metrics."""

    def end(self) -> None:
        """Nothing more will come."""


class MetricsFile:
    """Appends records to metrics.jsonl, each on disk's way when `record` returns."""

    def __init__(self, path: Path, step: int) -> None:
        """Goes on after update `step`: lines of later updates are taken out first, and lines that are no records.

        Warns of the latter, unless it is a last line cut short, as a killed process leaves it.
        """
        self.path = path
        if step and (foreign := _foreign(path)):
            noun = "line that is no record" if foreign == 1 else "lines that are no records"
            warnings.warn(f"{path}: {foreign} {noun} left out", stacklevel=2)
        kept = [record for record in read_metrics(path)[0] if record["step"] <= step] if step else []
        write_text(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept))
        with storage_errors(path):
            self._file: IO[str] = path.open("a", encoding="utf-8")

    def start(self, info: Record) -> None:
        """Nothing to write."""

    def record(self, record: Record) -> None:
        """Writes one line."""
        with storage_errors(self.path):
            self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
            self._file.flush()

    def end(self) -> None:
        """Closes the file."""
        with storage_errors(self.path):
            self._file.close()


def _foreign(path: Path) -> int:
    """How many lines of a metrics file are no records, a last line without its end not counted."""
    if not path.exists():
        return 0
    with storage_errors(path):
        lines = path.read_bytes().split(b"\n")[:-1]
    return sum(bool(line.strip()) and not _is_record(line) for line in lines)


def _is_record(line: bytes) -> bool:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and isinstance(record.get("step"), int)


class TensorBoard:
    """Scalars and samples for TensorBoard, in the run folder's `tensorboard/`."""

    def __init__(self, folder: Path, step: int) -> None:
        require_tensorboard()
        from torch.utils.tensorboard import SummaryWriter

        with storage_errors(folder):
            # Events of updates that a resumed run makes again are marked as outdated.
            self._writer: Any = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def start(self, info: Record) -> None:
        """The run's name."""
        self._writer.add_text("run", str(info["name"]), info["step"])

    def record(self, record: Record) -> None:
        """Every number of a train or eval record, and every sample."""
        kind, step = record["kind"], record["step"]
        if kind == "sample":
            self._writer.add_text("sample", f"**{record['prompt']}**{record['text']}", step)
        elif kind in ("train", "eval"):
            for name, value in record.items():
                if isinstance(value, float):
                    self._writer.add_scalar(f"{kind}/{name}", value, step)

    def end(self) -> None:
        """Flushes and closes."""
        self._writer.close()


def require_tensorboard() -> None:
    """Raises `UserError` where TensorBoard is not installed."""
    if find_spec("tensorboard") is None:
        raise UserError(
            "TensorBoard is not installed",
            where="track.tensorboard",
            remedy="pip install 'anyformer[tensorboard]', or set track.tensorboard = false",
        )
