# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 connections to backends, and the pool of each backend.

A connection carries one request at a time and reports the response to an `UpstreamHandler`. A response that arrives in one
piece with a head that was seen before takes the fast path in `UpstreamConnection.data_received`.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import TYPE_CHECKING, Protocol, cast

from headrace.fleet.router.responses import (
    CHUNKED,
    UNTIL_CLOSE,
    BadResponse,
    ChunkDecoder,
    UpstreamHead,
    UpstreamHeadParser,
    chunk_data_start,
)

if TYPE_CHECKING:
    from headrace.fleet.router.backend import Backend
    from headrace.fleet.router.settings import RouterSettings
    from headrace.net.http.heads import Buffer

log = logging.getLogger("headrace.router")


class ConnectionWaiter(Protocol):
    """Waits for a new connection."""

    def connected(self, connection: UpstreamConnection) -> bool:
        """Use the new connection. Return False if it is not needed any more."""

    def connection_failed(self, reason: str) -> None:
        """Handle that no connection could be made."""


class UpstreamHandler(Protocol):
    """Owns the request that a connection carries, and receives its response."""

    fast_path: bool
    """Whether a response may take the fast path: the request is sent completely and is not HEAD."""
    sending: bool
    """Whether the request body is incomplete: if the response ends first, the connection cannot be reused."""

    @property
    def is_head(self) -> bool:
        """Whether the request is HEAD: the response has no body, whatever its head says."""

    @property
    def upgrade(self) -> bool:
        """Whether 101 is a valid response."""

    def response_received(self, head: UpstreamHead, body: Buffer) -> None:
        """Take a whole response."""

    def response_started(self, head: UpstreamHead, length: int) -> None:
        """Take the head of a streamed response; `length` is -1 if unknown."""

    def response_data(self, data: Buffer) -> bool:
        """Take a piece of the body. Return False to stop reading until `resume_reading`."""

    def response_chunk(self, data: bytes, begin: int) -> bool:
        """Take one chunk as the backend framed it; its data starts at `begin`. Return False as in `response_data`."""

    def response_ended(self) -> None:
        """Take the end of a streamed response."""

    def protocol_switched(self, head: UpstreamHead, rest: bytes) -> None:
        """Take 101: the handler now owns the connection (`UpstreamConnection.detach`)."""

    def response_failed(self, reason: str, *, unanswered: bool = False, timed_out: bool = False) -> None:
        """Handle that no more of the response will come. `unanswered`: nothing of it had arrived."""

    def upstream_writable(self) -> None:
        """Send more: the backend reads again after `write_paused` was true."""


class CoarseClock:
    """The loop's time at the last tick: free to read, and accurate to a quarter of a second."""

    __slots__ = ("now",)

    def __init__(self, now: float = 0.0) -> None:
        self.now = now


