"""The command line's front: verbs, and what a mistake looks like. Imports nothing heavy, so that help comes at once."""

import os
import sys
from typing import Annotated

import typer

import anyformer
from anyformer.cli.chat import chat
from anyformer.cli.demo import demo
from anyformer.cli.eval import evaluate
from anyformer.cli.generate import generate
from anyformer.cli.plan import plan
from anyformer.cli.prepare import prepare
from anyformer.cli.train import train

app = typer.Typer(
    name="anyformer",
    help="Every Transformer is a specification: plan it, train it, evaluate it, generate from it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"anyformer {anyformer.__version__}")
        raise typer.Exit


@app.callback()
def front(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Every Transformer is a specification: plan it, train it, evaluate it, generate from it."""


app.command()(plan)
app.command()(prepare)
app.command()(train)
app.command(name="eval")(evaluate)
app.command()(generate)
app.command()(chat)
app.command()(demo)


def run() -> None:
    """Runs the command line. Exit code 0: done, 2: the user's mistake, 1: a fault of ours, 130: interrupted."""
    try:
        app()
    except BrokenPipeError:
        # The reader of our output has gone; nothing is left to say, nor anyone to say it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        print(f"error: {error.strerror or error}{place}", file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        if os.environ.get("ANYFORMER_TRACEBACK"):
            raise
        print(f"a fault of anyformer: {type(error).__name__}: {error}", file=sys.stderr)
        print("  remedy: set ANYFORMER_TRACEBACK=1, run it again, and report what it prints", file=sys.stderr)
        sys.exit(1)
