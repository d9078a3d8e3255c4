# SPDX-License-Identifier: Apache-2.0
"""Connections of the load generator, each with one request in flight, over HTTP/1.1 or gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable
from typing import Any, Protocol, cast

import httptools
import orjson

from headrace.client.grpc import channel_credentials, import_grpc, open_channel
from headrace.client.sockets import Address
from headrace.client.transport import Options

Done = Callable[[str, str], None]
"""Called once for each request: the kind of error and its text, or "" and "" for success."""

TIMED_OUT = "timeout"
NO_CONNECTION = "no connection"
LOST = "connection lost"
NEVER_SENT = "never sent"


class Connection(Protocol):
    """A connection, or a share of one, with one request at a time. It reconnects when needed."""

    def send(self, done: Done) -> None:
        """Send the request. `done` is called later, never during this call."""

    def expire(self, before: float) -> None:
        """Fail a request that was sent before this time of `time.perf_counter`."""

    def close(self) -> None:
        """Drop the request in flight."""


class Target(Protocol):
    """A server, and the one request that is sent to it."""

    def new_connection(self) -> Connection:
        """Return another connection."""

    async def close(self) -> None:
        """Close all connections."""


_RETRY_SECONDS = 0.05
"""Wait after a failed connection attempt."""
_CONNECT_SECONDS = 10.0
_TEXT_BYTES = 4096
_LOST_TEXT = "the connection ended before the answer came"


class HttpTarget:
    """A target over HTTP/1.1. `message` is a complete request."""

    def __init__(self, address: Address, message: bytes, tls: ssl.SSLContext | None = None) -> None:
        self.address = address
        self.message = message
        self.tls = tls
        self._connections: list[HttpConnection] = []

    def new_connection(self) -> HttpConnection:
        """Return another connection."""
        self._connections.append(HttpConnection(self))
        return self._connections[-1]

    async def close(self) -> None:
        """Close all connections."""
        for connection in self._connections:
            connection.close()
        # Transports notice an abort in the next turn of the event loop.
        await asyncio.sleep(0)


class HttpConnection:
    """A connection over HTTP/1.1."""

    def __init__(self, target: HttpTarget) -> None:
        self._target = target
        self._loop = asyncio.get_running_loop()
        self._protocol: _HttpProtocol | None = None
        self._opening: asyncio.Task[None] | None = None
        self._done: Done | None = None
        self._sent = 0.0

    def send(self, done: Done) -> None:
        """Send the request."""
        self._done = done
        self._sent = time.perf_counter()
        if self._protocol is not None:
            self._protocol.transport.write(self._target.message)
        else:
            self._opening = self._loop.create_task(self._open())

    def expire(self, before: float) -> None:
        """Fail a request that takes too long."""
        if self._done is not None and self._sent < before:
            self._drop()
            self.finish(TIMED_OUT, "no answer came in time")

    def close(self) -> None:
        """Close the connection."""
        self._done = None
        self._drop()

    def finish(self, kind: str, text: str) -> None:
        """Report the end of the request in flight."""
        done, self._done = self._done, None
        if done is not None:
            done(kind, text)

    def discard(self, protocol: _HttpProtocol, kind: str, text: str) -> None:
        """Drop a connection that cannot be used any more."""
        if protocol is self._protocol:
            self._protocol = None
            protocol.transport.abort()
            self.finish(kind, text)

    async def _open(self) -> None:
        address, tls = self._target.address, self._target.tls
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                _, protocol = await self._loop.create_connection(
                    lambda: _HttpProtocol(self),
                    address.host,
                    address.port,
                    ssl=tls,
                    server_hostname=address.host if tls is not None else None,
                )
        except (OSError, TimeoutError) as error:
            await asyncio.sleep(_RETRY_SECONDS)
            self._opening = None
            self.finish(NO_CONNECTION, getattr(error, "strerror", None) or type(error).__name__)
            return
        self._opening = None
        if protocol.lost or self._done is None:
            protocol.transport.abort()
            self.finish(LOST, _LOST_TEXT)
            return
        self._protocol = protocol
        protocol.transport.write(self._target.message)

    def _drop(self) -> None:
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.transport.abort()
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.cancel()


class _HttpProtocol(asyncio.Protocol):
    """The asyncio protocol of one connection."""

    transport: asyncio.Transport

    def __init__(self, connection: HttpConnection) -> None:
        self._connection = connection
        self._parser: Any = httptools.HttpResponseParser(self)
        self._error = b""
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._connection.discard(self, "no HTTP", "the server does not speak HTTP/1.1")

    def connection_lost(self, error: Exception | None) -> None:
        """Report a lost connection."""
        self.lost = True
        self._connection.discard(self, LOST, _LOST_TEXT)

    def on_body(self, data: bytes) -> None:
        """Keep the body of an error response."""
        if self._parser.get_status_code() != 200 and len(self._error) < _TEXT_BYTES:
            self._error += data

    def on_message_complete(self) -> None:
        """Report the end of the request."""
        status, error = self._parser.get_status_code(), self._error
        if status < 200:
            return
        self._error = b""
        kind, text = ("", "") if status == 200 else (f"HTTP {status}", _text(error))
        if self._parser.should_keep_alive():
            self._connection.finish(kind, text)
        else:
            self._connection.discard(self, kind, text)


def _text(body: bytes) -> str:
    """Return the text of an error of Headrace or of another v2 server."""
    try:
        document = orjson.loads(body)
        return str(document["error"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


_METHOD = "/inference.GRPCInferenceService/ModelInfer"
_MOST_CHANNELS = 64


class GrpcTarget:
    """A target over gRPC. `message` is a ModelInferRequest."""

    def __init__(self, address: Address, message: bytes, options: Options) -> None:
        self.grpc = import_grpc()
        self.message = message
        self.metadata = options.fields
        self._address = address
        self._credentials = channel_credentials(self.grpc, address, options)
        self._channels: list[Any] = []
        self._connections: list[GrpcConnection] = []

    def new_connection(self) -> GrpcConnection:
        """Return another connection."""
        if len(self._channels) < _MOST_CHANNELS:
            self._channels.append(open_channel(self.grpc.aio, self._address, self._credentials))
        channel = self._channels[len(self._connections) % len(self._channels)]
        self._connections.append(GrpcConnection(self, channel.unary_unary(_METHOD)))
        return self._connections[-1]

    async def close(self) -> None:
        """Close all channels."""
        tasks = [connection.task for connection in self._connections if connection.task is not None]
        for connection in self._connections:
            connection.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in self._channels:
            await channel.close()


class GrpcConnection:
    """A connection over gRPC."""

    def __init__(self, target: GrpcTarget, method: Any) -> None:
        self._target = target
        self._method = method
        self._loop = asyncio.get_running_loop()
        self._done: Done | None = None
        self._sent = 0.0
        self.task: asyncio.Task[None] | None = None
        """The request in flight."""

    def send(self, done: Done) -> None:
        """Send the request."""
        self._done = done
        self._sent = time.perf_counter()
        self.task = self._loop.create_task(self._call())

    def expire(self, before: float) -> None:
        """Fail a request that takes too long."""
        if self._done is not None and self._sent < before:
            done = self._done
            self.close()
            done(TIMED_OUT, "no answer came in time")

    def close(self) -> None:
        """Cancel the request in flight."""
        self._done = None
        task, self.task = self.task, None
        if task is not None:
            task.cancel()

    async def _call(self) -> None:
        kind = text = ""
        try:
            await self._method(self._target.message, metadata=self._target.metadata)
        except self._target.grpc.RpcError as error:
            kind, text = f"gRPC {error.code().name}", error.details() or ""
            if kind == "gRPC UNAVAILABLE" and "connect" in text.lower():
                kind = NO_CONNECTION
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(_RETRY_SECONDS)
        done, self._done = self._done, None
        if done is not None:
            done(kind, text)
