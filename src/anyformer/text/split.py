"""Train and validation text that never overlap: documents are dealt out by a hash of their content."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from anyformer.errors import UserError
from anyformer.text.sources import Document


@dataclass(frozen=True)
class Part:
    """A document, or a range of characters of one.

    Attributes:
        document: where the text is.
        start, stop: characters; `stop` None means the end.
    """

    document: Document
    start: int = 0
    stop: int | None = None

    @property
    def whole(self) -> bool:
        """Whether this is the document from beginning to end."""
        return self.start == 0 and self.stop is None

    def text(self) -> str:
        """The characters of this part."""
        text = self.document.text()
        return text if self.whole else text[self.start : self.stop]


def split_documents(documents: Sequence[Document], val_fraction: float) -> tuple[list[Part], list[Part]]:
    """The parts to learn from and those to validate on, each in the order of `documents`.

    Documents with equal content go to the same side. In the order of their content's hash, documents go to
    validation while its bytes stay within `val_fraction` of all; at least one goes to either side. A single
    document (or copies of a single one, of which one is kept) is cut by position: the first int(n·(1 −
    val_fraction)) of its n characters are for training and the rest for validation.
    """
    if isinstance(val_fraction, bool) or not 0 <= val_fraction < 1:
        raise UserError(
            "the share of validation text must be at least 0 and below 1", where="val_fraction", got=val_fraction
        )
    sizes: dict[str, int] = {}
    for document in documents:
        sizes[document.digest] = sizes.get(document.digest, 0) + document.size
    if val_fraction == 0:
        return [Part(document) for document in documents], []
    if len(sizes) == 1:
        return _cut(documents[0], val_fraction)
    chosen = _choose(sizes, val_fraction)
    train = [Part(document) for document in documents if document.digest not in chosen]
    val = [Part(document) for document in documents if document.digest in chosen]
    return train, val


def _choose(sizes: dict[str, int], val_fraction: float) -> set[str]:
    target = val_fraction * sum(sizes.values())
    chosen: set[str] = set()
    taken = 0
    for digest in sorted(sizes):
        if taken + sizes[digest] <= target:
            chosen.add(digest)
            taken += sizes[digest]
        elif taken >= 0.9 * target:
            # Looking further for ever smaller documents would fill validation with the shortest ones.
            break
    if not chosen:
        chosen.add(min(sizes, key=lambda digest: (sizes[digest], digest)))
    if len(chosen) == len(sizes):
        chosen.remove(max(sizes, key=lambda digest: (sizes[digest], digest)))
    return chosen


def _cut(document: Document, val_fraction: float) -> tuple[list[Part], list[Part]]:
    length = len(document.text())
    at = int(length * (1 - val_fraction))
    if not 0 < at < length:
        raise UserError(
            "this text is too short to be split into training and validation text",
            where=document.name,
            got=f"{length} characters at val_fraction={val_fraction}",
            remedy="give more text, or val_fraction=0",
        )
    return [Part(document, 0, at)], [Part(document, at)]


def sample_texts(parts: Sequence[Part], most: int) -> Iterator[str]:
    """About `most` bytes of the text of `parts`, spread over all of it, always the same; all of it when it
    is less.

    Documents come in the order of their content's hash; of one that is longer than an eighth of the sample,
    evenly spaced pieces are taken.
    """
    total = sum(part.document.size for part in parts)
    taken = 0
    for part in sorted(parts, key=lambda part: part.document.digest):
        if taken >= most:
            return
        text = part.text()
        if total > most and len(text) > most // 8:
            pieces = _pieces(text, most if len(parts) == 1 else most // 8)
        else:
            pieces = [text]
        for piece in pieces:
            taken += len(piece.encode("utf-8"))
            yield piece


def _pieces(text: str, most: int, size: int = 65536) -> list[str]:
    count = max(1, most // size)
    if len(text) <= count * size:
        return [text]
    step = len(text) / count
    return [text[int(index * step) : int(index * step) + size] for index in range(count)]
