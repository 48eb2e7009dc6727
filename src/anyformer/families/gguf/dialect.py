"""How GGUF files of one architecture say a family: data, read in both directions.

A file's metadata becomes a configuration of the family (the keys of its config.json), and its tensors have names of
their own. The keys are those of llama.cpp, which says what they mean.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from anyformer.families.config import REQUIRED, Config
from anyformer.families.family import Family, Rule
from anyformer.families.fields import Of, Quotient, put

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Said:
    """What a file says of its model.

    Attributes:
        meta: the metadata of the architecture, without its prefix.
        shapes: every tensor's shape, the longest stride first.
        numbers: the numbers of a small table of float32.
    """

    meta: Config
    shapes: Mapping[str, Shape]
    numbers: Callable[[str], list[float]]


@dataclass
class Made:
    """What a file is to say of its model: metadata without the architecture's prefix, and computed tables."""

    meta: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, list[float]] = field(default_factory=dict)


class Key(Protocol):
    """Metadata and keys of a configuration that say the same."""

    def read(self, said: Said, config: dict[str, Any]) -> None:
        """Puts what the file says into the configuration. Raises `UserError`."""

    def write(self, config: Config, made: Made) -> None:
        """Puts what the configuration says into the metadata."""


def short(value: float) -> float:
    """A float32 as the number of fewest digits that rounds to it: 1e-05, not 9.999999747378752e-06."""
    for digits in range(1, 10):
        near = float(f"{value:.{digits}g}")
        if near == value or _single(near) == _single(value):
            return near
    return value


def _single(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except (OverflowError, struct.error):
        return b""


@dataclass(frozen=True)
class Whole:
    """A whole number. `default`: where the file says none; None leaves the key to the family."""

    key: str
    theirs: str
    default: Any = REQUIRED

    def read(self, said: Said, config: dict[str, Any]) -> None:
        if said.meta.get(self.key, None) is not None:
            put(config, self.theirs, said.meta.whole(self.key))
        elif self.default is REQUIRED:
            said.meta.get(self.key)
        elif self.default is not None:
            put(config, self.theirs, _default(said.meta, self.default))

    def write(self, config: Config, made: Made) -> None:
        value = config.get(self.theirs, None)
        if value is not None:
            made.meta[self.key] = value


def _default(meta: Config, default: Any) -> Any:
    match default:
        case Of(key=key, default=other):
            return meta.get(key, other)
        case Quotient(key=key, by=by):
            return meta.whole(key) // meta.whole(by)
    return default


@dataclass(frozen=True)
class Real:
    """A number of float32, read as the decimal that people write."""

    key: str
    theirs: str
    default: Any = REQUIRED

    def read(self, said: Said, config: dict[str, Any]) -> None:
        if said.meta.get(self.key, None) is not None:
            put(config, self.theirs, short(said.meta.number(self.key)))
        elif self.default is REQUIRED:
            said.meta.get(self.key)
        elif self.default is not None:
            put(config, self.theirs, self.default)

    def write(self, config: Config, made: Made) -> None:
        value = config.get(self.theirs, None)
        if value is not None:
            made.meta[self.key] = float(value)


@dataclass(frozen=True)
class Switch:
    """True or false."""

    key: str
    theirs: str
    default: bool

    def read(self, said: Said, config: dict[str, Any]) -> None:
        put(config, self.theirs, said.meta.flag(self.key, self.default))

    def write(self, config: Config, made: Made) -> None:
        made.meta[self.key] = config.flag(self.theirs, self.default)


@dataclass(frozen=True)
class Chosen:
    """A number that stands for a word of the configuration."""

    key: str
    theirs: str
    words: Mapping[int, str]
    default: str

    def read(self, said: Said, config: dict[str, Any]) -> None:
        value = said.meta.get(self.key, None)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value not in self.words):
            said.meta.refuse(self.key, value, ", ".join(f"{n} ({word})" for n, word in self.words.items()))
        put(config, self.theirs, self.default if value is None else self.words[value])

    def write(self, config: Config, made: Made) -> None:
        word = config.get(self.theirs, self.default)
        for number, known in self.words.items():
            if known == word:
                made.meta[self.key] = number


