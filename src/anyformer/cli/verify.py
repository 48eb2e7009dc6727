"""`anyformer verify`: the laws on one's own model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anyformer.cli.plan import is_run
from anyformer.errors import UserError

if TYPE_CHECKING:
    from anyformer.laws.certificate import Certificate
    from anyformer.nn.model import Model
    from anyformer.spec import ModelSpec, SpecError


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
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Compare an ejected file, edited or not, with the core instead. Its code is executed.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Check the laws that every Transformer must obey on a model: causality, caches, padding, packing, backends, …

    Exits with 1 where a law is broken. A checkpoint judged by all laws gets a certificate.json beside its
    weights, and so does one that breaks a law. Where transformers is installed and a published family can say the
    checkpoint, it is compared with theirs as well.

    With --against no law is checked: the file's Model gets the checkpoint's weights and runs beside the core on the
    same inputs, and the first activation that differs is named. Exits with 1 where one does.
    """
    from anyformer.laws.names import chosen

    if against is not None:
        _compare(model, against, laws, seed, as_json=as_json)
        return

    # What can be refused without torch, which takes seconds to load, is.
    names = chosen(None if laws is None else [name.strip() for name in laws.split(",") if name.strip()])
    what = described(model)

    from anyformer.laws.certificate import certify
    from anyformer.laws.gguf import gguf
    from anyformer.laws.law import judge
    from anyformer.laws.parity import parity

    judged, folder = _model(model, what, seed)
    # Of a checkpoint also what the published implementation of its family makes of it.
    compared = folder is not None and laws is None
    with _bar(len(names) + compared) as progress:
        results = judge(judged, laws=names, seed=seed, progress=progress)
        if compared:
            progress("parity")
            results += [*parity(judged, seed), gguf(judged, seed)]
    _show(certify(model, judged, results, seed), folder, set(chosen(None)) <= set(names), as_json=as_json)


def _show(certificate: "Certificate", folder: Path | None, complete: bool, *, as_json: bool) -> None:
    """Prints a certificate, writes it beside a checkpoint's weights, and leaves with 1 where a law is broken."""
    if as_json:
        typer.echo(certificate.to_json())
    else:
        from rich.console import Console

        Console(highlight=False).print(certificate.table())
        typer.echo(certificate.line())
    if folder is not None and (complete or not certificate.holds):
        typer.echo(f"written to {certificate.write(folder)}", err=True)
    elif folder is not None:
        typer.echo("no certificate is written: that takes all laws, compile aside", err=True)
    if not certificate.holds:
        raise typer.Exit(1)


def _compare(source: str, file: Path, laws: str | None, seed: int, *, as_json: bool) -> None:
    """Shows how an ejected file differs from the core, and leaves with 1 where it does."""
    from anyformer.laws.foreign import code_of

    if laws is not None:
        what = "a file is compared or laws are checked, one of them"
        raise UserError(what, where="--laws and --against", remedy="leave one of them out")
    code_of(file)  # A mistake in it is said before torch is loaded.
    meant = described(source)

    from anyformer.laws.against import against

    judged, _ = _model(source, meant, seed)
    found = against(judged, file, seed, source)
    if as_json:
        typer.echo(found.to_json())
    else:
        from rich.console import Console

        Console(highlight=False, markup=False).print(found.table())
        typer.echo("\n".join(found.lines()))
    if not found.holds:
        raise typer.Exit(1)


def described(source: str) -> "ModelSpec | Path":
    """What is meant: a specification, or a checkpoint's folder. Raises `UserError` for what is neither."""
    from anyformer.spec import SpecError
    from anyformer.spec.folder import is_gguf, resolve
    from anyformer.weights.source import load_spec

    if Path(source).is_dir() or is_gguf(Path(source)):
        return resolve(source)
    try:
        return load_spec(source)
    except SpecError as error:
        if not is_run(source):
            raise
        raise _run_instead(source, error) from None


def _run_instead(source: str, error: "SpecError") -> UserError:
    """What to say of a run description whose model is no whole specification."""
    from anyformer.spec.source import find_toml, read_toml

    path = find_toml(source)
    table = read_toml(path)
    folder = f"runs/{table.get('name', path.stem)}"
    named = table["model"] if isinstance(table["model"], str) else "its [model] table, as a file of its own"
    return UserError(
        "a run description, whose model is whole only with the run's data",
        where=source,
        got="; ".join(f"model.{problem}" for problem in error.problems),
        expected="a recipe or a specification, or the folder of a checkpoint or of a run",
        remedy=f"give {folder} once the run is trained, or {named} with what is missing",
    )


def _model(source: str, what: "ModelSpec | Path", seed: int) -> "tuple[Model, Path | None]":
    """The model to judge: a checkpoint's as it is and its folder, or one drawn for a specification."""
    if isinstance(what, Path):
        from anyformer.checkpoint import load

        return load(source, dtype="stored").model, what
    from anyformer.laws.draw import fresh

    return fresh(what, seed), None
