"""The mutants: models broken on purpose, of which none may pass the laws that it breaks."""

from anyformer.laws.mutant import Mutant
from anyformer.laws.mutants_numbers import MUTANTS as _NUMBERS
from anyformer.laws.mutants_rows import MUTANTS as _ROWS

MUTANTS: tuple[Mutant, ...] = (*_ROWS, *_NUMBERS)
"""Every mutant, in the order of the laws; at least two for each."""

__all__ = ["MUTANTS", "Mutant"]
