# SPDX-License-Identifier: Apache-2.0
"""A small client of Redis: one connection, commands in flight one behind the other, answers in order.

Used by `redis_rates`. Speaks RESP2, which every Redis and Valkey does, as far as scripts and their answers need it. Nobody
waits for a connection: a command while there is none fails at once, and the connection is made again in the background.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from headrace.core.errors import InvalidArgument, Unavailable

_REPLY_BYTES = 1024 * 1024
_CONNECT_SECONDS = 2.0
_NEST = 8
# Not the URL itself: it may have a password.
_BAD_URL = (
    "the address of Redis is redis://[[user]:password@]host[:port][/database], or rediss:// for TLS, or unix:///path"
)


class RedisError(Unavailable):
    """For an answer of Redis that is an error. The first word says which."""


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """What the URL of a Redis says."""

    host: str = ""
    port: int = 0
    username: str = ""
    password: str = ""
    database: int = 0
    tls: bool = False
    path: str = ""
    """Of a UNIX socket, in place of host and port."""

    @classmethod
    def parse(cls, url: str) -> RedisAddress:
        """`redis://[[user]:password@]host[:port][/database]`, `rediss://` for TLS, or `unix://[...@]/path[?db=database]`."""
        try:
            parts = urlsplit(url)
            port = parts.port or 6379
            unix = parts.scheme == "unix"
            database = int(parse_qs(parts.query).get("db", ["0"])[0] if unix else parts.path.strip("/") or 0)
        except ValueError:
            raise InvalidArgument(_BAD_URL) from None
        if parts.scheme not in ("redis", "rediss", "unix") or not (parts.path if unix else parts.hostname):
            raise InvalidArgument(_BAD_URL)
        who = unquote(parts.username or ""), unquote(parts.password or "")
        if unix:
            return cls("", 0, *who, database, path=unquote(parts.path))
        return cls(parts.hostname or "", port, *who, database, parts.scheme == "rediss")

    def __str__(self) -> str:
        """Without the password."""
        return f"{self.path or f'{self.host}:{self.port}'}, database {self.database}"


class RedisWire(asyncio.Protocol):
    """One connection. Make it by `connect`."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._replies = ReplyReader()
        self._waiting: deque[asyncio.Future[Any]] = deque()

    @classmethod
    async def connect(cls, address: RedisAddress) -> RedisWire:
        """Connect, say who we are, choose the database. Raises `Unavailable`."""
        context = ssl.create_default_context() if address.tls else None
        loop = asyncio.get_running_loop()
        wire = None
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                if address.path:
                    _, wire = await loop.create_unix_connection(cls, address.path)
                else:
                    _, wire = await loop.create_connection(cls, address.host, address.port, ssl=context)
                if address.password:
                    user = (address.username,) if address.username else ()
                    await wire.command("AUTH", *user, address.password)
                if address.database:
                    await wire.command("SELECT", str(address.database))
                await wire.command("PING")
        except (OSError, TimeoutError, Unavailable) as error:
            if wire is not None:
                wire.close()
            # What Redis says of a password or a database is not secret, and worth reading in the log.
            said = error.message if isinstance(error, Unavailable) else type(error).__name__
            raise Unavailable(f"Redis at {address} does not answer: {said}") from None
        return wire

    @property
    def open(self) -> bool:
        """Whether commands can be sent."""
        return self._transport is not None

    def command(self, *words: str | bytes) -> asyncio.Future[Any]:
        """Send a command; the future has the answer, or `Unavailable`. It may be cancelled: the answer is dropped."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._transport is None:
            answer.set_exception(Unavailable("the connection to Redis is closed"))
            return answer
        parts = [b"*%d\r\n" % len(words)]
        for word in words:
            data = word.encode() if isinstance(word, str) else word
            parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
        self._waiting.append(answer)
        self._transport.write(b"".join(parts))
        return answer

    def close(self) -> None:
        """Close at once; who waits for an answer is told."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        while self._waiting:
            answer = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(Unavailable("the connection to Redis is closed"))

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        try:
            for reply in self._replies.feed(data):
                answer = self._waiting.popleft()
                if answer.done():
                    continue
                if isinstance(reply, RedisError):
                    answer.set_exception(reply)
                else:
                    answer.set_result(reply)
        except (ValueError, IndexError):
            # Not Redis, or not one answer for each command: nothing after this can be believed.
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self.close()


class ReplyReader:
    """Turns bytes into answers: texts as bytes, numbers, lists of these, None, or a `RedisError`."""

    def __init__(self) -> None:
        self._data = b""

    def feed(self, data: bytes) -> list[Any]:
        """The answers that are whole by now. Raises ValueError for what is no answer."""
        self._data += data
        found: list[Any] = []
        position = 0
        with contextlib.suppress(_Unfinished):
            while position < len(self._data):
                reply, position = self._reply(position, 0)
                found.append(reply)
        self._data = self._data[position:]
        if len(self._data) > _REPLY_BYTES:
            raise ValueError("an answer of Redis is too long")
        return found

    def _reply(self, position: int, depth: int) -> tuple[Any, int]:
        end = self._data.find(b"\r\n", position)
        if end < 0:
            raise _Unfinished
        kind, text = self._data[position : position + 1], self._data[position + 1 : end]
        after = end + 2
        if kind == b"+":
            return text, after
        if kind == b"-":
            return RedisError(text.decode("utf-8", "replace")), after
        if kind == b":":
            return int(text), after
        size = int(text)
        if kind == b"$":
            if size < 0:
                return None, after
            if len(self._data) < after + size + 2:
                raise _Unfinished
            return self._data[after : after + size], after + size + 2
        if kind != b"*" or depth >= _NEST:
            raise ValueError("not an answer of Redis")
        if size < 0:
            return None, after
        replies = []
        for _ in range(size):
            reply, after = self._reply(after, depth + 1)
            replies.append(reply)
        return replies, after


class _Unfinished(Exception):
    """More bytes are needed."""
