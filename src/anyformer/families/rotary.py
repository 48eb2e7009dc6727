"""Rotary positions in a configuration: `rope_theta` and `rope_scaling`, or the newer `rope_parameters`."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from anyformer.families.config import Config
from anyformer.families.fields import layers_of, put
from anyformer.families.tables import PerLayer, Tables, View
from anyformer.spec.parts import Rope
from anyformer.spec.positions import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NoScaling,
    YarnScaling,
)
from anyformer.spec.problems import MISSING

Table = dict[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"
"""Names of the layers that see all and of those with a window."""
ORIGINAL = "original_max_position_embeddings"
"""The key of the context before scaling."""


def _linear(rope: Config, length: int, original: int) -> Table:
    return {"kind": "linear", "factor": rope.number("factor")}


def _dynamic(rope: Config, length: int, original: int) -> Table:
    if original != length:
        rope.refuse(ORIGINAL, original, f"{length}, the context: readers differ in which one this scaling grows from")
    return {"kind": "dynamic", "factor": rope.number("factor"), "original": length}


def _llama3(rope: Config, length: int, original: int) -> Table:
    return {
        "kind": "llama3",
        "factor": rope.number("factor"),
        "low_freq_factor": rope.number("low_freq_factor"),
        "high_freq_factor": rope.number("high_freq_factor"),
        "original": original,
    }


def mscale(factor: float, m: float = 1.0) -> float:
    """0.1·m·ln(factor) + 1, and 1 for a factor up to 1 (Peng et al. 2023, eq. 22; m in DeepSeek-V2's code)."""
    return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn(rope: Config, length: int, original: int) -> Table:
    factor = rope.number("factor", length / original)
    m, m_all = rope.number("mscale", 0), rope.number("mscale_all_dim", 0)
    derived = mscale(factor, m) / mscale(factor, m_all) if m and m_all else mscale(factor)
    return {
        "kind": "yarn",
        "factor": factor,
        "original": original,
        "beta_fast": rope.number("beta_fast", 0) or 32.0,
        "beta_slow": rope.number("beta_slow", 0) or 1.0,
        "truncate": rope.flag("truncate", True),
        "attention_factor": rope.number("attention_factor", derived),
    }


def _stretched(factor: float, original: int) -> float:
    """√(1 + ln(factor) / ln(original)), and 1 for a factor up to 1 (Ding et al. 2024, in the published code)."""
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0


def _longrope(rope: Config, length: int, original: int) -> Table:
    factor = rope.number("factor", length / original)
    return {
        "kind": "longrope",
        "original": original,
        "short": rope.get("short_factor"),
        "long": rope.get("long_factor"),
        "attention_factor": rope.number("attention_factor", _stretched(factor, original)),
    }


_READ: dict[str, Callable[[Config, int, int], Table]] = {
    "none": lambda rope, length, original: {"kind": "none"},
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
WORDS: Mapping[str, str] = {
    "default": "none",
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
}
"""Published names of scalings, with ours."""


def _said(scaling: Any, length: Any) -> Table:
    """A scaling's numbers in the published words. `length`: the context, None where it is left open."""
    match scaling:
        case LinearScaling(factor=factor) | DynamicNTKScaling(factor=factor):
            return {"factor": factor}
        case Llama3Scaling():
            return {
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                ORIGINAL: scaling.original,
            }
        case YarnScaling():
            table: Table = {
                "factor": scaling.factor,
                ORIGINAL: scaling.original,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "attention_factor": scaling.attention_factor,
            }
            return table if scaling.truncate else {**table, "truncate": False}
        case LongRopeScaling():
            table = {"short_factor": list(scaling.short), "long_factor": list(scaling.long), ORIGINAL: scaling.original}
            derived = isinstance(length, int) and _stretched(length / scaling.original, scaling.original)
            same = derived and math.isclose(scaling.attention_factor, derived, rel_tol=1e-12)
            return table if same else {**table, "attention_factor": scaling.attention_factor}
    return {}


def _scaling(rope: Config, words: Mapping[str, str], length: int, original: int) -> Table:
    """What a table of rotary settings says of scaling. `original`: the context before it, where the table has none."""
    word = rope.word("type", words, "default")
    kind = words[rope.word("rope_type", words, word)]
    if "type" in rope and words[word] != kind:
        rope.refuse("type", word, f"{rope.get('rope_type')!r}, like rope_type")
    made = _READ[kind](rope, length, rope.whole(ORIGINAL, original))
    if kind == "none":
        rope.get("factor", None)  # Published configurations carry a factor that means nothing here.
    rope.finish({"finetuned": (True, False)}, ("attention_factor", "mscale", "mscale_all_dim"))
    return made


def _both(config: Config, newer: Table, older: Table) -> Table:
    """What two tables say together. Raises `UserError` where they say different things."""
    for key in older:
        if key in newer and newer[key] != older[key]:
            config.refuse(f"rope_scaling.{key}", older[key], f"{newer[key]!r}, like rope_parameters")
    return {**newer, **older}


def _agreed(config: Config, key: str, default: Any, rope: Config, inner: str) -> float:
    """A number that stands under `key`, or under another name in the table of rotary settings, or in both."""
    outside, inside = config.get(key, None), rope.get(inner, None)
    if outside is not None and inside is not None and outside != inside:
        config.refuse(key, outside, f"{inside!r}, like {inner} in {rope.where}")
    return rope.number(inner, config.number(key, default))


@dataclass(frozen=True)
class Rotary:
    """theta, the fraction that turns, and scaling of every layer; of layers with a window by themselves with `local`.

    It follows the context and the windows. What is written is read by older and newer versions of `transformers`.

    Args:
        theta: where the configuration says none.
        key: the key of theta.
        fraction: the key of the fraction and its default, None where all of a head turns.
        local: the key of theta in layers with a window and its default. Such layers are scaled by a table of their own
            in `rope_parameters` alone.
        path: the place of the position.
        outer: the original context where it is a key of the configuration itself, and its default (Phi-3).
        words: the scalings that the family's models know.
        label: the key of the scaling's name when it is written; without it "type", which older versions read, for
            scalings as old as that.
    """

    theta: float = 10000.0
    key: str = "rope_theta"
    fraction: tuple[str, float] | None = None
    local: tuple[str, float] | None = None
    path: str = "attention.position"
    outer: int | None = None
    words: Mapping[str, str] = field(default_factory=lambda: WORDS)
    label: str | None = None

    def read(self, config: Config, tables: Tables) -> None:
        name, full, sliding = self._tables(config)
        whole = Config(full, f"{config.where}, {name}")
        self._set(config, tables, whole, (self.key, self.theta), windowed=False)
        if self.local is not None:
            rope = Config(sliding, f"{config.where}, {name}, {SLIDING}")
            self._set(config, tables, rope, self.local, windowed=True)

    def _tables(self, config: Config) -> tuple[str, Table, Table]:
        """The key of the settings, those of all layers (or of those that see all), those of layers with a window."""
        newer, older = config.get("rope_parameters", {}), config.get("rope_scaling", {})
        for key, table in (("rope_parameters", newer), ("rope_scaling", older)):
            if not isinstance(table, dict):
                config.refuse(key, table, "a table")
            if (FULL in table or SLIDING in table) and (self.local is None or key == "rope_scaling"):
                config.refuse(key, table, "one table for all layers")
        name = "rope_parameters" if newer else "rope_scaling"
        if self.local is None:
            return name, _both(config, newer, older), {}
        full, sliding = ({} if newer.get(kind) is None else newer[kind] for kind in (FULL, SLIDING))
        if not set(newer) <= {FULL, SLIDING} or not isinstance(full, dict) or not isinstance(sliding, dict):
            config.refuse("rope_parameters", newer, f"a table with those of {FULL} and {SLIDING}")
        return name, _both(config, full, older), sliding

    def _set(self, config: Config, tables: Tables, rope: Config, theta: tuple[str, float], *, windowed: bool) -> None:
        length = tables.get("max_positions")
        if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length < 1 << 63:
            length = config.whole("max_position_embeddings")
        fraction = self.fraction or ("partial_rotary_factor", 1.0)
        values: Table = {
            "theta": _agreed(config, *theta, rope, "rope_theta"),
            "fraction": _agreed(config, *fraction, rope, "partial_rotary_factor"),
        }
        if self.fraction is None and values["fraction"] != 1:
            config.refuse("partial_rotary_factor", values["fraction"], "1: in this family all of a head turns")
        original = length if self.outer is None else config.whole(ORIGINAL, self.outer)
        values["scaling"] = _scaling(rope, self.words, length, original)
        self._same_original(config, rope, values["scaling"])
        for name, value in values.items():
            path = f"{self.path}.{name}"
            origin = {"theta": theta[0], "fraction": fraction[0]}.get(name, "rope_scaling")
            if windowed:
                windows = tables.get("attention.mask.window")
                windows = windows if isinstance(windows, PerLayer) else [windows for _ in layers_of(tables)]
                value = PerLayer(tables.get(path) if window is None else value for window in windows)
            tables.set(path, value, origin)

    def _same_original(self, config: Config, rope: Config, scaling: Table) -> None:
        """Refuses two original contexts: versions of `transformers` differ in which one they take."""
        outside, original = config.get(ORIGINAL, self.outer), scaling.get("original")
        if outside is not None and original not in (None, outside) and scaling["kind"] != "dynamic":
            config.refuse(ORIGINAL, outside, f"{original!r}, as {rope.where} gives it")

    def write(self, view: View, config: dict[str, Any]) -> None:
        positions, windows = view.layers(self.path), view.layers("attention.mask.window")
        if not isinstance(positions, PerLayer) or not isinstance(windows, PerLayer):
            return
        turning = [(p, w) for p, w in zip(positions, windows, strict=True) if isinstance(p, Rope)]
        whole = [p for p, w in turning if w is None or w is MISSING]
        local = [p for p, w in turning if w is not None and w is not MISSING]
        first = next(iter(whole if self.local and whole else [p for p, _ in turning]), None)
        if first is None:
            return
        length = view.get("max_positions")
        put(config, self.key, first.theta)
        if self.fraction is not None:
            put(config, self.fraction[0], first.fraction)
        scaled = self._written(first, length)
        if self.local is not None:
            other = (local or [first])[0]
            put(config, self.local[0], other.theta)
            if local and not isinstance(other.scaling, NoScaling):
                tables = {
                    FULL: {"rope_type": "default", **(scaled or {}), "rope_theta": first.theta},
                    SLIDING: {**(self._written(other, length) or {}), "rope_theta": other.theta},
                }
                put(config, "rope_parameters", tables)
                return
        put(config, "rope_scaling", scaled)
        original = getattr(first.scaling, "original", length)
        if original is not None and (self.outer is not None or isinstance(first.scaling, LongRopeScaling)):
            put(config, ORIGINAL, original)  # Where older versions look for it, they look here alone.

    def _written(self, rope: Rope, length: Any) -> Table | None:
        """The table of a scaling, None for none and for what the family's models do not know."""
        kind = rope.scaling.kind
        if kind == "none" or kind not in self.words.values():
            return None
        label = self.label or ("type" if kind in ("linear", "dynamic") else "rope_type")
        numbers = _said(rope.scaling, length)
        if self.outer is not None:
            numbers.pop(ORIGINAL, None)
        return {label: kind, **numbers}
