"""What a configuration leaves to be derived from other keys: widths, scales, and numbers of heads."""

from dataclasses import dataclass
from typing import Any

from anyformer.families.config import Config
from anyformer.families.fields import default_of, layers_of, put
from anyformer.families.tables import PerLayer, Tables, View
from anyformer.spec.parts import Rope
from anyformer.spec.problems import MISSING


@dataclass(frozen=True)
class Follows:
    """A place that no key names: `value` is a default, as of a key that is never there."""

    path: str
    value: Any

    def read(self, config: Config, tables: Tables) -> None:
        tables.set(self.path, default_of(config, self.value), getattr(self.value, "key", self.path))

    def write(self, view: View, config: dict[str, Any]) -> None:
        """Nothing: what follows is not said."""


@dataclass(frozen=True)
class HeadWidth:
    """A head is the model's width, the key `width`, divided among the heads, the key `heads`, without a remainder."""

    width: str = "hidden_size"
    heads: str = "num_attention_heads"
    parts: tuple[str, ...] = ("attention",)

    def read(self, config: Config, tables: Tables) -> None:
        width, heads = config.whole(self.width), config.whole(self.heads)
        if width % heads:
            config.refuse(self.heads, heads, f"a divisor of {self.width} = {width}")
        for part in self.parts:
            for name in ("d_head", "d_value"):
                tables.set(f"{part}.{name}", width // heads, self.heads)

    def write(self, view: View, config: dict[str, Any]) -> None:
        """Nothing: what follows is not said."""


@dataclass(frozen=True)
class ScoreScale:
    """Whether scores are divided by √d_head, and by the number of the layer, from 1: two keys with defaults (GPT-2)."""

    by_width: tuple[str, bool] = ("scale_attn_weights", True)
    by_layer: tuple[str, bool] = ("scale_attn_by_inverse_layer_idx", False)
    path: str = "attention.scale"

    def read(self, config: Config, tables: Tables) -> None:
        scale = tables.get("attention.d_head") ** -0.5 if config.flag(*self.by_width) else 1.0
        if config.flag(*self.by_layer):
            tables.set(self.path, PerLayer(scale / (i + 1) for i in layers_of(tables)), self.by_layer[0])
        else:
            tables.set(self.path, scale, self.by_width[0])

    def write(self, view: View, config: dict[str, Any]) -> None:
        scales = view.layers(self.path)
        if isinstance(scales, PerLayer) and MISSING not in scales:
            put(config, self.by_width[0], scales[0] != 1.0 or view.first("attention.d_head") == 1)
            put(config, self.by_layer[0], scales[0] != scales[-1])


@dataclass(frozen=True)
class Scale:
    """What scores are multiplied by, a key that is left out, or null, where it is 1/√d_head."""

    key: str
    path: str = "attention.scale"

    def read(self, config: Config, tables: Tables) -> None:
        tables.set(self.path, config.number(self.key, tables.get("attention.d_head") ** -0.5), self.key)

    def write(self, view: View, config: dict[str, Any]) -> None:
        scale, d_head = view.first(self.path), view.first("attention.d_head")
        if MISSING not in (scale, d_head):
            put(config, self.key, None if scale == d_head**-0.5 else scale)


@dataclass(frozen=True)
class SlopeScale:
    """ALiBi's slopes are divided by √d_head, as the scores are (Falcon).

    `transformers` rounds Falcon's slopes, and their products with positions, to bfloat16. Its logits are these for up
    to 256 tokens and slopes that are powers of two, and differ by a percent or so otherwise.
    """

    path: str = "attention.position.scale"

    def read(self, config: Config, tables: Tables) -> None:
        tables.set(self.path, tables.get("attention.d_head") ** -0.5, "alibi")

    def write(self, view: View, config: dict[str, Any]) -> None:
        """Nothing: what follows is not said."""


@dataclass(frozen=True)
class MultiQuery:
    """One key/value head for all query heads, or one for each: a key with a default.

    `n_kv_heads` is the key of their number, which may only repeat it, and means nothing where there is one.
    """

    key: str = "multi_query"
    default: bool = True
    n_kv_heads: str = "num_kv_heads"
    heads: str = "num_attention_heads"

    def read(self, config: Config, tables: Tables) -> None:
        n_heads = config.whole(self.heads)
        one = config.flag(self.key, self.default)
        n_kv_heads = config.get(self.n_kv_heads, n_heads)
        if not one and n_kv_heads != n_heads:
            config.refuse(self.n_kv_heads, n_kv_heads, f"{self.heads} = {n_heads}, where {self.key} is false")
        tables.set("attention.n_kv_heads", 1 if one else n_heads, self.key)

    def write(self, view: View, config: dict[str, Any]) -> None:
        put(config, self.key, view.first("attention.n_kv_heads") == 1)


@dataclass(frozen=True)
class TurningChannels:
    """The number of a head's channels that turn, a key with a default."""

    key: str = "rotary_dim"
    default: int = 64
    path: str = "attention.position"

    def read(self, config: Config, tables: Tables) -> None:
        n, d_head = config.get(self.key, self.default, nullable=True), tables.get("attention.d_head")
        if not isinstance(n, int) or isinstance(n, bool) or not 2 <= n <= d_head or n % 2:
            config.refuse(self.key, n, f"an even number of a head's {d_head} channels")
        tables.set(f"{self.path}.fraction", n / d_head, self.key)

    def write(self, view: View, config: dict[str, Any]) -> None:
        position, d_head = view.first(self.path), view.first("attention.d_head")
        if isinstance(position, Rope) and isinstance(d_head, int):
            put(config, self.key, position.width(d_head))
