"""How numbers, times, texts and tables read."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyformer.report import words


@pytest.mark.parametrize(
    ("seconds", "right"),
    [
        (0.1234, "123 ms"),
        (1.25, "1.2 s"),
        (59.94, "59.9 s"),
        (59.97, "1 min 0 s"),
        (178.4, "2 min 58 s"),
        (3599.6, "1 h 0 min"),
        (3600, "1 h 0 min"),
        (11040, "3 h 4 min"),
        (86399, "1 d 0 h"),
        (190_000, "2 d 5 h"),
        (None, "–"),
        (float("nan"), "–"),
    ],
)
def test_duration(seconds, right):
    assert words.duration(seconds) == right


@given(st.floats(1, 1e9))
def test_duration_is_right_to_five_percent(seconds):
    sizes = {"s": 1, "min": 60, "h": 3600, "d": 86400}
    parts = words.duration(seconds).split()
    total = sum(float(n) * sizes[unit] for n, unit in zip(parts[::2], parts[1::2], strict=True))
    assert total == pytest.approx(seconds, rel=0.05)


def test_numbers():
    assert words.fixed(1.23456) == "1.2346"
    assert words.fixed(float("nan")) == "NaN"
    assert words.fixed(float("-inf")) == "−∞"
    assert words.fixed(None) == "–"
    assert words.perplexity(5.2951) == "5.30"
    assert words.perplexity(54321.4) == "54,321"
    assert words.perplexity(1e12) == "1e+12"
    assert words.whole(1234567) == "1,234,567"


@given(st.text())
def test_visible_text_can_be_encoded_and_keeps_what_can_be_read(text):
    shown = words.visible(text)
    shown.encode("utf-8")
    assert not any(ord(c) < 32 and c not in "\n\t" for c in shown)
    text = text.replace("\r\n", "\n")
    assert len(shown) == len(text)
    assert all(a == b for a, b in zip(text, shown, strict=True) if a.isprintable() or a in "\n\t")


def test_visible_shows_controls_and_disarms_direction():
    assert words.visible("a\x00b\x1b[31m\r\nc\td") == "a␀b␛[31m\nc\td"
    assert words.visible("x\u202ey\ud800z") == "x�y�z"


_PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_TABLES = st.recursive(
    st.dictionaries(_TEXT, _PLAIN | _TEXT | st.lists(_PLAIN | _TEXT, max_size=3), max_size=4),
    lambda inner: st.dictionaries(_TEXT, inner | _PLAIN | st.lists(inner, max_size=2), max_size=4),
    max_leaves=6,
)


def _without_none(value):
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(v) for v in value if v is not None] if isinstance(value, list) else value


@given(_TABLES)
def test_toml_reads_back_as_the_table(table):
    """Against the standard library's own reader."""
    assert tomllib.loads(words.toml(table)) == _without_none(table)
