"""Every law on many recipes of the space, and the smallest recipe of each violation."""

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from anyformer.laws.command import Arguments
from anyformer.laws.cover import seeds as covering_seeds
from anyformer.laws.space import sample
from anyformer.laws.trial import Trial, Violation, attempt, described, one_thread, smallest

_QUIET_SECONDS = 20.0
_SHOWN = 8


@dataclass
class Tally:
    """What came of many recipes."""

    specs: int = 0
    checked: int = 0
    exempt: int = 0
    violations: list[Violation] = field(default_factory=list)

    def add(self, trial: Trial) -> None:
        """Counts one."""
        self.specs += 1
        self.checked += trial.checked
        self.exempt += trial.exempt
        self.violations += trial.violations

    def line(self, seconds: float) -> str:
        """All counts in one line."""
        return (
            f"{self.specs:,} specifications, {self.checked:,} laws checked, {self.exempt:,} exempt, "
            f"{len(self.violations):,} violations, {seconds:,.0f} s"
        )

    def kinds(self) -> list[list[Violation]]:
        """The violations by law and exception, of each kind the one of the lowest seed first."""
        kinds: dict[tuple[str, str | None], list[Violation]] = {}
        for violation in sorted(self.violations, key=lambda each: each.seed):
            kinds.setdefault((violation.law, violation.crash), []).append(violation)
        return list(kinds.values())


def _attempt(seed: int, laws: Sequence[str] | None) -> Trial:
    return attempt(sample(seed), seed, laws)


def trials(seeds: Iterable[int], laws: Sequence[str] | None, processes: int) -> Iterator[Trial]:
    """What comes of the recipe of each seed, in the order in which they are done."""
    if processes == 1:
        one_thread()
        yield from (_attempt(seed, laws) for seed in seeds)
        return
    # The processors are shared by processes; threads within each would only get in the way.
    os.environ["OMP_NUM_THREADS"] = "1"
    rest = iter(seeds)
    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=one_thread) as workers:
        going: set[Future[Trial]] = {workers.submit(_attempt, seed, laws) for seed in islice(rest, 2 * processes)}
        while going:
            done, going = wait(going, return_when=FIRST_COMPLETED)
            going |= {workers.submit(_attempt, seed, laws) for seed in islice(rest, len(done))}
            yield from (future.result() for future in done)


class _Shown:
    """A bar on a terminal; elsewhere a line now and then."""

    def __init__(self, total: int, console: Console) -> None:
        self.total, self.console = total, console
        self._said = time.monotonic()
        columns = (
            TextColumn("specifications"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[violations]} violations"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self._task = None if self._bar is None else self._bar.add_task("", total=total, violations=0)

    def __enter__(self) -> "_Shown":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, tally: Tally) -> None:
        """Shows how far the run is."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=tally.specs, violations=len(tally.violations))
        elif time.monotonic() - self._said >= _QUIET_SECONDS:
            self._said = time.monotonic()
            words = f"{tally.specs:,} of {self.total:,} specifications, {len(tally.violations):,} violations"
            self.console.print(words, highlight=False)


def report(tally: Tally, console: Console, *, shrinks: bool = True) -> None:
    """Prints the smallest recipe of each kind of violation, and the seeds of the others."""
    for kind in tally.kinds():
        first, others = kind[0], kind[1:]
        recipe = sample(first.seed)
        if shrinks:
            console.print(f"{first.law}: shrinking the recipe of seed {first.seed} …", highlight=False)
            recipe = smallest(recipe, first)
        print(described(recipe, first), flush=True)
        if others:
            more = ", …" if len(others) > _SHOWN else ""
            print(f"# the same of seeds {', '.join(str(each.seed) for each in others[:_SHOWN])}{more}")
        print()


def run(given: Arguments) -> int:
    """Runs what was asked; 0 where every law holds, 1 where one is violated."""
    console = Console(stderr=True)
    started = time.monotonic()
    seeds: Sequence[int] = covering_seeds() if given.cover else range(given.seed, given.seed + given.count)
    tally = Tally()
    try:
        with _Shown(len(seeds), console) as shown:
            for trial in trials(seeds, given.laws, min(given.processes, len(seeds))):
                tally.add(trial)
                shown.update(tally)
        report(tally, console, shrinks=given.shrinks)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        print(tally.line(time.monotonic() - started))
        return 130
    print(tally.line(time.monotonic() - started))
    return 1 if tally.violations else 0
