"""Recipe, specification and JSON say the same thing, over the whole space."""

import copy
import json
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings

from anyformer.spec import ModelSpec, condense, expand, load_spec, recipe_names
from anyformer.spec.recipe import normalise
from anyformer.spec.source import load_recipe
from spec.strategies import recipes


@settings(max_examples=150)
@given(recipes())
def test_json_gives_the_same_specification_back(recipe):
    before = copy.deepcopy(recipe)
    spec = expand(recipe)
    assert recipe == before
    text = spec.to_json()
    assert ModelSpec.from_json(text) == spec
    assert ModelSpec.from_json(text).to_json() == text


@settings(max_examples=150)
@given(recipes())
def test_a_condensed_specification_expands_to_itself(recipe):
    spec = expand(recipe)
    short = condense(spec)
    assert expand(short) == spec
    assert condense(expand(short)) == short
    assert expand(json.loads(json.dumps(short))) == spec


@settings(max_examples=50)
@given(recipes())
def test_writing_the_words_out_changes_nothing(recipe):
    assert expand(normalise(recipe)) == expand(recipe)
    assert normalise(normalise(recipe)) == normalise(recipe)


@settings(max_examples=50)
@given(recipes())
def test_equal_layers_are_one_object(recipe):
    for spec in (expand(recipe), ModelSpec.from_json(expand(recipe).to_json())):
        blocks = spec.decoder.blocks
        assert len({id(block) for block in blocks}) == len(Counter(blocks))


@settings(max_examples=30)
@given(recipes())
def test_json_writes_equal_neighbours_once(recipe):
    runs = json.loads(expand(recipe).to_json())["decoder"]["blocks"]
    assert sum(run["repeat"] for run in runs) == recipe["n_layers"]
    assert all(a["block"] != b["block"] for a, b in pairwise(runs))


@pytest.mark.parametrize("name", [n for n in recipe_names() if "vocab_size" in load_recipe(n)])
def test_every_shipped_recipe_round_trips(name):
    spec = load_spec(name)
    assert ModelSpec.from_json(spec.to_json()) == spec
    assert expand(condense(spec)) == spec


def test_a_pattern_that_repeats_is_condensed_to_its_period():
    recipe = {
        "vocab_size": 9,
        "d_model": 12,
        "n_layers": 7,
        "ffn": "swiglu",
        "attention": {"n_heads": 3, "position": "rope"},
        "pattern": [{"repeat": 2}, {"attention": {"position": "none"}}],
    }
    short = condense(expand(recipe))
    assert [entry["repeat"] for entry in short["pattern"]] == [2, 1]
    assert short["pattern"][0] == {"repeat": 2}
    assert short["n_layers"] == 7
