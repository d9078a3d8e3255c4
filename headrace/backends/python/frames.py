# SPDX-License-Identifier: Apache-2.0
"""The messages between a model's process and the server: a fixed head, a JSON part, and the bytes of small tensors.

Spoken by `process` on one side and `child.channel` on the other. Must not know what a message means. Needs nothing but
the standard library, because the child may run in an interpreter that has no orjson.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

try:
    from orjson import dumps as _orjson_dumps
    from orjson import loads as _orjson_loads
except ImportError:  # an interpreter of the model's own
    _orjson_dumps = _orjson_loads = None  # type: ignore[assignment]

Buffer = bytes | bytearray | memoryview
Meta = dict[str, Any]

_HEAD = struct.Struct("<BxxxIQ")
_READ_BYTES = 262_144


class Kind(IntEnum):
    """What a frame is; the comment says who sends it."""

    INIT = 1  # server: load the model and initialise it, or complete its configuration
    READY = 2  # child: initialised; with the completed configuration if that was asked
    FAILED = 3  # child: not initialised, and why
    EXECUTE = 4  # server: a batch of requests
    ANSWER = 5  # child: responses, and whether `execute` returned
    CANCEL = 6  # server: nobody waits for these requests any more
    CALL = 7  # child: do something for the model
    REPLY = 8  # server: what came of it
    LOG = 9  # child: a line for the log
    NOTE = 10  # both: nothing but what every frame may carry (freed memory, measures)
    TRIM = 11  # server: give memory back that has not been needed for a while
    CLOSE = 12  # server: finalise and end
    BYE = 13  # child: finalised


class Frame(NamedTuple):
    """One message."""

    kind: int
    meta: Meta
    payload: Buffer


def encode_frame(kind: int, meta: Meta, pieces: Sequence[Buffer] = ()) -> list[Buffer]:
    """The buffers to write for a message, in order; the pieces follow the JSON without copies."""
    text = encode_json(meta)
    return [_HEAD.pack(kind, len(text), sum(map(len, pieces))) + text, *pieces]


def encode_json(value: Any) -> bytes:
    """JSON, as quickly as this interpreter can."""
    if _orjson_dumps is not None:
        try:
            return _orjson_dumps(value)
        except TypeError:
            # Numbers over 64 bits, half surrogates: rare, and the slow way takes them.
            pass
    return json.dumps(value).encode()


def decode_json(text: Buffer) -> Any:
    """See `encode_json`."""
    if _orjson_loads is not None:
        try:
            return _orjson_loads(text)
        except ValueError:
            pass
    return json.loads(bytes(text))


class FrameReader:
    """Cuts received bytes into frames."""

    def __init__(self) -> None:
        self._rest = bytearray()
        # Kept: a new buffer of this size for every read would cost more than the read.
        self._buffer = memoryview(bytearray(_READ_BYTES))

    def read(self, sock: socket.socket, flags: int = 0) -> bytes:
        """What the socket has; nothing at its end."""
        size = sock.recv_into(self._buffer, 0, flags)
        return bytes(self._buffer[:size])

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are complete now. Their payloads are copies."""
        buffer: bytes | bytearray = data
        if self._rest:
            self._rest += data
            buffer = self._rest
        frames: list[Frame] = []
        position, end = 0, len(buffer)
        while end - position >= _HEAD.size:
            kind, text_bytes, payload_bytes = _HEAD.unpack_from(buffer, position)
            text_at = position + _HEAD.size
            payload_at = text_at + text_bytes
            after = payload_at + payload_bytes
            if after > end:
                break
            meta = decode_json(buffer[text_at:payload_at])
            frames.append(Frame(kind, meta, buffer[payload_at:after]))
            position = after
        if buffer is self._rest:
            del self._rest[:position]
        elif position < end:
            self._rest += memoryview(buffer)[position:]
        return frames
