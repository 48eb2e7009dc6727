"""The values of GGUF metadata about a tokenizer, each looked at before it is believed."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from anyformer.errors import UserError
from anyformer.text.gguf_bpe import CONTROL, NORMAL, TOKENS, TYPES, UNKNOWN

SCORES = "tokenizer.ggml.scores"
TEMPLATE = "tokenizer.chat_template"
_NO_ID = 0xFFFFFFFF
# The names of roles in a tokenizer's folder, by those of GGUF; then those of further ends.
ROLES = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
    "seperator": "sep_token",
    "separator": "sep_token",
    "cls": "cls_token",
    "mask": "mask_token",
}
MORE_ENDS = ("eot", "eom", "fim_pad", "fim_rep", "fim_sep")


class Fields:
    """The metadata of a file, each value looked at before it is believed."""

    def __init__(self, metadata: Mapping[str, Any], where: object) -> None:
        self.metadata, self._where = metadata, where

    def refuse(self, what: str, key: str, got: object, expected: object = None, remedy: object = None) -> NoReturn:
        """`UserError` about the value of `key`."""
        raise UserError(what, where=f"{self._where}, {key}", got=got, expected=expected, remedy=remedy)

    def _one(self, key: str, kind: type, name: str) -> Any:
        value = self.metadata.get(key)
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            self.refuse("this value is of the wrong type", key, type(value).__name__, name)
        return value

    def text(self, key: str, needed: bool = False) -> str | None:
        """A text, or None where the key is absent."""
        value: str | None = self._one(key, str, "text")
        if value is None and needed:
            self.refuse(
                "the metadata lack this key", key, None, "text", "the file has no tokenizer: give one beside it"
            )
        return value

    def flag(self, key: str) -> bool | None:
        """True or False, or None where the key is absent."""
        value: bool | None = self._one(key, bool, "true | false")
        return value

    def _list(self, key: str) -> Sequence[Any] | None:
        value = self.metadata.get(key)
        if value is None:
            return None
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
            # An array of the standard library or of numpy has a length and items, if not that name.
            array: Any = value
            if not (hasattr(value, "tolist") and hasattr(value, "__len__")):
                self.refuse("this value is of the wrong type", key, type(value).__name__, "a list")
            value = array.tolist()
        return value

    def texts(self, key: str) -> list[str]:
        """A list of texts."""
        found = self._list(key)
        if found is None:
            self.refuse("the metadata lack this key", key, None, "a list of texts")
        found = list(found)
        if {*map(type, found)} - {str}:
            strange = next(index for index, text in enumerate(found) if not isinstance(text, str))
            self.refuse("this list holds what is no text", f"{key}[{strange}]", type(found[strange]).__name__, "text")
        if key == TOKENS:
            self._require_distinct(found)
        return found

    def _require_distinct(self, tokens: list[str]) -> None:
        if not tokens:
            self.refuse("this vocabulary is empty", TOKENS, 0)
        if len(set(tokens)) == len(tokens):
            return
        first: dict[str, int] = {}
        for index, token in enumerate(tokens):
            if token and first.setdefault(token, index) != index:
                self.refuse("two ids stand for one token", TOKENS, f"{token!r} as {first[token]} and {index}")

    def types(self, tokens: Sequence[str]) -> list[int]:
        """The type of each token; one that is not said is an ordinary token."""
        found = self._numbers(TYPES, len(tokens))
        if found is None:
            return [NORMAL] * len(tokens)
        strange = {*found} - {*range(7)}
        if strange:
            self.refuse("there is no such type of token", TYPES, min(strange), "0 to 6")
        types = [int(kind) for kind in found]
        return [kind or NORMAL for kind in types] if 0 in types else types

    def scores(self, n: int) -> list[float]:
        """The score of each of the first `n` tokens."""
        found = self._numbers(SCORES, None)
        if found is None or len(found) < n:
            self.refuse("every token needs its score", SCORES, 0 if found is None else len(found), n)
        scores = [float(score) for score in found[:n]]
        strange = next((index for index, score in enumerate(scores) if not math.isfinite(score)), None)
        if strange is not None:
            self.refuse("a score must be a finite number", f"{SCORES}[{strange}]", scores[strange])
        return scores

    def _numbers(self, key: str, n: int | None) -> list[float] | None:
        found = self._list(key)
        if found is None:
            return None
        if n is not None and len(found) != n:
            self.refuse(f"this list is of another length than {TOKENS}", key, len(found), n)
        if {*map(type, found)} - {int, float}:
            strange = next(index for index, number in enumerate(found) if type(number) not in (int, float))
            self.refuse("this list holds what is no number", f"{key}[{strange}]", repr(found[strange]))
        return list(found)

    def ids(self, key: str, n: int) -> list[int]:
        """A list of ids below `n`; empty where the key is absent."""
        return [self._id(key, index, n) for index in self._numbers(key, None) or ()]

    def _id(self, key: str, index: Any, n: int) -> int:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < n:
            self.refuse("this is no id of a token", key, repr(index), f"0 to {n - 1}")
        return int(index)

    def roles(self, tokens: Sequence[str], types: Sequence[int], unsaid: Mapping[str, int]) -> dict[str, int]:
        """The id of every role that has one, those that the file leaves `unsaid` where they are control tokens."""
        found = {
            role: index for role, index in unsaid.items() if index < len(tokens) and types[index] in (CONTROL, UNKNOWN)
        }
        for role in (*ROLES, *MORE_ENDS):
            key = f"tokenizer.ggml.{role}_token_id"
            index = self._one(key, int, "the id of a token")
            if index is not None and index not in (-1, _NO_ID):
                found[role] = self._id(key, index, len(tokens))
        return found

    def templates(self) -> dict[str, str]:
        """Chat templates by name."""
        found = {}
        default = self.text(TEMPLATE)
        if default is not None:
            found["default"] = default
        prefix = f"{TEMPLATE}."
        for key in sorted(self.metadata):
            if key.startswith(prefix) and (template := self.text(key)) is not None:
                found[key.removeprefix(prefix)] = template
        return found
