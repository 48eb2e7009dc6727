"""Which tensor of a published file is which of ours: names and shapes, before anything is read. Imports no torch."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from anyformer.errors import UserError
from anyformer.families.family import (
    Form,
    Heads,
    Interleaved,
    Joined,
    Otherwise,
    Rotated,
    Row,
    Rule,
    Shifted,
    Stacked,
    Twice,
    Where,
)
from anyformer.planning import buffers, parameters
from anyformer.spec.parts import Grouped, Latent, ModelSpec
from anyformer.weights.config import Reading

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
_FIELDS = {"i": r"(?P<i>\d+)", "p": r"(?P<p>weight|bias)", "e": r"(?P<e>\d+)", "any": r".*"}


@dataclass(frozen=True)
class Step:
    """Tensors of ours and the tensors of theirs that hold the same numbers.

    Attributes:
        ours: canonical names.
        theirs: names, and the shape of each.
        form: how theirs is made of ours, None where they are the same.
        groups: the number of parts or heads, for a form that has them.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    shapes: tuple[Shape, ...]
    form: Form | None
    groups: int = 1


def canonical(spec: ModelSpec) -> dict[str, str]:
    """Names that a rule may use for a tied table, with the one name under which it is kept."""
    ties, tables = spec.ties, {}
    owner = "decoder" if spec.encoder is None or "encoder.embed" not in ties else "encoder"
    if {"encoder.embed", "decoder.embed"} <= ties:
        tables["decoder.embed.token.weight"] = "encoder.embed.token.weight"
    if "head" in ties:
        stack = owner if "decoder.embed" in ties or "encoder.embed" not in ties else "encoder"
        tables["head.weight"] = f"{stack}.embed.token.weight"
    return tables


def steps(reading: Reading, body: str) -> list[Step]:
    """Every rule that has a place in the specification, as steps, the preferred one for a tensor first."""
    spec = reading.spec
    room = {p.name: p.shape for p in (*parameters(spec), *buffers(spec))}
    aliases = canonical(spec)
    shapes = room | {name: room[kept] for name, kept in aliases.items()}
    found: list[Step] = []
    for rule in (*reading.family.tensors, *reading.variant.tensors):
        found += _steps_of(rule, spec, shapes, aliases, body)
    return sorted(found, key=lambda step: isinstance(step.form, Otherwise))


def _steps_of(rule: Rule, spec: ModelSpec, shapes: Shapes, aliases: Mapping[str, str], body: str) -> Iterator[Step]:
    theirs, ours, *rest = rule
    names = (ours,) if isinstance(ours, str) else ours
    form = rest[0] if rest else None
    first = pattern(names[0])
    for name in shapes:
        match = first.fullmatch(name)
        if match is None:
            continue
        fields = match.groupdict()
        targets = [each.format(**fields) for each in names]
        needed = [form.place.format(**fields)] if isinstance(form, Where) else []
        if not all(target in shapes for target in (*targets, *needed)):
            continue
        groups = _groups(form, spec, names[0], fields)
        sizes = [shapes[target] for target in targets]
        shape = shape_of(form, sizes, groups)
        if isinstance(form, Stacked):
            places = tuple(theirs.format(**fields, e=e, body=body) for e in range(sizes[0][0]))
        else:
            places = (theirs.format(**fields, body=body),)
        kept = tuple(aliases.get(target, target) for target in targets)
        yield Step(kept, places, (shape,) * len(places), form, groups)


def _groups(form: Form | None, spec: ModelSpec, name: str, fields: Mapping[str, str]) -> int:
    if not isinstance(form, Interleaved | Rotated | Heads):
        return 1
    stack, _, _, branch = name.split(".")[:4]
    block = spec.stacks[stack].blocks[int(fields["i"])]
    attention: Grouped | Latent | None = block.cross if branch == "cross" else block.attention
    return int(getattr(attention, form.groups))


def shape_of(form: Form | None, ours: list[Shape], groups: int = 1) -> Shape:
    """The shape of their tensor."""
    match form:
        case None | Twice() | Otherwise() | Where() | Rotated() | Shifted():
            return ours[0]
        case Heads(transposed=transposed):
            rows, width = ours[0][0] // groups, ours[0][1]
            return (groups, width, rows) if transposed else (groups, rows, width)
        case Row():
            return (1, *ours[0])
        case Stacked():
            return ours[0][1:]
        case Interleaved():
            return (sum(shape[0] for shape in ours), *ours[0][1:])
        case Joined(dim=dim, transposed=transposed):
            if len(ours[0]) <= dim:
                dim = len(ours[0]) - 1
            joined = list(ours[0])
            joined[dim] = sum(shape[dim] for shape in ours)
            return tuple(reversed(joined)) if transposed else tuple(joined)
    raise AssertionError(form)


