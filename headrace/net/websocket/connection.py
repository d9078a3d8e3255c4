# SPDX-License-Identifier: Apache-2.0
"""An open WebSocket: messages in by callback, messages out by `send`, close codes both ways.

Made by `accept`; owns the transport from then on and is a `site.Connection`. A message is delivered whole, in order, in
the loop's thread. The client is held back while the owner has paused messages; the owner is told by `send` to wait
while the client does not read.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, cast

from websockets.protocol import State

from headrace.net.websocket import closing
from headrace.net.websocket.contract import WebSocket
from headrace.net.websocket.inbox import Inbox

if TYPE_CHECKING:
    from websockets.server import ServerProtocol

    from headrace.net.http.exchange import Buffer
    from headrace.net.http.heads import RequestHead
    from headrace.net.site import Site

log = logging.getLogger("headrace.net.websocket")

_CLOSE_SECONDS = 10.0
"""How long the client may take to answer a close frame, or to hang up after ours."""

_PINGS_PER_IDLE = 4
"""A silent client is pinged this often within `limits.idle_seconds`: by default every 30 s, under the 60 s after which
common proxies cut a silent connection."""

_PONG_BYTE = 0x8A


class WebSocketConnection(WebSocket, asyncio.Protocol):
    """See the module, and `WebSocket`."""

    def __init__(self, site: Site, frames: ServerProtocol, head: RequestHead, peer: str) -> None:
        self.site = site
        self.head = head
        self.peer = peer
        self.subprotocol = frames.subprotocol
        self._frames = frames
        self._transport: asyncio.Transport | None = None
        # Reading.
        self._inbox = Inbox(frames)
        self._paused = False
        self._pumping = False
        self._deaf = False
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
        """See `WebSocket.closed`."""
        return self._ended or self._transport is None or self._frames.state is not State.OPEN

    def send(self, message: str | Buffer) -> bool:
        """See `WebSocket.send`."""
        if self.closed:
            return False
        if isinstance(message, str):
            self._frames.send_text(message.encode())
        else:
            self._frames.send_binary(message)
        self._flush()
        return not self._write_paused

    def close(self, code: int = closing.NORMAL, reason: str = "") -> None:
        """See `WebSocket.close`."""
        if not closing.may_be_sent(code):
            raise ValueError(f"{code} may not be sent in a close frame: use 1000 to 1014 or 3000 to 4999")
        if self.closed:
            return
        self._held_pong = None
        self._frames.send_close(code, closing.fit_reason(reason))
        self._closing_at = self.site.now + _CLOSE_SECONDS
        self._flush()
        self._deaf = True
        self.resume_messages()

    def pause_messages(self) -> None:
        """See `WebSocket.pause_messages`."""
        if not self._paused and not self._deaf:
            self._paused = True
            if self._transport is not None:
                self._transport.pause_reading()

    def resume_messages(self) -> None:
        """See `WebSocket.resume_messages`."""
        if self._paused:
            self._paused = False
            self._heard_at = self.site.now
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()
        self._pump()

    # Called by the server.

    def drain(self) -> None:
        """See `site.Connection`."""
        self.close(closing.GOING_AWAY, "the server is shutting down")

    def sweep(self, now: float) -> None:
        """See `site.Connection`. A client that answers pings may stay as long as it likes."""
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
                self._give_up(transport)
        elif now - self._unread_since > self.site.limits.write_idle_seconds:
            log.info("a WebSocket client stopped reading", extra={"peer": self.peer})
            self.abort()
        elif not self._paused:  # else the silence is the owner's wish
            self._sweep_silence(now)

    def expire(self) -> None:
        """See `site.Connection`."""
        self.drain()

    def abort(self) -> None:
        """See `site.Connection`."""
        if self._transport is not None:
            self._transport.abort()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection has been handed over."""
        self._transport = cast("asyncio.Transport", transport)
        self._heard_at = self.site.now
        self.site.connections.add(self)

    def data_received(self, data: bytes) -> None:
        """Bytes have arrived."""
        if self._ended:
            return
        self._heard_at = self.site.now
        self._pings = 0
        self._inbox.receive(data, self.site.now)
        self._pump()

    def eof_received(self) -> bool:
        """The client has hung up; what it has not read yet is still sent, but the owner need not wait for that."""
        if self._closing_at is None:
            self._closing_at = self.site.now + _CLOSE_SECONDS
        self._end()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is gone."""
        self._transport = None
        self.site.connections.discard(self)
        self._end()

    def pause_writing(self) -> None:
        """The client reads more slowly than we write."""
        self._write_paused = True

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._write_paused = False
        pong, self._held_pong = self._held_pong, None
        if pong is not None and self._transport is not None:
            self._transport.write(pong)
        if self.on_writable is not None and not self.closed:
            self.guard(self.on_writable)

    # Inside.

    def _pump(self) -> None:
        """Deliver what has come, until there is no more or the owner wants no more. Never runs inside itself."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while not self._paused and not self._ended:
                message = self._inbox.take()
                self._flush()
                if message is None:
                    break
                if self.on_message is not None and not self._deaf:
                    self.guard(self.on_message, message)
        finally:
            self._pumping = False
        if self._frames.eof_sent and not self._paused:
            self._end()

    def _sweep_silence(self, now: float) -> None:
        limits = self.site.limits
        silence = now - self._heard_at
        piece_at = self._inbox.piece_at
        if piece_at is not None and now - piece_at > limits.body_idle_seconds:
            self.close(closing.POLICY, f"a message stood still for {limits.body_idle_seconds:g} seconds")
        elif silence > limits.idle_seconds:
            self.close(closing.INTERNAL, "no answer to pings")
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
                self._hang_up(transport)
            elif self._write_paused and data[0] == _PONG_BYTE:
                # RFC 6455, 5.5.3: only the latest ping needs an answer. So a client that pings and does not read
                # cannot make us keep more than one pong.
                self._held_pong = data
            else:
                transport.write(data)

    def _hang_up(self, transport: asyncio.Transport) -> None:
        # Half-close and read on until the client hangs up too: closing at once could reset the close frame away.
        self._held_pong = None
        self._closing_at = self.site.now + _CLOSE_SECONDS
        if transport.can_write_eof():
            transport.write_eof()
        else:
            transport.close()

    def _give_up(self, transport: asyncio.Transport) -> None:
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
        self.told_closed(*((closing.ABNORMAL, "") if close is None else (int(close.code), close.reason)))