@dataclass(frozen=True)
class Implied:
    """A key of the configuration that the architecture has one value for."""

    theirs: str
    value: Any

    def read(self, said: Said, config: dict[str, Any]) -> None:
        put(config, self.theirs, self.value)

    def write(self, config: Config, made: Made) -> None:
        """Nothing: what follows is not said."""


@dataclass(frozen=True)
class Present:
    """A key that is true where the file has a tensor, as biases and an output matrix of its own are told."""

    theirs: str
    tensor: str
    on: Any = True
    off: Any = False

    def read(self, said: Said, config: dict[str, Any]) -> None:
        put(config, self.theirs, self.on if self.tensor in said.shapes else self.off)

    def write(self, config: Config, made: Made) -> None:
        """Nothing: the tensors say it."""


@dataclass(frozen=True)
class Repeated:
    """Metadata that repeats what another key says: left out, or the same.

    Args:
        key: the further key.
        of: the key whose value it has (an `Of` with what that key is where the file has none), a `Quotient` of two, or
            a plain number.
        theirs: the configuration's key with that value, written; None where it is not written.
    """

    key: str
    of: str | Of | Quotient | int
    theirs: str | None = None

    def read(self, said: Said, config: dict[str, Any]) -> None:
        value = said.meta.get(self.key, None)
        if value is None:
            return
        same = self.of if isinstance(self.of, int) else _value(said.meta, self.of)
        if same is not None and value != same:
            said.meta.refuse(self.key, value, f"{same}, as the other keys say")

    def write(self, config: Config, made: Made) -> None:
        value = None if self.theirs is None else config.get(self.theirs, None)
        if isinstance(self.of, int):
            value = self.of
        if value is not None:
            made.meta[self.key] = value


def _value(meta: Config, of: str | Of | Quotient) -> Any:
    match of:
        case Of(key=key, default=other):
            return meta.get(key, _default(meta, other))
        case Quotient():
            return _default(meta, of)
    return meta.get(of, None)


@dataclass(frozen=True)
class Rows:
    """The number of tokens: the rows of the token table, whatever `vocab_size` in the metadata says."""

    tensor: str = "token_embd.weight"

    def read(self, said: Said, config: dict[str, Any]) -> None:
        shape = said.shapes.get(self.tensor)
        if shape is None or len(shape) != 2:
            got = "no such tensor" if shape is None else f"{self.tensor} of shape {list(shape)}"
            said.meta.refuse("vocab_size", got, f"a table {self.tensor} with a row for each token")
        config["vocab_size"] = shape[0]
        said.meta.get("vocab_size", None)

    def write(self, config: Config, made: Made) -> None:
        made.meta["vocab_size"] = config.get("vocab_size")


@dataclass(frozen=True)
class Dialect:
    """An architecture of GGUF and the family that its models are of.

    Attributes:
        architecture: as `general.architecture` has it, and before the names of its metadata.
        family: whose configuration the keys give.
        model: the class of the family that such files hold.
        keys: metadata and the configuration's keys.
        tensors: rules for names and shapes, as `families.family.Rule` says: `{i}` is a layer, `{e}` an expert, `{p}`
            weight or bias.
        when: a key that tells this dialect from others of its architecture, and whether it is there and not 0.
        ignored: metadata that does not change what a model computes.
        dropped: patterns of tensors that are computed, not learned.
        vectors: patterns of tensors that some files have as matrices of one row, which ggml does not tell apart.
    """

    architecture: str
    family: Family
    model: str
    keys: tuple[Key, ...]
    tensors: tuple[Rule, ...]
    when: tuple[str, bool] | None = None
    ignored: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    vectors: tuple[str, ...] = ()

    def suits(self, meta: Mapping[str, Any]) -> bool:
        """Whether metadata without the architecture's prefix is of this dialect."""
        return self.when is None or bool(meta.get(self.when[0])) == self.when[1]
