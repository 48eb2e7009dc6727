"""Before the first step: the run's folder, its corpus, its model's specification, and what it goes on from."""

import hashlib
import json
import os
import platform
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

import anyformer
from anyformer.errors import UserError
from anyformer.files import storage_errors, sweep, write_text
from anyformer.nn.init import Init
from anyformer.spec.parts import ModelSpec, NoNorm
from anyformer.text.corpus import Corpus, prepare
from anyformer.train import state as states
from anyformer.train.parallel import World
from anyformer.train.planned import planned, val_fraction
from anyformer.train.run import BpeTokenizer, FileTokenizer, Initial, Run
from anyformer.train.schedule import span

RUN_FORMAT, RUN_FORMAT_VERSION = "anyformer run", 1
RUN_FILE = "run.json"
_OURS = ("checkpoints", "tensorboard", "metrics.jsonl", "report.html", RUN_FILE)
_DURATION = ("train.steps", "train.tokens", "train.minutes")
_MAY_CHANGE = (
    *_DURATION,
    "train.evaluate_every",
    "train.sample_every",
    "train.checkpoint_every",
    "train.keep",
    "train.device",
    "sample",
    "track",
)
DEEP_POST_NORM = 12

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Job:
    """A run that can begin: everything checked that can be checked before the model is built.

    Attributes:
        run: what was asked.
        folder: the run folder.
        corpus: its data, tokenizer included.
        spec: its model.
        checkpoint: what to go on from; None from the beginning.
        previous: the run.json of the run to go on with; None from the beginning.
    """

    run: Run
    folder: Path
    corpus: Corpus
    spec: ModelSpec
    checkpoint: Path | None
    previous: dict[str, Any] | None

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.folder / "checkpoints"

    def same_length(self) -> bool:
        """Whether the run is as long as when it began."""
        before = _flat((self.previous or {}).get("run", {}))
        now = _flat(self.run.to_dict())
        return all(before.get(key) == now.get(key) for key in _DURATION)


def set_up(run: Run, root: Path, *, resume: bool, fresh: bool, world: World, progress: Progress | None = None) -> Job:
    """The job of a run in `root`/name.

    Args:
        run: the description.
        root: the folder of runs.
        resume: go on with the run that is there.
        fresh: remove the run that is there and begin again.
        world: the first process prepares the corpus, the others wait for it.
        progress: called with bytes done and bytes in all while the corpus is encoded.

    Raises:
        UserError: a run that is there and neither flag, no run to resume, a run that was described otherwise, a corpus
            that cannot be made, a model that does not fit it.
    """
    folder = root / run.name
    previous = _previous(folder, run, resume=resume, fresh=fresh)
    if world.rank == 0:
        for name in ("corpus", *_OURS):
            sweep(folder, name)
        states.sweep(folder / "checkpoints")
    world.wait()
    corpus = _corpus(run, folder, reuse=previous is not None, world=world, progress=progress)
    spec = _fitting(run, corpus)
    if fresh and world.rank == 0:
        clear(folder)
    world.wait()
    checkpoint = states.latest(folder / "checkpoints") if previous is not None else None
    warn_of_deep_post_norm(spec, run)
    return Job(run, folder, corpus, spec, checkpoint, previous)


def _fitting(run: Run, corpus: Corpus) -> ModelSpec:
    """The run's model for a corpus. Raises `UserError` when they do not fit."""
    spec = run.spec(corpus.tokenizer.vocab_size)
    corpus.train.require(run.data.context)
    return spec


def clear(folder: Path) -> None:
    """Removes a run's files, and nothing else that lies in its folder; the description goes last."""
    with storage_errors(folder):
        for name in _OURS:
            path = folder / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def _previous(folder: Path, run: Run, *, resume: bool, fresh: bool) -> dict[str, Any] | None:
    file = folder / RUN_FILE
    if resume and fresh:
        raise UserError("a run is resumed or begun afresh, not both", where="--resume --fresh")
    if not resume:
        if file.exists() and not fresh:
            remedy = "--resume goes on with it, --fresh removes it and begins again; or choose another name"
            raise UserError("there is a run of this name already", where=folder, remedy=remedy)
        return None
    if not file.exists():
        raise UserError("there is no run to resume", where=folder, remedy="leave --resume out to begin it")
    previous = read_run_file(file)
    _require_same(previous.get("run", {}), run, file)
    return previous


def read_run_file(file: Path) -> dict[str, Any]:
    """A run.json. Raises `UserError` for one that is damaged or of another version."""
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(
            f"the run's description cannot be read: {error}", where=file, remedy="begin with --fresh"
        ) from None
    if not isinstance(table, dict) or table.get("format") != RUN_FORMAT:
        raise UserError("this is no description of a run", where=file)
    if table.get("format_version") != RUN_FORMAT_VERSION:
        got = table.get("format_version")
        raise UserError("the run is of another version", where=file, got=got, expected=RUN_FORMAT_VERSION)
    return table


