"""What configurations of encoders say in ways of their own: positions after an offset, two-sided windows, thetas."""

from dataclasses import dataclass
from typing import Any

from anyformer.families.config import REQUIRED, Config
from anyformer.families.fields import layers_of, put
from anyformer.families.tables import PerLayer, Tables, View
from anyformer.spec.parts import Rope
from anyformer.spec.problems import MISSING


@dataclass(frozen=True)
class Whole:
    """A key that is a whole number, 1 or more, at one place."""

    key: str
    path: str
    default: Any = REQUIRED

    def read(self, config: Config, tables: Tables) -> None:
        tables.set(self.path, config.whole(self.key, self.default), self.key)

    def write(self, view: View, config: dict[str, Any]) -> None:
        value = view.first(self.path)
        if value is not MISSING:
            put(config, self.key, value)


@dataclass(frozen=True)
class OffsetPositions:
    """Learned positions of which the first comes after the padding token's number: a table of `key` rows in all."""

    key: str = "max_position_embeddings"
    pad: str = "pad_token_id"
    defaults: tuple[int, int] = (512, 1)

    def read(self, config: Config, tables: Tables) -> None:
        rows, pad = config.whole(self.key, self.defaults[0]), config.get(self.pad, self.defaults[1])
        if not isinstance(pad, int) or isinstance(pad, bool) or pad < 0:
            config.refuse(self.pad, pad, "a whole number, 0 or more: positions are counted from the one after it")
        if rows < pad + 2:
            config.refuse(self.key, rows, f"more than {self.pad} + 1 = {pad + 1} rows, which no token reads")
        tables.set("embed.position.offset", pad + 1, self.pad)
        tables.set("max_positions", rows - pad - 1, self.key)

    def write(self, view: View, config: dict[str, Any]) -> None:
        length, offset = view.get("max_positions"), view.get("embed.position.offset")
        if isinstance(length, int) and isinstance(offset, int):
            put(config, self.key, length + offset)
            put(config, self.pad, offset - 1)


@dataclass(frozen=True)
class FirstLayer:
    """The option of an `Either` that the first layer has, and that of the others."""

    path: str
    first: str
    others: str

    def read(self, config: Config, tables: Tables) -> None:
        others = [self.others] * (len(layers_of(tables)) - 1)
        tables.set(self.path, PerLayer([self.first, *others]), "num_hidden_layers")

    def write(self, view: View, config: dict[str, Any]) -> None:
        """Nothing: every model of the family has it so."""


@dataclass(frozen=True)
class HalfWindows:
    """A window to both sides, `key` positions wide in all, in layers that `layer_types` names.

    Where there are no `layer_types`, all have it but each n-th, counted from the first.
    """

    key: str = "local_attention"
    every: tuple[str, int] = ("global_attn_every_n_layers", 3)
    default: int = 128
    path: str = "attention.mask.window"

    def read(self, config: Config, tables: Tables) -> None:
        window = config.whole(self.key, self.default) // 2 + 1
        n, types = config.whole(*self.every), config.get("layer_types", None)
        layers = layers_of(tables)
        local = [bool(i % n) for i in layers] if types is None else self._listed(config, types, len(layers))
        tables.set(self.path, PerLayer(window if here else None for here in local), self.key)

    def _listed(self, config: Config, types: Any, n_layers: int) -> list[bool]:
        known = {"sliding_attention": True, "full_attention": False}
        if not isinstance(types, list) or len(types) != n_layers or not all(isinstance(x, str) for x in types):
            config.refuse("layer_types", types, f"a word for each of {n_layers} layers")
        for word in types:
            if word not in known:
                config.refuse("layer_types", word, " or ".join(known))
        return [known[word] for word in types]

    def write(self, view: View, config: dict[str, Any]) -> None:
        windows = view.layers(self.path)
        if not isinstance(windows, PerLayer) or MISSING in windows:
            return
        local = [window is not None for window in windows]
        if any(local):
            put(config, self.key, max(1, 2 * (next(x for x in windows if x is not None) - 1)))
        put(config, "layer_types", ["sliding_attention" if here else "full_attention" for here in local])
        for n in range(1, len(local) + 1):
            if local == [bool(i % n) for i in range(len(local))]:
                put(config, self.every[0], n)
                break


@dataclass(frozen=True)
class LayerThetas:
    """theta of the layers that see all and of those with a window, unscaled: a key for each, or `rope_parameters`.

    A null for the second is the first's.
    """

    whole: tuple[str, float] = ("global_rope_theta", 160_000.0)
    local: tuple[str, float] = ("local_rope_theta", 10_000.0)
    path: str = "attention.position"

    def read(self, config: Config, tables: Tables) -> None:
        whole = self._theta(config, "full_attention", config.number(*self.whole), self.whole[0])
        said = config.get(self.local[0], MISSING, nullable=True)
        default = whole if said is None else config.number(*self.local)
        local = self._theta(config, "sliding_attention", default, self.local[0])
        windows = tables.get("attention.mask.window")
        assert isinstance(windows, PerLayer)
        theta = PerLayer(whole if window is None else local for window in windows)
        tables.set(f"{self.path}.theta", theta, self.whole[0])

    def _theta(self, config: Config, kind: str, default: float, key: str) -> float:
        where = f"{config.where}, rope_parameters.{kind}"
        table = config.get(f"rope_parameters.{kind}", {})
        if not isinstance(table, dict):
            config.refuse(f"rope_parameters.{kind}", table, "a table")
        rope = Config(table, where)
        if rope.get("rope_type", "default") != "default":
            rope.refuse("rope_type", rope.get("rope_type"), "default")
        theta = rope.number("rope_theta", default)
        rope.finish({"partial_rotary_factor": 1.0}, ())
        return theta

    def write(self, view: View, config: dict[str, Any]) -> None:
        positions, windows = view.layers(self.path), view.layers("attention.mask.window")
        if not isinstance(positions, PerLayer) or not isinstance(windows, PerLayer):
            return
        for position, window in reversed(list(zip(positions, windows, strict=True))):
            if isinstance(position, Rope):
                put(config, (self.whole if window is None else self.local)[0], position.theta)
