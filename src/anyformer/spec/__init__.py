"""What a Transformer is: a frozen, validated, serialisable description. Imports no torch."""

from anyformer.spec.condense import condense
from anyformer.spec.expand import expand
from anyformer.spec.parts import BlockSpec, ModelSpec, StackSpec
from anyformer.spec.problems import Problem, SpecError
from anyformer.spec.source import load_recipe, load_spec, recipe_names

__all__ = [
    "BlockSpec",
    "ModelSpec",
    "Problem",
    "SpecError",
    "StackSpec",
    "condense",
    "expand",
    "load_recipe",
    "load_spec",
    "recipe_names",
]
