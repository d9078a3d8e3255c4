# SPDX-License-Identifier: Apache-2.0
"""Frames and header blocks built by hand: any of them, also those that hyperframe and hpack refuse to build."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import hpack
from hyperframe.frame import SettingsFrame

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITISED = 0x1, 0x1, 0x4, 0x8, 0x20
TABLE_SIZE, ENABLE_PUSH, MAX_STREAMS, INITIAL_WINDOW, MAX_FRAME, MAX_LIST = range(1, 7)

Fields = Sequence[tuple[str | bytes, str | bytes]]

TOO_LARGE: Fields = [("content-length", "1000000000")]
"""Makes the server answer 413 at once, before the end of the request."""


def raw(kind: int, flags: int, stream_id: int, payload: bytes = b"", *, length: int | None = None) -> bytes:
    """Any frame at all, `length` being what its header claims."""
    size = len(payload) if length is None else length
    return struct.pack(">HBBBI", size >> 8, size & 0xFF, kind, flags, stream_id) + payload


def literal(fields: Fields) -> bytes:
    """A header block without tables: what it means depends on nothing, and names are not touched."""
    block = b""
    for name, value in fields:
        name, value = (text.encode() if isinstance(text, str) else text for text in (name, value))
        block += b"\x00" + _sized(name) + _sized(value)
    return block


def _sized(text: bytes) -> bytes:
    return bytes(hpack.hpack.encode_integer(len(text), 7)) + text


def request_fields(
    method: str = "GET", path: str = "/hello", more: Fields = ()
) -> list[tuple[str | bytes, str | bytes]]:
    return [(":method", method), (":scheme", "http"), (":path", path), (":authority", "test"), *more]


def settings(values: dict[int, int]) -> bytes:
    return SettingsFrame(0, values).serialize()
