"""`anyformer eval`: what a model makes of a text."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anyformer.cli.sampling import Device, Quantize, quantize_of
from anyformer.errors import UserError

if TYPE_CHECKING:
    from anyformer.text import Tokenizer
    from anyformer.text.sources import Document
    from anyformer.train.evaluate import Score


@contextmanager
def _bar(n_bytes: int) -> Iterator[Callable[[int], None]]:
    """A progress bar of bytes on stderr, and what moves it; nothing is shown where stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("scoring"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=n_bytes)
        yield lambda done: bar.update(task, completed=done)


def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint or run folder, or a GGUF file.", show_default=False)],
    text: Annotated[
        list[str],
        typer.Option(
            help="A text file or folder, python:docs or python:stdlib; may be repeated. Each file is a document.",
            show_default=False,
        ),
    ],
    context: Annotated[
        int | None, typer.Option(help="Tokens given at once.", min=1, show_default="the model's context")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="How far windows are apart.", min=1, show_default="half the context")
    ] = None,
    batch: Annotated[int, typer.Option(help="Windows at a time.", min=1)] = 8,
    device: Device = "auto",
    quantize: Quantize = "keep",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Loss, perplexity and bits per byte of text, each token scored once.

    A smaller stride gives each token more context and takes longer.
    """
    from anyformer.checkpoint import device_of, load
    from anyformer.infer.decode import decoder_of
    from anyformer.text.sources import list_documents
    from anyformer.train.evaluate import score_texts

    documents = list_documents(text).documents
    loaded = load(checkpoint, device=device_of(device, where="--device"), quantize=quantize_of(quantize))
    if loaded.tokenizer is None:
        raise UserError("this checkpoint has no tokenizer to read a text with", where=checkpoint)
    limit = decoder_of(loaded.spec).max_positions
    if context is not None and limit is not None and context > limit:
        raise UserError(
            "the model is made for a shorter context", where="--context", got=context, expected=f"1 to {limit}"
        )
    length = context or limit or 1024
    inexact: list[str] = []
    with _bar(sum(document.size for document in documents)) as progress:
        score = score_texts(
            loaded.model,
            loaded.tokenizer,
            _told(documents, loaded.tokenizer, inexact),
            context=length,
            stride=stride,
            rows=batch,
            progress=progress,
        )
    table: dict[str, Any] = {
        "checkpoint": str(checkpoint),
        "text": text,
        "documents": len(documents),
        "inexact_documents": len(inexact),
        **score.to_dict(),
        "context": length,
        "stride": stride or max(1, length // 2),
    }
    _say(table, score, as_json)


def _say(table: dict[str, Any], score: "Score", as_json: bool) -> None:
    if table["inexact_documents"]:
        count = f"{table['inexact_documents']} of {table['documents']}"
        typer.echo(f"{count} documents hold characters that the tokenizer does not know:", err=True)
        typer.echo("the figures are those of what it read instead, and bits per byte is not exact", err=True)
    if as_json:
        typer.echo(json.dumps(table, indent=1))
        return
    typer.echo(f"loss           {score.loss:.4f} nats a token over {score.n_tokens:,} tokens")
    typer.echo(f"perplexity     {score.perplexity:.3f}")
    typer.echo(f"bits per byte  {score.bits_per_byte:.4f} over {score.n_bytes:,} bytes")


def _told(documents: Sequence["Document"], tokenizer: "Tokenizer", inexact: list[str]) -> Iterator[str]:
    """The documents' texts; the names of those that do not survive the tokenizer are added to `inexact`."""
    for document in documents:
        text = document.text()
        if tokenizer.decode(tokenizer.encode(text, bare=True)) != text:
            inexact.append(document.name)
        yield text
