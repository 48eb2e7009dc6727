"""The recipe: the short form that people write, in which every number that follows from others may be left out.

A recipe is a TOML file or nested tables. A table whose only content is its kind may be written as that word
(`position = "rope"`), and `ffn = "swiglu"`, "geglu", "reglu" name the gated kinds of Shazeer (2020).
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import Field, ValidationError

from anyformer.spec.parts import (
    MAX_LAYERS,
    Activation,
    EmbedPosition,
    GroupedFields,
    Heads,
    InnerWidth,
    LanguageHead,
    Length,
    NoPosition,
    Norm,
    Norms,
    Part,
    Rate,
    RMSNorm,
    Serial,
    Vocabulary,
    Width,
    Wiring,
)
from anyformer.spec.problems import Problem, from_pydantic, look_up, raw_path

P = TypeVar("P", bound=Part)

Placement = Literal["pre", "post", "sandwich", "output"]


class GroupedRecipe(GroupedFields):
    """Grouped attention: n_kv_heads is n_heads, d_head is d_model / n_heads, d_value is d_head, where not given."""

    n_kv_heads: Heads | None = None
    d_head: Width | None = None
    d_value: Width | None = None
    qkv_bias: bool | None = None
    out_bias: bool | None = None
    dropout: Rate | None = None
    out_dropout: Rate | None = None


class _FeedForwardRecipe(Part):
    activation: Activation
    d_ff: InnerWidth | None = None
    multiple_of: Width = 64
    bias: bool | None = None
    dropout: Rate = 0.0
    out_dropout: Rate | None = None


class DenseRecipe(_FeedForwardRecipe):
    """A dense feed-forward: d_ff is 4 · d_model where not given."""

    kind: Literal["dense"] = "dense"


class GatedRecipe(_FeedForwardRecipe):
    """A gated feed-forward: d_ff is 8/3 · d_model rounded up to `multiple_of` where not given (Touvron et al. 2023)."""

    kind: Literal["gated"] = "gated"


class LayerRecipe(Part):
    """What may differ from layer to layer.

    `placement` puts `norm` into the slots of both branches: pre = before, post = residual, sandwich = before and after,
    output = after. `norms` says every slot by itself instead.
    """

    attention: GroupedRecipe
    ffn: Annotated[DenseRecipe | GatedRecipe, Field(discriminator="kind")]
    norm: Norm = RMSNorm()
    placement: Placement = "pre"
    norms: Norms | None = None
    wiring: Wiring = Serial()


class EmbedRecipe(Part):
    """The embedding: `dropout` is the recipe's where not given."""

    position: EmbedPosition = NoPosition()
    norm: Norm | None = None
    dropout: Rate | None = None


class NoHead(Part):
    """A model that ends with its hidden states."""

    kind: Literal["none"] = "none"


class Recipe(LayerRecipe):
    """A decoder-only model in short form.

    `dropout` and `bias` are the defaults of every part. `final_norm` is `norm` unless the placement is post. `pattern`
    lists differences from the root's layer, entry by entry, each for `repeat` layers, and starts again after the last.
    """

    vocab_size: Vocabulary
    d_model: Width
    n_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    max_positions: Length | None = None
    dropout: Rate = 0.0
    bias: bool = False
    tie: bool = False
    embed: EmbedRecipe = EmbedRecipe()
    final_norm: Norm | None = None
    head: Annotated[LanguageHead | NoHead, Field(discriminator="kind")] = LanguageHead()
    pattern: Annotated[tuple[dict[str, Any], ...], Field(strict=False)] = ()


LAYER_KEYS = frozenset(LayerRecipe.model_fields)

_WORDS = (
    ("attention", "position"),
    ("attention", "mask"),
    ("attention", "qk_norm", "norm"),
    ("embed", "position"),
    ("embed", "norm"),
    ("ffn",),
    ("norm",),
    ("final_norm",),
    ("wiring",),
    ("head",),
    *(("norms", branch, slot) for branch in ("attention", "ffn") for slot in ("before", "after", "residual")),
)
_FFN_WORDS = {
    "swiglu": {"kind": "gated", "activation": "silu"},
    "geglu": {"kind": "gated", "activation": "gelu"},
    "reglu": {"kind": "gated", "activation": "relu"},
}


