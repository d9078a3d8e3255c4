# SPDX-License-Identifier: Apache-2.0
"""The wire format of protobuf without a schema: varints, and the fields of an encoded message.

For messages that are not parsed as a whole: those with large tensors, and files whose format is still to be detected.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5
"""Wire types. DELIMITED: bytes, text, a message or a packed list, after its length."""
TAG_BYTES = 5
"""Maximum bytes of a varint that is a tag or a length; others have up to 10."""


class InvalidMessage(Exception):
    """Raised for bytes that are not a protobuf message."""


class TruncatedMessage(InvalidMessage):
    """Raised for bytes that end within a field: they may be the beginning of a message."""


class Bytes(Protocol):
    """Bytes by their position: `bytes`, `memoryview`, `mmap`, or pages of a file."""

    def __getitem__(self, position: int, /) -> int:
        """Return one byte."""


class WireField(NamedTuple):
    """One field of an encoded message."""

    number: int
    wire_type: int
    start: int
    """Position of the tag."""
    content: int
    """Position of the content, after the length if it has one."""
    end: int


def encode_varint(value: int) -> bytes:
    """Encode an integer of 0 or more."""
    if value < 0x80:
        return bytes((value,))
    if value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def decode_varint(data: Bytes, position: int, end: int, max_bytes: int = 10) -> tuple[int, int]:
    """Return a varint and the position after it."""
    value = shift = 0
    while position < end and shift < 7 * max_bytes:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise TruncatedMessage if position >= end else InvalidMessage


def encode_delimited(number: int, content: bytes) -> bytes:
    """Encode a field with its length: bytes, text or a message."""
    return encode_varint(number << 3 | DELIMITED) + encode_varint(len(content)) + content


def read_fields(data: Bytes, start: int, end: int, *, truncated: bool = False) -> Iterator[WireField]:
    """Yield the fields of the message from `start` to `end`. With `truncated`, the last one may be cut off at `end`."""
    position = start
    while position < end:
        tag, content = decode_varint(data, position, end)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == VARINT:
            field_end = decode_varint(data, content, end)[1]
        elif wire_type == DELIMITED:
            length, content = decode_varint(data, content, end)
            field_end = content + length
        elif wire_type in (FIXED64, FIXED32):
            field_end = content + (8 if wire_type == FIXED64 else 4)
        else:
            raise InvalidMessage
        if number == 0:
            raise InvalidMessage
        if field_end > end and not truncated:
            raise TruncatedMessage
        yield WireField(number, wire_type, position, content, min(field_end, end))
        position = field_end
