# SPDX-License-Identifier: Apache-2.0
"""Whether a gRPC server says that it serves: `grpc.health.v1.Health/Check` over one short connection. Called by `probes`.

One call needs little of HTTP/2: what is asked is written whole, and of what comes back only the message counts, since an
answer without SERVING in it is a no, whatever its status. So no header is read, and no library is loaded for it.
"""

from __future__ import annotations

import asyncio

from headrace.net.http2.frames import (
    ACK,
    DATA,
    DEFAULT_FRAME_BYTES,
    END_HEADERS,
    END_STREAM,
    HEADER,
    HEADER_BYTES,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    SETTINGS_ACK,
    frame,
)
from headrace.net.http2.headers import encode_field

_SERVING = b"\0\0\0\0\x02\x08\x01"
"""Not compressed, two bytes: field 1 is 1."""
_FIELDS = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/grpc.health.v1.Health/Check"),
    (b":authority", b"localhost"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
)
_STREAM = 1
_LONGEST_NAME = 127
"""So that its length is one byte; no service's name is longer."""


async def grpc_look(port: int, service: str, seconds: float) -> bool:
    """Whether it serves. An empty name asks for the server as a whole."""
    writer = None
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(_asked(service))
            return await _answer(reader, writer) == _SERVING
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
        return False
    finally:
        if writer is not None:
            writer.close()


def _asked(service: str) -> bytes:
    name = service.encode()[:_LONGEST_NAME]
    message = b"\n%c%b" % (len(name), name) if name else b""
    return b"".join(
        (
            PREFACE,
            frame(SETTINGS, 0, 0),
            frame(HEADERS, END_HEADERS, _STREAM, b"".join(encode_field(*each) for each in _FIELDS)),
            frame(DATA, END_STREAM, _STREAM, len(message).to_bytes(5, "big") + message),
        )
    )


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """The message with its five bytes in front, or what there was of it when the call ended."""
    said = b""
    while len(said) < len(_SERVING):
        high, low, kind, flags, stream = HEADER.unpack(await reader.readexactly(HEADER_BYTES))
        length = high << 8 | low
        if length > DEFAULT_FRAME_BYTES:
            raise ValueError("no HTTP/2, or none that keeps to our settings")
        payload = await reader.readexactly(length)
        if kind == SETTINGS and not flags & ACK:
            writer.write(SETTINGS_ACK)
        elif kind == PING and not flags & ACK:
            writer.write(frame(PING, ACK, 0, payload))
        elif kind == DATA and flags & PADDED:
            said += payload[1 : len(payload) - int.from_bytes(payload[:1], "big")]
        elif kind == DATA:
            said += payload
        if kind == RST_STREAM or (stream == _STREAM and kind in (DATA, HEADERS) and flags & END_STREAM):
            break
    return said
