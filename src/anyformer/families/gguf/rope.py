"""Scalings of rotary positions in GGUF: metadata for some, tables of divisors of the frequencies for others."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from anyformer.families.config import Config
from anyformer.families.gguf.dialect import Made, Said, short
from anyformer.families.rotary import ORIGINAL, mscale

FREQS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
TABLES = (FREQS, LONG, SHORT)
KINDS = ("none", "linear", "yarn", "longrope")
_LLAMA3_ORIGINAL = 8192
_BETAS = {"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0}
"""Of YaRN's ramp; llama.cpp reads them for none of the architectures here."""
_TOLERANCE = 1e-5
"""Of divisors that other programs computed in float32."""


@dataclass(frozen=True)
class RopeScaling:
    """The scaling of rotary positions, which a configuration has in `rope_scaling`.

    llama.cpp multiplies YaRN's own attention factor by `attn_factor`; the tables divide frequencies one by one. LLaMA
    3's scaling is written as such a table and recognised by its numbers.

    Args:
        theta: the key of theta in the configuration.
        outer: whether the original context is a key of the configuration itself (Phi-3).
        log_multiplier: whether scores under YaRN are scaled by `mscale_all_dim`, written as a tenth (DeepSeek-V2).
        tables: those that llama.cpp reads for the architecture.
        local: whether layers with a window are not scaled; an attention factor would reach them all the same (Gemma 3).
    """

    theta: str = "rope_theta"
    outer: bool = False
    log_multiplier: bool = False
    tables: tuple[str, ...] = TABLES
    local: bool = False

    def read(self, said: Said, config: dict[str, Any]) -> None:
        meta = said.meta
        length = meta.whole("context_length")
        original = meta.whole("rope.scaling.original_context_length", length)
        attn = short(meta.number("rope.scaling.attn_factor", 1.0))
        meta.get("rope.scaling.finetuned", None)
        linear = meta.get("rope.scale_linear", None)  # As older files say it.
        factor = short(meta.number("rope.scaling.factor", 0.0 if linear is None else linear))
        kind = meta.word("rope.scaling.type", KINDS, "linear")
        if self.outer:
            config[ORIGINAL] = original
        table: dict[str, Any] | None = None
        self._require_applied(said, kind, attn, factor)
        if kind == "yarn":
            table = self._yarn(meta, factor, original, attn)
        elif kind == "longrope" or LONG in said.shapes:
            names = [name for name in (SHORT, LONG) if name in said.shapes]
            if len(names) < 2:
                meta.refuse("rope.scaling.type", kind, f"the tables {SHORT} and {LONG}")
            near, far = ([short(x) for x in said.numbers(name)] for name in (SHORT, LONG))
            table = _longrope(near, far, original, attn)
        elif kind == "linear" and factor not in (0.0, 1.0):
            table = {"type": "linear", "factor": factor}
        if FREQS in said.shapes:
            if table is not None:
                meta.refuse("rope.scaling.type", kind, f"no scaling beside the table {FREQS}")
            theta = short(meta.number("rope.freq_base", 10000.0))
            if theta <= 0:
                meta.refuse("rope.freq_base", theta, "a positive number")
            divisors, pairs = said.numbers(FREQS), _pairs(Config(config, meta.where))
            if len(divisors) != pairs:
                meta.refuse(FREQS, f"{len(divisors)} numbers", f"{pairs}, one for each pair of channels that turn")
            table = _recognised(divisors, theta, length, original)
        if table is not None:
            if self.outer:
                table.pop(ORIGINAL, None)
            config["rope_scaling"] = table

    def _require_applied(self, said: Said, kind: str, attn: float, factor: float) -> None:
        """Refuses what llama.cpp would leave out, or combine in a way that no specification has."""
        meta, here = said.meta, [name for name in TABLES if name in said.shapes]
        longrope, scaled = kind == "longrope" or LONG in here, kind != "none" and factor not in (0.0, 1.0)
        if not set(here) <= set(self.tables) or (longrope and LONG not in self.tables):
            meta.refuse(
                "rope.scaling.type", f"{kind} with {', '.join(here) or 'no tables'}", "what llama.cpp reads here"
            )
        if longrope and (scaled or kind == "yarn"):
            meta.refuse("rope.scaling.type", f"{kind} by {factor:g}", f"no scaling beside the table {LONG}")
        if attn != 1.0 and (self.log_multiplier or self.local or not (longrope or kind == "yarn")):
            expected = "1 without YaRN and LongRoPE, and 1 in DeepSeek-V2 and Gemma 3"
            meta.refuse("rope.scaling.attn_factor", attn, expected)
        if self.log_multiplier:
            meta.get("rope.scaling.yarn_log_multiplier", None)
            if scaled and (kind != "yarn" or factor < 1):  # llama.cpp would scale the scores by it too.
                meta.refuse("rope.scaling.factor", factor, "1 or more, and the type yarn")
        for key, usual in _BETAS.items():
            if kind == "yarn" and meta.number(key, usual) != usual:
                meta.refuse(key, meta.number(key), f"{usual:g}, which llama.cpp uses in this architecture")

    def _yarn(self, meta: Config, factor: float, original: int, attn: float) -> dict[str, Any]:
        if factor <= 0:
            meta.refuse("rope.scaling.factor", factor, "a positive number")
        table = {"rope_type": "yarn", "factor": factor, ORIGINAL: original}
        for key in ("rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"):
            meta.get(key, None)  # llama.cpp sets these itself for the architectures read here.
        if self.log_multiplier:
            m = round(10 * short(meta.number("rope.scaling.yarn_log_multiplier", 0.0)), 9)
            # Without the multiplier llama.cpp scales rotations as YaRN does, and then scores by its square.
            said = {"mscale": m} if m else {"attention_factor": mscale(factor)}
            return table | said | {"mscale_all_dim": m or 1.0}
        return table if attn == 1.0 else {**table, "attention_factor": mscale(factor) * attn}

    def write(self, config: Config, made: Made) -> None:
        rope = config.table("rope_scaling")
        kind = rope.get("rope_type", rope.get("type", "default"))
        meta, length = made.meta, config.get("max_position_embeddings", None)
        original = rope.get(ORIGINAL, config.get(ORIGINAL, length))
        if self.outer:
            meta["rope.scaling.original_context_length"] = original
        match kind:
            case "linear":
                meta |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope.number("factor"))}
            case "yarn":
                self._write_yarn(rope, original, meta)
            case "longrope" | "su" if LONG in self.tables:
                near, far = rope.get("short_factor"), rope.get("long_factor")
                made.tables |= {SHORT: list(near), LONG: list(far)}
                meta["rope.scaling.type"] = "longrope"
                meta["rope.scaling.original_context_length"] = original
                meta["rope.scaling.attn_factor"] = float(rope.number("attention_factor", _stretch(length, original)))
            case "llama3" if FREQS in self.tables:
                names = ("factor", "low_freq_factor", "high_freq_factor")
                factor, low, high = (rope.number(name) for name in names)
                theta, width = config.number(self.theta), 2 * _pairs(config)
                made.tables[FREQS] = list(_llama3(theta, width, factor, low, high, original))
                meta["rope.scaling.original_context_length"] = original  # Of no effect there, and kept for reading.

    def _write_yarn(self, rope: Config, original: Any, meta: dict[str, Any]) -> None:
        factor = float(rope.number("factor"))
        meta |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": factor,
            "rope.scaling.original_context_length": original,
        }
        attention = rope.number("attention_factor", mscale(factor))
        m = rope.number("mscale_all_dim", 0.0)
        if self.log_multiplier:
            if m and attention != mscale(factor):
                meta["rope.scaling.yarn_log_multiplier"] = 0.1 * m
        elif abs(attention / mscale(factor) - 1) > 1e-9:
            meta["rope.scaling.attn_factor"] = attention / mscale(factor)


