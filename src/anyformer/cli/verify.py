"""`anyformer verify`: the laws on one's own model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from anyformer.nn.model import Model


@contextmanager
def _bar(n_laws: int) -> Iterator[Callable[[str], None]]:
    """A progress bar of laws on stderr, and what moves it; nothing is shown where stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=n_laws)
        begun: list[str] = []

        def said(law: str) -> None:
            bar.update(task, description=law, completed=len(begun))
            begun.append(law)

        yield said


def verify(
    model: Annotated[
        str,
        typer.Argument(
            metavar="SPEC|CHECKPOINT",
            help="A recipe's name or file, or a checkpoint or run folder, whose weights are judged as they are.",
            show_default=False,
        ),
    ],
    laws: Annotated[
        str | None,
        typer.Option(help="Names of laws, separated by commas.", show_default="all but compile, which takes long"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the inputs, and of a specification's weights.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Check the laws that every Transformer must obey on a model: causality, caches, padding, packing, backends, …

    Exits with 1 where a law is broken. A checkpoint judged by all laws gets a certificate.json beside its
    weights, and so does one that breaks a law.
    """
    from anyformer.laws.certificate import certify
    from anyformer.laws.law import chosen, judge

    names = chosen(None if laws is None else [name.strip() for name in laws.split(",") if name.strip()])
    judged, folder = _model(model, seed)
    with _bar(len(names)) as progress:
        results = judge(judged, laws=names, seed=seed, progress=progress)
    certificate = certify(model, judged, results, seed)
    if as_json:
        typer.echo(certificate.to_json())
    else:
        from rich.console import Console

        Console(highlight=False).print(certificate.table())
        typer.echo(certificate.line())
    if folder is not None and (set(chosen(None)) <= set(names) or not certificate.holds):
        typer.echo(f"written to {certificate.write(folder)}", err=True)
    elif folder is not None:
        typer.echo("no certificate is written: that takes all laws, compile aside", err=True)
    if not certificate.holds:
        raise typer.Exit(1)


def _model(source: str, seed: int) -> "tuple[Model, Path | None]":
    """What to judge: a checkpoint's model as it is and its folder, or one drawn for a specification."""
    from anyformer.spec.folder import resolve

    if Path(source).is_dir():
        from anyformer.checkpoint import load

        return load(source, dtype="stored").model, resolve(source)
    from anyformer.laws.draw import fresh
    from anyformer.spec import load_spec

    return fresh(load_spec(source), seed), None
