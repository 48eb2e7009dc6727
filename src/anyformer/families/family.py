"""What a family of published models is: data, read in both directions."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anyformer.families.fields import Field


@dataclass(frozen=True)
class Joined:
    """Their tensor is ours side by side along `dim`; `transposed` where theirs is kept as [in, out]."""

    dim: int = 0
    transposed: bool = False


@dataclass(frozen=True)
class Interleaved:
    """Each of `groups` parts of their rows holds the same part of each of ours, one after another.

    `groups` is a field of the block's attention: "n_heads" or "n_kv_heads".
    """

    groups: str


@dataclass(frozen=True)
class Stacked:
    """Theirs is a tensor for each `{e}`, ours one tensor with them along a new first dimension."""


@dataclass(frozen=True)
class Row:
    """Theirs is [1, n], ours [n]."""


@dataclass(frozen=True)
class Twice:
    """Theirs is what another rule has under another name, and is written as well: some versions read only this one.

    `untied`: written only beside a head with a matrix of its own.
    """

    untied: bool = False


@dataclass(frozen=True)
class Otherwise:
    """Theirs, which another rule reads too, is copied where no other rule gives ours. Never written."""


@dataclass(frozen=True)
class Where:
    """The same tensor, called so in models that have the tensor `place` of ours too."""

    place: str


@dataclass(frozen=True)
class Rotated:
    """The rows of each head lie with the two halves that turn together side by side: 0, D/2, 1, D/2 + 1, …

    `groups` is a field of the block's attention: "n_heads" or "n_kv_heads".
    """

    groups: str


@dataclass(frozen=True)
class Shifted:
    """Theirs is ours plus 1. What 1 + w loses to rounding is lost, at most 2⁻²⁴ for |w| < 1 in float32."""


@dataclass(frozen=True)
class Heads:
    """Theirs is [heads, out, in] of ours [heads · out, in]; `transposed`: [heads, in, out]."""

    groups: str
    transposed: bool = False


Form = Joined | Interleaved | Stacked | Row | Twice | Otherwise | Where | Rotated | Shifted | Heads
Rule = tuple[str, str | tuple[str, ...]] | tuple[str, str | tuple[str, ...], Form]
"""Their name, ours (or several of ours), and how theirs is made of ours; the same tensor where that is not said.

In names `{i}` is a layer, `{e}` an expert, `{p}` weight or bias, `{body}` what stands before the body's names.
"""


@dataclass(frozen=True)
class Variant:
    """A class of models of a family: the family's body with a head of some kind.

    Attributes:
        spec: what it adds to the family's tables.
        tensors: rules of its own, after the family's.
        config: fields of its own, read after the family's.
        body: what stands before the names of the body's tensors.
    """

    spec: Mapping[str, Any]
    tensors: tuple[Rule, ...] = ()
    config: tuple[Field, ...] = ()
    body: str = ""


@dataclass(frozen=True)
class Family:
    """A family: one description for reading and for writing.

    Attributes:
        name: for people.
        model_type: as config.json has it.
        stack: the stack that paths without one mean.
        spec: what is the same in all its models.
        config: what differs, key by key, in the order in which keys are read.
        models: by class name (`architectures` of config.json), the usual one first.
        tensors: rules for names and shapes; a rule without a place in a specification is not used.
        when: keys with the values that tell this family from others of its model type; null stands for an absent key.
        aliases: other names of keys, with the name that the fields use.
        fixed: keys that may be left out and otherwise have this value, or one of these in a tuple.
        ignored: keys that do not change what a model computes.
        dropped: patterns of tensors that are computed, not learned, or serve only training.
        computed: patterns of tables of sinusoidal positions, and the stack whose positions they should hold.
        peer: the implementation of attention in `transformers` that computes what its configuration says.
        presets: shipped recipes of published sizes that this family says exactly.
    """

    name: str
    model_type: str
    stack: str
    spec: Mapping[str, Any]
    config: tuple[Field, ...]
    models: Mapping[str, Variant]
    tensors: tuple[Rule, ...]
    when: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    computed: Mapping[str, str] = field(default_factory=dict)
    peer: str = "eager"
    presets: tuple[str, ...] = ()
