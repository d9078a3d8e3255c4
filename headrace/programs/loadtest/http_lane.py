# SPDX-License-Identifier: Apache-2.0
"""Requests over HTTP/1.1 connections that are kept: the same bytes again and again. Made by `targets`.

Reads of an answer only how it ended: status, length, and the text of an error.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import Any, cast

import httptools
import orjson

from headrace.client.addresses import Address
from headrace.programs.loadtest.lanes import LOST, NO_CONNECTION, TIMED_OUT, Done

_AGAIN_SECONDS = 0.05
"""How long to wait after a connection that could not be made: a server that is gone need not be asked in a hurry."""
_CONNECT_SECONDS = 10.0
_TEXT_BYTES = 4096
_CUT = "the connection ended before the answer came"


class HttpTarget:
    """See `lanes.Target`. `message` is a whole request."""

    def __init__(self, address: Address, message: bytes, tls: ssl.SSLContext | None = None) -> None:
        self.address = address
        self.message = message
        self.tls = tls
        self._lanes: list[HttpLane] = []

    def lane(self) -> HttpLane:
        """See `Target.lane`."""
        self._lanes.append(HttpLane(self))
        return self._lanes[-1]

    async def close(self) -> None:
        """See `Target.close`."""
        for lane in self._lanes:
            lane.close()
        # Transports notice that they were aborted in the next round of the loop.
        await asyncio.sleep(0)


class HttpLane:
    """See `lanes.Lane`."""

    def __init__(self, target: HttpTarget) -> None:
        self._target = target
        self._loop = asyncio.get_running_loop()
        self._connection: _Connection | None = None
        self._opening: asyncio.Task[None] | None = None
        self._done: Done | None = None
        self._sent = 0.0

    def ask(self, done: Done) -> None:
        """See `Lane.ask`."""
        self._done = done
        self._sent = time.perf_counter()
        if self._connection is not None:
            self._connection.transport.write(self._target.message)
        else:
            self._opening = self._loop.create_task(self._open())

    def expire(self, before: float) -> None:
        """See `Lane.expire`."""
        if self._done is not None and self._sent < before:
            self._drop()
            self.tell(TIMED_OUT, "no answer came in time")

    def close(self) -> None:
        """See `Lane.close`."""
        self._done = None
        self._drop()

    def tell(self, kind: str, text: str) -> None:
        """How the request under way ended."""
        done, self._done = self._done, None
        if done is not None:
            done(kind, text)

    def ended(self, connection: _Connection, kind: str, text: str) -> None:
        """A connection is of no use any more; one that was left before is nobody's loss."""
        if connection is self._connection:
            self._connection = None
            connection.transport.abort()
            self.tell(kind, text)

    async def _open(self) -> None:
        address, tls = self._target.address, self._target.tls
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                _, made = await self._loop.create_connection(
                    lambda: _Connection(self),
                    address.host,
                    address.port,
                    ssl=tls,
                    server_hostname=address.host if tls is not None else None,
                )
        except (OSError, TimeoutError) as error:
            await asyncio.sleep(_AGAIN_SECONDS)
            self._opening = None
            self.tell(NO_CONNECTION, getattr(error, "strerror", None) or type(error).__name__)
            return
        self._opening = None
        if made.lost or self._done is None:
            made.transport.abort()
            self.tell(LOST, _CUT)
            return
        self._connection = made
        made.transport.write(self._target.message)

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.transport.abort()
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.cancel()


class _Connection(asyncio.Protocol):
    """One connection of a lane."""

    transport: asyncio.Transport

    def __init__(self, lane: HttpLane) -> None:
        self._lane = lane
        self._parser: Any = httptools.HttpResponseParser(self)
        self._error = b""
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._lane.ended(self, "no HTTP", "what answers there does not speak HTTP/1.1")

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self.lost = True
        self._lane.ended(self, LOST, _CUT)

    def on_body(self, data: bytes) -> None:
        """See httptools. Kept only where it tells what is wrong."""
        if self._parser.get_status_code() != 200 and len(self._error) < _TEXT_BYTES:
            self._error += data

    def on_message_complete(self) -> None:
        """See httptools."""
        status, error = self._parser.get_status_code(), self._error
        if status < 200:
            return
        self._error = b""
        kind, text = ("", "") if status == 200 else (f"HTTP {status}", _text(error))
        if self._parser.should_keep_alive():
            self._lane.tell(kind, text)
        else:
            self._lane.ended(self, kind, text)


def _text(body: bytes) -> str:
    """What an error of Headrace or of another v2 server says."""
    try:
        document = orjson.loads(body)
        return str(document["error"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
