# SPDX-License-Identifier: Apache-2.0
"""The sending side of an HTTP/2 connection: the socket, the client's windows and settings, and whose turn it is.

The base of `connection.Http2Connection`, which tells it what the client's frames say. Streams hand their frames to it
and wait in line here when the connection's window or the socket is full. It reads nothing.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from headrace.net.http2 import frames
from headrace.net.http2.frames import (
    CONTINUATION,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    ConnectionFault,
    ErrorCode,
    frame,
    frame_header,
)
from headrace.net.peers import peer_name
from headrace.net.unread import UnreadWatch

if TYPE_CHECKING:
    from headrace.net.http.exchange import Buffer
    from headrace.net.http2.stream import Stream
    from headrace.net.site import Site

log = logging.getLogger("headrace.wire")

_UNREAD_ANSWERS = 1000
_NO_TABLE = b"\x20"
"""HPACK: the dynamic table has size 0 from here on."""


class SendingSide:
    """See the module."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.streams: dict[int, Stream] = {}
        self.blocked: dict[int, Stream] = {}
        """Streams that could send if the connection's window or the socket let them, longest waiting first."""
        self.peer_stream_window = frames.DEFAULT_WINDOW
        self.peer_frame_bytes = frames.DEFAULT_FRAME_BYTES
        self.send_window = frames.DEFAULT_WINDOW
        self.write_paused = False
        self._straight = True
        """Whether a small answer may go out in one write: the socket takes bytes, and no table update is owed."""
        self._transport: asyncio.Transport | None = None
        self._out: asyncio.Transport | None = None
        """The transport as long as it may be written to."""
        self._peer: str | None = None
        self._table_bytes = frames.DEFAULT_TABLE_BYTES
        self._table_update = b""
        self._unread_answers = 0
        self._unread = UnreadWatch()

    # Called by the event loop.

    def pause_writing(self) -> None:
        """The client reads more slowly than we write."""
        self.write_paused = True
        self._straight = False
        self._unread.begin(self.site.now)

    def resume_writing(self) -> None:
        """The client has caught up."""
        self.write_paused = False
        self._straight = not self._table_update
        self._unread_answers = 0
        for stream in list(self.blocked.values()):
            if not stream.pending_bytes:
                # Only its end is missing, which needs no window.
                stream.pump()
        self.pump_blocked()
        for stream in list(self.streams.values()):
            stream.room_again()

    # Called by the server.

    def abort(self) -> None:
        """See `site.Connection`."""
        if self._transport is not None:
            self._transport.abort()

    def sweep_unread(self, now: float) -> None:
        """The socket has been full since the last sweep: give up a client that reads nothing."""
        transport = self._transport
        if transport is not None and self._unread.gave_up(transport, now, self.site.limits.write_idle_seconds):
            log.info("a client stopped reading", extra={"peer": self.peer})
            self.abort()

    # Called by streams.

    @property
    def peer(self) -> str:
        """The client's address, for logs."""
        if self._peer is None:
            self._peer = peer_name(self._transport)
        return self._peer

    def write(self, data: Buffer) -> None:
        """Hand bytes to the socket."""
        if self._out is not None:
            self._out.write(data)

    def write_many(self, buffers: list[Buffer]) -> None:
        """Hand several buffers to the socket without joining them."""
        if self._out is not None:
            self._out.writelines(buffers)

    def write_headers(self, stream_id: int, block: bytes, end: bool) -> None:
        """Send a header block, in as many frames as the peer's frame size asks for."""
        if self._table_update:
            block, self._table_update = self._table_update + block, b""
            self._straight = not self.write_paused
        room = self.peer_frame_bytes
        flags = END_STREAM if end else 0
        if len(block) <= room:
            self.write(frame(HEADERS, flags | END_HEADERS, stream_id, block))
            return
        pieces = [block[i : i + room] for i in range(0, len(block), room)]
        kind = HEADERS
        for number, piece in enumerate(pieces, 1):
            last = END_HEADERS if number == len(pieces) else 0
            self.write(frame_header(len(piece), kind, flags | last, stream_id) + piece)
            kind, flags = CONTINUATION, 0

    def has_room(self, stream: Stream, size: int) -> bool:
        """Whether a body of `size` fits in one frame and in both windows now."""
        return (
            size <= stream.send_window and size <= self.send_window and size <= self.peer_frame_bytes and self._straight
        )

    # Called by the connection and its control frames.

    def answer(self, data: bytes) -> None:
        """Acknowledge a SETTINGS or PING. A client that sends them and does not read may not fill our memory."""
        self.write(data)
        if self.write_paused:
            self.count_unread()

    def count_unread(self) -> None:
        """Something to be answered came from a client that does not read: our answers may not fill the memory."""
        self._unread_answers += 1
        if self._unread_answers > _UNREAD_ANSWERS + 2 * self.site.limits.concurrent_streams:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "answers are not read")

    def peer_window_changed(self, size: int) -> None:
        """The client's SETTINGS gave every stream another initial window (6.9.2)."""
        change = size - self.peer_stream_window
        self.peer_stream_window = size
        for stream in self.streams.values():
            stream.send_window += change
            if stream.send_window > frames.MAX_WINDOW:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "initial window overflows a stream's")

    def peer_table_changed(self, size: int) -> None:
        """The client's SETTINGS gave our HPACK table another limit. We use none, but have to say so (4.3.1)."""
        if size < self._table_bytes:
            self._table_bytes = 0
            self._table_update = _NO_TABLE
            self._straight = False

    def settings_changed(self) -> None:
        """The client's SETTINGS have been acknowledged: send what larger windows allow."""
        for stream in list(self.streams.values()):
            if stream.pending_bytes:
                stream.flush()

    def pump_blocked(self) -> None:
        """Send what the connection's window allows now, one frame a stream in turn.

        Each turn sends something or takes a stream out of the line, so that no WINDOW_UPDATE, however small, costs more
        than it brings.
        """
        blocked = self.blocked
        while blocked and self.send_window > 0 and not self.write_paused:
            number = next(iter(blocked))
            stream = blocked.pop(number)
            stream.pump()
            if stream.can_send:
                blocked[number] = stream
