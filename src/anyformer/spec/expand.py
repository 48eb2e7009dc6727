"""Recipe to specification: every number resolved, every layer written out, equal layers sharing one object."""

from collections.abc import Iterable, Mapping
from typing import Any

from anyformer.spec.draft import Draft, combined, draft, model_problems
from anyformer.spec.idle import idle_words
from anyformer.spec.parts import BlockSpec, ModelSpec, StackSpec
from anyformer.spec.problems import MISSING, Problem, SpecError
from anyformer.spec.reader import Reader, apply
from anyformer.spec.recipe import Share, ShareAll, ShareListed
from anyformer.spec.resolve import block_parts, model_parts, owners_of, stack_parts
from anyformer.spec.rules_model import owners_come_first
from anyformer.spec.settle import contradicted_words, stack_tables
from anyformer.spec.words import normalise

_LISTED = 16
"""The most layers whose owners a message lists."""


def _stack(each: Draft) -> StackSpec:
    """The stack that a sound draft describes."""
    root = each.root
    cycle = [layer for layer in each.layers for _ in range(layer.repeat)]
    made = {id(layer): BlockSpec(**block_parts(layer.recipe, root)) for layer in each.layers}
    shared: dict[BlockSpec, BlockSpec] = {}
    blocks = tuple(
        shared.setdefault(block, block) for block in (made[id(cycle[i % len(cycle)])] for i in range(root.n_layers))
    )
    return StackSpec(blocks=blocks, owners=owners_of(root.share, root.n_layers), **stack_parts(root))


def _sharing_problems(stack: StackSpec, share: Share | None) -> list[Problem]:
    """What is wrong with a recipe's `share`, which is only seen of all layers."""
    found = list(apply((owners_come_first,), Reader(stack)))
    if not found or isinstance(share, ShareListed):
        return [Problem(p.path.replace("owners", "share", 1), p.why, p.got, p.remedy) for p in found]
    # Nobody wrote an owner's number: what would do is said in whole.
    first: dict[BlockSpec, int] = {}
    equal = [first.setdefault(block, layer) for layer, block in enumerate(stack.blocks)]
    near = "false" if len(first) == len(equal) else equal if len(equal) <= _LISTED else "a list of owners"
    got = "all" if isinstance(share, ShareAll) else MISSING
    return [Problem("share", found[0].why, got, f"{near}, or equal layers, would do")]


def _refuse(problems: Iterable[Problem], where: object) -> None:
    """Raises if there are problems, each said once."""
    found = {(problem.path, problem.why): problem for problem in problems}
    if found:
        raise SpecError(list(found.values()), where=where)


def _unnamed(recipe: Any, place: str = "") -> list[Problem]:
    """Keys that are no words, which Python's tables may have and no file can."""
    if not place and not isinstance(recipe, Mapping):
        return [Problem("(the whole)", "should be a table", recipe, "a recipe's keys and values would do")]
    found: list[Problem] = []
    if isinstance(recipe, Mapping):
        for key, value in recipe.items():
            at = f"{place}.{key}".lstrip(".")
            found += _unnamed(value, at) if isinstance(key, str) else [Problem(at, "a key is a word", key)]
    elif isinstance(recipe, list | tuple):
        for index, value in enumerate(recipe):
            found += _unnamed(value, f"{place}.{index}")
    return found


def expand(recipe: Mapping[str, Any], *, where: object = None) -> ModelSpec:
    """Builds the specification that a recipe describes. Raises `SpecError` with every problem found.

    Args:
        recipe: nested tables as TOML gives them.
        where: the file's name for messages.
    """
    _refuse(_unnamed(recipe), where)
    raw = normalise(recipe)
    tables, problems = stack_tables(raw)
    both = len(tables) > 1
    drafts = {name: draft(name, table, beside=both) for name, table in tables.items()}
    whole, of_stacks = model_problems(drafts)
    found = {name: [*each.problems, *of_stacks[name]] for name, each in drafts.items()}
    of_words = [*contradicted_words(dict(recipe)), *(each.problem() for each in idle_words(raw))]
    _refuse([*of_words, *problems, *combined(found, raw, prefixed=both), *whole], where)
    stacks: dict[str, Any] = {name: _stack(each) for name, each in drafts.items()}
    sharing = {name: _sharing_problems(stack, drafts[name].root.share) for name, stack in stacks.items()}
    _refuse(combined(sharing, raw, prefixed=both), where)
    return ModelSpec(**stacks, **model_parts(list(drafts.values())[-1].root))