def normalise(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The same recipe with every shorthand word written out as a table."""
    table: dict[str, Any] = copy.deepcopy(dict(raw))
    for path in _WORDS:
        parent = look_up(table, path[:-1])
        if isinstance(parent, dict) and isinstance(parent.get(path[-1]), str):
            parent[path[-1]] = {"kind": parent[path[-1]]}
    ffn = table.get("ffn")
    if isinstance(ffn, dict) and ffn.get("kind") in _FFN_WORDS:
        table["ffn"] = {**ffn, "activation": None, **_FFN_WORDS[ffn["kind"]]}
    attention = table.get("attention")
    if isinstance(attention, dict) and isinstance(attention.get("qk_norm"), bool):
        on = attention.pop("qk_norm")
        attention.update({"qk_norm": {}} if on else {})
    pattern = table.get("pattern")
    if isinstance(pattern, list | tuple):
        table["pattern"] = [_normalise_entry(x) if isinstance(x, dict) else x for x in pattern]
    return table


def _normalise_entry(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry's `qk_norm = false` stays, since it takes away what the root has."""
    off = isinstance(entry.get("attention"), dict) and entry["attention"].get("qk_norm") is False
    result = normalise(entry)
    if off:
        result["attention"]["qk_norm"] = None
    return result


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the tables of `over` laid on it; a table of another kind takes the place of the whole table."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        same_kind = (
            isinstance(old, dict) and isinstance(value, dict) and value.get("kind", old.get("kind")) == old.get("kind")
        )
        result[key] = merged(old, value) if same_kind and isinstance(old, dict) else value
    return result


def _parts_in(annotation: Any) -> Iterator[type[Part]]:
    if isinstance(annotation, type) and issubclass(annotation, Part):
        yield annotation
    for argument in get_args(annotation):
        yield from _parts_in(argument)


def known_keys(part: type[Part], raw: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], list[str]]:
    """For every table in `raw`, the keys that a table of its kind may have; at its path and "kind", the kinds."""
    keys = {path: list(part.model_fields)}
    for name, field in part.model_fields.items():
        value = raw.get(name) if isinstance(raw, dict) else None
        entries = enumerate(value) if isinstance(value, list) else [(None, value)]
        for index, entry in entries:
            here = (*path, name) if index is None else (*path, name, str(index))
            for choice in _parts_in(field.rebuild_annotation()):
                kind = choice.model_fields.get("kind")
                if isinstance(entry, dict) and kind is not None:
                    keys.setdefault((*here, "kind"), []).append(str(kind.default))
                if isinstance(entry, dict) and (kind is None or entry.get("kind", kind.default) == kind.default):
                    keys |= known_keys(choice, entry, here)
    return keys


_PLACEHOLDERS: dict[tuple[str, ...], Any] = {
    ("vocab_size",): 1,
    ("d_model",): 2,
    ("n_layers",): 1,
    ("attention",): {"n_heads": 1, "position": {"kind": "none"}},
    ("attention", "n_heads"): 1,
    ("attention", "position"): {"kind": "none"},
    ("ffn",): {"kind": "dense", "activation": "relu"},
    ("ffn", "activation"): "relu",
}


def partly(model: type[P], raw: dict[str, Any]) -> tuple[P, list[Problem], set[str]]:
    """The recipe as far as it is sound: the part, its problems, and the paths whose values are unknown.

    Broken values are left out, or stand-ins where something must be there, so that the rules between fields can still
    judge the rest.
    """
    try:
        return model.model_validate(raw), [], set()
    except ValidationError as error:
        problems = from_pydantic(error, raw, known_keys(model, raw), {"ffn": _FFN_WORDS})
        failed = error
    table: dict[str, Any] = copy.deepcopy(raw)
    unknown: set[str] = set()
    for _ in range(10):
        for each in failed.errors(include_url=False):
            path = raw_path(table, each["loc"])
            parent = look_up(table, path[:-1])
            if each["type"] != "extra_forbidden":
                unknown.add(".".join(path))
            if isinstance(parent, dict):
                parent.pop(path[-1], None)
                if path in _PLACEHOLDERS:
                    parent[path[-1]] = copy.deepcopy(_PLACEHOLDERS[path])
            elif path[:1] and path[0] in table:
                del table[path[0]]
        try:
            return model.model_validate(table), problems, unknown
        except ValidationError as error:
            failed = error
    raise AssertionError(f"no sound part of the recipe found: {failed}")
