"""Documents to tokens, in bounded memory: long texts are cut only where the tokenizer does not notice."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from anyformer.text.shards import ShardWriter
from anyformer.text.split import Part
from anyformer.text.tokenizer import Tokenizer

Progress = Callable[[int, int], None]

_PIECE = 1 << 16
_WINDOW = 256
_SHIFT = 37
_BATCH = 1 << 21


@dataclass(frozen=True)
class _Piece:
    text: str
    part: Part
    size: int | None
    """Bytes of the whole part, on its first piece alone."""
    last: bool


def encode_parts(
    tokenizer: Tokenizer,
    parts: Sequence[Part],
    writer: ShardWriter,
    advance: Callable[[int], None],
) -> int:
    """Writes the tokens of every part; returns how many parts do not decode to exactly their text.

    A whole document is written as `encode` gives it, and then the EOS token, where the tokenizer has one. A
    part of a document is written bare: it neither begins nor ends a document.
    """
    eos = tokenizer.eos_id
    suffix = list(tokenizer.suffix)
    if eos is not None and suffix[-1:] != [eos]:
        suffix.append(eos)
    inexact: set[int] = set()
    number = -1
    for batch in _batches(tokenizer, parts):
        found = tokenizer.encode_batch([piece.text for piece in batch], bare=True)
        for piece, ids in zip(batch, found, strict=True):
            if piece.size is not None:
                number += 1
                writer.begin(piece.size)
                if piece.part.whole:
                    writer.add(tokenizer.prefix)
            writer.add(ids)
            if piece.last and piece.part.whole:
                writer.add(suffix)
            if not tokenizer.spells(ids, piece.text, first=piece.size is not None):
                inexact.add(number)
        advance(sum(len(piece.text.encode("utf-8")) for piece in batch))
    return len(inexact)


def _batches(tokenizer: Tokenizer, parts: Sequence[Part]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    held = 0
    for part in parts:
        for piece in _pieces(tokenizer, part):
            batch.append(piece)
            held += len(piece.text)
            if held >= _BATCH:
                yield batch
                batch, held = [], 0
    if batch:
        yield batch


def _pieces(tokenizer: Tokenizer, part: Part) -> Iterator[_Piece]:
    text = part.text()
    size: int | None = len(text.encode("utf-8"))
    start = 0
    for end in [*neutral_cuts(tokenizer, text), len(text)]:
        yield _Piece(text[start:end], part, size, end == len(text))
        start, size = end, None


def neutral_cuts(tokenizer: Tokenizer, text: str, piece: int = _PIECE) -> list[int]:
    """Places about `piece` characters apart at which `text` can be cut without changing its tokens.

    A place is taken only where the tokenizer, shown the surroundings, gives the same tokens with and
    without the cut. A tokenizer that marks the start of every text, as SentencePiece does, has no such
    place: it gets texts whole.
    """
    cuts: list[int] = []
    at = piece
    while at + piece // 2 < len(text):
        cut = next((place for place in _places(text, at) if _neutral(tokenizer, text, place)), None)
        if cut is None and not cuts and at > 4 * piece:
            break
        if cut is not None:
            cuts.append(cut)
        at = (at if cut is None else cut) + piece
    return cuts


def _places(text: str, at: int) -> Iterator[int]:
    """Starts of lines near `at`, then `at` itself."""
    place = at
    for _ in range(8):
        place = text.find("\n", place, at + _PIECE // 4) + 1
        if place == 0:
            break
        if place < len(text) and not text[place].isspace():
            yield place
    yield at


def _neutral(tokenizer: Tokenizer, text: str, cut: int) -> bool:
    right = text[cut : cut + _WINDOW]
    # An endless word is cut every so many characters from its start: seen from two places, no cut in it is neutral.
    for begin in (cut - _WINDOW, cut - _WINDOW + _SHIFT):
        left = text[max(0, begin) : cut]
        one, before, after = tokenizer.encode_batch([left + right, left, right], bare=True, parallel=False)
        if one != before + after:
            return False
    return True
