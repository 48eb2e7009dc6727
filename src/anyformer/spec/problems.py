"""Everything wrong with a specification, said at once: each problem with its value, its reason and what would do."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from anyformer.errors import UserError

MISSING: Any = object()
"""The value of a key that is not there."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong: where it is, the value there, why it cannot be, and what would do instead."""

    path: str
    why: str
    got: Any = MISSING
    remedy: str | None = None

    def __str__(self) -> str:
        place = self.path if self.got is MISSING else f"{self.path} = {self.got!r}"
        return f"{place}: {self.why}" + (f"; {self.remedy}" if self.remedy else "")


class SpecError(UserError):
    """A description that no model can be built from. `problems` lists everything found."""

    def __init__(self, problems: Sequence[Problem], *, where: object = None) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        source = f" in {where}" if where is not None else ""
        super().__init__("\n".join([f"{count}{source}", *(f"  {problem}" for problem in problems)]))
        self.where = where


_LONGEST = 100
"""Letters of a word that may be a slip; comparing takes the square of them."""


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """The nearest known word, or None when nothing is near.

    Near is what shares seven tenths of its letters in order, or is a slip away: one letter, or two of six or more.
    """
    choices = list(known)
    if len(word) > _LONGEST:
        return None
    found = get_close_matches(word, choices, n=1, cutoff=0.7)
    if found:
        return found[0]
    nearest = min(choices, key=lambda choice: _edits(word, choice), default=None)
    slips = 1 if len(word) < 6 else 2
    return nearest if nearest is not None and _edits(word, nearest) <= slips < len(word) else None


def _edits(a: str, b: str) -> int:
    """How many letters must be put in, taken out or changed to turn `a` into `b` (Levenshtein 1966)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]


def unknown_word(word: str, known: Iterable[str], *, noun: str = "key") -> tuple[str, str]:
    """The reason and the remedy for a word outside a closed list."""
    choices = sorted(known)
    near = did_you_mean(word, choices)
    remedy = f"did you mean `{near}`?" if near else f"known: {', '.join(choices)}"
    return f"unknown {noun} `{word}`", remedy


def neighbours(value: int, legal: Iterable[int]) -> str:
    """The legal numbers next to `value` on either side, in words: "3 or 9 would do"."""
    choices = sorted(set(legal))
    below = [x for x in choices if x < value][-1:]
    above = [x for x in choices if x > value][:1]
    near = " or ".join(str(x) for x in below + above)
    return f"{near} would do" if near else "no value would do"


def raw_path(raw: Any, location: Sequence[int | str]) -> tuple[str, ...]:
    """Pydantic's error location as a path into what the user wrote: without the tags of unions."""
    path: list[str] = []
    here = raw
    for part in location:
        if isinstance(here, dict) and here.get("kind") == part and part not in here:
            continue
        path.append(str(part))
        if isinstance(here, dict):
            here = here.get(part)
        elif isinstance(here, list | tuple) and isinstance(part, int) and part < len(here):
            here = here[part]
        else:
            here = None
    return tuple(path)


def look_up(raw: Any, path: Sequence[str]) -> Any:
    """The value at `path` in nested tables and lists, or `MISSING`."""
    here = raw
    for part in path:
        if isinstance(here, dict) and part in here:
            here = here[part]
        elif isinstance(here, list | tuple) and part.isdigit() and int(part) < len(here):
            here = here[int(part)]
        else:
            return MISSING
    return here


Hint = Callable[[Sequence[str], Any], tuple[str, str] | None]
"""For the path of an unknown key and the table that holds it, a reason and a remedy where they are known."""


def _one(
    error: Any,
    raw: Any,
    keys_at: Mapping[tuple[str, ...], Iterable[str]],
    words: Mapping[str, Iterable[str]],
    hint: Hint,
) -> Problem:
    path = raw_path(raw, error["loc"])
    dotted = ".".join(path) or "(the whole)"
    got = look_up(raw, path)
    context = error.get("ctx", {})
    match error["type"]:
        case "extra_forbidden":
            known = keys_at.get(path[:-1], ())
            why, remedy = hint(path, look_up(raw, path[:-1])) or unknown_word(path[-1], known)
            return Problem(dotted, why, remedy=remedy)
        case "missing":
            return Problem(dotted, "is required and not given")
        case "union_tag_not_found":
            kinds = sorted({*keys_at.get((*path, "kind"), ()), *words.get(path[-1], ())})
            return Problem(f"{dotted}.kind", "is required and not given", remedy=f"known: {', '.join(kinds)}")
        case "literal_error" | "union_tag_invalid":
            tags = error["type"] == "union_tag_invalid"
            word = str(context["tag"]) if tags else str(got)
            expected = str(context["expected_tags" if tags else "expected"]).replace(" or ", ", ")
            choices = [x.strip().strip("'") for x in expected.split(",")]
            why, remedy = unknown_word(word, [*choices, *(words.get(path[-1], ()) if tags else ())], noun="choice")
            return Problem(f"{dotted}.kind" if tags else dotted, why, remedy=remedy)
        case _:
            return Problem(dotted, _reason(error["msg"]), MISSING if isinstance(got, dict) else got)


def _reason(message: str) -> str:
    """Pydantic's sentence without its subject, which the problem's place already is."""
    message = message.removeprefix("Input ").removeprefix("Value error, ")
    if message.startswith("should be a valid dictionary"):
        return "should be a table"
    if message.startswith("should be a valid tuple"):
        return "should be a list"
    return message[0].lower() + message[1:]


def from_pydantic(
    error: ValidationError,
    raw: Any,
    keys_at: Mapping[tuple[str, ...], Iterable[str]],
    words: Mapping[str, Iterable[str]] | None = None,
    hint: Hint = lambda path, table: None,
) -> list[Problem]:
    """Pydantic's errors as problems, a missing key dropped where a misspelt one beside it explains it.

    Args:
        error: what `model_validate(raw)` raised.
        raw: what the user wrote.
        keys_at: for a table's path, the keys that it may have (for "did you mean").
        words: for a key, the words that stand for one of its kinds, beside the kinds themselves.
        hint: what is known of keys that are often looked for in the wrong table.
    """
    # A list whose entries are broken is also called too short, whatever its length; a default that would follow from
    # broken fields is no problem of its own.
    problems = [
        _one(each, raw, keys_at, words or {}, hint)
        for each in error.errors(include_url=False)
        if each["type"] != "default_factory_not_called"
        and (each["type"] != "too_short" or not look_up(raw, raw_path(raw, each["loc"])))
    ]
    misspelt = {
        (p.path.rpartition(".")[0], p.remedy.split("`")[1])
        for p in problems
        if p.why.startswith("unknown key") and p.remedy and p.remedy.startswith("did you mean")
    }
    return [p for p in problems if not (p.why.startswith("is required") and _place(p.path) in misspelt)]


def _place(path: str) -> tuple[str, str]:
    parent, _, key = path.rpartition(".")
    return parent, key
