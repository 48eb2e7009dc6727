from collections import Counter

import pytest

from anyformer.laws.law import LAWS, SLOW, fresh, settled
from anyformer.laws.mutants import MUTANTS
from anyformer.spec import expand

SEED = 3
CASES = [
    pytest.param(m, law, id=f"{m.name}-{law}", marks=[pytest.mark.slow] if law in SLOW else [])
    for m in MUTANTS
    for law in m.laws
]


@pytest.mark.parametrize(("mutant", "law"), CASES)
def test_no_mutant_survives_and_the_whole_model_passes(mutant, law):
    model = fresh(expand(mutant.recipe), SEED)
    whole = settled(model, law, SEED)
    assert whole.holds, whole
    with mutant.broken(model):
        broken = settled(model, law, SEED)
    assert broken.holds is False, f"{mutant.name} passes {law}: {broken}"
    assert settled(model, law, SEED) == whole, "what was broken is whole again"


def test_every_law_has_two_mutants():
    caught = Counter(law for mutant in MUTANTS for law in mutant.laws)
    assert {law: n for law in LAWS if (n := caught[law]) < 2} == {}
    assert set(caught) <= set(LAWS)


def test_mutants_are_told_apart_by_name():
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)
