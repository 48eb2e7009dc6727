"""Training checkpoints: a checkpoint folder with `train/` beside the weights. Safetensors and JSON, nothing pickled.

    step-000123/{spec.json, model.safetensors, tokenizer files,
                 train/state.json, train/optimizer.safetensors, train/random.safetensors}
    best, last        relative links to two of them (a file with the folder's name where links cannot be made)

A folder appears whole or not at all. The last `keep` and the best stay.
"""

import json
import math
import os
import re
import shutil
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from anyformer import files
from anyformer.checkpoint import save_into
from anyformer.errors import UserError
from anyformer.files import atomic_folder, storage_errors, write_text
from anyformer.nn.model import Model
from anyformer.spec.folder import pointed_at
from anyformer.text.tokenizer import Tokenizer
from anyformer.train.optim import Optimizer
from anyformer.weights.own import WEIGHTS_FILE, read_weights

FORMAT, FORMAT_VERSION = "anyformer training state", 1
STATE_FILE, OPTIMIZER_FILE, RANDOM_FILE = "state.json", "optimizer.safetensors", "random.safetensors"
_STEP = re.compile(r"step-(\d{6,})")


@dataclass
class TrainState:
    """What a run knows beside its tensors.

    Attributes:
        step: finished updates.
        steps: the updates of the whole run.
        tokens: targets learned from so far.
        seconds: time spent in steps, evaluation excluded.
        evaluated: the step that was evaluated last.
        sampled: the step that was sampled last.
        best_step, best_loss: the best evaluation; None before the first.
        score: the last evaluation's numbers.
        context: tokens a row.
        corpus: a mark of the token files, to notice other data.
    """

    steps: int
    context: int
    corpus: str
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    evaluated: int = 0
    sampled: int = 0
    best_step: int | None = None
    best_loss: float | None = None
    score: dict[str, Any] | None = None


def random_state(device: torch.device) -> Tensor:
    """The state of this process's generators, uint8 [n]: the host's, then the CUDA device's."""
    host = torch.get_rng_state()
    return torch.cat([host, torch.cuda.get_rng_state(device)]) if device.type == "cuda" else host


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Takes over what `random_state` gave."""
    n_host = torch.get_rng_state().numel()
    torch.set_rng_state(state[:n_host].clone())
    if device.type == "cuda" and state.numel() > n_host:
        torch.cuda.set_rng_state(state[n_host:].clone(), device)


def step_folder(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return checkpoints / f"step-{step:06d}"


def step_of(folder: Path) -> int:
    """The step in a checkpoint folder's name; −1 for another name."""
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) if match else -1


def all_steps(checkpoints: Path) -> list[Path]:
    """The checkpoint folders, oldest first."""
    found = [path for path in checkpoints.glob("step-*") if step_of(path) >= 0 and path.is_dir()]
    return sorted(found, key=step_of)


def save(
    checkpoints: Path,
    state: TrainState,
    *,
    model: Model,
    tokenizer: Tokenizer,
    optimizer: Optimizer,
    random: Tensor,
) -> Path:
    """Writes the checkpoint of `state.step`, whole or not at all. Raises `UserError` when the disk refuses.

    Args:
        checkpoints: the run's folder of checkpoints.
        state: goes into train/state.json.
        model: the model itself, not a compiled wrapper.
        tokenizer: the model's.
        optimizer: its tensors go into train/optimizer.safetensors.
        random: uint8 [processes, n], each process's `random_state`.
    """
    folder = step_folder(checkpoints, state.step)
    with atomic_folder(folder) as partial, _stored(folder):
        save_into(partial, model.spec, model, tokenizer)
        inner = partial / "train"
        inner.mkdir()
        tensors = {name: value.detach().cpu().contiguous() for name, value in optimizer.state().items()}
        save_file(tensors, inner / OPTIMIZER_FILE)
        save_file({"torch": random.contiguous()}, inner / RANDOM_FILE)
        table = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(state)}
        (inner / STATE_FILE).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return folder


