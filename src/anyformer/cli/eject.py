"""`anyformer eject`: a model as one readable PyTorch file."""

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anyformer.cli.hurry import hurry
from anyformer.cli.verify import described
from anyformer.errors import UserError

if TYPE_CHECKING:
    from anyformer.checkpoint import Checkpoint
    from anyformer.spec import ModelSpec
    from anyformer.weights.eject.file import Surroundings


def eject(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SPEC|CHECKPOINT",
            help="A recipe's name or file, or a checkpoint or run folder, a Hugging Face folder, or a GGUF file.",
            show_default=False,
        ),
    ],
    out: Annotated[str, typer.Option(metavar="FILE", help="The file to write; - prints it.", show_default=False)],
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
) -> None:
    """Write a model as one readable PyTorch file, which needs torch alone and nothing of anyformer.

    The file holds what this model uses and nothing else. By itself it shows a forward pass; with --prompt it reads
    a checkpoint's weights and tokenizer, by default those that it was written for. Weights that are not a
    checkpoint of anyformer, or are quantised, are written beside it as one, in the folder NAME-checkpoint.
    """
    from anyformer.files import write_text
    from anyformer.weights.eject import eject as text_of
    from anyformer.weights.eject.file import Surroundings
    from anyformer.weights.source import load_spec

    target = None if out == "-" else _free(Path(out), force=force)
    meant = described(source)
    if target is not None:
        _spare(Path(source), meant, target)
    if isinstance(meant, Path):
        text_of(load_spec(meant))  # What no file can say is refused before gigabytes are read.
        checkpoint, around = _checkpoint(source, meant, target, force=force)
        spec, has_tokenizer, arguments = checkpoint.spec, checkpoint.tokenizer is not None, ""
    else:
        around = Surroundings(name=_name(source), file="model.py" if target is None else target.name)
        spec, has_tokenizer, arguments = meant, True, " --checkpoint DIR"
    text = text_of(spec, around)
    if target is None:
        sys.stdout.write(text)
        return
    write_text(target, text)
    script = shlex.quote(str(target))
    arguments += ' --prompt "…"' + (" --start ID" if around.asks_for_start(spec) else "")
    typer.echo(f"{target}: {len(text.splitlines())} lines")
    typer.echo(f"run it: python {script}" + (f", or python {script}{arguments}" if has_tokenizer else ""))


def _free(path: Path, *, force: bool) -> Path:
    """The place of a file to write. Raises `UserError` where none can be, or one is already."""
    if path.is_dir():
        raise UserError("--out is a file, and this is a folder", where=path, remedy=f"--out {path / 'model.py'}")
    if not path.parent.is_dir():
        file = next((each for each in path.parents if each.exists() and not each.is_dir()), None)
        if file is not None:
            raise UserError("a folder is meant, and this is a file", where=file, remedy="choose another name")
        raise UserError("there is no such folder to write to", where=path.parent, remedy=f"mkdir -p {path.parent}")
    if path.exists() and not path.is_file():
        raise UserError("there is something else than a file", where=path, remedy="choose another name")
    if os.path.lexists(path) and not force:
        remedy = "choose another name, or --force to replace it"
        raise UserError("there is a file of this name already", where=path, remedy=remedy)
    if not os.access(path.parent, os.W_OK):
        remedy = "choose a folder that you may write to"
        raise UserError("nothing can be written here", where=path.parent, remedy=remedy)
    return path


def _name(source: str) -> str:
    """What the file calls the model: by its recipe, folder or file."""
    path = Path(source).resolve()
    if path.is_file():
        path = path.parent if path.name in ("config.json", "spec.json") else path.with_suffix("")
    return path.name or "model"


def _checkpoint(source: str, found: Path, target: Path | None, *, force: bool) -> "tuple[Checkpoint, Surroundings]":
    """A checkpoint, and what its file must know of it, once its weights lie where the file reads them."""
    from rich.console import Console

    folder = found if _is_plain(found) else _beside(target, found, force=force)
    console = Console(stderr=True, highlight=False)
    with console.status(f"reading {source}") as shown:
        with hurry():
            from anyformer.checkpoint import load
        checkpoint = load(source, dtype="stored")
        if folder != found:
            shown.update(f"writing {folder}")
            checkpoint.save(folder)
    if folder != found:
        size = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
        typer.echo(f"{folder}: the weights as the file reads them, {size / 1e6:,.0f} MB", err=True)
    if checkpoint.tokenizer is None:
        typer.echo("the checkpoint has no tokenizer, so that --prompt cannot be read", err=True)
    return checkpoint, _surroundings(checkpoint, _name(source), folder, target)


def _is_plain(found: Path) -> bool:
    """Whether a file that was ejected can read the weights: ours, and floats alone."""
    from anyformer.spec.folder import SPEC_FILE, is_gguf

    if is_gguf(found) or not (found / SPEC_FILE).exists():
        return False
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(found / "model.safetensors", framework="numpy") as stored:
            return not any(name.endswith(".scales") for name in stored.keys())  # noqa: SIM118  no mapping
    except (OSError, SafetensorError):
        return True  # `load` says what is wrong with them.


def _spare(source: Path, meant: "ModelSpec | Path", target: Path) -> None:
    """Raises `UserError` where the file would take the place of what it is made from, whatever --force says."""
    from anyformer.spec.folder import CODE_FILE

    there = target.resolve()
    folder = meant.resolve() if isinstance(meant, Path) else None
    part = there.parent == folder and there.exists() and (there.suffix != ".py" or there.name == CODE_FILE)
    if part or there in (source.resolve(), folder):
        what = "the file would take the place of what it is made from"
        raise UserError(what, where=target, remedy="choose another name, as in --out model.py")


def _beside(target: Path | None, found: Path, *, force: bool) -> Path:
    """The folder for weights beside the file.

    Raises `UserError` where one is there, where it is the source's, or where there is no file to be beside.
    """
    if target is None:
        what = "these weights must be written beside the file, in a form that it reads"
        raise UserError(what, where="--out", got="-", remedy="name a file, as in --out model.py")
    folder = target.with_name(f"{target.stem}-checkpoint")
    if folder.resolve() in (found.resolve(), *found.resolve().parents):
        what = "the weights would take the place of the checkpoint that they are read from"
        raise UserError(what, where=folder, remedy="choose another name for the file")
    if os.path.lexists(folder) and not force:
        what = "the weights would be written here, and there is something of this name already"
        raise UserError(what, where=folder, remedy="choose another name for the file, or --force to replace both")
    return folder


def _surroundings(checkpoint: "Checkpoint", name: str, folder: Path, target: Path | None) -> "Surroundings":
    from anyformer.weights.eject.file import Surroundings

    generation, tokenizer, n = checkpoint.generation, checkpoint.tokenizer, checkpoint.spec.vocab_size
    words = n if tokenizer is None else min(n, tokenizer.vocab_size)
    origin = Path.cwd() if target is None else target.parent.resolve()
    return Surroundings(
        name=name,
        checkpoint=Path(os.path.relpath(folder.resolve(), origin)).as_posix(),
        file="model.py" if target is None else target.name,
        words=words if words < n else None,
        suffix=0 if tokenizer is None else len(tokenizer.suffix),
        # An id without a row is never generated, and cannot be looked up.
        ends=tuple(i for i in checkpoint.eos_ids if i < n),
        start=generation.start,
        suppressed=generation.suppressed,
    )
