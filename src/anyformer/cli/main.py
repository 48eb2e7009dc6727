"""The command line's front: verbs, and what a mistake looks like. Imports nothing heavy, so that help comes at once."""

import atexit
import os
import sys
import threading
from contextlib import suppress
from typing import Annotated, NoReturn

import typer

import anyformer
from anyformer.cli.chat import chat
from anyformer.cli.convert import convert
from anyformer.cli.demo import demo
from anyformer.cli.eject import eject
from anyformer.cli.eval import evaluate
from anyformer.cli.generate import generate
from anyformer.cli.plan import plan
from anyformer.cli.prepare import prepare
from anyformer.cli.train import train
from anyformer.cli.verify import verify

app = typer.Typer(
    name="anyformer",
    help="Every Transformer is a specification: plan it, train it, evaluate it, generate from it.",
    no_args_is_help=True,
    add_completion=False,
    # Plain help: the panels of rich take 0.1 s more, and help should come at once.
    rich_markup_mode=None,
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
app.command()(convert)
app.command()(eject)
app.command()(verify)
app.command()(demo)


def program() -> NoReturn:
    """The program `anyformer`: runs the command line and ends the process at once.

    What Python and torch would take apart, the system takes away by itself: that saves a sixth of a second, and
    memory that is touched for nothing else. What asked to be called at the end is called, threads are waited for.
    """
    code = 0
    try:
        run()
    except SystemExit as leaving:
        if isinstance(leaving.code, str):  # Python prints it.
            raise
        code = leaving.code or 0
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def run() -> None:
    """Runs the command line.

    Exit code 0: done, 2: the user's mistake, 1: a fault of ours, 130: interrupted, 141: the reader of our output has
    gone. With ANYFORMER_TRACEBACK set, every error shows where in the code it comes from.
    """
    _prepare_process()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _leave_quietly()
    except SystemExit as leaving:
        # typer and rich both turn a broken pipe into exit code 1, and typer an interrupt into a silent 130.
        if isinstance(leaving.__context__, BrokenPipeError):
            _leave_quietly()
        if isinstance(getattr(leaving.__context__, "__cause__", None), KeyboardInterrupt):
            print("interrupted", file=sys.stderr)
        raise
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if os.environ.get("ANYFORMER_TRACEBACK"):
            raise
        sys.exit(_say(error))


def _prepare_process() -> None:
    """Settles what must be settled before torch is loaded, and stands in for streams that the shell has closed."""
    # OpenMP threads that wait spin for milliseconds; where other programs want the processors, a step of a small model
    # takes up to five times as long for it. A short spin costs nothing measurable on an idle machine.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def _leave_quietly() -> NoReturn:
    """Ends without a word: the reader of our output has gone, and what is still buffered has nowhere to go."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a stream that is closed, or stands for no file
            stream.flush()
            continue
        os.dup2(nowhere, stream.fileno())
    sys.exit(141)


def _is_lack_of_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out; torch says so on the CPU by a RuntimeError's words alone."""
    words = str(error)
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or "can't allocate memory" in words or "not enough memory" in words


def _say(error: Exception) -> int:
    """Prints an error in words and gives its exit code."""
    if isinstance(error, OSError):
        place = f": {error.filename}" if error.filename else ""
        print(f"error: {error.strerror or error}{place}", file=sys.stderr)
        return 2
    if isinstance(error, ValueError):
        print(f"error: {error}", file=sys.stderr)
        return 2
    if _is_lack_of_memory(error):
        print("error: not enough memory", file=sys.stderr)
        remedy = "`anyformer plan` says what a model and a batch take; make one of them smaller"
        print(f"  remedy: {remedy}", file=sys.stderr)
        return 2
    print(f"a fault of anyformer: {type(error).__name__}: {error}", file=sys.stderr)
    print("  remedy: set ANYFORMER_TRACEBACK=1, run it again, and report what it prints", file=sys.stderr)
    return 1
