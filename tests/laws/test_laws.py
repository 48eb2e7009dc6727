"""Every law on the recipes of the pairwise cover: each pair of levels of two axes is checked by every law."""

import pytest

from anyformer.laws.cover import seeds
from anyformer.laws.law import chosen
from anyformer.laws.space import sample
from anyformer.laws.trial import attempt, described

CHUNKS = 20
"""Tests of a few seconds, so that processes share them."""


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_law_holds_on_the_cover(chunk):
    found = []
    for index, seed in enumerate(seeds()[chunk::CHUNKS]):
        recipe = sample(seed)
        # Half precision takes a fifth of the time and is tested part by part: every third recipe has it, too.
        laws = [law for law in chosen(None) if law != "precision" or (index + chunk) % 3 == 0]
        tried = attempt(recipe, seed, laws)
        assert tried.checked > 4
        found += [described(recipe, violation) for violation in tried.violations]
    assert not found, "\n\n".join(found)
