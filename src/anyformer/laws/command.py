"""`python -m anyformer.laws N`: what is asked of it. Imports no torch, so that a mistake is said at once."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from anyformer.errors import UserError
from anyformer.laws.names import BUILD, SPACE, chosen


@dataclass(frozen=True)
class Arguments:
    """What a run of the laws is.

    Attributes:
        count: how many recipes.
        seed: of the first recipe.
        laws: names of laws.
        cover: the recipes of the pairwise cover, instead of `count`.
        processes: how many at a time.
        shrinks: violations are shown on smaller recipes.
    """

    count: int
    seed: int
    laws: list[str]
    cover: bool
    processes: int
    shrinks: bool


def arguments(argv: Sequence[str] | None = None) -> Arguments:
    """The words of a command. Raises `UserError` for a law that there is not; leaves with 2 for other mistakes."""
    parser = argparse.ArgumentParser(
        "python -m anyformer.laws", description="The laws on recipes drawn from the space."
    )
    parser.add_argument("count", type=int, nargs="?", default=100, metavar="N", help="how many recipes (100)")
    parser.add_argument("--seed", type=int, default=0, help="of the first recipe; the others follow (0)")
    parser.add_argument("--laws", help="which laws, by names with commas between (all but the slow ones)")
    parser.add_argument("--cover", action="store_true", help="the recipes that show every pair of levels, instead of N")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, help="how many at a time (one a processor)"
    )
    parser.add_argument("--no-shrink", action="store_true", help="print the recipes of violations as drawn")
    parsed = parser.parse_args(argv)
    if parsed.count < 1 or parsed.processes < 1 or parsed.seed < 0:
        parser.error("N and --processes are at least 1, --seed at least 0")
    laws = _laws(parsed.laws)
    return Arguments(parsed.count, parsed.seed, laws, parsed.cover, parsed.processes, not parsed.no_shrink)


def _laws(words: str | None) -> list[str]:
    """The laws that are named; none where only what comes before the laws is, as a violation's command may ask."""
    if words is None:
        return chosen(None)
    named = [word.strip() for word in words.split(",") if word.strip()]
    laws = [word for word in named if word not in (SPACE, BUILD)]
    return chosen(laws) if laws or not named else []


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; 0 where every law holds, 1 where one is violated, 2 for a mistake in its arguments."""
    try:
        given = arguments(argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from anyformer.laws.run import run

    return run(given)
