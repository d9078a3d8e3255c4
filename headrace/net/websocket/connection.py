# SPDX-License-Identifier: Apache-2.0
"""An open WebSocket connection: messages in by callback, messages out by `send`, close codes both ways.

Made by `handshake.accept`; owns the transport from then on. Each message is delivered complete, in order, in the event
loop's thread. Reading pauses while the owner has paused messages; `send` returns False while the client does not read.
"""

from __future__ import annotations

import asyncio
import logging
from typing import cast

from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.server import ServerProtocol

from headrace.net.http.heads import Buffer, RequestHead
from headrace.net.site import Site
from headrace.net.websocket.contract import CloseCode, WebSocket, fit_reason, may_be_sent

log = logging.getLogger("headrace.wire.websocket")

_CLOSE_SECONDS = 10.0
"""How long the client may take to answer a close frame, or to close its end after ours."""

_PINGS_PER_IDLE = 4
"""A silent client is pinged this often within `limits.idle_seconds`: by default every 30 s, under the 60 s after which
common proxies close a silent connection."""

_PONG_BYTE = 0x8A


class WebSocketConnection(WebSocket, asyncio.Protocol):
    """A `WebSocket` on our own connection. Implements `site.Connection`."""

    def __init__(self, site: Site, frames: ServerProtocol, head: RequestHead, peer: str) -> None:
        self.site = site
        self.head = head
        self.peer = peer
        self.subprotocol = frames.subprotocol
        self._frames = frames
        self._transport: asyncio.Transport | None = None
        # Reading.
        self._reader = MessageReader(frames)
        self._paused = False
        self._pumping = False
        self._discarding = False
        # Writing.
        self._write_paused = False
        self._held_pong: bytes | None = None
        # Time and the end.
        self._heard_at = self._unread_since = 0.0
        self._unread_bytes = 0
        self._pings = 0
        self._closing_at: float | None = None
        self._ended = False

    # For the owner.

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._ended or self._transport is None or self._frames.state is not State.OPEN

    def send(self, message: str | Buffer) -> bool:
        """Send a message."""
        if self.closed:
            return False
        if isinstance(message, str):
            self._frames.send_text(message.encode())
        else:
            self._frames.send_binary(message)
        self._flush()
        return not self._write_paused

    def close(self, code: int = CloseCode.NORMAL, reason: str = "") -> None:
        """Start to close."""
        if not may_be_sent(code):
            raise ValueError(f"{code} may not be sent in a close frame: use 1000 to 1014 or 3000 to 4999")
        if self.closed:
            return
        self._held_pong = None
        self._frames.send_close(code, fit_reason(reason))
        self._closing_at = self.site.now + _CLOSE_SECONDS
        self._flush()
        self._discarding = True
        self.resume_messages()

    def pause_messages(self) -> None:
        """Stop reading from the client."""
        if not self._paused and not self._discarding:
            self._paused = True
            if self._transport is not None:
                self._transport.pause_reading()

    def resume_messages(self) -> None:
        """Read from the client again."""
        if self._paused:
            self._paused = False
            self._heard_at = self.site.now
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()
        self._pump()

    # Called by the server.

    def drain(self) -> None:
        """Close with 1001."""
        self.close(CloseCode.GOING_AWAY, "the server is shutting down")

    def sweep(self, now: float) -> None:
        """Enforce the timeouts. A client that answers pings may stay connected forever."""
        transport = self._transport
        if transport is None:
            return
        unread = transport.get_write_buffer_size()
        if unread != self._unread_bytes or unread == 0:
            self._unread_since = now
        reads = unread != self._unread_bytes
        self._unread_bytes = unread
        if self._closing_at is not None:
            if reads:
                self._closing_at = now + _CLOSE_SECONDS
            elif now >= self._closing_at:
                self._close_transport(transport)
        elif now - self._unread_since > self.site.limits.write_idle_seconds:
            log.info("WebSocket client stopped reading", extra={"peer": self.peer})
            self.abort()
        elif not self._paused:  # else the owner caused the silence
            self._sweep_silence(now)

    def expire(self) -> None:
        """Close with 1001."""
        self.drain()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start on the transport that HTTP/1.1 has given up."""
        self._transport = cast("asyncio.Transport", transport)
        self._heard_at = self.site.now
        self.site.connections.add(self)

    def data_received(self, data: bytes) -> None:
        """Read received bytes."""
        if self._ended:
            return
        self._heard_at = self.site.now
        self._pings = 0
        self._reader.receive(data, self.site.now)
        self._pump()

    def eof_received(self) -> bool:
        """Handle the client's close of its end; buffered bytes are still sent, but the owner is notified at once."""
        if self._closing_at is None:
            self._closing_at = self.site.now + _CLOSE_SECONDS
        self._end()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the owner: the socket is closed."""
        self._transport = None
        self.site.connections.discard(self)
        self._end()

    def pause_writing(self) -> None:
        """Ask the owner to wait: the socket's buffer is full."""
        self._write_paused = True

    def resume_writing(self) -> None:
        """Let the owner send again: the client has read what was buffered."""
        self._write_paused = False
        pong, self._held_pong = self._held_pong, None
        if pong is not None and self._transport is not None:
            self._transport.write(pong)
        if self.on_writable is not None and not self.closed:
            self.guard(self.on_writable)

    # Internal.

    def _pump(self) -> None:
        """Deliver received messages until there are no more or the owner pauses. Not reentrant."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while not self._paused and not self._ended:
                message = self._reader.next_message()
                self._flush()
                if message is None:
                    break
                if self.on_message is not None and not self._discarding:
                    self.guard(self.on_message, message)
        finally:
            self._pumping = False
        if self._frames.eof_sent and not self._paused:
            self._end()

    def _sweep_silence(self, now: float) -> None:
        limits = self.site.limits
        silence = now - self._heard_at
        piece_at = self._reader.piece_at
        if piece_at is not None and now - piece_at > limits.body_idle_seconds:
            self.close(CloseCode.POLICY, f"a message made no progress for {limits.body_idle_seconds:g} seconds")
        elif silence > limits.idle_seconds:
            self.close(CloseCode.INTERNAL, "no answer to pings")
        elif silence > limits.idle_seconds * (self._pings + 1) / _PINGS_PER_IDLE and not self._write_paused:
            self._pings += 1
            self._frames.send_ping(b"")
            self._flush()

    def _flush(self) -> None:
        transport = self._transport
        for data in self._frames.data_to_send():
            if transport is None:
                continue
            if not data:
                self._half_close(transport)
            elif self._write_paused and data[0] == _PONG_BYTE:
                # RFC 6455, 5.5.3: only the latest ping needs an answer. So a client that pings and does not read
                # cannot make us keep more than one pong.
                self._held_pong = data
            else:
                transport.write(data)

    def _half_close(self, transport: asyncio.Transport) -> None:
        # Half-close and read on until the client closes too: a TCP reset could destroy our close frame.
        self._held_pong = None
        self._closing_at = self.site.now + _CLOSE_SECONDS
        if transport.can_write_eof():
            transport.write_eof()
        else:
            transport.close()

    def _close_transport(self, transport: asyncio.Transport) -> None:
        # With nothing left to write, an orderly close lets the kernel deliver what a slow client has not read yet.
        if transport.get_write_buffer_size():
            transport.abort()
        else:
            transport.close()

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        frames = self._frames
        close = frames.close_rcvd or (frames.close_sent if frames.eof_sent else None)
        self.notify_closed(*((CloseCode.ABNORMAL, "") if close is None else (int(close.code), close.reason)))


class MessageReader:
    """Turns received bytes into complete messages, no further ahead than the owner asks for. One per connection.

    The `websockets` package parses, inflates, checks sizes and finds protocol errors; fragments are joined and UTF-8 is
    checked here. A protocol error fails the connection through `frames`; then no message follows.
    """

    def __init__(self, frames: ServerProtocol) -> None:
        self._frames = frames
        self._received = b""
        self._consumed = 0
        self._frame_left = 0
        # One growing buffer, not a list of pieces: a million empty fragments must not cost a million objects.
        self._partial: bytearray | None = None
        self._is_text = False
        self._now = 0.0
        self.piece_at: float | None = None
        """When the last piece of an incomplete message arrived; None between messages."""

    def receive(self, data: bytes, now: float) -> None:
        """Keep bytes for `next_message`."""
        self._now = now
        self._received = self._received[self._consumed :] + data if self._received else data
        self._consumed = 0

    def next_message(self) -> str | bytes | None:
        """Return the next complete message; None if there is none yet."""
        # The parser gets one frame at a time, although it would take all: nothing is inflated before its turn, and a
        # close frame is not answered before the owner has received the messages before it.
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
        """Return the received bytes of the next frame; nothing until its length is known."""
        received, start = self._received, self._consumed
        if not self._frame_left:
            self._frame_left = _frame_bytes(received, start)
            if not self._frame_left:
                return b""
        piece = received[start : start + self._frame_left]
        self._frame_left -= len(piece)
        self._consumed = start + len(piece)
        if self._consumed == len(received):
            self._received = b""
            self._consumed = 0
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
            self._frames.fail(CloseCode.INVALID_DATA, "a text message is not UTF-8")
            return None


def _frame_bytes(data: bytes, start: int) -> int:
    """Return the size of the frame at `start` with its head (RFC 6455, 5.2); 0 if it is not known yet."""
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
