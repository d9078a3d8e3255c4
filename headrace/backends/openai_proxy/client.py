# SPDX-License-Identifier: Apache-2.0
"""An asyncio HTTP/1.1 client for one engine: a connection pool, one request per connection at a time, streamed responses.

Used by `instance` for requests and by `engine` for health checks, in the loop's thread. A `ResponseHandler` gets one
response; `Call.cancel` closes the connection, so that the engine stops generating. `EventReader` parses Server-Sent Events.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Mapping
from typing import Protocol, cast

import httptools

from headrace.backends.openai_proxy.settings import Origin
from headrace.core.errors import Unavailable

log = logging.getLogger("headrace.backends")

CONNECT_SECONDS = 10.0
HEAD_BYTES = 65_536
_MAX_IDLE = 64
_FIRST_FINAL_STATUS = 200
"""Lower statuses are interim responses."""

Headers = Mapping[bytes, bytes]


class ResponseHandler(Protocol):
    """Receives one response. `completed` or `failed` is called last, once."""

    def head_received(self, status: int, headers: Headers) -> None:
        """Take the status and the headers; names are in lower case."""

    def body_received(self, data: bytes) -> None:
        """Take a part of the body."""

    def completed(self) -> None:
        """Handle the end of the response."""

    def failed(self, reason: str) -> None:
        """Handle a missing or incomplete response. The reason continues "the engine ..."."""


class Call:
    """One request in flight."""

    __slots__ = ("connection", "handler", "last_activity", "text")

    def __init__(self, text: bytes, handler: ResponseHandler, now: float) -> None:
        self.text = text
        self.handler: ResponseHandler | None = handler
        """None once the response has ended, or the call was cancelled."""
        self.connection: Connection | None = None
        self.last_activity = now

    def cancel(self) -> None:
        """Close the connection, so that the engine stops generating. The handler is not called any more."""
        self.handler = None
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.abort()

    def fail(self, reason: str) -> None:
        """Notify the handler, unless the call has ended."""
        handler, self.handler = self.handler, None
        self.connection = None
        if handler is not None:
            handler.failed(reason)


class Connection(asyncio.Protocol):
    """One connection. The parser calls the `on_` methods while it is fed; handlers are called afterwards."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self.call: Call | None = None
        self._reused = False
        self._bytes = 0
        self._headers: dict[bytes, bytes] = {}
        self._status = 0
        self._head_complete = False
        self._head_delivered = False
        self._body: list[bytes] = []
        self._complete = False
        self._excess = False
        """Whether data follows the response."""
        self._keep_alive = False

    @property
    def usable(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, call: Call) -> None:
        """Send a request."""
        self.call = call
        call.connection = self
        self._bytes = 0
        self._head_complete = self._head_delivered = False
        if self._transport is not None:
            self._transport.write(call.text)

    def abort(self) -> None:
        """Close at once."""
        self.call = None
        if self._transport is not None:
            self._transport.abort()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Add the connection to the pool."""
        self._transport = cast("asyncio.Transport", transport)
        self._pool.all.add(self)

    def data_received(self, data: bytes) -> None:
        """Parse a part of a response and pass it to the handler."""
        call = self.call
        if call is None:
            # Unsolicited data must not be taken for the response to the next request.
            self.abort()
            return
        call.last_activity = self._pool.loop.time()
        call.text = b""  # it is not sent again
        self._bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail("sent an invalid HTTP response")
            return
        if not self._head_complete:
            if self._bytes > HEAD_BYTES:
                self._fail(f"sent response headers of more than {HEAD_BYTES} bytes")
            return
        self._deliver(call)

    def connection_lost(self, exc: Exception | None) -> None:
        """End, repeat or fail the request on a closed connection."""
        self._transport = None
        self._pool.lost(self)
        call, self.call = self.call, None
        if call is None:
            return
        if self._head_complete and self._ends_with_connection() and exc is None:
            self._end(call)
        elif self._reused and not self._bytes:
            # The engine closed the idle connection before it read the request: send it again.
            self._pool.connect(call)
        else:
            call.fail(
                "closed the connection " + ("in the middle of its response" if self._bytes else "without a response")
            )

    # Called by the parser.

    def on_message_begin(self) -> None:
        """Start a response."""
        if self._complete:
            self._excess = True
        else:
            self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header."""
        if not self._excess:
            self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """End the head of a final or an interim response."""
        if not self._excess:
            self._status = self._parser.get_status_code()
            self._head_complete = self._status >= _FIRST_FINAL_STATUS

    def on_body(self, body: bytes) -> None:
        """Add a part of the body."""
        if not self._excess:
            self._body.append(body)

    def on_message_complete(self) -> None:
        """End a response; after 100 Continue the final one follows."""
        if not self._excess:
            self._complete = self._head_complete
            self._keep_alive = self._parser.should_keep_alive()

    # Internal.

    def _deliver(self, call: Call) -> None:
        handler = call.handler
        body, self._body = self._body, []
        if handler is not None and not self._head_delivered:
            self._head_delivered = True
            handler.head_received(self._status, self._headers)
        if body and call.handler is not None and handler is not None:
            handler.body_received(body[0] if len(body) == 1 else b"".join(body))
        if self._complete and self.call is call:
            self.call = None
            self._complete = False
            if self._keep_alive and not self._excess:
                self._reused = True
                self._pool.release(self)
            else:
                self.abort()
            self._end(call)

    def _end(self, call: Call) -> None:
        handler, call.handler = call.handler, None
        call.connection = None
        if handler is not None:
            handler.completed()

    def _fail(self, reason: str) -> None:
        call = self.call
        self.abort()
        if call is not None:
            call.fail(reason)

    def _ends_with_connection(self) -> bool:
        return b"content-length" not in self._headers and b"transfer-encoding" not in self._headers


