# SPDX-License-Identifier: Apache-2.0
"""From received bytes to whole messages, no further ahead than the owner asks for.

Owned by `connection`, which feeds it and takes messages out one by one. Parsing, inflation, size limits and protocol
errors are the `websockets` package's; joining fragments and checking UTF-8 are here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from websockets.frames import Frame, Opcode

from headrace.net.websocket import closing

if TYPE_CHECKING:
    from websockets.server import ServerProtocol


class Inbox:
    """One per connection. A connection that must be failed is, through `frames`; then no message comes any more."""

    def __init__(self, frames: ServerProtocol) -> None:
        self._frames = frames
        self._received = b""
        self._fed = 0
        self._frame_left = 0
        # One growing buffer and not a list of pieces: a million empty fragments must not cost a million objects.
        self._partial: bytearray | None = None
        self._is_text = False
        self._now = 0.0
        self.piece_at: float | None = None
        """When the last piece of an unfinished message came; None outside of messages."""

    def receive(self, data: bytes, now: float) -> None:
        """Keep bytes for `take`."""
        self._now = now
        self._received = self._received[self._fed :] + data if self._received else data
        self._fed = 0

    def take(self) -> str | bytes | None:
        """The next whole message; None when there is none yet."""
        # The parser gets one frame at a time, although it would take all: so nothing is inflated before its turn, and
        # a close frame is not answered before the owner has seen, and perhaps answered, the messages before it.
        while piece := self._next_piece():
            self._frames.receive_data(piece)
            for frame in self._frames.events_received():
                message = self._join(cast("Frame", frame))
                if message is not None:
                    return message
            if self._frames.eof_sent:
                self._received = b""
        return None

    def _next_piece(self) -> bytes:
        """What there is of the frame that comes next; nothing while not even its length is known."""
        received, start = self._received, self._fed
        if not self._frame_left:
            self._frame_left = _frame_bytes(received, start)
            if not self._frame_left:
                return b""
        piece = received[start : start + self._frame_left]
        self._frame_left -= len(piece)
        self._fed = start + len(piece)
        if self._fed == len(received):
            self._received = b""
            self._fed = 0
        return piece

    def _join(self, frame: Frame) -> str | bytes | None:
        if frame.opcode not in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            return None  # The package has answered pings and closes.
        data = frame.data
        if frame.opcode is not Opcode.CONT:
            self._is_text = frame.opcode is Opcode.TEXT
        if self._partial is not None:
            self._partial += data
            data = self._partial
        elif not frame.fin:
            self._partial = bytearray(data)
        if not frame.fin:
            self.piece_at = self._now
            return None
        self._partial = self.piece_at = None
        return self._text(data) if self._is_text else bytes(data)

    def _text(self, data: bytes | bytearray | memoryview) -> str | None:
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError:
            self._frames.fail(closing.INVALID_DATA, "a text message is not UTF-8")
            return None


def _frame_bytes(data: bytes, start: int) -> int:
    """Size of the frame that begins at `start`, its head included (RFC 6455, 5.2); 0 if it cannot be told yet."""
    if len(data) < start + 2:
        return 0
    length = data[start + 1]
    head = 6 if length & 0x80 else 2
    length &= 0x7F
    if length < 126:
        return head + length
    size = 2 if length == 126 else 8
    if len(data) < start + 2 + size:
        return 0
    return head + size + int.from_bytes(data[start + 2 : start + 2 + size], "big")