class ConnectionPool:
    """The connections to one backend. Used from the loop's thread only."""

    def __init__(
        self, backend: Backend, settings: RouterSettings, head_parser: UpstreamHeadParser, clock: CoarseClock
    ) -> None:
        self.backend = backend
        self.head_parser = head_parser
        self.clock = clock
        self.timeouts = settings.timeouts
        self.max_head_bytes = settings.answer_head_bytes
        self.whole_bytes = settings.whole_bytes
        self.idle: list[UpstreamConnection] = []
        """The most recently used last. It is taken first, so that surplus connections age and are closed."""
        self.all: set[UpstreamConnection] = set()
        self._max_idle = settings.idle_connections
        self._connecting: set[asyncio.Task[None]] = set()
        self._tls = backend_tls(settings) if backend.address.scheme == "https" else None
        host = backend.address.url.partition("://")[2].encode()
        self.head_end = b"\r\n\r\n" if settings.keep_host else b"\r\nhost: %b\r\n\r\n" % host
        """The end of a request head."""
        self.head_end_with_host = b"\r\nhost: %b\r\n\r\n" % host
        """The end of a request head for a client that named no host."""

    def send(self, handler: UpstreamHandler, text: bytes) -> UpstreamConnection | None:
        """Send a request, or its head, on an idle connection. Return None if there is none."""
        idle = self.idle
        while idle:
            connection = idle.pop()
            transport = connection.transport
            if transport is not None and not transport.is_closing():
                connection.handler = handler
                connection.last_activity = self.clock.now
                transport.write(text)
                return connection
        return None

    def release(self, connection: UpstreamConnection) -> None:
        """Make a connection available for the next request."""
        connection.last_activity = self.clock.now
        self.idle.append(connection)

    def connect(self, waiter: ConnectionWaiter) -> None:
        """Open a connection; the loop calls the waiter later."""
        task = asyncio.get_running_loop().create_task(self._connect(waiter))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def remove(self, connection: UpstreamConnection) -> None:
        """Remove a connection that is closed or detached."""
        self.all.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)

    def sweep(self, now: float) -> None:
        """Enforce the timeouts of all connections and the limit on idle ones."""
        for connection in tuple(self.all):
            connection.sweep(now)
        while len(self.idle) > self._max_idle:
            self.idle.pop(0).close()

    def close_idle(self) -> None:
        """Close idle connections of a backend that is out: they will be stale when it returns."""
        idle, self.idle = self.idle, []
        for connection in idle:
            connection.close()

    async def close(self) -> None:
        """Close all connections."""
        for task in tuple(self._connecting):
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        for connection in tuple(self.all):
            connection.abort()

    async def _connect(self, waiter: ConnectionWaiter) -> None:
        address = self.backend.address
        seconds = self.timeouts.connect_seconds
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(seconds):
                _, connection = await loop.create_connection(
                    lambda: UpstreamConnection(self),
                    address.host,
                    address.port,
                    ssl=self._tls,
                    server_hostname=address.host if self._tls is not None else None,
                )
        except TimeoutError:
            waiter.connection_failed(f"did not accept a connection within {seconds:g} seconds")
        except OSError as error:
            log.debug("Cannot connect to %s: %s", self.backend.name, error)
            waiter.connection_failed("could not be reached")
        else:
            if not waiter.connected(connection):
                self.release(connection)


class ReadState:
    """What a connection reads next. Plain numbers, for speed."""

    HEAD = 0
    WHOLE_BODY = 1
    """A body of known length that is passed on in one piece."""
    LENGTH = 2
    CHUNKED = 3
    UNTIL_CLOSE = 4


