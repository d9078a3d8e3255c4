# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 to one engine: connections that are kept, a request on each at a time, answers told piece by piece.

Used by `instance` for requests and by `engine` for health, in the loop's thread. A `Receiver` hears of one answer; a `Call`
is the handle to give it up, which closes the connection, so that the engine stops. Knows nothing of what is said.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Mapping
from typing import Protocol, cast

import httptools

from headrace.backends.openai_proxy.origin import Origin

log = logging.getLogger("headrace.backends")

CONNECT_SECONDS = 10.0
HEAD_BYTES = 65_536
_MOST_IDLE = 64
_FINAL = 200
"""Statuses below come before the answer itself."""

Fields = Mapping[bytes, bytes]


class Receiver(Protocol):
    """Who waits for an answer. `ended` or `failed` comes last, once."""

    def begun(self, status: int, fields: Fields) -> None:
        """The head is here; names in lower case."""

    def piece(self, data: bytes) -> None:
        """More of the body."""

    def ended(self) -> None:
        """That was all."""

    def failed(self, why: str) -> None:
        """There is no (more) answer. The text continues "the engine ..."."""


class Call:
    """One request on its way."""

    __slots__ = ("connection", "receiver", "since", "text")

    def __init__(self, text: bytes, receiver: Receiver, now: float) -> None:
        self.text = text
        self.receiver: Receiver | None = receiver
        """None once the last was said, or nobody wants to hear it."""
        self.connection: Connection | None = None
        self.since = now
        """When something last happened."""

    def cancel(self) -> None:
        """Nobody waits any more: close the connection, so that the engine stops."""
        self.receiver = None
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.abort()

    def fail(self, why: str) -> None:
        """Tell the receiver, if it is still there."""
        receiver, self.receiver = self.receiver, None
        self.connection = None
        if receiver is not None:
            receiver.failed(why)


