"""Spaces before punctuation taken out of decoded text, as `clean_up_tokenization_spaces` asks for."""

from collections.abc import Callable

_WRITTEN = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
# Whatever a spelling above may go on after: no other character is ever followed by the rest of one.
_OPEN = "".join(sorted({character for written in _WRITTEN for character in written[:-1]}))

Tidier = Callable[[str], str]


def tidy(text: str) -> str:
    """`text` without the spaces that a tokenizer's decoder puts before punctuation and English contractions."""
    for written in _WRITTEN:
        text = text.replace(written, written.strip(" "))
    return text


def settled(text: str) -> int:
    """How much of the beginning of `text` is tidied the same whatever comes after it."""
    return len(text.rstrip(_OPEN))
