"""`anyformer generate`: continue a text, as it comes."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from anyformer.cli.hurry import hurry
from anyformer.cli.sampling import (
    Device,
    MaxNewTokens,
    MinP,
    Quantize,
    RepetitionPenalty,
    Stop,
    Temperature,
    TopK,
    TopP,
    may_pack,
    quantize_of,
    sampling_of,
)
from anyformer.errors import UserError

# Control characters other than tab and line feed: a model's text must not steer the terminal that shows it.
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\ufffd")


def show(text: str) -> None:
    """Writes a piece of a model's text to stdout at once: to a terminal without control characters."""
    if sys.stdout.isatty():
        text = text.translate(_CONTROLS)
    try:
        sys.stdout.write(text)
    except UnicodeEncodeError:  # stdout that is not UTF-8 gets a question mark for what it cannot write
        encoding = sys.stdout.encoding or "ascii"
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def _read_prompt(prompt: str) -> str:
    if prompt != "-":
        return prompt
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        got = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise UserError("the prompt is not text", where="standard input", got=got, expected="text in UTF-8") from None


def generate(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT", help="A checkpoint or run folder, or a GGUF file.", show_default=False),
    ],
    prompt: Annotated[
        str, typer.Option(help="The text to continue; - reads standard input, as it is.", show_default=False)
    ],
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    stop: Stop = None,
    device: Device = "auto",
    quantize: Quantize = "keep",
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Print pieces as they come, or all at once.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Continue a text.

    The continuation alone goes to standard output. Penalty, temperature, top-k, top-p, min-p act in this order.
    """
    held = quantize_of(quantize)
    with hurry():
        from anyformer.opened import opened

        source = opened(checkpoint, pack=may_pack(held, device))
        from anyformer import infer
        from anyformer.checkpoint import device_of, load

    sampling = sampling_of(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
    )
    text = _read_prompt(prompt)
    with hurry():
        loaded = load(source, device=device_of(device, where="--device"), quantize=held)
    completion = None
    for delta in infer.stream(loaded.model, loaded.tokenizer, text, sampling, loaded.generation):
        completion = delta.completion
        if stream and not as_json:
            show(delta.text)
    assert completion is not None
    if as_json:
        sys.stdout.write(json.dumps(_document(checkpoint, text, sampling, completion), indent=2) + "\n")
        return
    show("\n" if stream else completion.text + "\n")
    typer.echo(f"{completion.n_new_tokens} tokens, finish: {completion.finish_reason}", err=True)


def _document(checkpoint: Path, prompt: str, sampling: Any, completion: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "checkpoint": str(checkpoint),
        "prompt": prompt,
        **asdict(completion),
        "sampling": asdict(sampling),
    }
