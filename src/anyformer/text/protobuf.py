"""Reading the wire format of Protocol Buffers: the fields of one message, in a bounded number of steps."""

import struct
from collections.abc import Iterator

from anyformer.errors import UserError

VARINT, EIGHT_BYTES, SIZED, FOUR_BYTES = 0, 1, 2, 5
Value = int | memoryview


def fields(message: memoryview, where: object) -> Iterator[tuple[int, Value]]:
    """The number and value of each field: an int for a varint, the bytes for every other form.

    Raises:
        UserError: the bytes are no such message, or end too early.
    """
    at, end = 0, len(message)
    while at < end:
        key, at = _varint(message, at, where)
        number, form = key >> 3, key & 7
        if not 0 < number < 1 << 29:
            raise _broken(where, f"field {number}")
        if form == VARINT:
            value, at = _varint(message, at, where)
            yield number, value
            continue
        size = {EIGHT_BYTES: 8, FOUR_BYTES: 4}.get(form)
        if form == SIZED:
            size, at = _varint(message, at, where)
        if size is None:
            raise _broken(where, f"a field of form {form}")
        if size > end - at:
            raise _broken(where, f"{size} bytes where {end - at} are left")
        yield number, message[at : at + size]
        at += size


def number(value: Value, where: object) -> int:
    """A varint as a signed number of 64 bits."""
    if not isinstance(value, int):
        raise _broken(where, "bytes where a number should be")
    return value - (1 << 64) if value >> 63 else value


def real(value: Value, where: object) -> float:
    """A number of four bytes."""
    if isinstance(value, int) or len(value) != 4:
        raise _broken(where, "no four bytes where a number should be")
    return float(struct.unpack("<f", value)[0])


def content(value: Value, where: object) -> memoryview:
    """The bytes of a sized field."""
    if isinstance(value, int):
        raise _broken(where, "a number where bytes should be")
    return value


def text(value: Value, where: object) -> str:
    """A sized field as UTF-8."""
    try:
        return str(content(value, where), "utf-8")
    except UnicodeDecodeError as error:
        raise _broken(where, error) from error


def _varint(message: memoryview, at: int, where: object) -> tuple[int, int]:
    """The number that begins at `at`, of at most 64 bits, and where it ends."""
    value = 0
    for place, byte in enumerate(message[at : at + 10]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at + place + 1
    raise _broken(where, "a number without an end")


def _broken(where: object, got: object) -> UserError:
    return UserError("this is no whole SentencePiece model", where=where, got=got)
