"""`anyformer eval`: what a model makes of a text."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from anyformer.errors import UserError


def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint or run folder.", show_default=False)],
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
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Loss, perplexity and bits per byte of text, each token scored once.

    A smaller stride gives each token more context and takes longer.
    """
    from anyformer.checkpoint import load
    from anyformer.text.sources import list_documents
    from anyformer.train.evaluate import score_texts
    from anyformer.train.parallel import device_of

    documents = list_documents(text).documents
    loaded = load(checkpoint, device=str(device_of(device, where="--device")))
    if loaded.tokenizer is None:
        raise UserError("this checkpoint has no tokenizer to read a text with", where=checkpoint)
    limit = loaded.spec.decoder.max_positions
    if context is not None and limit is not None and context > limit:
        raise UserError(
            "the model is made for a shorter context", where="--context", got=context, expected=f"1 to {limit}"
        )
    length = context or limit or 1024
    score = score_texts(
        loaded.model,
        loaded.tokenizer,
        (document.text() for document in documents),
        context=length,
        stride=stride,
        rows=batch,
    )
    table: dict[str, Any] = {
        "checkpoint": str(checkpoint),
        "text": text,
        "documents": len(documents),
        **score.to_dict(),
        "context": length,
        "stride": stride or max(1, length // 2),
    }
    if as_json:
        typer.echo(json.dumps(table, indent=1))
        return
    typer.echo(f"loss           {score.loss:.4f} nats a token over {score.n_tokens:,} tokens")
    typer.echo(f"perplexity     {score.perplexity:.3f}")
    typer.echo(f"bits per byte  {score.bits_per_byte:.4f} over {score.n_bytes:,} bytes")
