"""A published configuration as a specification, and back, by the rules of its family. Imports no torch.

Back is found by trying: what a family writes for a specification is read again, and fits where nothing differs.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyformer.errors import UserError
from anyformer.families import FAMILIES, Family, Variant
from anyformer.families.common import FIXED, IGNORED
from anyformer.families.config import Config
from anyformer.families.fields import put
from anyformer.families.tables import Tables, View, merged
from anyformer.spec.folder import PUBLISHED_FILE
from anyformer.spec.parts import Alibi, Causal, Grouped, Latent, ModelSpec, Part
from anyformer.spec.problems import did_you_mean
from anyformer.weights.carried import MODEL_TYPE, carried

CONFIG_FILE = PUBLISHED_FILE
_REMEDIES = {
    "gemma3": "its text part, the `text_config`, is a model of type gemma3_text; in transformers: "
    "text = Gemma3ForCausalLM(model.config.text_config); text.model = model.model.language_model; "
    "text.tie_weights(); text.save_pretrained(FOLDER)"
}
"""Model types of which a part is a family, with how to take it out."""


@dataclass(frozen=True)
class Reading:
    """A configuration as it was understood."""

    spec: ModelSpec
    family: Family
    model: str
    """The class of the model, a key of the family's `models`."""
    dropped: tuple[str, ...] = ()
    """Patterns of tensors that this model's file may hold beside its own, as a family's `dropped`."""

    @property
    def variant(self) -> Variant:
        """The class's own rules."""
        return self.family.models[self.model]


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `UserError`."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError("there is no such file", where=path) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"this file cannot be read as JSON: {error}", where=path) from None
    if not isinstance(table, dict):
        raise UserError("this file does not hold a JSON object", where=path, got=type(table).__name__)
    return table


def read_config(table: dict[str, Any], where: object, families: Sequence[Family] = FAMILIES) -> Reading:
    """What a configuration means to one of some families; one that carries a specification means that.

    Raises:
        UserError: a model type that no family has; a key that is not known, or whose value no specification has.
        SpecError: values that contradict each other.
    """
    _require_unquantised(table, where)
    if table.get("model_type") == MODEL_TYPE:
        return Reading(*carried(table, where))
    family = _family_of(table, where, families)
    model = _model_of(family, table, where)
    config = Config(table, where)
    for other, key in family.aliases.items():
        config.rename(other, key)
    for key in family.when:
        config.get(key, None)
    tables = _read(family, family.models[model], config)
    spec = tables.spec(where)
    config.finish({**FIXED, **family.fixed}, (*IGNORED, *family.ignored))
    return Reading(spec, family, model, tuple(tables.dropped))


def _require_unquantised(table: dict[str, Any], where: object) -> None:
    said = table.get("quantization_config")
    if said is None:
        return
    method = said.get("quant_method") if isinstance(said, dict) else said
    raise UserError(
        "the weights are quantised in a way that is not read here",
        where=where,
        got=f"quantization_config of the method {method!r}",
        expected="weights of float32, bfloat16 or float16, and no quantization_config",
        remedy="use the model's bfloat16 weights; where it is published in FP8 alone (DeepSeek-V3), cast them first",
    )


def _read(family: Family, variant: Variant, config: Config) -> Tables:
    tables = Tables(merged(family.spec, variant.spec), family.stack)
    for field in (*family.config, *variant.config):
        field.read(config, tables)
    return tables


def _family_of(table: dict[str, Any], where: object, families: Sequence[Family]) -> Family:
    model_type = table.get("model_type")
    types = sorted({family.model_type for family in families})
    known = [family for family in families if family.model_type == model_type]
    if not known:
        near = did_you_mean(model_type, types) if isinstance(model_type, str) else None
        remedy = f"did you mean `{near}`? " if near else ""
        remedy += "another family of Transformers is one file of rules: docs/families.md shows how to add one"
        raise UserError(
            "no family of this model type is known" if model_type else "the configuration names no model type",
            where=where,
            got=f"model_type = {model_type!r}",
            expected=None if str(model_type) in _REMEDIES else ", ".join(types),
            remedy=_REMEDIES.get(str(model_type), remedy),
        )
    fitting = [family for family in known if _suits(family, table)]
    if fitting:
        return fitting[0]
    keys = sorted({key for family in known for key in family.when})
    got = ", ".join(f"{key} = {table.get(key)!r}" for key in keys)
    ways = " or ".join(", ".join(f"{key} = {value!r}" for key, value in family.when.items()) for family in known)
    raise UserError(f"this kind of {known[0].name} is not known", where=where, got=got, expected=ways)


def _suits(family: Family, table: dict[str, Any]) -> bool:
    for key, wanted in family.when.items():
        allowed = wanted if isinstance(wanted, tuple) else (wanted,)
        value = table.get(key)
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
            return False
    return True


def _model_of(family: Family, table: dict[str, Any], where: object) -> str:
    names = table.get("architectures")
    if names is None or names == []:
        return next(iter(family.models))
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise UserError("one class of models is expected", where=where, got=f"architectures = {names!r}")
    if names[0] not in family.models:
        near = did_you_mean(names[0], family.models)
        remedy = f"did you mean `{near}`?" if near else None
        raise UserError(
            f"this class of {family.name} models is not known",
            where=where,
            got=names[0],
            expected=", ".join(family.models),
            remedy=remedy,
        )
    return names[0]


