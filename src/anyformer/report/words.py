"""Numbers, texts and tables as a page says them."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from anyformer.planning import binary, si

NONE = "–"

# What a model writes may hold anything. Control characters become their visible pictures (Unicode block 2400), those
# that would turn the reading direction or cannot be encoded become U+FFFD.
_VISIBLE = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421}
_VISIBLE |= dict.fromkeys([*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD)
_VISIBLE |= dict.fromkeys(range(0xD800, 0xE000), 0xFFFD)


def visible(text: str) -> str:
    """`text` in which every character can be seen, encoded and shown inside a page."""
    return text.replace("\r\n", "\n").translate(_VISIBLE)


def fixed(value: float | None, digits: int = 4) -> str:
    """A number with so many decimals, or the sign for none; NaN and infinities as words."""
    if value is None:
        return NONE
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    return f"{value:,.{digits}f}"


def perplexity(value: float | None) -> str:
    """A perplexity with about four significant figures."""
    if value is not None and math.isfinite(value) and value >= 1e7:
        return f"{value:.3g}"
    return fixed(value, 2 if value is None or value < 1000 else 0)


def whole(value: float | None) -> str:
    """A whole number with its thousands apart."""
    return NONE if value is None else f"{value:,.0f}"


def short(value: float | None) -> str:
    """A number with a decimal prefix: 1.5 M."""
    return NONE if value is None or not math.isfinite(value) else si(value)


def size(value: float | None) -> str:
    """Bytes with a binary prefix: 1.5 MiB."""
    return NONE if value is None or not math.isfinite(value) else binary(value)


def duration(seconds: float | None) -> str:
    """A time as people say it: 0.8 s, 2 min 58 s, 3 h 4 min, 2 d 5 h."""
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return NONE
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    for size, small, big_name, small_name in ((60, 1, "min", "s"), (3600, 60, "h", "min"), (86400, 3600, "d", "h")):
        parts, rest = divmod(round(seconds / small), size // small)
        if big_name == "d" or parts * size < {"min": 3600, "h": 86400}[big_name]:
            return f"{parts} {big_name} {rest} {small_name}"
    raise AssertionError("a day is the largest unit")


def _string(text: str) -> str:
    # DEL is the one character that JSON leaves bare and TOML does not take so.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _string(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value if item is not None) + "]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(str(k))} = {_value(v)}" for k, v in value.items() if v is not None) + " }"
    return _string(str(value))


def toml(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> str:
    """Nested tables as TOML. Entries that are None are left out, as TOML has no word for them."""
    plain = [(key, value) for key, value in table.items() if value is not None and not isinstance(value, Mapping)]
    tables = [(key, value) for key, value in table.items() if isinstance(value, Mapping)]
    lines = [f"{_key(str(key))} = {_value(value)}" for key, value in plain]
    if path and (lines or not tables):
        lines.insert(0, f"[{'.'.join(map(_key, path))}]")
    blocks = ["\n".join(lines), *(toml(value, (*path, str(key))) for key, value in tables)]
    return "\n\n".join(block for block in blocks if block)
