# SPDX-License-Identifier: Apache-2.0
"""One HTTP/1.1 connection: receives bytes, answers requests in order, enforces timeouts, drains.

Made by `negotiation` for each connection. Requests that arrive while one is being answered are queued; `sweep` drops a
request that takes too long to arrive and a client that stops reading.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import cast

import orjson

from headrace.core.errors import Unavailable
from headrace.net.http.coding import inflate
from headrace.net.http.exchange import peer_host
from headrace.net.http.heads import CONTENT_TYPE, JSON, Buffer, ResponseHead
from headrace.net.http.routes import KnownHead
from headrace.net.http1.exchange import Http1Exchange, PauseReason, Stage, new_exchange
from headrace.net.http1.reader import HeadCache, Phase, RequestReader, RequestRejected
from headrace.net.site import LINGER_SECONDS, TOO_MANY_UNFINISHED, Site, WriteStall, peer_name, sweep_closing

log = logging.getLogger("headrace.wire")

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Http1Connection(asyncio.Protocol):
    """A server's end of an HTTP/1.1 connection.

    Implements `site.Connection` for the server, `reader.RequestSink` for its reader and its exchanges.
    """

    def __init__(self, site: Site) -> None:
        # For the life of the connection.
        self.site = site
        self.write_paused = False
        self._transport: asyncio.Transport | None = None
        self._reader: RequestReader
        self._head_cache: HeadCache
        self.peer = ""
        """The client's address, for logs."""
        self.peer_address = b""
        """The same without the port, for `Exchange.peer_address`."""
        self._queue: deque[Http1Exchange] = deque()
        self._queued_bytes = 0
        self._paused_by = 0
        self._idle_since = 0.0
        self._write_stall = WriteStall()
        self.ending = False
        """Draining, or the client has half-closed: the connection closes after what has arrived by now."""
        self.open = True
        """Whether more requests may be read."""
        self._at_eof = False
        self._closing_at: float | None = None
        self._queued_upload: Http1Exchange | None = None
        """The streamed request that was queued last: only its body can be unfinished."""
        self._continue_owed: Http1Exchange | None = None
        """The request that is being read, if it expects 100 Continue and others must be answered first."""
        self.last: KnownHead
        self.last_size = -1
        """The last request found in the head cache and its size; -1 unless the next byte begins a request."""
        # For the request that is being answered.
        self._current: Http1Exchange | None = None
        self._advancing = False
        self._status = 0

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the connection."""
        self._transport = cast("asyncio.Transport", transport)
        self.peer = peer_name(self._transport)
        self.peer_address = peer_host(self.peer)
        secure = transport.get_extra_info("sslcontext") is not None
        self._reader = RequestReader(self, b"https" if secure else b"http")
        self._head_cache = self._reader.head_cache
        self._idle_since = self.site.now
        self.site.connections.add(self)

    def data_received(self, data: bytes) -> None:
        """Read received bytes."""
        if len(data) == self.last_size and self._current is None and not self.write_paused:
            last = self.last
            body = data.removeprefix(last.text)
            if body is not data:
                # The same head again, and no request before it: nothing to parse, nothing to look up.
                handler = last.route.handler
                self._current = exchange = new_exchange(self, last.head, last.route, last.params, body)
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
                data = self._head_cache.feed(data)
            if data:
                reader.feed(data)
        except RequestRejected as rejection:
            self._reject(rejection)
            return
        if reader.direct is not None and self._transport is not None:
            self._transport.set_protocol(BodyReceiver(self))

    def eof_received(self) -> bool:
        """Handle a half-close: the client may still read, so answer what was requested, then close."""
        current = self._current
        transport = self._transport
        if transport is None or self._closing_at is not None or (current is None and not self._queue):
            return False
        if current is not None and (current.on_disconnect is not None or current is self._reader.exchange):
            # A handler wants to know of disconnects: as in Go and nginx, a half-close counts as one.
            # And an incomplete body is not a request.
            current.disconnected()
            return False
        self.ending = self._at_eof = True
        self._stop_reading()
        return transport.can_write_eof()  # not with TLS, which closes both ways at once

    def connection_lost(self, exc: Exception | None) -> None:
        """End all requests: the socket is closed."""
        self.site.connections.discard(self)
        if self._transport is None:
            return
        self._transport = None
        current, self._current = self._current, None
        self._queue.clear()
        self._stop_reading()
        if current is not None:
            current.disconnected()

    def pause_writing(self) -> None:
        """Stop answering: the socket's buffer is full."""
        self.write_paused = True
        self._write_stall.start(self.site.now)

    def resume_writing(self) -> None:
        """Continue to answer: the client has read what was buffered."""
        self.write_paused = False
        current = self._current
        if current is None:
            self._advance()
        elif current.on_writable is not None:
            self.guard(current, current.on_writable)

    # Called by `BodyReceiver`.

    def body_buffer(self) -> memoryview:
        """Return where to receive the body."""
        reader = self._reader
        direct = reader.direct
        # The rest of a rejected body is still read, so that the client can read its answer; but not kept.
        return self.site.receive_buffer if direct is None else reader.direct_rest(direct)

    def body_received(self, size: int) -> None:
        """Count received bytes; complete the request with the last of them."""
        reader = self._reader
        if reader.direct is None:
            return
        if reader.direct_filled(size) and self._transport is not None:
            # First: the handler may answer at once, and this protocol must read the next request.
            self._transport.set_protocol(self)
            reader.direct_complete()

    # Called by the server.

    def drain(self) -> None:
        """Close after the current requests. An idle client may have just sent one: it gets until the next sweep."""
        self.ending = True

    def sweep(self, now: float) -> None:
        """Enforce the timeouts."""
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
                self._reject(
                    RequestRejected(408, f"the header did not arrive within {limits.header_seconds:g} seconds")
                )
        elif reader.phase == Phase.BODY:
            if waited > limits.body_idle_seconds and not self._paused_by:
                self._reject(
                    RequestRejected(408, f"the body made no progress for {limits.body_idle_seconds:g} seconds")
                )
        elif self._current is None and (self.ending or now - self._idle_since > limits.idle_seconds):
            self.close()

    def drop_body(self) -> None:
        """Answer 503 to the request that is being read, and close: too many bodies are unfinished."""
        self._reject(RequestRejected(503, TOO_MANY_UNFINISHED))

    def expire(self) -> None:
        """Answer 503 to a request without a response; cut a response that has started; close."""
        current = self._current
        if current is None or current is self._reader.exchange:
            if self._reader.phase != Phase.BETWEEN:
                self._reject(RequestRejected(503, "the server is shutting down"))
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
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    # Called by the reader.

    def request_begun(self, exchange: Http1Exchange) -> None:
        """Dispatch or queue a request whose head is complete and whose body is streamed."""
        if self._current is None and not self.write_paused and not self._queue:
            self._current = exchange
            self._dispatch(exchange)
        else:
            # The body must not pile up while earlier requests are answered.
            self._queue.append(exchange)
            self._queued_upload = exchange
            self.pause_reading(PauseReason.UPLOAD)

    def request_complete(self, exchange: Http1Exchange) -> None:
        """Dispatch or queue a complete request."""
        if self._current is None and not self.write_paused and not self._queue:
            self._current = exchange
            self._dispatch(exchange)
            return
        self._queue.append(exchange)
        self._queued_bytes += len(exchange.body)
        if self._queue_is_full:
            self.pause_reading(PauseReason.QUEUE)

    def hold(self, size: int) -> None:
        """Count `size` bytes of a body of which the rest has not arrived."""
        self.site.unfinished.count(self, size)

    @property
    def _queue_is_full(self) -> bool:
        limits = self.site.limits
        return len(self._queue) >= limits.pipelined_requests or self._queued_bytes > limits.pipelined_bytes

    def continue_expected(self, exchange: Http1Exchange) -> None:
        """Send 100 Continue for a request whose body is not streamed, now or after the requests before it."""
        self._continue_owed = exchange
        if self._current is None and not self._queue:
            self._send_continue()

    def stop_reading(self) -> None:
        """Read nothing more as HTTP, but answer the requests that have been read."""
        if self.open:
            self._stop_reading()
            self.pause_reading(PauseReason.END)

    # Called by exchanges.

    def guard(self, exchange: Http1Exchange, callback: Callable[..., object], *arguments: object) -> None:
        """Call a handler's callback; an exception fails the exchange, not the connection."""
        try:
            callback(*arguments)
        except Exception as error:
            exchange.fail(error)

    def closes_after(self, exchange: Http1Exchange) -> bool:
        """Return whether the connection closes after this response."""
        if not exchange.keep_alive:
            return True
        if self.ending and not self._queue and self._reader.phase == Phase.BETWEEN:
            exchange.keep_alive = False
            return True
        return False

    def write(self, data: Buffer) -> None:
        """Write bytes to the socket."""
        if self._transport is not None:
            self._transport.write(data)

    def write_many(self, buffers: list[Buffer]) -> None:
        """Write several buffers to the socket without joining them."""
        if self._transport is not None:
            self._transport.writelines(buffers)

    def response_started(self, exchange: Http1Exchange, status: int) -> None:
        """Keep the status of a streamed response for the access log."""
        self._status = status

    def finished(self, exchange: Http1Exchange, status: int, close: bool, data: Buffer = b"") -> None:
        """Write the last bytes of the current response, and go on with the next request."""
        transport = self._transport
        if data and transport is not None:
            transport.write(data)
        if exchange.on_over is not None:
            # Called once: an exchange does not finish twice, nor after a disconnect.
            exchange.on_over()
        if exchange is not self._current:
            return
        self._current = None
        site = self.site
        self._idle_since = site.now
        if site.access_log is not None:
            site.access_log(self.peer, exchange.head, status or self._status)
        if self._paused_by:
            self.resume_reading(PauseReason.HANDLER)
        if close:
            self.close()
        elif self._queue:
            self._advance()
        elif self._continue_owed is not None:
            self._send_continue()

    def pause_reading(self, reason: int) -> None:
        """Stop reading from the socket."""
        if not self._paused_by and self._transport is not None:
            self._transport.pause_reading()
        self._paused_by |= reason

    def resume_reading(self, reason: int) -> None:
        """Undo `pause_reading` for this reason."""
        if self._paused_by & reason:
            self._paused_by &= ~reason
            if not self._paused_by and self._transport is not None and not self._transport.is_closing():
                # The pause was ours: it does not count as the client's silence.
                self._reader.since = self.site.now
                self._transport.resume_reading()

    def detach(self) -> asyncio.Transport:
        """Give the transport to another protocol."""
        transport, self._transport = self._transport, None
        if transport is None:
            raise ConnectionResetError("the client has disconnected")
        self.site.connections.discard(self)
        self._current = None
        self._stop_reading()
        if self._paused_by:
            self._paused_by = 0
            transport.resume_reading()
        return transport

    def close(self) -> None:
        """Close after what was written; keep reading for a moment so that a TCP reset does not overtake the response."""
        transport = self._transport
        if transport is None or self._closing_at is not None:
            return
        self._queue.clear()
        self._stop_reading()
        self._write_stall.start(self.site.now)
        if transport.can_write_eof() and not self._at_eof:
            self._closing_at = self.site.now + LINGER_SECONDS
            if self._paused_by:
                self._paused_by = 0
                transport.resume_reading()
            transport.write_eof()
        else:
            # TLS closes both directions: an idle client has the linger time to answer, one that may still be reading a
            # response has the usual write timeout. The transport does not say what is still unsent.
            idle = self._current is None and self._idle_since < self.site.now
            self._closing_at = self.site.now + (LINGER_SECONDS if idle else self.site.limits.write_idle_seconds)
            transport.close()

    # Internal.

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
                if exchange.expects_continue and exchange.stage == Stage.WAITING and exchange is self._reader.exchange:
                    self.write(_CONTINUE)

    def _advance(self) -> None:
        # A handler that answers at once calls this again through `finished`: one loop, no recursion.
        if self._advancing:
            return
        self._advancing = True
        try:
            while self._current is None and self._queue and not self.write_paused:
                exchange = self._queue.popleft()
                self._current = exchange
                self._queued_bytes -= len(exchange.body)
                if self._paused_by:
                    if exchange is self._queued_upload:
                        self.resume_reading(PauseReason.UPLOAD)
                    if not self._queue_is_full:
                        self.resume_reading(PauseReason.QUEUE)
                self._dispatch(exchange)
        finally:
            self._advancing = False

    def _reject(self, rejection: RequestRejected) -> None:
        """Answer a request that cannot be read, and close; if earlier ones are unanswered, close after them."""
        if not self.open:
            return
        log.info("request rejected: %s", rejection.text, extra={"peer": self.peer, "status": rejection.status})
        unfinished = self._reader.exchange
        if unfinished is not None:
            # A streamed request may be with its handler by now, or queued.
            cut = unfinished.started
            unfinished.disconnected()
            if cut:
                self.abort()
                return
            if unfinished is self._current:
                self._current = None
            elif self._queue and self._queue[-1] is unfinished:
                self._queue.pop()
        if self._current is None and not self._queue:
            head = ResponseHead(rejection.status, [(CONTENT_TYPE, JSON), (b"connection", b"close")])
            body = orjson.dumps({"error": rejection.text})
            self.write(head.http1 + self.site.date_line + b"content-length: %d\r\n\r\n%b" % (len(body), body))
            if unfinished is not None and self.site.access_log is not None:
                self.site.access_log(self.peer, unfinished.head, rejection.status)
            self.close()
            return
        # Earlier requests still get their answers; the bad one is dropped with the connection.
        last = self._queue[-1] if self._queue else self._current
        if last is not None:
            last.keep_alive = False
        self.stop_reading()

    def _stop_reading(self) -> None:
        """Read no more requests; release the memory of a half-read one."""
        self.open = False
        self.last_size = -1
        self._reader.stop()

    def _send_continue(self) -> None:
        exchange, self._continue_owed = self._continue_owed, None
        # A client need not wait for it: the body may have arrived by now.
        if exchange is not None and exchange is self._reader.exchange:
            self.write(_CONTINUE)

    def sweep_unread(self, now: float) -> None:
        """Abort if the client has read nothing for too long."""
        transport = self._transport
        if transport is not None and self._write_stall.is_stalled(transport, now, self.site.limits.write_idle_seconds):
            log.info("client stopped reading", extra={"peer": self.peer})
            self.abort()


class BodyReceiver(asyncio.BufferedProtocol):
    """Receives a large body straight into its own memory, in place of the connection.

    A connection reads through `data_received`, which is cheaper for small requests. For a body longer than one read it
    installs this protocol: the kernel then writes the body to its final place, and nothing copies it.
    """

    def __init__(self, connection: Http1Connection) -> None:
        self._connection = connection

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory for the rest of the body, and nothing after it."""
        return self._connection.body_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Count received bytes."""
        self._connection.body_received(nbytes)

    def eof_received(self) -> bool:
        """Pass the half-close to the connection."""
        return self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass the end to the connection."""
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        """Pass the full socket buffer to the connection."""
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        """Pass the free socket buffer to the connection."""
        self._connection.resume_writing()
