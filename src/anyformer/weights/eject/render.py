"""From a kind to its text: the lines of a piece that its flags keep, names and numbers in place of placeholders."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template

from anyformer.weights.eject.constants import Constants
from anyformer.weights.eject.format import tidied
from anyformer.weights.eject.uses import Call, Kind, Number, Use

_PACKAGE = Path(__file__).parents[2]
_NAME = re.compile(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*\b")
_STATEMENT = re.compile(r"^ *#: (.+)\n", re.M)


def _source(piece: str) -> str:
    """A piece whose line statements are blocks: Jinja's own would take the blank lines after them along."""
    return _STATEMENT.sub(r"{% \1 %}", (_PACKAGE / piece).read_text(encoding="utf-8"))


@cache
def _environment() -> Environment:
    loader = FunctionLoader(_source)
    return Environment(loader=loader, undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)


@cache
def _template(piece: str) -> Template:
    return _environment().get_template(piece)


def render(kind: Kind, constants: Constants, texts: Mapping[str, str], calls: Mapping[str, Call]) -> str:
    """The text of a kind; its `fields` are known afterwards.

    Args:
        kind: whose parts' kinds are rendered already.
        constants: where numbers that do not vary get their names.
        texts: what placeholders become; a text that is empty takes ", PLACE" with it.
        calls: what placeholders that are called become.
    """
    use = kind.first
    numbers = {name: kind.number(name) for name in use.numbers}
    context: dict[str, Any] = {name.lower(): number for name, number in numbers.items()}
    draft = _template(use.piece).render({**context, **use.flags})
    parts = {place: _called(part, names) for place, (part, names) in use.parts.items()}
    draft = _expanded(draft, texts, {**parts, **calls})
    return _with_numbers(draft, kind, numbers, constants)


def _called(part: Use, names: Mapping[str, str]) -> Call:
    """How a part is called by a text that has its numbers under other names."""
    if part.builtin is not None:
        return Call(f"{part.builtin[0]}(", _named(part.builtin[1], names))
    assert part.kind is not None
    given = "".join(f", {name.lower()}={names[name]}" for name in part.kind.fields)
    return Call(f"{part.kind.name}(", f"{given})", bool(part.flags.get("shapeless")))


def _expanded(text: str, texts: Mapping[str, str], calls: Mapping[str, Call]) -> str:
    """Puts calls and texts in place of their placeholders."""
    for place, call in calls.items():
        text = _call(text, place, call)
    for place, said in texts.items():
        if not said:
            text = _whole(f", {place}").sub("", text)
        text = _whole(place).sub(said.replace("\\", r"\\"), text)
    return text


@cache
def _whole(place: str) -> re.Pattern[str]:
    """A placeholder that is no part of a longer name."""
    before, after = (r"(?<!\w)" if place[0].isalnum() else ""), (r"(?!\w)" if place[-1].isalnum() else "")
    return re.compile(before + re.escape(place) + after)


def _call(text: str, place: str, call: Call) -> str:
    opening = re.compile(rf"\b{place}\(")
    while found := opening.search(text):
        depth, end = 1, found.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        text = text[: found.start()] + call.of(text[found.end() : end - 1]) + text[end:]
    return text


def _with_numbers(draft: str, kind: Kind, numbers: Mapping[str, Number], constants: Constants) -> str:
    """Names of constants, or of what is given, in place of numbers."""
    is_class = draft.lstrip().startswith("class ")
    needed = [name for name in dict.fromkeys(_NAME.findall(draft)) if name in numbers]
    fields = tuple(name for name in needed if numbers[name].varies)
    kind.fields = fields
    names = {
        name: name.lower() if name in fields else constants.name(name, numbers[name].values[0], kind.name)
        for name in needed
    }
    params = ", ".join(f"{name.lower()}: {numbers[name].type}" for name in fields)
    first, rest = _at_first_use(draft) if is_class else (draft, "")
    stored = [name for name in fields if name in _NAME.findall(rest)]
    text = _named(first, names) + _named(rest, names | {name: f"self.{name.lower()}" for name in stored})
    text = text.replace(", PARAMS", f", {params}" if params else "").replace("PARAMS", params)
    if not stored:
        return tidied(re.sub(r"^ *FIELDS\n", "", text, flags=re.M))
    left, right = (", ".join(f"{prefix}{name.lower()}" for name in stored) for prefix in ("self.", ""))
    return tidied(text.replace("FIELDS", f"{left} = {right}"))


def _named(text: str, names: Mapping[str, str]) -> str:
    return _NAME.sub(lambda found: names.get(found[0], found[0]), text)


def _at_first_use(text: str) -> tuple[str, str]:
    """A class up to the end of its constructor, whose arguments are at hand there, and the rest."""
    start = text.find("def __init__(")
    end = text.find("\n    def ", start) if start >= 0 else 0
    return (text[:end], text[end:]) if end > 0 else (text, "")
