"""The named constants of a file: one name for a value wherever it is needed, the short name for the commonest value."""

import re
from collections import Counter
from itertools import chain, count
from typing import Any

_LETTERS = {
    "VOCAB_SIZE": "V",
    "D_MODEL": "C",
    "N_HEADS": "H",
    "N_KV_HEADS": "G",
    "D_HEAD": "D",
    "D_VALUE": "Dv",
    "D_FF": "F",
    "N_EXPERTS": "E",
    "Q_RANK": "width of the latent that queries come from",
    "KV_RANK": "width of the latent that keys and values come from",
    "D_NOPE": "channels of a head that do not turn",
    "D_ROPE": "channels of a head that turn",
    "D_EXPERT": "F of an expert",
    "TOP_K": "experts for each token",
    "SCALE": "of q·kᵀ",
    "START_IDS": "what a reply begins with",
    "END_IDS": "what ends a reply",
    "SUPPRESSED_IDS": "never generated",
    "N_WORDS": "ids that the tokenizer has",
    "SUFFIX_IDS": "ids that the tokenizer puts behind a text",
}
"""What stands beside a constant: the letter that shapes are written in, or what it is."""
_SHORT = ("NORM_EPS", "DROPOUT")
"""Numbers that mostly have one value all over a model."""
_ORDER = (
    *("VOCAB_SIZE", "N_LABELS", "SOURCE_POSITIONS", "MAX_POSITIONS", "N_TYPES", "N_LAYERS", "D_MODEL", "D_EMBED"),
    *("D_TRANSFORM", "N_HEADS", "N_KV_HEADS", "D_HEAD", "Q_RANK", "KV_RANK", "D_NOPE", "D_ROPE", "D_VALUE", "D_FF"),
    *("N_EXPERTS", "TOP_K", "D_EXPERT", "N_GROUPS", "TOP_GROUPS", "EXPERT_SCALE", "ROPE_THETA", "ROPE_THETAS"),
    *("ROPE_FACTOR", "ROPE_ORIGINAL", "ROPE_ORIGINALS", "ROPE_BETA_FAST", "ROPE_BETA_SLOW", "ROPE_LOW"),
    *("ROPE_HIGH", "ROPE_ATTENTION_FACTOR", "ROPE_SHORT", "ROPE_LONG", "N_BUCKETS", "MAX_DISTANCE", "WINDOW"),
    *("WINDOWS", "SINKS", "SCALE", "SOFTCAP", "EMBED_SCALE", "HEAD_SCALE", "HEAD_SOFTCAP", "NORM_EPS", "DROPOUT"),
)
"""The order of constants: sizes first, as one would say them."""
_TOKEN = re.compile("\x01(\\d+)\x02")


class Raw(str):
    """A constant's value that is written as it is."""

    def __repr__(self) -> str:
        return str(self)


class Constants:
    """The constants that a text asks for. Their names are known once all are asked for: until then a token stands."""

    def __init__(self) -> None:
        self._wanted: dict[tuple[str, str], int] = {}
        self._asked: list[tuple[str, str, str, Any]] = []
        self._times: Counter[int] = Counter()
        self._fixed: dict[str, Raw] = {}
        self.notes: dict[str, str] = dict(_LETTERS)

    def name(self, wanted: str, value: Any, owner: str) -> str:
        """What stands for the name of a value until `put`; True, False and None stand for themselves.

        Args:
            wanted: its name, unless another value has it.
            value: which.
            owner: the class or function that needs it, whose name then goes before.
        """
        if value is None or isinstance(value, bool):
            return str(value)
        short = next((each for each in _SHORT if wanted.endswith(f"_{each}")), wanted)
        key = (short, f"{type(value).__name__} {value!r}")
        if key not in self._wanted:
            self._wanted[key] = len(self._asked)
            self._asked.append((short, wanted, owner, value))
        index = self._wanted[key]
        self._times[index] += 1
        return f"\x01{index}\x02"

    def fix(self, name: str, text: str) -> None:
        """A constant of this name, written as it is, behind the others."""
        self._fixed[name] = Raw(text)

    def put(self, text: str) -> tuple[str, str]:
        """The assignments of what a text asks for, and the text with their names."""
        needed = sorted({int(index) for index in _TOKEN.findall(text)})
        names = self._names(needed)
        written = {names[i]: self._asked[i][3] for i in needed}
        lines = []
        for name, value in [*sorted(written.items(), key=lambda each: _rank(each[0])), *self._fixed.items()]:
            note = self.notes.get(name)
            lines.append(f"{name} = {literal(value)}" + (f"  # {note}" if note else ""))
        assignments = "\n".join(lines) + "\n"
        put = _TOKEN.sub(lambda found: names[int(found[1])], text)
        return _TOKEN.sub(lambda found: names[int(found[1])], assignments), put

    def _names(self, needed: list[int]) -> dict[int, str]:
        names: dict[int, str] = {}
        taken = set(self._fixed)
        for index in sorted(needed, key=lambda i: (-self._times[i], i)):
            short, wanted, owner, _ = self._asked[index]
            prefix = _prefix(owner)
            tried = chain((short, wanted, f"{prefix}_{short}"), (f"{prefix}_{short}_{i}" for i in count(2)))
            names[index] = next(name for name in tried if name not in taken)
            taken.add(names[index])
        return names


def _prefix(owner: str) -> str:
    """The name of a class or function as constants have it, short."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", owner).upper()
    for long, short in (("MIXTURE_OF_EXPERTS", "MOE"), ("FEED_FORWARD", "FFN")):
        name = name.replace(long, short)
    for word in ("ROTATE_", "ATTEND_", "_ATTENTION", "_BLOCK", "_EMBEDDING"):
        name = name.replace(word, "") if len(name) > len(word) and not name.replace(word, "")[0].isdigit() else name
    return name


def _rank(name: str) -> tuple[int, bool]:
    """Where a constant stands among the others: those with an owner's name behind the one without."""
    place = next((i for i, each in enumerate(_ORDER) if f"_{name}".endswith(f"_{each}")), len(_ORDER))
    return place, name not in _ORDER


def literal(value: Any) -> str:
    """A value as Python writes it, long tuples over several lines."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, tuple):
        inner = ", ".join(map(literal, value)) + ("," if len(value) == 1 else "")
        if len(inner) <= 90:
            return f"({inner})"
        return "(\n" + "".join(f"    {literal(each)},\n" for each in value) + ")"
    if isinstance(value, float):
        return repr(value).replace("e+", "e")  # as the formatter leaves it
    return repr(value).replace("'", '"') if isinstance(value, str) else repr(value)