def _flat(table: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(table, dict) or not table:
        return {path: table}
    return {k: v for key, value in table.items() for k, v in _flat(value, f"{path}.{key}" if path else key).items()}


def _completed(before: dict[str, Any]) -> dict[str, Any]:
    """A stored description with the defaults of keys that there were not when it was stored."""
    try:
        return Run.model_validate(before).to_dict()
    except ValidationError:
        return before


def _require_same(before: dict[str, Any], run: Run, file: Path) -> None:
    old, new = _flat(_completed(before)), _flat(run.to_dict())
    changed = [
        f"{key}: {old.get(key)!r} became {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not any(key == free or key.startswith(f"{free}.") for free in _MAY_CHANGE)
    ]
    if changed:
        raise UserError(
            "the run was begun with another description",
            where=file,
            got="; ".join(changed),
            expected=f"the same, except {', '.join(_MAY_CHANGE)}",
            remedy="undo the change, give it another name, or begin again with --fresh",
        )


def _corpus(run: Run, folder: Path, *, reuse: bool, world: World, progress: Progress | None) -> Corpus:
    if run.data.corpus is not None:
        return Corpus.open(run.data.corpus)
    place = folder / "corpus"
    if world.rank == 0 and not (reuse and place.exists()):
        choice = run.data.tokenizer or BpeTokenizer()
        tokenizer = choice.path if isinstance(choice, FileTokenizer) else choice.kind
        size = choice.vocab_size if isinstance(choice, BpeTokenizer) else None

        def check(corpus: Corpus) -> None:
            _fitting(run, corpus)

        # The old corpus goes only when all is sound: a mistake in a fresh run must not cost the run that is there.
        prepare(run.data.sources, place, tokenizer, size, val_fraction(run), progress=progress, check=check)
    world.wait()
    return Corpus.open(place)


def corpus_mark(corpus: Corpus) -> str:
    """A mark of a corpus: its vocabulary, its sizes, and pieces from all over its tokens."""
    digest = hashlib.sha256(str(corpus.info["vocabulary_hash"]).encode())
    for split in (corpus.train, corpus.val):
        digest.update(f"{split.name} {split.n_tokens} {split.n_documents}".encode())
        for start in range(0, split.n_tokens, max(1024, split.n_tokens // 64)):
            digest.update(split.tokens[start : start + 1024].astype("<i8").tobytes())
    return digest.hexdigest()[:32]


def warn_of_deep_post_norm(spec: ModelSpec, run: Run) -> None:
    """Warns when a post-norm stack of 12 layers or more is trained without warm-up.

    Gradients near the output of a post-norm stack are large at first, and grow with depth (Xiong et al. 2020).
    """
    blocks = spec.last.blocks
    norms = [branch for block in blocks for branch in (block.norms.attention, block.norms.ffn)]
    post = any(not isinstance(branch.residual, NoNorm) for branch in norms)
    steps = run.train.steps or 1000
    if post and len(blocks) >= DEEP_POST_NORM and span(run.schedule.warmup, steps) == 0:
        warnings.warn(
            f"a post-norm stack of {len(blocks)} layers without warm-up often diverges (Xiong et al. 2020): "
            "set schedule.warmup to a few hundred steps, or placement = 'pre'",
            stacklevel=2,
        )


def initial(run: Run) -> str | Init:
    """The run's initialisation as `build` takes it."""
    choice = run.init
    if isinstance(choice, Initial):
        return Init(**{key: value for key, value in choice.model_dump().items() if key != "kind"})
    return choice.kind


def write_run_file(job: Job, *, steps: int, device: torch.device, processes: int, more: Mapping[str, Any]) -> None:
    """Writes run.json: the description with its defaults, the plan, the data's sizes, versions, and `more`."""
    run, corpus = job.run, job.corpus
    made = planned(run, job.spec)
    table = {
        "format": RUN_FORMAT,
        "format_version": RUN_FORMAT_VERSION,
        "name": run.name,
        "run": run.to_dict(),
        "steps": steps,
        "tokens_per_step": run.train.batch * run.data.context,
        "parameters": made.parameters,
        "plan": made.to_dict(),
        "spec": json.loads(job.spec.to_json()),
        "data": {
            "vocab_size": corpus.tokenizer.vocab_size,
            **{
                split.name: {"tokens": split.n_tokens, "bytes": split.n_bytes, "documents": split.n_documents}
                for split in (corpus.train, corpus.val)
            },
        },
        "device": str(device),
        "processes": processes,
        "versions": {
            "anyformer": anyformer.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        **more,
    }
    write_text(job.folder / RUN_FILE, json.dumps(table, indent=1, ensure_ascii=False) + "\n")


def require_compiler(device: torch.device) -> None:
    """Raises `UserError` where `torch.compile` cannot work for want of a C++ compiler."""
    named = os.environ.get("CXX")
    if device.type == "cpu" and not any(shutil.which(word) for word in (named, "g++", "clang++", "c++") if word):
        raise UserError(
            "torch.compile needs a C++ compiler on the CPU, and there is none",
            where="train.compile",
            remedy="install g++ or clang++, or set train.compile = false",
        )
