"""`anyformer prepare`: tokenise a corpus once, so that training can read it at once."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from anyformer.text.corpus import Corpus


def prepare(
    text: Annotated[
        list[str],
        typer.Argument(
            metavar="TEXT…",
            help="Text files and folders; python:stdlib and python:docs are the source and the documentation of the "
            "running Python.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder to write; a corpus there is replaced.", show_default=False)],
    tokenizer: Annotated[
        str, typer.Option(help="byte, char or bpe, trained on the training text; or a tokenizer's folder.")
    ] = "bpe",
    vocab_size: Annotated[
        int | None, typer.Option(help="For bpe: the most tokens it may have.", show_default="4096")
    ] = None,
    val_fraction: Annotated[float, typer.Option(help="The share of the text's bytes kept for validation.")] = 0.1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Tokenise texts and split them into training and validation text.

    A document, that is a file, goes to one side as a whole; a single file is cut by position.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from anyformer.text import corpus as corpora

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading, training the tokenizer", total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, description="encoding", completed=done, total=total)

        made = corpora.prepare(text, out, tokenizer, vocab_size, val_fraction, progress=advance)
    if as_json:
        typer.echo(json.dumps({"folder": str(made.folder), **made.info}))
    else:
        _show(made, console)


def _show(corpus: "Corpus", console: "Console") -> None:
    skipped = corpus.info["skipped"]
    if skipped:
        reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
        console.print(f"left out: {reasons}", style="yellow", highlight=False)
    if corpus.inexact_documents:
        count = corpus.inexact_documents
        console.print(
            f"{count} of the documents hold text that this tokenizer cannot write exactly",
            style="yellow",
            highlight=False,
        )
    typer.echo(f"{corpus.folder}: {corpus.tokenizer.vocab_size} tokens in the vocabulary")
    for split in (corpus.train, corpus.val):
        ratio = split.n_bytes / split.n_tokens if split.n_tokens else 0.0
        typer.echo(
            f"  {split.name:<5}  {split.n_tokens:>13,} tokens  {split.n_bytes:>14,} bytes"
            f"  {split.n_documents:>8,} documents  {ratio:.2f} bytes per token"
        )
