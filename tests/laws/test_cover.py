"""The pairwise cover: complete against recipes that it was not made of, small, and of the space as it is."""

import json
from collections import Counter

import numpy as np

from anyformer.laws.cover import FILE, Numbering, greedy, levels, missing, seeds

FRESH = range(5_000_000, 5_000_600)


def test_the_cover_shows_every_pair_that_fresh_recipes_show():
    """Fails when the space has changed: then `python -m anyformer.laws.cover` makes the cover anew."""
    covered = [levels(seed) for seed in seeds()]
    assert missing((levels(seed) for seed in FRESH), covered) == []
    numbering = Numbering()
    pairs = {pair for each in covered for pair in numbering.pairs(each).tolist()}
    assert len(pairs) == json.loads(FILE.read_text(encoding="utf-8"))["pairs"]


def test_the_cover_is_small_and_each_recipe_is_needed():
    assert len(set(seeds())) == len(seeds()) < 250
    numbering = Numbering()
    shown = [numbering.pairs(levels(seed)).tolist() for seed in seeds()]
    counts = Counter(pair for pairs in shown for pair in pairs)
    assert all(any(counts[pair] == 1 for pair in pairs) for pairs in shown)


def test_a_pair_that_is_not_covered_is_named():
    one, other = levels(seeds()[0]), levels(seeds()[1])
    found = missing([one, other], [one])
    assert found
    assert all(" = " in words for words in found)
    assert missing([one], [one, other]) == []


def test_pairs_are_counted_within_a_layer_alone():
    """Levels that two layers show apart are no pair."""
    numbering = Numbering()
    assert len(numbering.pairs((("a", "x"), ("b", "y")))) == 2
    assert len(numbering.pairs((("a", "x"), ("a", "y"), ("b", "x"), ("b", "y")))) == 4


def test_greedy_takes_what_adds_most_and_covers_all():
    shown = {5: np.array([1, 2]), 3: np.array([1, 2, 3, 4]), 9: np.array([4, 5]), 7: np.array([5, 6, 1])}
    assert greedy(shown) == [3, 7]
    assert greedy({}) == []


def test_greedy_finds_a_small_cover_of_a_known_design():
    """Nine rows of an orthogonal array cover four axes of three levels, and no fewer can (Sloane's OA(9, 4, 3, 2))."""
    numbering = Numbering()
    every = [(a, b, c, d) for a in "012" for b in "012" for c in "012" for d in "012"]
    shown = {i: numbering.pairs((row,)) for i, row in enumerate(every)}
    chosen = greedy(shown)
    assert 9 <= len(chosen) <= 15
    covered = {pair for i in chosen for pair in shown[i].tolist()}
    assert len(covered) == 6 * 9