class _stored:
    """The safetensors library's own complaint about a disk, as an operating system's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, SafetensorError):
            number = re.search(r"os error (\d+)", str(error))
            code = int(number[1]) if number else 5
            raise OSError(code, os.strerror(code), str(self.folder)) from error


def point(checkpoints: Path, name: str, target: Path) -> None:
    """Makes `best` or `last` name a checkpoint; readers see the old or the new one."""
    link = checkpoints / name
    with storage_errors(link):
        temporary = Path(tempfile.mktemp(prefix=f".{name}.", suffix=".partial", dir=checkpoints))
        try:
            temporary.symlink_to(target.name, target_is_directory=True)
            if link.is_dir() and not link.is_symlink():
                shutil.rmtree(link)  # A copy that followed links has made a folder of it.
            temporary.replace(link)
            return
        except (NotImplementedError, PermissionError):
            temporary.unlink(missing_ok=True)
    write_text(link, target.name + "\n")


def prune(checkpoints: Path, keep: int, best: int | None) -> None:
    """Removes all but the last `keep` checkpoints and the best."""
    folders = all_steps(checkpoints)
    for folder in folders[:-keep]:
        if step_of(folder) != best:
            with storage_errors(folder):
                # Out of sight first, so that a folder half removed is never taken for a checkpoint.
                hidden = folder.rename(checkpoints / f".{folder.name}.old")
            shutil.rmtree(hidden, ignore_errors=True)


def sweep(checkpoints: Path) -> None:
    """Removes what a killed process left half written or half removed; a checkpoint it had moved away comes back."""
    for names in ("step-*", "best", "last"):
        files.sweep(checkpoints, names)
    for hidden in checkpoints.glob(".step-*.old"):
        shutil.rmtree(hidden, ignore_errors=True)


def latest(checkpoints: Path) -> Path | None:
    """The newest checkpoint of a run, None where there is none yet."""
    found = all_steps(checkpoints)
    pointed = pointed_at(checkpoints / "last") if checkpoints.is_dir() else None
    if pointed is not None and step_of(pointed.resolve()) >= 0:
        found.append(pointed.resolve())
    return max(found, key=step_of, default=None)


def read_state(folder: Path) -> TrainState:
    """The state in a training checkpoint. Raises `UserError` for one that is damaged, foreign or of another version."""
    file = folder / "train" / STATE_FILE
    try:
        table: Any = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError("this checkpoint holds no training state", where=folder, remedy=_advice(folder)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"the training state cannot be read: {error}", where=file, remedy=_advice(folder)) from None
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise UserError("this is no training state", where=file, remedy=_advice(folder))
    if table.get("format_version") != FORMAT_VERSION:
        got = table.get("format_version")
        remedy = "resume with the release that wrote it; the model itself can still be loaded"
        raise UserError(
            "the training state is of another version", where=file, got=got, expected=FORMAT_VERSION, remedy=remedy
        )
    known = {field.name for field in fields(TrainState)}
    try:
        state = TrainState(**{key: value for key, value in table.items() if key in known})
    except TypeError as error:
        raise UserError(f"the training state is not whole: {error}", where=file, remedy=_advice(folder)) from None
    fault = _fault(state, step_of(folder))
    if fault is not None:
        name, expected = fault
        got = f"{name} = {getattr(state, name)!r}"
        raise UserError("the training state is damaged", where=file, got=got, expected=expected, remedy=_advice(folder))
    return state


def _is_count(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_score(score: object) -> bool:
    """Whether a stored score holds the numbers of one; its perplexity may be too large to be written."""
    return (
        isinstance(score, dict)
        and score.keys() == {"loss", "perplexity", "bits_per_byte", "n_tokens", "n_bytes"}
        and all(_is_number(score[name]) for name in ("loss", "bits_per_byte"))
        and (score["perplexity"] is None or isinstance(score["perplexity"], int | float))
        and all(_is_count(score[name]) for name in ("n_tokens", "n_bytes"))
    )


def _fault(state: TrainState, step: int) -> tuple[str, str] | None:
    """The first field that cannot be, and what it would be, in the checkpoint of `step` (−1: of any)."""
    if not _is_count(state.step) or step not in (-1, state.step):
        return "step", "a whole number" if step < 0 else f"{step}, as the folder's name says"
    if not _is_count(state.steps, max(1, state.step)):
        return "steps", f"a whole number of at least {max(1, state.step)}"
    if not _is_count(state.context, 1):
        return "context", "a whole number of at least 1"
    corpus: object = state.corpus
    if not isinstance(corpus, str):
        return "corpus", "a text"
    if not _is_count(state.tokens):
        return "tokens", "a whole number"
    if not _is_number(state.seconds) or state.seconds < 0:
        return "seconds", "a number of at least 0"
    for name in ("evaluated", "sampled"):
        if not _is_count(getattr(state, name)) or getattr(state, name) > state.step:
            return name, f"a whole number up to {state.step}"
    if state.best_step is not None and not (_is_count(state.best_step) and state.best_step <= state.step):
        return "best_step", f"null or a whole number up to {state.step}"
    if (state.best_loss is None) != (state.best_step is None) or not (
        state.best_loss is None or _is_number(state.best_loss)
    ):
        return "best_loss", "a number where there is a best_step, null where not"
    if state.score is not None and not _is_score(state.score):
        return "score", "null or the numbers of an evaluation"
    return None


def restore(folder: Path, *, model: Model, optimizer: Optimizer, device: torch.device) -> Tensor:
    """Fills a model and its optimiser from a checkpoint; gives the random states, uint8 [processes, n].

    Raises:
        UserError: a file that is missing, cut short, or of another model; a random state that no generator takes.
    """
    stored = read_weights(folder / WEIGHTS_FILE, model.spec, dtype=None, device=torch.device("cpu"), mapped=True)
    with torch.no_grad():
        kept = stored.state_dict()
        for name, tensor in model.state_dict().items():
            tensor.copy_(kept[name])
    optimizer.load(_tensors(folder, OPTIMIZER_FILE))
    random = _tensors(folder, RANDOM_FILE).get("torch")
    if random is None or not _is_random(random, device):
        raise UserError("the random state is not whole", where=folder / "train" / RANDOM_FILE, remedy=_advice(folder))
    return random


def _is_random(random: Tensor, device: torch.device) -> bool:
    """Whether these are states of generators, those of a CUDA device included where `device` is one."""
    n_host = torch.get_rng_state().numel()
    if random.dtype != torch.uint8 or random.dim() != 2 or random.shape[1] < n_host:
        return False
    n_device = random.shape[1] - n_host
    if device.type == "cuda" and n_device not in (0, torch.cuda.get_rng_state(device).numel()):
        return False
    try:
        for row in random:
            torch.Generator().set_state(row[:n_host].clone())
    except RuntimeError:
        return False
    return True


def _tensors(folder: Path, name: str) -> dict[str, Tensor]:
    file = folder / "train" / name
    try:
        return load_file(file)
    except FileNotFoundError:
        raise UserError("a file of this checkpoint is missing", where=file, remedy=_advice(folder)) from None
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"a file of this checkpoint is damaged: {error}", where=file, remedy=_advice(folder)) from None


def _advice(folder: Path) -> str:
    others = [path.name for path in all_steps(folder.parent) if path.name != folder.name]
    if others:
        return f"remove {folder.name} to go on from {others[-1]}"
    return "start again with --fresh"
