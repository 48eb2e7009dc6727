"""The sizes of LLaMA and its kin, and what must hold between their keys."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anyformer.errors import UserError
from anyformer.families.config import Config
from anyformer.families.fields import Field, Quotient, Same, put
from anyformer.families.tables import PerLayer, Tables, View


@dataclass(frozen=True)
class KeyHeads:
    """The number of key/value heads; null, and absence without a default, is one for each query head."""

    default: int | None = None
    key: str = "num_key_value_heads"
    heads: str = "num_attention_heads"
    path: str = "attention.n_kv_heads"

    def read(self, config: Config, tables: Tables) -> None:
        n = config.get(self.key, self.default, nullable=True)
        tables.set(self.path, config.get(self.heads) if n is None else n, self.key)

    def write(self, view: View, config: dict[str, Any]) -> None:
        put(config, self.key, view.first(self.path))


@dataclass(frozen=True)
class Divides:
    """Heads whose number divides the width, whatever the width of a head is.

    Newer versions of `transformers` open no others in some families, so that none are written; they are read.
    """

    def read(self, config: Config, tables: Tables) -> None:
        """Nothing: the keys have fields of their own."""

    def write(self, view: View, config: dict[str, Any]) -> None:
        """Raises `UserError` where heads do not divide the width."""
        width, n_heads = view.get("d_model"), view.first("attention.n_heads")
        if width % n_heads:
            what = "the number of heads does not divide the width"
            raise UserError(what, got=f"attention.n_heads = {n_heads}", expected=f"a divisor of d_model = {width}")


@dataclass(frozen=True)
class Again:
    """A further key for a place that has one: left out or null, or the same.

    Args:
        key: the further key.
        path: the place, which another field has set.
        names: what its words stand for, None where it is a number.
        written: the word to be written where it fits, and otherwise the first that does; None for a key that is not
            written.
    """

    key: str
    path: str
    names: Mapping[str, Any] | None = None
    written: str | None = None

    def read(self, config: Config, tables: Tables) -> None:
        value, here = config.get(self.key, None), tables.get(self.path)
        if value is None:
            return
        meant = value if self.names is None else self.names[config.word(self.key, self.names)]
        if meant not in (here if isinstance(here, PerLayer) else (here,)):
            config.refuse(self.key, value, f"what the other keys say: {self.path.split('.')[-1]} = {here!r}")

    def write(self, view: View, config: dict[str, Any]) -> None:
        value, names = view.first(self.path), self.names or {}
        words = [word for word, ours in names.items() if ours == value]
        if self.written is not None and words:
            put(config, self.key, self.written if self.written in words else words[0])


@dataclass(frozen=True)
class RootOfWidth:
    """Embeddings times the square root of the width, which no key says (Gemma)."""

    width: str = "hidden_size"
    path: str = "embed.scale"

    def read(self, config: Config, tables: Tables) -> None:
        tables.set(self.path, config.whole(self.width) ** 0.5, self.width)

    def write(self, view: View, config: dict[str, Any]) -> None:
        """Nothing: what follows is not said."""


@dataclass(frozen=True)
class ScoresOver:
    """Scores are divided by the square root of a key's whole number (Gemma 2)."""

    key: str
    default: int
    path: str = "attention.scale"

    def read(self, config: Config, tables: Tables) -> None:
        tables.set(self.path, config.whole(self.key, self.default) ** -0.5, self.key)

    def write(self, view: View, config: dict[str, Any]) -> None:
        scale = view.first(self.path)
        if isinstance(scale, float):
            put(config, self.key, max(1, round(scale**-2)))


@dataclass(frozen=True)
class PadWithin:
    """The token that pads: null where the vocabulary ends before `default`, the one that `transformers` takes then."""

    default: int
    key: str = "pad_token_id"

    def read(self, config: Config, tables: Tables) -> None:
        """Nothing: what pads is the tokenizer's."""

    def write(self, view: View, config: dict[str, Any]) -> None:
        if view.spec.vocab_size <= self.default:
            put(config, self.key, None)


def sizes(max_positions: int, n_kv_heads: int | None = None) -> tuple[Field, ...]:
    """Vocabulary, width, layers, context and heads, with the defaults of the last."""
    return (
        Same("vocab_size", "vocab_size"),
        Same("hidden_size", "d_model"),
        Same("num_hidden_layers", "n_layers"),
        Same("max_position_embeddings", "max_positions", default=max_positions),
        Same("num_attention_heads", "attention.n_heads"),
        KeyHeads(n_kv_heads),
    )


SHARE = Quotient("hidden_size", "num_attention_heads")
"""A head's share of the width."""


def head_dim(default: Any = SHARE) -> Field:
    """The width of a head, whose values are as wide as its keys."""
    return Same("head_dim", ("attention.d_head", "attention.d_value"), default=default)
