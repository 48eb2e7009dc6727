"""`anyformer convert`: a checkpoint in another form."""

from pathlib import Path
from typing import Annotated

import typer

from anyformer.errors import UserError


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SRC", help="A checkpoint, a run folder, a Hugging Face folder, or a GGUF file.", show_default=False
        ),
    ],
    target: Annotated[
        Path, typer.Argument(metavar="DST", help="The folder to write; for gguf also a file.", show_default=False)
    ],
    to: Annotated[str, typer.Option(help="anyformer, hf or gguf.", show_default=False)],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, float64, or stored: as they are.")] = "stored",
    quantize: Annotated[
        str | None,
        typer.Option(
            help="gguf's type of matrices: f32, f16, bf16, q8_0, q4_0, q4_1, q5_0 or q5_1.",
            show_default="that in memory, f32 for quantised ones",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a checkpoint that is there.")] = False,
) -> None:
    """Write a checkpoint in another form: ours, that of Hugging Face, or that of llama.cpp.

    The Hugging Face form opens in transformers and the GGUF form in llama.cpp, with equal logits. What no published
    family says is written with modelling code of its own, which transformers runs with trust_remote_code=True. The
    GGUF form exists for what its families can say; else the message names the nearest and what it cannot say.
    """
    from rich.console import Console

    from anyformer.checkpoint import FORMATS, load
    from anyformer.weights.eject.hugging import hugging_face
    from anyformer.weights.gguf.reading import write_place
    from anyformer.weights.gguf.types import KIND
    from anyformer.weights.source import load_spec

    if to not in FORMATS:
        raise UserError("there is no such form", where="--to", got=to, expected=", ".join(FORMATS))
    if quantize is not None and to != "gguf":
        raise UserError("only gguf is written quantised", where="--quantize", got=quantize, remedy="--to gguf")
    if target.exists() and not force:
        remedy = "choose another name, or --force to replace a checkpoint"
        raise UserError("there is something of this name already", where=target, remedy=remedy)
    console = Console(stderr=True, highlight=False)
    # Said before gigabytes are read.
    if to == "gguf":
        write_place(load_spec(source))
    elif to == "hf" and (form := hugging_face(load_spec(source))).code is not None:
        typer.echo(
            f"{form.why}.\n"
            "So the folder carries its own modelling code: transformers opens it with trust_remote_code=True",
            err=True,
        )
    with console.status(f"reading {source}") as shown:
        checkpoint = load(source, dtype=dtype)
        shown.update(f"writing {target}")
        if quantize is None and any(KIND[each.kind].quantised for each in checkpoint.placed):
            remedy = "; --quantize q8_0 or q4_0 would keep it small" if to == "gguf" else ""
            console.print(f"[yellow]quantised weights become float32, which takes more room{remedy}[/]")
        checkpoint.save(target, format=to, quantize=quantize)
    typer.echo(f"{target}: {_written(target, to)}", err=True)


def _written(target: Path, to: str) -> str:
    """What was written: of which kind, in how many files, how large."""
    from anyformer.weights.config import CONFIG_FILE, read_object

    files = [file for file in target.rglob("*") if file.is_file()] if target.is_dir() else [target]
    kind = read_object(target / CONFIG_FILE)["architectures"][0] if to == "hf" else to
    size = sum(file.stat().st_size for file in files)
    return f"{kind}, {len(files)} {'file' if len(files) == 1 else 'files'}, {size / 1e6:,.1f} MB"