class ConnectionPool:
    """The connections to one engine."""

    def __init__(self, loop: asyncio.AbstractEventLoop, origin: Origin, api_key: str = "") -> None:
        self.loop = loop
        self.origin = origin
        self.all: set[Connection] = set()
        self._idle: list[Connection] = []
        self._connecting: set[asyncio.Task[None]] = set()
        self._tls = origin.context()
        key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._headers = f"host: {origin.shown}\r\nuser-agent: headrace\r\naccept-encoding: identity\r\n{key}".encode()

    def post(self, path: str, body: bytes, handler: ResponseHandler) -> Call:
        """Send a POST request with a JSON body."""
        head = b"POST %b HTTP/1.1\r\n%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        return self._start(head % (self._path(path), self._headers, len(body)) + body, handler)

    def get(self, path: str, handler: ResponseHandler) -> Call:
        """Send a GET request."""
        return self._start(b"GET %b HTTP/1.1\r\n%b\r\n" % (self._path(path), self._headers), handler)

    def connect(self, call: Call) -> None:
        """Open a connection for a request."""
        task = self.loop.create_task(self._connect(call))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def release(self, connection: Connection) -> None:
        """Keep an idle connection for the next request."""
        self._idle.append(connection)
        if len(self._idle) > _MAX_IDLE:
            self._idle.pop(0).abort()

    def lost(self, connection: Connection) -> None:
        """Remove a closed connection."""
        self.all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Close all connections; handlers are not called any more."""
        for task in tuple(self._connecting):
            task.cancel()
        for connection in tuple(self.all):
            connection.abort()

    def _path(self, path: str) -> bytes:
        return (self.origin.prefix + path).encode()

    def _start(self, text: bytes, handler: ResponseHandler) -> Call:
        call = Call(text, handler, self.loop.time())
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                connection.send(call)
                return call
        self.connect(call)
        return call

    async def _connect(self, call: Call) -> None:
        origin = self.origin
        name = origin.host if self._tls is not None else None
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await self.loop.create_connection(
                    lambda: Connection(self), origin.host, origin.port, ssl=self._tls, server_hostname=name
                )
        except TimeoutError:
            call.fail(f"did not accept a connection within {CONNECT_SECONDS:g} seconds")
        except ssl.SSLCertVerificationError as error:
            log.warning("The certificate of the engine at %s is not trusted: %s", origin.shown, error.verify_message)
            call.fail("has a certificate that is not trusted here")
        except OSError as error:
            log.debug("Cannot connect to the engine at %s: %s", origin.shown, error)
            call.fail("cannot be reached")
        else:
            if call.handler is not None:
                call.last_activity = self.loop.time()
                connection.send(call)
            else:
                self.release(connection)


class _BodyCollector:
    """A response handler that collects a small body."""

    def __init__(self, future: asyncio.Future[tuple[int, bytes]], max_bytes: int) -> None:
        self._future = future
        self._max_bytes = max_bytes
        self._status = 0
        self._body = b""

    def head_received(self, status: int, headers: Headers) -> None:
        self._status = status

    def body_received(self, data: bytes) -> None:
        if len(self._body) <= self._max_bytes:
            self._body += data

    def completed(self) -> None:
        if not self._future.done():
            self._future.set_result((self._status, self._body[: self._max_bytes]))

    def failed(self, reason: str) -> None:
        if not self._future.done():
            self._future.set_exception(ConnectionError(reason))


async def fetch(pool: ConnectionPool, path: str, seconds: float, max_bytes: int = 1 << 20) -> tuple[int, bytes]:
    """Return the status and the first bytes of a page.

    Raises `ConnectionError`, whose text continues "the engine ...".
    """
    future: asyncio.Future[tuple[int, bytes]] = pool.loop.create_future()
    call = pool.get(path, _BodyCollector(future, max_bytes))
    try:
        async with asyncio.timeout(seconds):
            return await future
    except TimeoutError:
        raise ConnectionError(f"did not answer {path} within {seconds:g} seconds") from None
    finally:
        call.cancel()


class EventReader:
    """Parses Server-Sent Events from data of any size. Works on bytes, so that a character may be split between data."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._partial: list[bytes] = []
        """Data of the incomplete line."""
        self._size = 0
        """Bytes of the incomplete line and of the incomplete event."""
        self._after_return = False
        """Whether the last byte was a carriage return: a line feed then belongs to it."""
        self._data: list[bytes] = []
        self._name = b""

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """Return the events that are complete: name (b"" for most) and data."""
        if self._after_return and data.startswith(b"\n"):
            data = data[1:]
        if data:
            self._after_return = data.endswith(b"\r")
        self._size += len(data)
        if b"\n" not in data and b"\r" not in data:
            self._partial.append(data)
            self._check_size()
            return []
        self._partial.append(data)
        text = b"".join(self._partial)
        lines = text.splitlines()
        self._partial = [] if text.endswith((b"\n", b"\r")) else [lines.pop()]
        events: list[tuple[bytes, bytes]] = []
        for line in lines:
            if line:
                self._parse_line(line)
            elif self._data:
                events.append((self._name, self._take_data()))
            else:
                self._name = b""
        self._size = sum(map(len, self._partial)) + sum(map(len, self._data))
        self._check_size()
        return events

    def finish(self) -> list[tuple[bytes, bytes]]:
        """Return the last event at the end of the stream, if only its empty line is missing."""
        if self._partial:
            self._parse_line(b"".join(self._partial))
            self._partial = []
        return [(self._name, self._take_data())] if self._data else []

    def _parse_line(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._name = value
        elif field == b"error":
            # Older llama.cpp sends errors in a field of its own.
            self._name = b"error"
            self._data.append(value)

    def _take_data(self) -> bytes:
        data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
        self._data = []
        self._name = b""
        return data

    def _check_size(self) -> None:
        if self._size > self._max_bytes:
            raise Unavailable(f"the engine sent an event of more than {self._max_bytes} bytes")
