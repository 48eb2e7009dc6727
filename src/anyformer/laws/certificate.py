"""The certificate: what the laws said of one model, and of exactly which one."""

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

import anyformer
from anyformer.files import write_text
from anyformer.laws.draw import dtype_of
from anyformer.laws.result import Result
from anyformer.nn.model import Model

FILE = "certificate.json"
"""Its name beside a checkpoint."""
FORMAT = 1


@dataclass(frozen=True)
class Certificate:
    """The results of laws on a model.

    Attributes:
        subject: what was judged, as it was named.
        spec: SHA-256 of the specification's JSON.
        weights: SHA-256 of all names, dtypes, shapes and values.
        dtype: of the weights.
        seed: of the inputs, and of the weights where they were drawn for this.
        versions: of anyformer, torch and Python, and of transformers where it was compared with.
        results: law by law.
    """

    subject: str
    spec: str
    weights: str
    dtype: str
    seed: int
    versions: dict[str, str]
    results: tuple[Result, ...]

    @property
    def holds(self) -> bool:
        """Whether no law is broken."""
        return all(result.holds is not False for result in self.results)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain tables; an error that is no finite number is null."""
        table = {"format_version": FORMAT, "holds": self.holds, **asdict(self)}
        for result in table["results"]:
            if result["error"] == float("inf"):
                result["error"] = None
        table["results"] = list(table["results"])
        return table

    def to_json(self) -> str:
        """As `certificate.json` holds it."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False)

    def write(self, folder: Path) -> Path:
        """Puts it into a checkpoint's folder or beside its file, whole or not at all; `UserError` where it cannot."""
        path = folder / FILE if folder.is_dir() else folder.with_name(f"{folder.name}.{FILE}")
        write_text(path, self.to_json() + "\n")
        return path

    def table(self) -> Table:
        """For a terminal: a line for each law, with the worst error and where it was."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name, justify in (("law", "left"), ("", "left"), ("error", "right"), ("allowed", "right")):
            table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        table.add_column("where the worst was, or what was compared")
        for result in self.results:
            word = {True: "holds", False: "BROKEN", None: "no case"}[result.holds]
            numbers = ("", "") if result.holds is None else (f"{result.error:.1e}", f"{result.tolerance:.1e}")
            table.add_row(result.law, word, *numbers, result.where or result.why)
        return table

    def line(self) -> str:
        """One line of counts."""
        counts = [sum(r.holds is x for r in self.results) for x in (True, False, None)]
        return f"{counts[0]} laws hold, {counts[1]} are broken, {counts[2]} have no case here"


def certify(subject: str, model: Model, results: Sequence[Result], seed: int) -> Certificate:
    """The certificate of a model that was judged with `seed`."""
    versions = {
        "anyformer": anyformer.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if any(result.law.startswith("parity") and result.holds is not None for result in results):
        versions["transformers"] = version("transformers")
    spec = hashlib.sha256(model.spec.to_json().encode()).hexdigest()
    dtype = str(dtype_of(model)).removeprefix("torch.")
    return Certificate(subject, spec, weights_hash(model), dtype, seed, versions, tuple(results))


def weights_hash(model: Model) -> str:
    """SHA-256 of a model's state: every name, dtype, shape and value, in the order of names."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
