"""`anyformer convert`: a checkpoint in another form."""

from pathlib import Path
from typing import Annotated

import typer

from anyformer.errors import UserError


def convert(
    source: Annotated[
        Path,
        typer.Argument(metavar="SRC", help="A checkpoint, a run folder, or a Hugging Face folder.", show_default=False),
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The folder to write.", show_default=False)],
    to: Annotated[str, typer.Option(help="anyformer or hf.", show_default=False)],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, float64, or stored: as they are.")] = "stored",
    force: Annotated[bool, typer.Option("--force", help="Replace a checkpoint that is there.")] = False,
) -> None:
    """Write a checkpoint in another form: ours, or that of Hugging Face.

    The Hugging Face form opens in transformers with equal logits. It exists for what a published family can say; for
    anything else the message names the nearest family and what it cannot say.
    """
    from rich.console import Console

    from anyformer.checkpoint import FORMATS, load
    from anyformer.weights.config import CONFIG_FILE, read_object, write_config
    from anyformer.weights.source import load_spec

    if to not in FORMATS:
        raise UserError("there is no such form", where="--to", got=to, expected=" or ".join(FORMATS))
    if target.exists() and not force:
        remedy = "choose another name, or --force to replace a checkpoint"
        raise UserError("there is something of this name already", where=target, remedy=remedy)
    if to == "hf":  # Said before gigabytes are read.
        write_config(load_spec(source))
    console = Console(stderr=True, highlight=False)
    with console.status(f"reading {source}") as shown:
        checkpoint = load(source, dtype=dtype)
        shown.update(f"writing {target}")
        checkpoint.save(target, format=to)
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    kind = read_object(target / CONFIG_FILE)["architectures"][0] if to == "hf" else "anyformer"
    typer.echo(f"{target}: {kind}, {len(list(target.iterdir()))} files, {size / 1e6:,.1f} MB", err=True)
