"""Every law on the recipes of the pairwise cover: each pair of levels of two axes is checked by every law."""

import pytest

from anyformer.laws.cover import seeds
from anyformer.laws.space import sample
from anyformer.laws.trial import attempt, described

CHUNKS = 20
"""Tests of a few seconds, so that processes share them."""


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_law_holds_on_the_cover(chunk):
    found = []
    for seed in seeds()[chunk::CHUNKS]:
        recipe = sample(seed)
        tried = attempt(recipe, seed)
        assert tried.checked > 4
        found += [described(recipe, violation) for violation in tried.violations]
    assert not found, "\n\n".join(found)