class UpstreamConnection(asyncio.Protocol):
    """One connection to a backend: sends a request, parses its response, and returns to its pool."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._known_heads = pool.head_parser.known
        self._clock = pool.clock
        self.transport: asyncio.Transport | None = None
        """None before the connection is made and after it is lost."""
        self.handler: UpstreamHandler | None = None
        self.reused = False
        """Whether it carried a request before: the backend may have closed it without our knowledge."""
        self.last_activity = 0.0
        """Time of the last read or write, by the coarse clock."""
        self.write_paused = False
        self._read_paused = False
        self._state = ReadState.HEAD
        self._partial_head = b""
        self._last_head: UpstreamHead
        self._last_size = -1
        """Bytes of the last response with its head; -1 unless the next byte starts another response."""
        self._head: UpstreamHead | None = None
        self._pieces: list[bytes] = []
        self._left = 0
        self._chunks: ChunkDecoder | None = None
        self._between_chunks = False
        """Whether the next byte starts a chunk of a streamed response."""

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Add the connection to its pool."""
        self.transport = cast("asyncio.Transport", transport)
        self.last_activity = self._clock.now
        self._pool.all.add(self)

    def data_received(self, data: bytes) -> None:
        """Parse bytes of a response."""
        handler = self.handler
        if handler is None:
            # No request is open: these bytes must not become the response to the next one.
            self.abort()
            return
        if self._last_size >= 0 and handler.fast_path:
            head: UpstreamHead | None = self._last_head
            body = data.removeprefix(self._last_head.text) if len(data) == self._last_size else data
            if body is data:
                # Not the last head again. Within one second a backend sends only a few different ones.
                end = data.find(b"\r\n\r\n") + 4
                head = self._known_heads.get(data[:end])
                if head is not None and head.size == len(data):
                    self._last_head, self._last_size = head, head.size
                    body = data[end:]
            if head is not None and body is not data:
                self.handler = None
                self.last_activity = self._clock.now
                self._pool.idle.append(self)
                handler.response_received(head, body)
                return
        if self._between_chunks:
            begin = chunk_data_start(data)
            if begin:
                self.last_activity = self._clock.now
                if not handler.response_chunk(data, begin):
                    self._pause(handler)
                return
        self._last_size = -1
        if self._state != ReadState.HEAD:
            # Not for a head: one that arrives byte by byte has no more time than any other.
            self.last_activity = self._clock.now
        try:
            self._read(data, handler)
        except BadResponse as bad:
            self._fail(f"sent a response that cannot be passed on: {bad}")

    def eof_received(self) -> None:
        """Let the transport close."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave the pool, and end or fail the open response."""
        self.transport = None
        self._pool.remove(self)
        handler, self.handler = self.handler, None
        chunks, self._chunks = self._chunks, None
        if chunks is not None:
            chunks.close()
        if handler is None:
            return
        if self._state == ReadState.UNTIL_CLOSE and exc is None:
            handler.response_ended()
        elif self._state == ReadState.HEAD and not self._partial_head:
            handler.response_failed("closed the connection before it answered", unanswered=True)
        else:
            handler.response_failed("closed the connection in the middle of its response")

    def pause_writing(self) -> None:
        """Note that the backend reads more slowly than the client sends."""
        self.write_paused = True

    def resume_writing(self) -> None:
        """Tell the handler that the backend reads again."""
        self.write_paused = False
        if self.handler is not None:
            self.handler.upstream_writable()

    # Called by handlers.

    def start_request(self, handler: UpstreamHandler, text: Buffer) -> None:
        """Send a request, or its head, on a new connection; `ConnectionPool.send` does it for idle ones."""
        self.handler = handler
        self.last_activity = self._clock.now
        if self.transport is not None:
            self.transport.write(text)

    def write(self, data: Buffer) -> None:
        """Send more of the request body."""
        self.last_activity = self._clock.now
        if self.transport is not None:
            self.transport.write(data)

    def resume_reading(self) -> None:
        """Read again after `response_data` returned False."""
        if self._read_paused:
            self._read_paused = False
            self.last_activity = self._clock.now
            if self.transport is not None and not self.transport.is_closing():
                self.transport.resume_reading()

    def detach(self) -> asyncio.Transport:
        """Leave the pool and return the transport, for another protocol."""
        transport, self.transport = self.transport, None
        self.handler = None
        self._pool.remove(self)
        if transport is None:
            raise ConnectionResetError("the backend closed the connection")
        return transport

    def cancel(self) -> None:
        """Close the connection because the response is no longer needed."""
        self.handler = None
        self.abort()

    # Called by the pool.

    def sweep(self, now: float) -> None:
        """Enforce the timeouts."""
        timeouts = self._pool.timeouts
        waited = now - self.last_activity
        if self.handler is None:
            if waited > timeouts.keep_alive_seconds:
                self.close()
        elif self._state == ReadState.HEAD:
            if waited > timeouts.response_seconds:
                self._fail(f"did not answer within {timeouts.response_seconds:g} seconds", timed_out=True)
        elif waited > timeouts.idle_seconds and not self._read_paused:
            self._fail(f"sent nothing for {timeouts.idle_seconds:g} seconds in its response", timed_out=True)

    def close(self) -> None:
        """Close after pending writes."""
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """Close at once."""
        if self.transport is not None:
            self.transport.abort()

    # Private.

    def _fail(self, reason: str, *, timed_out: bool = False) -> None:
        handler, self.handler = self.handler, None
        self.abort()
        if handler is not None:
            handler.response_failed(reason, timed_out=timed_out)

    def _read(self, data: bytes, handler: UpstreamHandler) -> None:
        state = self._state
        if state == ReadState.HEAD:
            self._read_head(self._partial_head + data if self._partial_head else data, handler)
        elif state == ReadState.WHOLE_BODY:
            self._read_whole_body(data, handler)
        elif state == ReadState.LENGTH:
            self._read_length(data, handler)
        elif state == ReadState.CHUNKED:
            self._read_chunks(data, handler)
        else:
            self._pass_on(data, handler)

    def _read_head(self, data: bytes, handler: UpstreamHandler) -> None:
        while True:
            limit = self._pool.max_head_bytes
            end = data.find(b"\r\n\r\n", 0, limit) + 4
            if end < 4:
                if len(data) >= limit:
                    raise BadResponse(f"its head is over {limit} bytes")
                self._partial_head = data
                return
            head = self._pool.head_parser.parse(data[:end])
            data = data[end:]
            if head.status >= 200:
                break
            if head.status == 101:
                if not handler.upgrade:
                    raise BadResponse("it switched protocols without being asked")
                self._partial_head = b""
                handler.protocol_switched(head, data)
                return
            # An interim response. The server side has sent 100 Continue itself; clients need no other.
            self._partial_head = b""
            if not data:
                return
        self._partial_head = b""
        self._head = head
        self.last_activity = self._clock.now
        length = 0 if handler.is_head else head.length
        if len(data) == length:
            self._finish(reuse=True)
            handler.response_received(head, data)
        elif length >= 0:
            if len(data) < length and length > self._pool.whole_bytes:
                self._state = ReadState.LENGTH
                self._left = length
                handler.response_started(head, length)
                self._read_length(data, handler)
            else:
                self._state = ReadState.WHOLE_BODY
                self._left = length
                self._read_whole_body(data, handler)
        elif length == CHUNKED:
            self._state = ReadState.CHUNKED
            self._chunks = ChunkDecoder(self._pieces.append)
            self._read_chunks(data, handler)
        elif length == UNTIL_CLOSE:
            self._state = ReadState.UNTIL_CLOSE
            handler.response_started(head, -1)
            self._pass_on(data, handler)

    def _read_whole_body(self, data: bytes, handler: UpstreamHandler) -> None:
        excess = len(data) > self._left
        if excess:
            data = data[: self._left]
        self._pieces.append(data)
        self._left -= len(data)
        if self._left:
            return
        body = self._take_pieces()
        head = self._head
        self._finish(reuse=not excess)
        if head is not None:
            handler.response_received(head, body)

    def _read_length(self, data: bytes, handler: UpstreamHandler) -> None:
        excess = len(data) > self._left
        if excess:
            data = data[: self._left]
        self._left -= len(data)
        self._pass_on(data, handler)
        if not self._left:
            self._finish(reuse=not excess)
            handler.response_ended()

    def _read_chunks(self, data: bytes, handler: UpstreamHandler) -> None:
        chunks, head = self._chunks, self._head
        if chunks is None or head is None:
            return
        started = self._left < 0
        chunks.feed(data)
        if chunks.done and not started:
            # The whole body came with the head: its length is known after all.
            body = self._take_pieces()
            self._finish(reuse=not chunks.excess)
            handler.response_received(head, body)
            return
        if not started:
            self._left = -1
            handler.response_started(head, -1)
        if self._pieces:
            self._pass_on(self._take_pieces(), handler)
        self._between_chunks = chunks.is_between(data)
        if chunks.done:
            self._finish(reuse=not chunks.excess)
            handler.response_ended()

    def _take_pieces(self) -> bytes:
        pieces = self._pieces
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        return body

    def _pass_on(self, data: bytes, handler: UpstreamHandler) -> None:
        if data and not handler.response_data(data):
            self._pause(handler)

    def _pause(self, handler: UpstreamHandler) -> None:
        if self.handler is handler and not self._read_paused:
            self._read_paused = True
            if self.transport is not None:
                self.transport.pause_reading()

    def _finish(self, *, reuse: bool) -> None:
        """End the response; return to the pool if the connection can carry another request."""
        handler, self.handler = self.handler, None
        head, self._head = self._head, None
        chunks, self._chunks = self._chunks, None
        if chunks is not None:
            chunks.close()
        self._state = ReadState.HEAD
        self._between_chunks = False
        self._left = 0
        if handler is None or head is None:
            return
        if reuse and head.keep_alive and not handler.sending:
            self.reused = True
            self._last_head, self._last_size = head, head.size
            self.resume_reading()
            self._pool.release(self)
        else:
            self.abort()


def backend_tls(settings: RouterSettings) -> ssl.SSLContext:
    """Return the TLS context for https backends."""
    context = ssl.create_default_context(cafile=settings.ca_file or None)
    context.set_alpn_protocols(["http/1.1"])
    return context