def pattern(name: str, body: str = "") -> re.Pattern[str]:
    """A rule's name as a regular expression; `{any}` is anything."""
    parts = re.split(r"\{(\w+)\}", name.replace("{body}", body))
    return re.compile("".join(_FIELDS[part] if n % 2 else re.escape(part) for n, part in enumerate(parts)))


@dataclass(frozen=True)
class Matching:
    """A whole file matched: what each of our tensors is made of, and which tensors should be equal to these.

    Attributes:
        taken: one step for each of our tensors, every one covered.
        again: further steps for the same tensors of ours, where the file holds tied tables twice.
    """

    taken: list[Step]
    again: list[Step]


def match(reading: Reading, found: Shapes, where: object, dropped: Iterable[str]) -> Matching:
    """Matches the tensors of a file with a specification's: every one of either exactly once.

    Args:
        reading: the specification and its family.
        found: names and shapes in the file.
        where: the file or folder, for messages.
        dropped: patterns of names that are left alone.

    Raises:
        UserError: a tensor that is missing, not known, or of another shape than the configuration says.
    """
    n_ours = sum(1 for _ in parameters(reading.spec))
    if n_ours > 8 * len(found) + 64:  # No form makes so many of one; matching names would take minutes first.
        got = f"{len(found)} tensors"
        raise UserError("the weights lack most tensors", where=where, got=got, expected=f"those of {n_ours:,} of ours")
    best = _body_of(reading, found)
    taken: list[Step] = []
    again: list[Step] = []
    covered: set[str] = set()
    read: set[str] = set()
    partial: list[Step] = []
    for step in steps(reading, best):
        if isinstance(step.form, Otherwise) and not covered.isdisjoint(step.ours):
            continue
        present = [name for name in step.theirs if name in found]
        if len(present) < len(step.theirs):
            partial += [step] if present else []
            continue
        read.update(step.theirs)
        _require_shapes(step, found, where)
        if covered.isdisjoint(step.ours):
            taken.append(step)
            covered.update(step.ours)
        else:
            again.append(step)
    _require_all(reading, covered, found, best, where)
    assert all(covered.issuperset(step.ours) for step in partial)
    free = [pattern(name, best) for name in (*dropped, *reading.family.computed)]
    extra = sorted(name for name in found if name not in read and not any(p.fullmatch(name) for p in free))
    if extra:
        some = ", ".join(extra[:3]) + (", …" if len(extra) > 3 else "")
        raise UserError(
            f"{len(extra)} {'tensor has' if len(extra) == 1 else 'tensors have'} no place in the model",
            where=where,
            got=some,
            expected=f"the tensors of {reading.model} as the configuration describes it",
            remedy="the configuration and the weights are not of one model, or the class in `architectures` is another",
        )
    return Matching(taken, again)


def _body_of(reading: Reading, found: Shapes) -> str:
    """What stands before the body's names in a file: as the class has it, or as another class of the family has."""
    bodies = dict.fromkeys([reading.variant.body, *(v.body for v in reading.family.models.values())])
    counts = {body: sum(name in found for step in steps(reading, body) for name in step.theirs) for body in bodies}
    return max(counts, key=lambda body: counts[body])


def _require_shapes(step: Step, found: Shapes, where: object) -> None:
    for name, shape in zip(step.theirs, step.shapes, strict=True):
        if found[name] != shape:
            got, expected = list(found[name]), list(shape)
            what = f"the tensor {name} does not have the shape that the configuration gives it"
            raise UserError(what, where=where, got=got, expected=expected)


def _require_all(reading: Reading, covered: set[str], found: Shapes, body: str, where: object) -> None:
    spec = reading.spec
    room = {p.name: p.shape for p in (*parameters(spec), *buffers(spec))}
    missing = [name for name in room if name not in covered]
    if not missing:
        return
    wanted = {ours: step for step in reversed(steps(reading, body)) for ours in step.ours}
    ruleless = [name for name in missing if name not in wanted]
    if ruleless:
        what = f"the family {reading.family.name} has no rule for {len(ruleless)} tensors of its models"
        remedy = "add them to its `tensors`, or take the part of the specification that has them away"
        raise UserError(what, where=where, got=", ".join(ruleless[:3]), remedy=remedy)
    names = [
        next((each for each in wanted[name].theirs if each not in found), wanted[name].theirs[0]) for name in missing
    ]
    numbers = sum(prod(room[name]) for name in missing)
    some = ", ".join(dict.fromkeys(names[:3])) + (", …" if len(set(names)) > 3 else "")
    raise UserError(
        f"the weights lack {len(missing)} of {len(room)} tensors ({numbers:,} numbers)",
        where=where,
        got=f"no {some}",
        expected=f"the tensors of {reading.model} as the configuration describes it",
    )
