"""What cannot be encoded, said in words: of what is given, and of what the `tokenizers` library refuses."""

from collections.abc import Iterator
from contextlib import contextmanager

from anyformer.errors import UserError


def require_text(text: object) -> None:
    """Raises `UserError` for what is no text, or holds lone surrogates, which no encoding has."""
    if not isinstance(text, str):
        raise UserError("only text can be encoded", where="text", got=type(text).__name__, expected="str")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            "this text is not valid Unicode",
            where=f"text, character {error.start}",
            got=repr(text[error.start]),
            remedy="replace lone surrogates, for example by decoding bytes with errors='replace'",
        ) from error


@contextmanager
def clear(what: str, where: object) -> Iterator[None]:
    """Turns the library's refusals into a `UserError`: plain Exception, or, where it fails by itself, a panic."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(what, where=where, got=error) from error