def _pairs(config: Config) -> int:
    """Pairs of channels that turn in a head."""
    width = config.get("head_dim", None) or config.whole("hidden_size") // config.whole("num_attention_heads")
    return int(width) // 2


def _stretch(length: Any, original: int) -> float:
    factor = length / original if isinstance(length, int) else 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0


def _longrope(near: list[float], far: list[float], original: int, attn: float) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": near,
        "long_factor": far,
        ORIGINAL: original,
        "attention_factor": attn,
    }


def _llama3(theta: float, width: int, factor: float, low: float, high: float, original: float) -> Iterator[float]:
    """Divisors of the frequencies (Grattafiori et al. 2024, in the published code)."""
    for pair in range(width // 2):
        turns = original * theta ** (-2 * pair / width) / (2 * math.pi)
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        yield 1 / ((1 - smooth) / factor + smooth)


def _recognised(divisors: Sequence[float], theta: float, length: int, original: int) -> dict[str, Any] | None:
    """The scaling that has such divisors: LLaMA 3's where its numbers fit, else the divisors as they are."""
    factor, width = short(max(divisors, default=1.0)), 2 * len(divisors)
    if all(x == 1 for x in divisors):
        return None
    positive = all(0 < x < math.inf for x in divisors)  # Others are for the specification to refuse.
    for low, high, start in _candidates(divisors, theta, factor, (original, length)) if positive else ():
        made = _llama3(theta, width, factor, low, high, start)
        if all(abs(x / y - 1) <= _TOLERANCE for x, y in zip(divisors, made, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                ORIGINAL: start,
            }
    near = [short(x) for x in divisors]
    return _longrope(near, list(near), original, 1.0)


def _candidates(
    divisors: Sequence[float], theta: float, factor: float, lengths: tuple[int, ...]
) -> Iterator[tuple[float, float, int]]:
    """Bands that may have made the divisors: the published one, then that which the numbers between its ends give."""
    if factor <= 1:
        return
    for start in dict.fromkeys((lengths[0], _LLAMA3_ORIGINAL, *lengths, *(1 << n for n in range(4, 21)))):
        yield 1.0, 4.0, start
    width = 2 * len(divisors)
    points = [
        (theta ** (-2 * pair / width) / (2 * math.pi), (1 / x - 1 / factor) / (1 - 1 / factor))
        for pair, x in enumerate(divisors)
        if 1 < x < factor
    ]
    if len(points) < 2 or points[0][0] == points[-1][0]:
        return
    slope = (points[0][1] - points[-1][1]) / (points[0][0] - points[-1][0])
    offset = points[0][1] - slope * points[0][0]
    if offset >= 0:
        return
    # The band is known up to a common factor of its three numbers: the original context as it is said, or 1 as its end.
    for span in (lengths[0] / slope, -1 / offset):
        yield float(f"{-offset * span:.5g}"), float(f"{(1 - offset) * span:.5g}"), round(slope * span)
