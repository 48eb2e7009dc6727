"""Text as it is generated: decoding that never breaks a character, and stop strings that straddle tokens."""

import codecs
from collections.abc import Callable, Sequence

from anyformer.errors import UserError
from anyformer.text.pieces import Pieces, strip_end, strip_start
from anyformer.text.tidy import settled, tidy


class TextStream:
    """Decodes one id at a time; all deltas joined equal `decode` of all ids, for any ids.

    A push costs time in proportion to the token's own length. A character whose bytes come in several
    tokens is held back until it is whole; what is still incomplete at `finish` becomes one U+FFFD. A
    tokenizer whose decoder must see all tokens at once (CTC, replacement by a regular expression) gives its
    whole text at `finish`. Where text is tidied, a space is held back until it is known to stay.
    """

    def __init__(
        self,
        pieces: Pieces,
        skip: frozenset[int],
        check: Callable[[int], int],
        whole: Callable[[list[int]], str],
        tidies: bool = False,
    ) -> None:
        self._pieces, self._skip, self._check, self._whole = pieces, skip, check, whole
        self._tidies, self._untidy = tidies, ""
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = True
        self._lead = pieces.lead[1]
        self._held = ""
        self._ids: list[int] = []

    def push(self, token: int) -> str:
        """The text that `token` completes, often the empty string. `UserError` for an id outside the vocabulary."""
        token = self._check(token)
        if token in self._skip:
            return ""
        if not self._pieces.additive:
            self._ids.append(token)
            return ""
        piece = self._pieces.of(token, self._first)
        self._first = False
        text = self._release(self._utf8.decode(piece))
        if not self._tidies:
            return text
        text = self._untidy + text
        end = settled(text)
        self._untidy = text[end:]
        return tidy(text[:end])

    def finish(self) -> str:
        """What was still held back; call it once, after the last push."""
        if not self._pieces.additive:
            text = self._whole(self._ids)
        else:
            text = self._held + self._strip_lead(self._utf8.decode(b"", final=True))
            self._held = ""
            text = strip_end(text, *self._pieces.tail)
        return tidy(self._untidy + text) if self._tidies else text

    def _strip_lead(self, text: str) -> str:
        if self._lead and text:
            text, self._lead = strip_start(text, self._pieces.lead[0], self._lead)
        return text

    def _release(self, text: str) -> str:
        text = self._held + self._strip_lead(text)
        safe = strip_end(text, *self._pieces.tail)
        self._held = text[len(safe) :]
        return safe


class StopMatcher:
    """Cuts a stream of text before the earliest stop string, wherever the pieces of the stream end.

    The text released, joined, is the whole text up to the smallest index at which any stop string occurs in
    it, or all of it. Text that may turn out to begin a stop string is held back: never more than the
    longest stop string less one character, plus the piece just pushed.

    Args:
        stops: the stop strings; one string alone stands for itself.

    Attributes:
        stopped: the stop string that ended the text, None while there is none.
    """

    def __init__(self, stops: Sequence[str] | str = ()) -> None:
        stops = (stops,) if isinstance(stops, str) else tuple(stops)
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise UserError("a stop string must be text of at least one character", where="stop", got=repr(stop))
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """The text that is safe to show after `text` has arrived; nothing once a stop string was met."""
        if self.stopped is not None:
            return ""
        held = self._held + text
        at, stop = self._earliest(held)
        open_at = self._open(held)
        if stop is not None and at <= open_at:
            self.stopped, self._held = stop, ""
            return held[:at]
        # A complete match may wait here for a longer stop string that began before it.
        self._held = held[open_at:]
        return held[:open_at]

    def finish(self) -> str:
        """What was held back, when the text has ended; a stop string inside it still cuts."""
        if self.stopped is not None:
            return ""
        held, self._held = self._held, ""
        at, self.stopped = self._earliest(held)
        return held[:at]

    def _earliest(self, text: str) -> tuple[int, str | None]:
        found = [(at, -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if not found:
            return len(text), None
        at, _, stop = min(found)
        return at, stop

    def _open(self, text: str) -> int:
        """The first index from which the rest of `text` is the beginning, and not the whole, of a stop string."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            rest = text[at:]
            if any(len(rest) < len(stop) and stop.startswith(rest) for stop in self._stops):
                return at
        return len(text)