class Connection(asyncio.Protocol):
    """One connection. Its parser calls the `on_` methods while it is fed; receivers are told afterwards."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self.call: Call | None = None
        self._reused = False
        self._bytes = 0
        self._fields: dict[bytes, bytes] = {}
        self._status = 0
        self._headed = False
        self._told = False
        self._pieces: list[bytes] = []
        self._complete = False
        self._excess = False
        """Whether more came than was asked for."""
        self._keeps = False

    @property
    def usable(self) -> bool:
        """Whether another request may be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, call: Call) -> None:
        """Send a request."""
        self.call = call
        call.connection = self
        self._bytes = 0
        self._headed = self._told = False
        if self._transport is not None:
            self._transport.write(call.text)

    def abort(self) -> None:
        """Close at once."""
        self.call = None
        if self._transport is not None:
            self._transport.abort()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The engine is there."""
        self._transport = cast("asyncio.Transport", transport)
        self._pool.all.add(self)

    def data_received(self, data: bytes) -> None:
        """Bytes of an answer."""
        call = self.call
        if call is None:
            # Nobody asked. It must not be taken for the answer to the next request.
            self.abort()
            return
        call.since = self._pool.loop.time()
        call.text = b""  # it will not be sent again
        self._bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail("sent what is no HTTP answer")
            return
        if not self._headed:
            if self._bytes > HEAD_BYTES:
                self._fail(f"sent the head of an answer of more than {HEAD_BYTES} bytes")
            return
        self._tell(call)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._transport = None
        self._pool.lost(self)
        call, self.call = self.call, None
        if call is None:
            return
        if self._headed and self._ends_with_connection() and exc is None:
            self._end(call)
        elif self._reused and not self._bytes:
            # It was closed while nobody used it, and the request came too late: nobody has read it.
            self._pool.connect(call)
        else:
            call.fail(
                "closed the connection " + ("in the middle of its answer" if self._bytes else "without an answer")
            )

    # Called by the parser.

    def on_message_begin(self) -> None:
        """An answer begins."""
        if self._complete:
            self._excess = True
        else:
            self._fields = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field."""
        if not self._excess:
            self._fields[name.lower()] = value

    def on_headers_complete(self) -> None:
        """The head is whole."""
        if not self._excess:
            self._status = self._parser.get_status_code()
            self._headed = self._status >= _FINAL

    def on_body(self, body: bytes) -> None:
        """A piece of the body, out of its chunk."""
        if not self._excess:
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        """The answer is whole; or one with 100 Continue, after which the real one comes."""
        if not self._excess:
            self._complete = self._headed
            self._keeps = self._parser.should_keep_alive()

    # Inside.

    def _tell(self, call: Call) -> None:
        receiver = call.receiver
        pieces, self._pieces = self._pieces, []
        if receiver is not None and not self._told:
            self._told = True
            receiver.begun(self._status, self._fields)
        if pieces and call.receiver is not None and receiver is not None:
            receiver.piece(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        if self._complete and self.call is call:
            self.call = None
            self._complete = False
            if self._keeps and not self._excess:
                self._reused = True
                self._pool.give_back(self)
            else:
                self.abort()
            self._end(call)

    def _end(self, call: Call) -> None:
        receiver, call.receiver = call.receiver, None
        call.connection = None
        if receiver is not None:
            receiver.ended()

    def _fail(self, why: str) -> None:
        call = self.call
        self.abort()
        if call is not None:
            call.fail(why)

    def _ends_with_connection(self) -> bool:
        return b"content-length" not in self._fields and b"transfer-encoding" not in self._fields


class Pool:
    """The connections to one engine."""

    def __init__(self, loop: asyncio.AbstractEventLoop, origin: Origin, api_key: str = "") -> None:
        self.loop = loop
        self.origin = origin
        self.all: set[Connection] = set()
        self._idle: list[Connection] = []
        self._connecting: set[asyncio.Task[None]] = set()
        self._tls = origin.context()
        key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._fields = f"host: {origin.shown}\r\nuser-agent: headrace\r\naccept-encoding: identity\r\n{key}".encode()

    def post(self, path: str, body: bytes, receiver: Receiver) -> Call:
        """Send JSON."""
        head = b"POST %b HTTP/1.1\r\n%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        return self._begin(head % (self._path(path), self._fields, len(body)) + body, receiver)

    def get(self, path: str, receiver: Receiver) -> Call:
        """Ask for a page."""
        return self._begin(b"GET %b HTTP/1.1\r\n%b\r\n" % (self._path(path), self._fields), receiver)

    def connect(self, call: Call) -> None:
        """Make a connection for a request."""
        task = self.loop.create_task(self._connect(call))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def give_back(self, connection: Connection) -> None:
        """A connection has done its work."""
        self._idle.append(connection)
        if len(self._idle) > _MOST_IDLE:
            self._idle.pop(0).abort()

    def lost(self, connection: Connection) -> None:
        """A connection is gone."""
        self.all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Close everything; who still waits for an answer is not told."""
        for task in tuple(self._connecting):
            task.cancel()
        for connection in tuple(self.all):
            connection.abort()

    def _path(self, path: str) -> bytes:
        return (self.origin.prefix + path).encode()

    def _begin(self, text: bytes, receiver: Receiver) -> Call:
        call = Call(text, receiver, self.loop.time())
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
            call.fail(f"does not take a connection within {CONNECT_SECONDS:g} seconds")
        except ssl.SSLCertVerificationError as error:
            log.warning("the certificate of the engine at %s is not trusted: %s", origin.shown, error.verify_message)
            call.fail("has a certificate that is not trusted here")
        except OSError as error:
            log.debug("cannot connect to the engine at %s: %s", origin.shown, error)
            call.fail("cannot be reached")
        else:
            if call.receiver is not None:
                call.since = self.loop.time()
                connection.send(call)
            else:
                self.give_back(connection)


class _Whole:
    """A receiver that gathers a small answer."""

    def __init__(self, future: asyncio.Future[tuple[int, bytes]], most_bytes: int) -> None:
        self._future = future
        self._most = most_bytes
        self._status = 0
        self._body = b""

    def begun(self, status: int, fields: Fields) -> None:
        self._status = status

    def piece(self, data: bytes) -> None:
        if len(self._body) <= self._most:
            self._body += data

    def ended(self) -> None:
        if not self._future.done():
            self._future.set_result((self._status, self._body[: self._most]))

    def failed(self, why: str) -> None:
        if not self._future.done():
            self._future.set_exception(ConnectionError(why))


async def fetch(pool: Pool, path: str, seconds: float, most_bytes: int = 1 << 20) -> tuple[int, bytes]:
    """A page's status and its first bytes. Raises `ConnectionError`, whose text continues "the engine ..."."""
    future: asyncio.Future[tuple[int, bytes]] = pool.loop.create_future()
    call = pool.get(path, _Whole(future, most_bytes))
    try:
        async with asyncio.timeout(seconds):
            return await future
    except TimeoutError:
        raise ConnectionError(f"does not answer {path} within {seconds:g} seconds") from None
    finally:
        call.cancel()
