"""One recipe before the laws: what was checked, and what was violated."""

import shlex
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from anyformer.laws.law import fresh, settled
from anyformer.laws.names import BUILD, NAMES, SPACE, chosen
from anyformer.laws.shrink import shrink
from anyformer.report.words import toml
from anyformer.spec import SpecError, expand


@dataclass(frozen=True)
class Violation:
    """A law that a model breaks, or that could not be checked because something raised.

    Attributes:
        seed: of the recipe, the weights and the inputs.
        law: its name, or `SPACE` or `BUILD`.
        what: the error and where it was, in words.
        crash: the kind of exception, if one was raised.
    """

    seed: int
    law: str
    what: str
    crash: str | None = None

    def same_as(self, other: "Violation") -> bool:
        """Whether two are of one kind: of the same law, raised alike."""
        return (self.law, self.crash) == (other.law, other.crash)


@dataclass
class Trial:
    """What came of one recipe."""

    checked: int = 0
    exempt: int = 0
    violations: list[Violation] = field(default_factory=list)


def _crash(seed: int, law: str, error: Exception) -> Violation:
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    said = "; ".join(line.strip() for line in str(error).strip().splitlines())
    kind = type(error).__name__
    return Violation(seed, law, f"{kind}: {said[:300]} ({last.filename}:{last.lineno})", kind)


def attempt(recipe: dict[str, Any], seed: int, laws: Sequence[str] | None = None) -> Trial:
    """Checks laws on a recipe's model, with weights that hide nothing.

    Args:
        recipe: the recipe.
        seed: of the weights and the inputs.
        laws: which; all but the slow ones where None, and with an empty list what comes before the laws alone.
    """
    trial = Trial()
    law = SPACE
    try:
        spec = expand(recipe)
        law = BUILD
        model = fresh(spec, seed)
    except Exception as error:
        trial.violations.append(_crash(seed, law, error))
        return trial
    for law in chosen(laws) if laws is None or laws else []:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                result = settled(model, law, seed)
        except Exception as error:
            trial.violations.append(_crash(seed, law, error))
            continue
        trial.exempt += result.holds is None
        trial.checked += result.holds is not None
        if result.holds is False:
            what = f"error {result.error:.3g}, tolerance {result.tolerance:.3g}, at {result.where or 'the whole'}"
            trial.violations.append(Violation(seed, law, what))
    return trial


def _again(recipe: dict[str, Any], violation: Violation) -> Violation | None:
    """What a recipe does of the same kind as a violation, if it does."""
    laws = [] if violation.law in (SPACE, BUILD) else [violation.law]
    found = attempt(recipe, violation.seed, laws).violations
    return next((each for each in found if each.same_as(violation)), None)


def _fails_like(recipe: dict[str, Any], violation: Violation) -> bool:
    if violation.law != SPACE:
        try:
            expand(recipe)
        except (SpecError, TypeError, AttributeError):
            return False
    return _again(recipe, violation) is not None


def smallest(recipe: dict[str, Any], violation: Violation, **limits: Any) -> dict[str, Any]:
    """The smallest recipe found that is legal and violates the same; `limits` as of `shrink`."""
    return shrink(recipe, lambda smaller: _fails_like(smaller, violation), **limits)


def described(recipe: dict[str, Any], violation: Violation) -> str:
    """A violation as a person can use it: the recipe as TOML, what it breaks, and how to see it again."""
    now = _again(recipe, violation) or violation
    options = f"--seed {violation.seed} --laws {shlex.quote(violation.law)}"
    # What comes before the laws has no name that `verify` knows, and comes before every law.
    verified = options if violation.law in NAMES else f"--seed {violation.seed}"
    lines = [
        f"# {violation.law}: {now.what}",
        f"# drawn by: python -m anyformer.laws 1 {options}",
        f"# saved as smallest.toml: anyformer verify smallest.toml {verified}",
    ]
    return "\n".join([*lines, toml(recipe)])


def one_thread() -> None:
    """Settles a process that shares its processors with others."""
    torch.set_num_threads(1)


__all__ = ["Trial", "Violation", "attempt", "described", "one_thread", "smallest"]
