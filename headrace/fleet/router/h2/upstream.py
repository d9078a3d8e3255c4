# SPDX-License-Identifier: Apache-2.0
"""A call as a stream to its backend: one attempt of `call.ProxiedCall`, which it tells of all that comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.net.http2.frames import (
    DATA,
    DEFAULT_FRAME_BYTES,
    END_HEADERS,
    END_STREAM,
    HEADER,
    HEADERS,
    ErrorCode,
)
from headrace.net.http2.stream import Stream

if TYPE_CHECKING:
    from headrace.fleet.router.h2.call import ProxiedCall
    from headrace.fleet.router.h2.connection import UpstreamConnection

_pack = HEADER.pack


class UpstreamStream(Stream):
    """See the module."""

    # Defaults on the class, as in `Stream`.
    id = 0
    """0 until the head is written: numbers must go out in order."""
    unsent = True
    headed = False
    """Whether the head of the answer has come."""
    _first = b""

    connection: UpstreamConnection

    def __init__(self, connection: UpstreamConnection, call: ProxiedCall) -> None:
        self.connection = connection
        self.call = call
        self.receive_window = connection.own_stream_window

    # Called by the call.

    def send(self, piece: bytes) -> bool:
        """Send bytes of the request. False asks the caller to wait for `upstream_room`."""
        if self.unsent:
            if not self._first and len(piece) <= DEFAULT_FRAME_BYTES:
                # It may be all: then head, bytes and end are one write.
                self._first = piece
                return True
            self.write_head(end=False)
        return self.send_data([piece])

    def finish(self) -> None:
        """The request is complete."""
        if self.unsent:
            self.write_head(end=True)
        else:
            self.send_data([], end=True)

    def abandon(self) -> None:
        """Nobody waits for the answer."""
        if self.local_closed and self.remote_closed:
            return
        if self.unsent:
            self.forget()
            self.connection.not_begun()
        else:
            self.reset(ErrorCode.CANCEL)

    # Called by the connection.

    def write_head(self, *, end: bool) -> None:
        """Open the stream, with what there is of the request."""
        self.unsent = False
        if self.local_closed:
            return
        connection = self.connection
        call = self.call
        number = self.id = connection.begin(self)
        self.send_window = connection.peer_stream_window
        plan = call.plan
        block = call.head_block() if call.late else plan.block
        block = (connection.scheme if plan.names_host else connection.scheme_and_host) + block
        piece, self._first = self._first, b""
        size, fields = len(piece), len(block)
        if not size:
            connection.write_headers(number, block, end)
            self.local_closed = end
        elif fields <= DEFAULT_FRAME_BYTES and connection.has_room(self, size):
            self.send_window -= size
            connection.send_window -= size
            connection.write(
                _pack(fields >> 8, fields & 0xFF, HEADERS, END_HEADERS, number)
                + block
                + _pack(size >> 8, size & 0xFF, DATA, END_STREAM if end else 0, number)
                + piece
            )
            self.local_closed = end
        else:
            connection.write_headers(number, block, end=False)
            self.send_data([piece], end=end)

    def forget(self) -> None:
        """See `Stream.forget`."""
        super().forget()
        self.unsent = False

    def on_data(self, data: memoryview) -> None:
        """See `Stream.on_data`."""
        if self.headed:
            self.call.answer_data(self, bytes(data))

    def on_end(self) -> None:
        """See `Stream.on_end`."""
        self.call.answer_end(self)

    def on_room(self) -> None:
        """See `Stream.on_room`."""
        self.call.upstream_room(self)

    def on_reset(self, code: int) -> None:
        """See `Stream.on_reset`."""
        self.call.attempt_reset(self, code)

    def on_fault(self, text: str) -> None:
        """The backend broke a rule on this stream."""
        self.call.attempt_lost(self, f"the backend broke HTTP/2: {text}")

    def on_lost(self, text: str) -> None:
        """The connection is gone."""
        self.call.attempt_lost(self, text)

    def on_refused(self) -> None:
        """The backend has not looked at the call and never will."""
        self.call.attempt_refused(self)

    def patience(self) -> float | None:
        """See `Stream.patience`. A backend may take its time: the caller's deadline is what ends a call."""
        return None
