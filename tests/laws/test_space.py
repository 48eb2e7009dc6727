"""The sampler: what it draws is legal, reproducible, of sizes that hide nothing, and shrinks."""

from collections import defaultdict
from functools import reduce
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings

from anyformer.laws import space
from anyformer.laws.axes import points
from anyformer.laws.choose import Seeded
from anyformer.laws.space import ARCHITECTURES, recipe, sample, strategy
from anyformer.spec import SpecError, condense, expand
from anyformer.spec.idle import idle_words, without_idle
from anyformer.spec.parts import Part
from anyformer.spec.problems import look_up
from anyformer.spec.words import normalise

N = 150


@pytest.fixture(scope="module")
def drawn():
    return [(seed, expand(sample(seed))) for seed in range(10_000, 10_000 + N)]


def test_every_drawn_recipe_is_legal(drawn):
    assert len(drawn) == N  # expand raises for one that is not


def test_a_seed_draws_the_same_recipe_again():
    assert sample(7) == sample(7)
    assert len({repr(sample(seed)) for seed in range(50)}) == 50


def test_picks_follow_the_numbers_that_python_promises_to_keep():
    # random.Random(0).random(): 0.844…, 0.757…, 0.420…, 0.258…, 0.511…
    choose = Seeded(0)
    assert [choose.pick("abcdefghij") for _ in range(5)] == ["i", "h", "e", "c", "f"]


def test_limits_are_kept():
    for seed in range(40):
        spec = expand(sample(seed, architectures=["decoder"], max_layers=1, heads=["language"]))
        assert spec.encoder is None
        assert spec.decoder.n_layers == 1
        assert spec.head.kind == "language"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_architecture_is_drawn(architecture):
    spec = expand(sample(3, architectures=[architecture]))
    assert "-".join(spec.stacks) == architecture


def test_every_branch_has_a_norm(drawn):
    """Without one activations grow until nothing can be compared."""
    for seed, spec in drawn:
        for stack in spec.stacks.values():
            for block in stack.blocks:
                present = {"attention": True, "ffn": True, "cross": block.cross is not None}
                for name in (name for name, there in present.items() if there):
                    branch = getattr(block.norms, name)
                    kinds = {branch.before.kind, branch.after.kind, branch.residual.kind}
                    assert kinds != {"none"}, (seed, name)


def test_sizes_hide_nothing(drawn):
    blocks = [block for _, spec in drawn for stack in spec.stacks.values() for block in stack.blocks]
    attentions = [block.attention for block in blocks]
    grouped = [a for a in attentions if a.kind == "grouped"]
    assert {a.n_heads for a in attentions} >= {1, 3, 5, 6}
    assert {stack.d_model for _, spec in drawn for stack in spec.stacks.values()} >= {9, 15}
    assert sum(a.n_kv_heads < a.n_heads for a in grouped) > len(grouped) / 5
    assert sum(a.d_value != a.d_head for a in grouped) > len(grouped) / 5
    assert max(a.mask.window or 0 for a in attentions) == 5
    lengths = [getattr(getattr(a.position, "scaling", None), "original", 0) for a in attentions]
    assert 0 < max(lengths) < 17
    # A learned table holds every sequence of the laws.
    learned = [s for _, spec in drawn for s in spec.stacks.values() if s.embed.position.kind == "learned"]
    assert all(stack.max_positions == 64 for stack in learned)


def _parts(value):
    if isinstance(value, Part):
        yield value
        for name in type(value).model_fields:
            yield from _parts(getattr(value, name))
    elif isinstance(value, tuple):
        for each in value:
            yield from _parts(each)


def _every_part(kind=Part):
    for each in kind.__subclasses__():
        if each.__module__ in MODULES and not each.__name__.startswith("_") and not each.__name__.endswith("Fields"):
            yield each
        yield from _every_part(each)


MODULES = {f"anyformer.spec.{name}" for name in ("positions", "norms", "attention", "ffn", "parts")}


def test_every_field_of_every_part_is_drawn_with_several_values():
    """A field that is added to the specification belongs to the space too."""
    seen = defaultdict(set)
    for seed in range(700):
        for part in _parts(expand(sample(seed))):
            for name in type(part).model_fields:
                seen[type(part).__name__, name].add(repr(getattr(part, name)))
    fields = {(part.__name__, name) for part in _every_part() for name in part.model_fields if name != "kind"}
    assert sorted(fields - seen.keys()) == []
    assert sorted(field for field in fields if len(seen[field]) < 2) == []


def test_what_is_drawn_comes_back_from_its_condensed_recipe(drawn):
    for seed, spec in drawn[:100]:
        assert expand(condense(spec)) == spec, seed


def test_axes_are_the_same_for_every_layer(drawn):
    seen = [point for _, spec in drawn for point in points(spec)]
    assert len({tuple(point) for point in seen}) == 1
    assert len(seen[0]) > 60
    levels = {axis: {point[axis] for point in seen} for axis in seen[0]}
    assert all(len(found) > 1 for found in levels.values()), "an axis with one level is none"


def test_points_are_of_the_layers_that_differ():
    spec = expand(
        {
            "vocab_size": 19,
            "d_model": 9,
            "n_layers": 4,
            "attention": {"n_heads": 3, "position": "rope", "d_head": 4},
            "ffn": "swiglu",
            "pattern": [{"repeat": 3}, {"attention": {"position": "alibi"}}],
        }
    )
    assert [point["position"] for point in points(spec)] == ["rope", "alibi"]


quick = settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@quick
@given(strategy(architectures=("decoder", "encoder")))
def test_hypothesis_draws_legal_recipes_too(drawn):
    expand(drawn)


def test_hypothesis_shrinks_to_what_matters():
    """The smallest recipe with ALiBi has one layer and nothing else that could be left out."""
    smallest = find(
        strategy(architectures=("decoder",)),
        lambda table: any(point["position"] == "alibi" for point in points(expand(table))),
        settings=settings(max_examples=100, database=None, deadline=None, phases=(Phase.generate, Phase.shrink)),
        random=Random(0),
    )
    spec = expand(smallest)
    assert spec.decoder.n_layers == 1
    assert smallest["attention"]["n_heads"] == 1
    assert "softcap" not in smallest["attention"]


def test_the_remedy_of_a_word_that_changes_nothing_changes_something(monkeypatch):
    """Of differences as they are drawn, of which some are none."""
    monkeypatch.setattr(space, "without_idle", lambda table: table)
    drawn = [(table, idle_words(normalise(table))) for table in map(sample, range(700))]
    broken = [(table, found) for table, found in drawn if found]
    assert len(broken) > 15
    for table, found in broken:
        with pytest.raises(SpecError, match="changes nothing: it keeps the stack's"):
            expand(table)
        kept = expand(without_idle(table))
        for each in found:
            instead = look_up(table, each.path[:-1])[each.path[-1]] = {}
            for path, _, value in each.kept:
                *way, last = path.split(".")
                reduce(lambda here, key: here.setdefault(key, {}), way, instead)[last] = value
        assert expand(table) != kept


class Always:
    """Picks the first option, always."""

    def pick(self, options):
        return options[0]


class Never:
    """Picks the last option, always."""

    def pick(self, options):
        return options[-1]


@pytest.mark.parametrize("chooser", [Always, Never])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_ends_of_the_space_are_legal(chooser, architecture):
    expand(recipe(chooser(), architectures=[architecture]))
