"""`anyformer demo`: train a small model on text that every Python brings, and hear it write."""

import json
from pathlib import Path
from typing import Annotated

import typer

from anyformer.cli.generate import show
from anyformer.cli.train import RUNS, resume_command, say, train_on_console


def demo(
    docs: Annotated[
        bool, typer.Option("--docs", help="Learn Python's documentation instead of its source code.")
    ] = False,
    minutes: Annotated[float | None, typer.Option(help="Train for so long.", show_default="2.2")] = None,
    steps: Annotated[int | None, typer.Option(help="Train for so many steps instead.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Of the weights, the order of the text and the sample.", min=0)] = 0,
    runs: Annotated[Path, typer.Option(help="The folder of runs; an earlier demo in it is replaced.")] = RUNS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Train the small LLaMA of recipes/demo.toml for about two minutes, then let it write."""
    overrides = [f"seed={seed}"]
    if docs:
        overrides += ['data.sources=["python:docs"]', 'sample.prompts=["The", "A class"]']
    if minutes is not None:
        overrides.append(f"train.minutes={minutes}")
    if steps is not None:
        overrides += ["train.minutes=", f"train.steps={steps}"]
    result = train_on_console("demo", overrides, runs=runs, fresh=True)
    say(result, resume_command("demo", overrides, runs), as_json=False, err=as_json)
    if not result.finished:
        raise typer.Exit(128 + (result.signum or 2))
    prompt = "The" if docs else "    def"
    text = _sample(result.folder, prompt, seed, aloud=not as_json)
    if as_json:
        typer.echo(json.dumps({**result.to_dict(), "sample": {"prompt": prompt, "text": text}}, indent=1))


def _sample(folder: Path, prompt: str, seed: int, *, aloud: bool) -> str:
    """Continues a prompt with the run's best checkpoint, on stdout as it comes when `aloud`."""
    from anyformer.checkpoint import load
    from anyformer.infer import Sampling, stream

    checkpoint = load(folder)
    sampling = Sampling(max_new_tokens=160, temperature=0.6, top_p=0.95, seed=seed)
    if aloud:
        show(f"\nwhat it writes after {prompt!r}:\n\n{prompt}")
    pieces: list[str] = []
    for delta in stream(checkpoint.model, checkpoint.tokenizer, prompt, sampling):
        pieces.append(delta.text)
        if aloud:
            show(delta.text)
    if aloud:
        show(f"\n\nmore of it: anyformer generate {folder} --prompt 'class' --temperature 0.6\n")
    return "".join(pieces)