@dataclass(frozen=True)
class Difference:
    """A part of a specification that a family says otherwise, or cannot say at all."""

    path: str
    ours: Any
    theirs: Any

    @property
    def weight(self) -> int:
        """How many numbers and words are other ones."""
        return _leaves(self.ours)

    def __str__(self) -> str:
        return f"{self.path} = {_short(self.ours)} (there: {_short(self.theirs)})"


def _leaves(value: Any) -> int:
    if isinstance(value, Part):
        return sum(_leaves(getattr(value, name)) for name in type(value).model_fields)
    return sum(map(_leaves, value)) if isinstance(value, tuple) else 1


def _short(value: Any) -> str:
    text = getattr(value, "kind", None) if isinstance(value, Part) else None
    return str(text) if text is not None else repr(value)


def write_config(spec: ModelSpec, families: Sequence[Family] = FAMILIES) -> tuple[dict[str, Any], Reading]:
    """The configuration of the published family that is exactly `spec`, and how it reads.

    Dropout and the losses of experts, which act in training alone, are written where the family has a place for them
    and are no obstacle where it has none. A context that the specification leaves open becomes the family's default.

    Raises `UserError` where no family says the specification, with the nearest and the first part that it cannot say.
    """
    nearest: tuple[int, str, str] | None = None
    wanted = evaluated(spec)
    for family, model in candidates(spec, families):
        try:
            table, reading = written(family, model, spec)
        except UserError as error:
            why = str(error).splitlines()[-1].strip()
            nearest = min(nearest or (10_000, "", ""), (1_000, family.name, f"it cannot be written: {why}"))
            continue
        found = list(differences(wanted, evaluated(reading.spec)))
        if not found:
            return table, reading
        weight = sum(difference.weight for difference in found)
        nearest = min(nearest or (10_000, "", ""), (weight, family.name, str(found[0])))
    raise UserError(
        "no published family is this model, so it has no Hugging Face form",
        got=nearest[2] if nearest else f"a head of kind {getattr(spec.head, 'kind', None)}",
        expected=f"a published family; the nearest is {nearest[1]}" if nearest else "a published family",
        remedy='format="anyformer" keeps everything',
    )


def candidates(spec: ModelSpec, families: Sequence[Family]) -> Iterator[tuple[Family, str]]:
    """Families with the specification's stacks and classes with its kind of head."""
    kind = getattr(spec.head, "kind", None)
    for family in families:
        if set(spec.stacks) != {name for name in ("encoder", "decoder") if name in family.spec}:
            continue
        for model, variant in family.models.items():
            head = merged(family.spec, variant.spec).get("head", {"kind": "language"})
            if (None if head is None else head["kind"]) == kind:
                yield family, model


def written(family: Family, model: str, spec: ModelSpec) -> tuple[dict[str, Any], Reading]:
    """What a family's class writes for a specification, and how that reads, which may be something else."""
    variant = family.models[model]
    view = View(spec, merged(family.spec, variant.spec), family.stack)
    table: dict[str, Any] = {"architectures": [model], "model_type": family.model_type}
    for key, value in family.when.items():
        one = value[0] if isinstance(value, tuple) else value
        if one is not None:
            put(table, key, one)
    for field in (*family.config, *variant.config):
        field.write(view, table)
    return table, read_config(table, f"{family.name}'s configuration", (family,))


_TRAINING = ("dropout", "out_dropout", "balance_loss", "balance_over", "z_loss", "bias_rate")
"""What acts in training alone."""


def evaluated(part: Any) -> Any:
    """A part of a specification without what acts in training alone, and without what a causal mask hides."""
    if not isinstance(part, Part):
        return part
    if isinstance(part, Grouped | Latent) and isinstance(part.mask, Causal) and isinstance(part.position, Alibi):
        part = part.model_copy(update={"position": part.position.model_copy(update={"symmetric": True})})
    fields = type(part).model_fields
    update = {name: fields[name].default for name in _TRAINING if name in fields}
    update |= {name: evaluated(getattr(part, name)) for name in fields if isinstance(getattr(part, name), Part)}
    if "blocks" in fields:
        made: dict[Any, Any] = {}
        for block in part.blocks:
            made.setdefault(block, evaluated(block))
        update["blocks"] = tuple(made[block] for block in part.blocks)
    return part.model_copy(update=update)


def differences(ours: Any, theirs: Any, path: str = "") -> Iterator[Difference]:
    """Where two specifications differ, place by place; of equal layers the first alone."""
    if ours == theirs or (path.endswith(".max_positions") and ours is None):
        return
    if isinstance(ours, float | int) and isinstance(theirs, float | int) and not isinstance(ours, bool):
        if abs(ours - theirs) > 1e-12 * abs(ours):  # What is derived from others rounds.
            yield Difference(path, ours, theirs)
        return
    if isinstance(ours, Part) and type(ours) is type(theirs):
        for name in type(ours).model_fields:
            here = f"{path}.{name}" if path else name
            yield from differences(getattr(ours, name), getattr(theirs, name), here)
        return
    if path.endswith(".blocks") and len(ours) == len(theirs):
        seen: set[Any] = set()
        for layer, pair in enumerate(zip(ours, theirs, strict=True)):
            if pair not in seen:
                seen.add(pair)
                yield from differences(*pair, f"{path}.{layer}")
        return
    yield Difference(path, *(sorted(x) if isinstance(x, frozenset) else x for x in (ours, theirs)))
