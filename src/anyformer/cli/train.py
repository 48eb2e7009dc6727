"""`anyformer train`: train a model as a run description says."""

import json
import os
import shlex
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anyformer.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from anyformer.train import Result

RUNS = Path("runs")
"""The folder of runs, in the working folder."""


def train(
    run: Annotated[str, typer.Argument(metavar="RUN.toml", help="A run description, or a shipped run's name.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the run; may be repeated.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and the whole description, no more.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Remove the run of this name and begin again.")] = False,
    runs: Annotated[Path, typer.Option(help="The folder of runs.")] = RUNS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Train a model into runs/NAME.

    Ctrl-C or SIGTERM ends after the current step with a checkpoint and the command to go on; a second one
    stops at once. Exit code 0 means that every step was made; 130 and 143 that Ctrl-C and SIGTERM stopped it.
    """
    if dry_run:
        _show_plan(run, set_ or [], as_json)
        return
    result = train_on_console(run, set_ or [], runs=runs, resume=resume, fresh=fresh)
    if _is_first():
        say(result, resume_command(run, set_ or [], runs), as_json=as_json)
    if not result.finished:
        raise typer.Exit(128 + (result.signum or 2))


def train_on_console(
    run: str, overrides: list[str], *, runs: Path = RUNS, resume: bool = False, fresh: bool = False
) -> "Result":
    """Trains with progress on stderr; signals end it with a checkpoint.

    Args:
        run: a run description's file, or a shipped run's name.
        overrides: `KEY=VALUE` each.
        runs: the folder of runs.
        resume: go on from the last checkpoint.
        fresh: remove the run of this name first.
    """
    from anyformer.spec.folder import GGUF, PUBLISHED_FILE
    from anyformer.train import load_run

    if Path(run).suffix.lower() == GGUF or (Path(run).is_dir() and (Path(run) / PUBLISHED_FILE).exists()):
        remedy = "give a run description (TOML); a loaded model cannot be trained further yet"
        raise UserError("training starts from a recipe, and this is a checkpoint", where=run, remedy=remedy)
    # Before torch is loaded, which takes seconds: what cannot be trained is refused at once.
    described = load_run(run, overrides)

    from rich.console import Console

    from anyformer.train import train as start
    from anyformer.train.parallel import leave
    from anyformer.train.progress import ConsoleProgress

    console = Console(stderr=True, quiet=not _is_first())
    with _warnings_on(console), ConsoleProgress(console) as progress:
        result = start(
            described,
            root=runs,
            resume=resume,
            fresh=fresh,
            observers=[progress],
            signals=True,
            notice=_notice if _is_first() else None,
            preparing=progress.preparing,
            command=resume_command(run, overrides, runs),
        )
    leave()
    return result


def _is_first() -> bool:
    """Whether this is the process that speaks, of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def resume_command(run: str, overrides: list[str], runs: Path) -> str:
    """The command that goes on with a run, ready for a shell."""
    words = ["anyformer", "train", run]
    for override in overrides:
        words += ["--set", override]
    if runs != RUNS:
        words += ["--runs", str(runs)]
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes != "1":
        words = ["torchrun", f"--nproc-per-node={processes}", "--no-python", *words]
    return shlex.join([*words, "--resume"])


def _notice(name: str) -> None:
    # From a signal handler: one write, no lock that the interrupted code might hold.
    os.write(2, f"\n{name}: finishing this step and saving; once more stops at once\n".encode())


@contextmanager
def _warnings_on(console: "Console") -> Iterator[None]:
    """Warnings as one line each."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        console.print(f"warning: {message}", style="yellow", highlight=False, markup=False, soft_wrap=True)

    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = show
        yield


def _show_plan(source: str, overrides: list[str], as_json: bool) -> None:
    from anyformer.report.words import toml
    from anyformer.train import load_run
    from anyformer.train.planned import expected_spec, planned, steps_of

    run = load_run(source, overrides)
    spec = expected_spec(run)
    plan, steps = planned(run, spec), steps_of(run)
    if as_json:
        typer.echo(json.dumps({"run": run.to_dict(), "steps": steps, "plan": plan.to_dict()}, indent=1))
        return
    per_step = run.train.batch * run.data.context
    length = f"as many as fit into {run.train.minutes:g} minutes" if steps is None else f"{steps:,}"
    total = "" if steps is None else f", {steps * per_step:,} in all"
    typer.echo(plan.table())
    typer.echo(f"\nsteps            {length}, each of {per_step:,} tokens{total}\n")
    typer.echo(toml(run.to_dict()))


def say(result: "Result", command: str, *, as_json: bool, err: bool = False) -> None:
    """How a run ended, in words or as JSON.

    Args:
        result: of the run.
        command: how to go on with it.
        as_json: one JSON document instead of words.
        err: words go to stderr.
    """
    if as_json:
        more = {"resume": None if result.finished else command}
        typer.echo(json.dumps({**result.to_dict(), **more}, indent=1))
        return
    if not result.finished:
        typer.echo(f"stopped after step {result.step:,} of {result.steps:,}; to go on:\n\n  {command}\n", err=True)
        return
    lines = [f"{result.step:,} steps, {result.tokens:,} tokens in {result.seconds:.1f} s of steps"]
    if result.score is not None:
        score = result.score
        lines.append(
            f"validation loss {score.loss:.4f}, perplexity {score.perplexity:.2f}, "
            f"{score.bits_per_byte:.4f} bits per byte of {score.n_bytes:,}"
        )
    if result.best_step not in (None, result.step):
        lines.append(f"the best was step {result.best_step:,} with loss {result.best_loss:.4f}")
    typer.echo("\n".join([*lines, str(result.folder / "report.html")]), err=err)
