# SPDX-License-Identifier: Apache-2.0
"""One HTTP/1.1 connection: reads through `reader`, answers in order, keeps time, drains.

Made by `wire.negotiation` for each connection. Requests that arrive while one is being answered wait in line; one that
waits too long to arrive, or a client that stops reading, is dropped by `sweep`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, cast

import orjson

from headrace.core.errors import Unavailable
from headrace.net.http.coding import inflate
from headrace.net.http.exchange import address_in
from headrace.net.http.heads import CONTENT_TYPE, JSON, ResponseHead
from headrace.net.http1.direct import BodyReceiver
from headrace.net.http1.exchange import Http1Exchange, Pause, Stage, made_exchange
from headrace.net.http1.reader import Phase, Refusal, RequestReader
from headrace.net.http1.recognising import Recogniser
from headrace.net.peers import peer_name
from headrace.net.unread import LINGER_SECONDS, UnreadWatch, sweep_closing

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.net.http.exchange import Buffer
    from headrace.net.http.routes import KnownHead
    from headrace.net.site import Site

log = logging.getLogger("headrace.wire")

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Http1Protocol(asyncio.Protocol):
    """See the module. Public methods are for `reader`, `exchange` and the server (`site.Connection`)."""

    def __init__(self, site: Site) -> None:
        # For the life of the connection.
        self.site = site
        self.write_paused = False
        self._transport: asyncio.Transport | None = None
        self._reader: RequestReader
        self._recogniser: Recogniser
        self.peer = ""
        """The client's address, for logs."""
        self.peer_address = b""
        """The same without the port, for `Exchange.peer_address`."""
        self._waiting: deque[Http1Exchange] = deque()
        self._paused_by = 0
        self._idle_since = 0.0
        self._unread = UnreadWatch()
        self.ending = False
        """Draining, or the client has said its last word: the connection ends with what has arrived by now."""
        self.open = True
        """Whether more requests may be taken from the bytes that come, or that have been read."""
        self._at_eof = False
        self._closing_at: float | None = None
        self._upload: Http1Exchange | None = None
        """The streamed request that went into line last: only its body can be unfinished."""
        self._leave_owed: Http1Exchange | None = None
        """The request that is being read, if it waits for 100 Continue and others are to be answered first."""
        self.last: KnownHead
        self.last_size = -1
        """The last request that `recognising` knew and its bytes; -1 unless the next byte begins another one."""
        # For the request that is being answered.
        self._current: Http1Exchange | None = None
        self._advancing = False
        self._status = 0

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is there."""
        self._transport = cast("asyncio.Transport", transport)
        self.peer = peer_name(self._transport)
        self.peer_address = address_in(self.peer)
        secure = transport.get_extra_info("sslcontext") is not None
        self._reader = RequestReader(self, b"https" if secure else b"http")
        self._recogniser = self._reader.recogniser
        self._idle_since = self.site.now
        self.site.connections.add(self)

    def data_received(self, data: bytes) -> None:
        """Bytes have arrived."""
        if len(data) == self.last_size and self._current is None and not self.write_paused:
            last = self.last
            body = data.removeprefix(last.text)
            if body is not data:
                # The same again, but for its body, and nobody is before it: nothing to read, nothing to look up.
                handler = last.route.handler
                self._current = exchange = made_exchange(self, last.head, last.route, last.params, body)
                try:
                    handler(exchange)
                except Exception as error:
                    exchange.fail(error)
                return
        self.last_size = -1
        if not self.open:
            return
        reader = self._reader
        try:
            if reader.phase == Phase.BETWEEN:
                data = self._recogniser.feed(data)
            if data:
                reader.feed(data)
        except Refusal as refusal:
            self._refuse(refusal)
            return
        if reader.direct is not None and self._transport is not None:
            self._transport.set_protocol(BodyReceiver(self))

    def eof_received(self) -> bool:
        """The client will send no more. It may still read, so what was asked is answered, then the socket closes."""
        current = self._current
        transport = self._transport
        if transport is None or self._closing_at is not None or (current is None and not self._waiting):
            return False
        if current is not None and (current.on_disconnect is not None or current is self._reader.exchange):
            # Someone asked to be told: as in Go and nginx, a client that stops talking counts as gone.
            # And a body that ends before its end is no request.
            current.disconnected()
            return False
        self.ending = self._at_eof = True
        self._stop_reading()
        return transport.can_write_eof()  # not with TLS, which closes both ways at once

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is gone."""
        self.site.connections.discard(self)
        if self._transport is None:
            return
        self._transport = None
        current, self._current = self._current, None
        self._waiting.clear()
        self._stop_reading()
        if current is not None:
            current.disconnected()

    def pause_writing(self) -> None:
        """The client reads more slowly than we write."""
        self.write_paused = True
        self._unread.begin(self.site.now)

    def resume_writing(self) -> None:
        """The client has caught up."""
        self.write_paused = False
        current = self._current
        if current is None:
            self._advance()
        elif current.on_writable is not None:
            self.guard(current, current.on_writable)

    # Called by the body's receiver.

    def body_buffer(self) -> memoryview:
        """Where the kernel should write."""
        reader = self._reader
        direct = reader.direct
        # A body that was given up is still read, so that the client can read its answer; but not kept.
        return self.site.receive_buffer if direct is None else reader.direct_rest(direct)

    def body_received(self, size: int) -> None:
        """The kernel has written there."""
        reader = self._reader
        if reader.direct is None:
            return
        if reader.direct_filled(size) and self._transport is not None:
            # First: the handler that gets the body may answer at once, and the next request is ours to read.
            self._transport.set_protocol(self)
            reader.direct_complete()

    # Called by the server.

    def drain(self) -> None:
        """See `site.Connection`. An idle client may have a request on its way: it gets until the next sweep."""
        self.ending = True

    def sweep(self, now: float) -> None:
        """See `site.Connection`."""
        limits = self.site.limits
        if self._closing_at is not None:
            if self._transport is not None:
                self._closing_at = sweep_closing(self, self._transport, self._closing_at, now)
            return
        if self.write_paused:
            self.sweep_unread(now)
            return
        reader = self._reader
        waited = now - reader.since
        if reader.phase == Phase.HEAD:
            if waited > limits.header_seconds and not self._paused_by:
                self._refuse(Refusal(408, f"the header did not arrive within {limits.header_seconds:g} seconds"))
        elif reader.phase == Phase.BODY:
            if waited > limits.body_idle_seconds and not self._paused_by:
                self._refuse(Refusal(408, f"the body stood still for {limits.body_idle_seconds:g} seconds"))
        elif self._current is None and (self.ending or now - self._idle_since > limits.idle_seconds):
            self.close()

    def expire(self) -> None:
        """See `site.Connection`. A request that has no answer yet gets one; a response half sent can only be cut."""
        current = self._current
        if current is None or current is self._reader.exchange:
            if self._reader.phase != Phase.BETWEEN:
                self._refuse(Refusal(503, "the server is shutting down"))
        elif current.started:
            current.disconnected()
        else:
            current.keep_alive = False
            on_disconnect, current.on_disconnect = current.on_disconnect, None
            current.fail(Unavailable("the server is shutting down"))
            if on_disconnect is not None:
                self.guard(current, on_disconnect)
        self.close()

    def abort(self) -> None:
        """See `site.Connection`."""
        if self._transport is not None:
            self._transport.abort()

    # Called by the reader.

    def request_begun(self, exchange: Http1Exchange) -> None:
        """A request whose body is streamed has its head."""
        if self._current is None and not self.write_paused and not self._waiting:
            self._current = exchange
            self._dispatch(exchange)
        else:
            # Its body must not pile up while earlier requests are answered.
            self._waiting.append(exchange)
            self._upload = exchange
            self.pause_reading(Pause.UPLOAD)

    def request_complete(self, exchange: Http1Exchange) -> None:
        """A request is whole."""
        if self._current is None and not self.write_paused and not self._waiting:
            self._current = exchange
            self._dispatch(exchange)
            return
        self._waiting.append(exchange)
        if len(self._waiting) >= self.site.limits.pipelined_requests:
            self.pause_reading(Pause.LINE)

    def leave_wanted(self, exchange: Http1Exchange) -> None:
        """The client waits for leave to send a body that is read as a whole."""
        self._leave_owed = exchange
        if self._current is None and not self._waiting:
            self._give_leave()

    def stop_reading(self) -> None:
        """Read nothing more as HTTP, but stay for what is to be answered."""
        if self.open:
            self._stop_reading()
            self.pause_reading(Pause.END)

    # Called by exchanges.

    def guard(self, exchange: Http1Exchange, callback: Callable[..., object], *arguments: object) -> None:
        """Call what a handler gave us; its failure is the exchange's, not the connection's."""
        try:
            callback(*arguments)
        except Exception as error:
            exchange.fail(error)

    def closes_after(self, exchange: Http1Exchange) -> bool:
        """Whether the connection ends with this response."""
        if not exchange.keep_alive:
            return True
        if self.ending and not self._waiting and self._reader.phase == Phase.BETWEEN:
            exchange.keep_alive = False
            return True
        return False

    def write(self, data: Buffer) -> None:
        """Hand bytes to the socket."""
        if self._transport is not None:
            self._transport.write(data)

    def write_many(self, buffers: list[Buffer]) -> None:
        """Hand several buffers to the socket without joining them."""
        if self._transport is not None:
            self._transport.writelines(buffers)

    def response_started(self, exchange: Http1Exchange, status: int) -> None:
        """The head of a streamed response has gone out."""
        self._status = status

    def finished(self, exchange: Http1Exchange, status: int, close: bool, data: Buffer = b"") -> None:
        """The response of the current request is complete with these bytes, and so is the exchange."""
        transport = self._transport
        if data and transport is not None:
            transport.write(data)
        if exchange.on_over is not None:
            # Once: no exchange gets here twice, nor after another end of it.
            exchange.on_over()
        if exchange is not self._current:
            return
        self._current = None
        site = self.site
        self._idle_since = site.now
        if site.access_log is not None:
            site.access_log(self.peer, exchange.head, status or self._status)
        if self._paused_by:
            self.resume_reading(Pause.HANDLER)
        if close:
            self.close()
        elif self._waiting:
            self._advance()
        elif self._leave_owed is not None:
            self._give_leave()

    def pause_reading(self, reason: int) -> None:
        """Hold the client back."""
        if not self._paused_by and self._transport is not None:
            self._transport.pause_reading()
        self._paused_by |= reason

    def resume_reading(self, reason: int) -> None:
        """Undo `pause_reading` for this reason."""
        if self._paused_by & reason:
            self._paused_by &= ~reason
            if not self._paused_by and self._transport is not None and not self._transport.is_closing():
                # It was our pause and not the client's silence.
                self._reader.since = self.site.now
                self._transport.resume_reading()

    def detach(self) -> asyncio.Transport:
        """Give the transport to another protocol and forget it."""
        transport, self._transport = self._transport, None
        if transport is None:
            raise ConnectionResetError("the client has gone")
        self.site.connections.discard(self)
        self._current = None
        self._stop_reading()
        if self._paused_by:
            self._paused_by = 0
            transport.resume_reading()
        return transport

    def close(self) -> None:
        """Close after what was written; keep reading for a moment so that a reset does not overtake the response."""
        transport = self._transport
        if transport is None or self._closing_at is not None:
            return
        self._waiting.clear()
        self._stop_reading()
        self._unread.begin(self.site.now)
        if transport.can_write_eof() and not self._at_eof:
            self._closing_at = self.site.now + LINGER_SECONDS
            if self._paused_by:
                self._paused_by = 0
                transport.resume_reading()
            transport.write_eof()
        else:
            # TLS says goodbye both ways: a client that was idle anyway has the linger to answer, one that may still be
            # reading a response has as long as any reader. The transport does not tell what it has left to send.
            idle = self._current is None and self._idle_since < self.site.now
            self._closing_at = self.site.now + (LINGER_SECONDS if idle else self.site.limits.write_idle_seconds)
            transport.close()

    # Inside.

    def _dispatch(self, exchange: Http1Exchange) -> None:
        exchange.dispatched = True
        route = exchange.route
        try:
            if not (route.raw or route.streams_body):
                encoding = exchange.head.by_name.get(b"content-encoding")
                if encoding is not None:
                    exchange.body = inflate(encoding, exchange.body, self.site.limits.body_bytes)
            route.handler(exchange)
        except Exception as error:
            exchange.fail(error)
        else:
            if route.streams_body:
                exchange.release_early_body()
                if exchange.wants_leave and exchange.stage == Stage.WAITING and exchange is self._reader.exchange:
                    self.write(_CONTINUE)

    def _advance(self) -> None:
        # A handler that answers at once comes back here through `finished`: one loop, no recursion.
        if self._advancing:
            return
        self._advancing = True
        try:
            limit = self.site.limits.pipelined_requests
            while self._current is None and self._waiting and not self.write_paused:
                exchange = self._waiting.popleft()
                self._current = exchange
                if self._paused_by:
                    if exchange is self._upload:
                        self.resume_reading(Pause.UPLOAD)
                    if len(self._waiting) < limit:
                        self.resume_reading(Pause.LINE)
                self._dispatch(exchange)
        finally:
            self._advancing = False

    def _refuse(self, refusal: Refusal) -> None:
        """Answer a request that cannot be read, and close; if others are to be answered first, close after them."""
        if not self.open:
            return
        log.info("refused: %s", refusal.text, extra={"peer": self.peer, "status": refusal.status})
        unread = self._reader.exchange
        if unread is not None:
            # A streamed request may be in its handler's hands by now, or wait in line.
            cut = unread.started
            unread.disconnected()
            if cut:
                self.abort()
                return
            if unread is self._current:
                self._current = None
            elif self._waiting and self._waiting[-1] is unread:
                self._waiting.pop()
        if self._current is None and not self._waiting:
            head = ResponseHead(refusal.status, [(CONTENT_TYPE, JSON), (b"connection", b"close")])
            body = orjson.dumps({"error": refusal.text})
            self.write(head.http1 + self.site.date_line + b"content-length: %d\r\n\r\n%b" % (len(body), body))
            if unread is not None and self.site.access_log is not None:
                self.site.access_log(self.peer, unread.head, refusal.status)
            self.close()
            return
        # Requests before the bad one are still owed their answers; the bad one is dropped with the connection.
        last = self._waiting[-1] if self._waiting else self._current
        if last is not None:
            last.keep_alive = False
        self.stop_reading()

    def _stop_reading(self) -> None:
        """No request comes after those that have been read. A half-read one is given up, and its memory with it."""
        self.open = False
        self.last_size = -1
        self._reader.give_up()

    def _give_leave(self) -> None:
        exchange, self._leave_owed = self._leave_owed, None
        # A client need not wait for it: by now its body may have come.
        if exchange is not None and exchange is self._reader.exchange:
            self.write(_CONTINUE)

    def sweep_unread(self, now: float) -> None:
        """See `unread.Swept`."""
        transport = self._transport
        if transport is not None and self._unread.gave_up(transport, now, self.site.limits.write_idle_seconds):
            log.info("a client stopped reading", extra={"peer": self.peer})
            self.abort()
