"""Recipe, specification and JSON say the same thing, over the whole space."""

import copy
import json
from collections import Counter
from itertools import pairwise
from math import log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyformer.spec import ModelSpec, condense, expand, load_spec, recipe_names
from anyformer.spec.recipe import normalise
from anyformer.spec.source import load_recipe
from spec.strategies import every_recipe, recipes

anything = st.one_of(every_recipe(), every_recipe(), recipes())


@settings(max_examples=100)
@given(anything)
def test_json_gives_the_same_specification_back(recipe):
    before = copy.deepcopy(recipe)
    spec = expand(recipe)
    assert recipe == before
    text = spec.to_json()
    assert ModelSpec.from_json(text) == spec
    assert ModelSpec.from_json(text).to_json() == text


@settings(max_examples=150)
@given(anything)
def test_a_condensed_specification_expands_to_itself(recipe):
    spec = expand(recipe)
    short = condense(spec)
    assert expand(short) == spec
    assert condense(expand(short)) == short
    assert expand(json.loads(json.dumps(short))) == spec


@settings(max_examples=80)
@given(anything)
def test_writing_the_words_out_changes_nothing(recipe):
    assert expand(normalise(recipe)) == expand(recipe)
    assert normalise(normalise(recipe)) == normalise(recipe)


@settings(max_examples=50)
@given(anything)
def test_equal_layers_are_one_object(recipe):
    for spec in (expand(recipe), ModelSpec.from_json(expand(recipe).to_json())):
        for stack in spec.stacks.values():
            assert len({id(block) for block in stack.blocks}) == len(Counter(stack.blocks))


@settings(max_examples=30)
@given(anything)
def test_json_writes_equal_neighbours_once(recipe):
    spec = expand(recipe)
    table = json.loads(spec.to_json())
    for name, stack in spec.stacks.items():
        runs = table[name]["blocks"]
        assert sum(run["repeat"] for run in runs) == stack.n_layers
        assert all(a["block"] != b["block"] for a, b in pairwise(runs))


@pytest.mark.parametrize("name", [n for n in recipe_names() if "vocab_size" in load_recipe(n)])
def test_every_shipped_recipe_round_trips(name):
    spec = load_spec(name)
    assert ModelSpec.from_json(spec.to_json()) == spec
    assert expand(condense(spec)) == spec


SHORT = {
    "vocab_size": 9,
    "d_model": 12,
    "n_layers": 7,
    "ffn": "swiglu",
    "attention": {"n_heads": 3, "position": "rope"},
}


def test_a_pattern_that_repeats_is_condensed_to_its_period():
    short = condense(expand({**SHORT, "pattern": [{"repeat": 2}, {"attention": {"position": "none"}}]}))
    assert [entry["repeat"] for entry in short["pattern"]] == [2, 1]
    assert short["pattern"] == [{"repeat": 2}, {"repeat": 1, "attention": {"position": {"kind": "none"}}}]
    assert short["n_layers"] == 7


@pytest.mark.parametrize(
    ("given_", "key", "short"),
    [
        ({"tie": True}, "tie", True),
        ({"tie": False}, "tie", False),
        ({"tie": ["decoder.embed", "head"]}, "tie", True),
        ({"share": "all"}, "share", "all"),
        ({"share": [0] * 7}, "share", "all"),
        ({"share": {"distinct": 3}}, "share", {"distinct": 3, "order": "cycle"}),
        ({"share": [0, 0, 0, 3, 3, 5, 5]}, "share", {"distinct": 3, "order": "runs"}),
        ({"share": [0, 0, 2, 0, 0, 2, 2]}, "share", [0, 0, 2, 0, 0, 2, 2]),
    ],
)
def test_the_shortest_words_are_found(given_, key, short):
    assert condense(expand({**SHORT, **given_}))[key] == short


def test_what_follows_is_left_out():
    short = condense(expand({**SHORT, "attention": {"n_heads": 3, "position": "relative", "mask": "causal"}}))
    assert short["attention"] == {"kind": "grouped", "n_heads": 3, "position": {"kind": "relative"}}
    assert not {"architecture", "cross", "pattern", "share", "pooler", "alpha", "max_positions"} & short.keys()


def test_stacks_share_what_they_can():
    recipe = {**SHORT, "architecture": "encoder-decoder", "attention": {"n_heads": 3, "position": "relative"}}
    short = condense(expand({**recipe, "decoder": {"n_layers": 2}, "tie": ["encoder.embed", "decoder.embed"]}))
    assert (short["encoder"], short["decoder"]) == ({"n_layers": 7}, {"n_layers": 2})
    assert short["tie"] == ["decoder.embed", "encoder.embed"]
    assert condense(expand({**recipe, "tie": True}))["tie"] is True
    assert not {"encoder", "decoder"} & condense(expand(recipe)).keys()


YARN = {"kind": "rope", "scaling": {"kind": "yarn", "factor": 4.0, "original": 8}}
MOE = {"kind": "moe", "n_experts": 4, "top_k": 2, "expert": {"kind": "swiglu", "d_ff": 5}}


@pytest.mark.parametrize(
    ("root", "entry"),
    [
        # The scale, and yarn's factor on cos and sin, follow in the root and are given, the same, in the entry.
        ({"attention": {"n_heads": 3, "d_head": 4, "position": "none"}}, {"attention": {"d_head": 16, "scale": 0.5}}),
        (
            {"attention": {"n_heads": 3, "position": YARN}},
            {"attention": {"position": {"scaling": {"factor": 8.0, "attention_factor": 0.1 * log(4) + 1}}}},
        ),
        # A default that the root leaves out has no kind for a change of its eps to be laid on.
        (
            {"attention": {"n_heads": 3, "position": "none", "qk_norm": True}},
            {"attention": {"qk_norm": {"norm": {"kind": "rms", "eps": 1.0}}}},
        ),
        # The shared expert stays as it is where the expert that it is described by changes.
        ({"ffn": {**MOE, "shared": 2}}, {"ffn": {"expert": {"d_ff": 7}, "shared": {"kind": "swiglu", "d_ff": 10}}}),
        ({"ffn": {**MOE, "shared": 1}}, {"ffn": {"expert": {"limit": 2.0}, "shared": {"limit": False}}}),
        ({"ffn": {**MOE, "shared": 1}}, {"ffn": {"shared": False}}),
    ],
)
def test_what_follows_from_the_root_is_said_where_it_would_follow_differently(root, entry):
    spec = expand({**SHORT, **root, "pattern": [{}, entry]})
    assert spec.decoder.blocks[0] != spec.decoder.blocks[1]
    assert expand(condense(spec)) == spec
