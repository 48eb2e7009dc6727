"""Latent attention (DeepSeek-V2 2024, section 2.1) in a configuration and in a file."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anyformer.families.config import REQUIRED, Config
from anyformer.families.family import Interleaved, Rule
from anyformer.families.fields import put
from anyformer.families.rotary import mscale
from anyformer.families.tables import Tables, View


def _scale(width: int, factor: float, m: float) -> float:
    return float(width**-0.5 * mscale(factor, m) * mscale(factor, m))


def _short(value: Callable[[float], float], m: float, target: float) -> float:
    """The number of six decimals that gives the very target, as people write it, else `m`."""
    short = round(m, 6)
    return short if value(short) == target else m


@dataclass(frozen=True)
class Equal:
    """A key that must have the value of another (or its `default`), which is its own default: it says nothing new."""

    key: str
    to: str
    default: Any = REQUIRED

    def read(self, config: Config, tables: Tables) -> None:
        wanted = config.get(self.to, self.default)
        if config.get(self.key, wanted) != wanted:
            config.refuse(self.key, config.get(self.key), f"{wanted!r}, like {self.to}")

    def write(self, view: View, config: dict[str, Any]) -> None:
        if self.to in config:
            put(config, self.key, config[self.to])


@dataclass(frozen=True)
class LatentScale:
    """The scale of scores under scaled rotation, `mscale_all_dim`: 1/√d · (0.1·mscale_all_dim·ln(factor) + 1)².

    It follows `Rotary`, whose table it completes: `mscale` and `type` say there once more what `attention_factor` and
    `rope_type` do, for DeepSeek's own code, which does not know these.

    Args:
        nope: the key of the channels of a head without position, and its default.
        rope: the key of those that turn, and its default.
    """

    nope: tuple[str, int] = ("qk_nope_head_dim", 128)
    rope: tuple[str, int] = ("qk_rope_head_dim", 64)

    def read(self, config: Config, tables: Tables) -> None:
        table = Config({**config.get("rope_parameters", {}), **config.get("rope_scaling", {})}, config.where)
        m = table.number("mscale_all_dim", 0)
        if m and table.get("rope_type", table.get("type", "default")) != "default":
            width = config.whole(*self.nope) + config.whole(*self.rope)
            tables.set("attention.scale", _scale(width, table.number("factor"), m), "rope_scaling")

    def write(self, view: View, config: dict[str, Any]) -> None:
        table, scale = config.get("rope_scaling"), view.get("attention.scale")
        parts = view.get("attention.d_nope"), view.get("attention.d_rope")
        if not isinstance(table, dict) or not isinstance(scale, float) or not all(isinstance(x, int) for x in parts):
            return
        table["type"] = table["rope_type"] = table.get("rope_type", table.get("type"))
        width, factor = sum(parts), table.get("factor", 1.0)
        if factor <= 1:
            return
        log, m = 0.1 * math.log(factor), 0.0
        if scale != width**-0.5:
            m = _short(lambda m: _scale(width, factor, m), ((scale * width**0.5) ** 0.5 - 1) / log, scale)
            table["mscale_all_dim"] = m
        turned = table.get("attention_factor")
        if turned is not None:
            whole = mscale(factor, m)
            table["mscale"] = _short(lambda m: mscale(factor, m) / whole, (turned * whole - 1) / log, turned)


@dataclass(frozen=True)
class FurtherLayers:
    """A number of layers past a stack's last, which predict tokens after the next (DeepSeek-V3, section 2.2).

    They serve training and drafts alone: a file may hold them, and their tensors are left alone.
    """

    key: str
    default: int

    def read(self, config: Config, tables: Tables) -> None:
        n, first = config.get(self.key, self.default), tables.get("n_layers")
        if not isinstance(n, int) or isinstance(n, bool) or not 0 <= n <= 100:
            config.refuse(self.key, n, "a whole number from 0 to 100")
        if isinstance(first, int):
            tables.dropped += [f"{{body}}layers.{first + place}.{{any}}" for place in range(n)]

    def write(self, view: View, config: dict[str, Any]) -> None:
        put(config, self.key, 0)


ATTENTION = {
    "kind": "latent",
    "norm": {"kind": "rms"},
    "position": {"kind": "rope", "layout": "interleaved"},
    "mask": {"kind": "causal"},
}
_OURS = "decoder.blocks.{i}.attention"
_THEIRS = "{body}layers.{i}.self_attn"
LATENT: tuple[Rule, ...] = (
    (f"{_THEIRS}.q_proj.weight", f"{_OURS}.q.weight"),
    (f"{_THEIRS}.q_a_proj.{{p}}", f"{_OURS}.q_down.{{p}}"),
    (f"{_THEIRS}.q_a_layernorm.{{p}}", f"{_OURS}.q_norm.{{p}}"),
    (f"{_THEIRS}.q_b_proj.weight", f"{_OURS}.q_up.weight"),
    (f"{_THEIRS}.kv_a_proj_with_mqa.{{p}}", f"{_OURS}.kv_down.{{p}}"),
    (f"{_THEIRS}.kv_a_layernorm.{{p}}", f"{_OURS}.kv_norm.{{p}}"),
    (f"{_THEIRS}.kv_b_proj.weight", (f"{_OURS}.k_up.weight", f"{_OURS}.v_up.weight"), Interleaved("n_heads")),
    (f"{_THEIRS}.o_proj.{{p}}", f"{_OURS}.out.{{p}}"),
)
"""Queries with or without a latent of their own, keys and values from one latent."""
