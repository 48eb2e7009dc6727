"""What each token stands for: the bytes that one id adds to decoded text.

A tokenizer's decoder is a chain of steps over all tokens at once. For every chain in common use the result
is a plain
concatenation: each token adds bytes that depend on itself and on whether it is the first, then a character
may be stripped at either end, then the bytes are read as UTF-8. Written in this form, decoding can run one
token at a time at a bounded cost, and the bytes of any token can be counted.
"""

import json
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as Library

from anyformer.errors import UserError

_CLEANUP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
Step = dict[str, Any]
# The largest published vocabularies have a few hundred thousand tokens; a single id in a file must not fill the memory.
_MOST_IDS = 1 << 24


def byte_characters() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary (Radford et al., 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF = byte_characters()


def vocabulary(library: Library) -> dict[str, int]:
    """Every token string with its id, added tokens included."""
    return library.get_vocab(with_added_tokens=True)


class Pieces:
    """The bytes that each id adds to a text.

    Attributes:
        additive: decoding is the concatenation described above; otherwise only the whole list of ids can be
            decoded.
        lead: a character and how many of it are stripped from the start of the whole text.
        tail: the same for its end.
        size: the number of ids, one more than the largest.
    """

    def __init__(self, library: Library) -> None:
        self.lead, self.tail = ("", 0), ("", 0)
        known = vocabulary(library)
        largest = max(known.values(), default=-1)
        if largest >= _MOST_IDS:
            raise UserError(
                "the vocabulary counts further than any embedding has rows",
                where="vocab",
                got=f"id {largest} for {next(token for token in known if known[token] == largest)!r}",
                expected=f"ids below {_MOST_IDS}",
            )
        added = library.get_added_tokens_decoder()
        self._library, self.size = library, largest + 1
        self._whole = len(known) == len(set(known.values())) == self.size
        # The library has the others; a second list of them would take some 80 bytes for each.
        self._added = {index: entry.content for index, entry in added.items()}
        self._present: set[int] = set()
        # An added token that is matched in normalised text stands for its own normalised spelling, which may begin
        # with the space before it.
        self._meant = {index: library.id_to_token(index) for index in added}
        self._steps: list[Step] = []
        self.additive = self._read(_decoder_steps(library))
        self._first: dict[int, bytes] = {}
        self._later: dict[int, bytes] = {}

    def _read(self, steps: list[Step]) -> bool:
        """Sorts the steps into per-token ones and stripping of the whole; False when a step fits neither."""
        fused = False
        for step in steps:
            kind = step["type"]
            if kind in ("Fuse", "ByteLevel"):
                if kind == "ByteLevel":
                    self._steps.append(step)
                fused = True
            elif fused and kind == "Strip":
                self.lead = (step["content"], step["start"])
                self.tail = (step["content"], step["stop"])
            elif kind == "BPEDecoder" and not fused:
                self._steps.append(step)
                self.tail = (" ", 1)
            elif kind in _STEPS and not fused and (kind != "Replace" or "String" in step["pattern"]):
                self._steps.append(step)
            else:
                return False
        return True

    @cached_property
    def holes(self) -> tuple[int, ...]:
        """The ids below `size` that stand for no token, ascending; none where every id is one token's."""
        return () if self._whole else tuple(i for i in range(self.size) if self.token(i) is None)

    def token(self, index: int) -> str | None:
        """The token string of an id; None where the vocabulary has a hole, and outside it."""
        if index in self._added or not 0 <= index < self.size:
            return self._added.get(index)
        found: str | None = self._library.id_to_token(index)
        return found if found is not None and self._library.token_to_id(found) == index else None

    def has(self, index: int) -> bool:
        """Whether an id stands for a token."""
        if index in self._present:
            return True
        if self.token(index) is None:
            return False
        self._present.add(index)
        return True

    def of(self, index: int, first: bool) -> bytes:
        """The bytes that token `index` adds, as the first token of a text or as a later one."""
        cache = self._first if first else self._later
        piece = cache.get(index)
        if piece is None:
            piece = cache[index] = self._make(index, first)
        return piece

    def opening(self, index: int) -> bytes:
        """The bytes that token `index` leaves at the start of a text, once what is stripped there is gone."""
        piece = self.of(index, True)
        lead = self.lead[0].encode("utf-8")
        for _ in range(self.lead[1]):
            piece = piece.removeprefix(lead)
        return piece

    def _make(self, index: int, first: bool) -> bytes:
        piece: str | bytes = self._meant.get(index) or self.token(index) or ""
        for step in self._steps:
            # An added token is written in plain characters, never in the stand-ins of a byte-level
            # vocabulary.
            if isinstance(piece, str) and not (step["type"] == "ByteLevel" and index in self._added):
                piece = _STEPS[step["type"]](piece, first, step)
        return piece if isinstance(piece, bytes) else piece.encode("utf-8")

    def join(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD, one for each maximal invalid part."""
        rest = iter(ids)
        head = next(rest, None)
        if head is None:
            return ""
        later, get = self._later, self.of
        parts = [self.of(head, True)]
        parts.extend(later[index] if index in later else get(index, False) for index in rest)
        text = b"".join(parts).decode("utf-8", "replace")
        return strip_end(strip_start(text, *self.lead)[0], *self.tail)

    def join_later(self, ids: Iterable[int]) -> str:
        """What `ids` add to a text that has begun and goes on after them."""
        return b"".join(self.of(index, False) for index in ids).decode("utf-8", "replace")


def strip_start(text: str, character: str, most: int) -> tuple[str, int]:
    """`text` without up to `most` leading `character`s, and how many more could still go if nothing else came."""
    cut = 0
    while cut < most and text[cut : cut + 1] == character:
        cut += 1
    rest = text[cut:]
    return rest, 0 if rest else most - cut


def strip_end(text: str, character: str, most: int) -> str:
    """`text` without up to `most` trailing `character`s."""
    end = len(text)
    while len(text) - end < most and end > 0 and text[end - 1] == character:
        end -= 1
    return text[:end]


def _decoder_steps(library: Library) -> list[Step]:
    decoder = library.decoder
    if decoder is None:
        return [{"type": "Spaced"}]
    state: Step = json.loads(decoder.__getstate__())
    return _flatten(state)


def _flatten(state: Step) -> list[Step]:
    if state["type"] != "Sequence":
        return [state]
    return [step for inner in state["decoders"] for step in _flatten(inner)]


def _spaced(token: str, first: bool, step: Step) -> str:
    return token if first else " " + token


def _byte_level(token: str, first: bool, step: Step) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode("utf-8")


def _byte_fallback(token: str, first: bool, step: Step) -> str | bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return token
    return token


def _replace(token: str, first: bool, step: Step) -> str:
    return token.replace(step["pattern"]["String"], step["content"])


def _strip(token: str, first: bool, step: Step) -> str:
    return strip_end(strip_start(token, step["content"], step["start"])[0], step["content"], step["stop"])


def _metaspace(token: str, first: bool, step: Step) -> str:
    scheme = step.get("prepend_scheme", "always")
    return token.replace(step["replacement"], "" if first and scheme != "never" else " ")


def _word_piece(token: str, first: bool, step: Step) -> str:
    if not first:
        token = token[len(step["prefix"]) :] if token.startswith(step["prefix"]) else " " + token
    if step["cleanup"]:
        for written, meant in _CLEANUP:
            token = token.replace(written, meant)
    return token


def _suffix(token: str, first: bool, step: Step) -> str:
    return token.replace(step["suffix"], " ")


_STEPS: dict[str, Callable[[str, bool, Step], str | bytes]] = {
    "Spaced": _spaced,
    "ByteLevel": _byte_level,
    "ByteFallback": _byte_fallback,
    "Replace": _replace,
    "Strip": _strip,
    "Metaspace": _metaspace,
    "WordPiece": _word_piece,
    "BPEDecoder": _suffix,
}
