# SPDX-License-Identifier: Apache-2.0
"""An open WebSocket: messages in by callback, messages out by `send`, close codes both ways.

Made by `accept`; owns the transport from then on and is a `site.Connection`. A message is delivered whole, in order, in
the loop's thread. The client is held back while the owner has paused messages; the owner is told by `send` to wait
while the client does not read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from websockets.protocol import State

from headrace.core.errors import HeadraceError
from headrace.core.ids import REQUEST_ID_FIELD, request_id
from headrace.wire.websocket import closing
from headrace.wire.websocket.inbox import Inbox

if TYPE_CHECKING:
    from websockets.server import ServerProtocol

    from headrace.wire.http.exchange import Buffer
    from headrace.wire.http.heads import RequestHead
    from headrace.wire.site import Site

log = logging.getLogger("headrace.wire.websocket")

_CLOSE_SECONDS = 10.0
"""How long the client may take to answer a close frame, or to hang up after ours."""

_PINGS_PER_IDLE = 4
"""A silent client is pinged this often within `limits.idle_seconds`: by default every 30 s, under the 60 s after which
common proxies cut a silent connection."""

_PONG_BYTE = 0x8A


class WebSocketConnection(asyncio.Protocol):
    """See the module. After the end, every method does nothing. Use it from the loop's thread only."""

    def __init__(self, site: Site, frames: ServerProtocol, head: RequestHead, peer: str) -> None:
        self.site = site
        self.head = head
        """The request that opened the WebSocket."""
        self.peer = peer
        """The client's address, for logs."""
        self.subprotocol: str | None = frames.subprotocol
        """What was agreed on, if anything."""
        self.on_message: Callable[[str | bytes], object] | None = None
        """Called with each message: `str` for text, `bytes` for binary. What it raises closes the connection."""
        self.on_close: Callable[[int, str], None] | None = None
        """Called once, with the client's code and reason, ours if we had to fail it, or 1006 if it just broke off."""
        self.on_writable: Callable[[], None] | None = None
        """Called when `send` may be called again after it returned False."""
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
        """Whether nothing can be sent any more: closing has begun, or the client has gone."""
        return self._ended or self._transport is None or self._frames.state is not State.OPEN

    def send(self, message: str | Buffer) -> bool:
        """Send a text (`str`) or binary message. False asks the caller to wait for `on_writable` (or `on_close`)."""
        if self.closed:
            return False
        if isinstance(message, str):
            self._frames.send_text(message.encode())
        else:
            self._frames.send_binary(message)
        self._flush()
        return not self._write_paused

    def close(self, code: int = closing.NORMAL, reason: str = "") -> None:
        """Begin to close; the client's answer ends it. No message is delivered after this call."""
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

    def fail(self, error: BaseException) -> None:
        """Close with the code for an error (`closing.CLOSE_CODE`).

        An exception that is not ours goes to the log, and only the id to find it there goes to the client.
        """
        if isinstance(error, HeadraceError):
            self.close(closing.CLOSE_CODE[error.code], error.message)
            return
        found_by = request_id(self.head.get(REQUEST_ID_FIELD.encode()))
        details = {"request_id": found_by, "path": self.head.path.decode("latin-1"), "peer": self.peer}
        log.error("a WebSocket handler failed", exc_info=error, extra=details)
        self.close(closing.INTERNAL, f"internal error; the server's log has the details under {found_by}")

    def pause_messages(self) -> None:
        """Ask for no more `on_message` calls: the client is held back. Pongs and a close are not seen either."""
        if not self._paused and not self._deaf:
            self._paused = True
            if self._transport is not None:
                self._transport.pause_reading()

    def resume_messages(self) -> None:
        """Undo `pause_messages`; messages that had come already are delivered before this returns."""
        if self._paused:
            self._paused = False
            self._heard_at = self.site.now
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()
        self._pump()

    def guard(self, callback: Callable[..., object], *arguments: object) -> None:
        """Call the owner; what it raises closes the connection."""
        try:
            callback(*arguments)
        except Exception as error:
            self.fail(error)

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
        on_close, self.on_close = self.on_close, None
        self.on_message = self.on_writable = None
        if on_close is not None:
            try:
                on_close(*((closing.ABNORMAL, "") if close is None else (int(close.code), close.reason)))
            except Exception:
                log.exception("a WebSocket handler failed", extra={"path": self.head.path.decode("latin-1")})
