# SPDX-License-Identifier: Apache-2.0
"""The client side of HTTP/1.1, and Server-Sent Events.

Does not follow redirects, and limits the size of a response's head and body.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace.client.retries import Deadline
from headrace.client.sockets import Connection
from headrace.core.errors import InvalidArgument, TooLarge
from headrace.core.tensors import Buffer

MAX_BODY_BYTES = 8 * 1024**3
"""Larger responses are refused."""
_MAX_HEAD_BYTES = 64 * 1024
_MAX_LINE_BYTES = 4096
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: .*)?")
_FIELD_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_FIELD_VALUE = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f]*")
_RESERVED = frozenset(
    {"host", "connection", "content-length", "transfer-encoding", "content-encoding", "accept-encoding", "content-type"}
    | {"inference-header-content-length", "x-request-id", "expect", "upgrade", "te"}
)


class InvalidHttp(Exception):
    """Raised when a server does not speak HTTP/1.1; the text says what it does."""


class ConnectionClosed(Exception):
    """Raised when the connection ends before the end of a response."""


@dataclass(frozen=True, slots=True)
class Head:
    """Status and header fields of a response; names in lower case."""

    status: int
    fields: Mapping[str, str]
    keeps_alive: bool
    """Whether the server keeps the connection open."""


def request_head(method: str, target: str, fields: Iterable[tuple[str, str]], length: int) -> bytes:
    """Encode the head of a request. `length` is that of the body, -1 for none."""
    lines = [f"{method} {target} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in fields]
    if length >= 0:
        lines.append(f"content-length: {length}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def check_fields(fields: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Check a caller's header fields."""
    for name, value in fields.items():
        if str(name).lower() in _RESERVED:
            raise InvalidArgument(f"header {name!a} is written by the client itself")
        if not isinstance(value, str) or not _FIELD_NAME.fullmatch(name) or not _FIELD_VALUE.fullmatch(value):
            raise InvalidArgument(f"header {name!a} has a name or value that HTTP cannot carry")
        try:
            value.encode("latin-1")
        except UnicodeEncodeError:
            raise InvalidArgument(f"header {name!a} has letters that HTTP cannot carry") from None
    return tuple((name.lower(), value) for name, value in fields.items())


class Response:
    """One response: read `head`, then `body`, or `piece` by piece."""

    def __init__(self, connection: Connection, deadline: Deadline, *, max_bytes: int = MAX_BODY_BYTES) -> None:
        self._connection = connection
        self._deadline = deadline
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._remaining: int | None = 0
        """Bytes left of the body, or of its chunk; None: until the connection ends."""
        self._chunked = False
        self.complete = False
        """Whether everything has been read."""

    @property
    def is_reusable(self) -> bool:
        """Whether the connection can be reused: the response is complete, and nothing follows it."""
        return self.complete and not self._buffer

    async def head(self) -> Head:
        """Read status and fields; skip interim responses."""
        while True:
            version, status, fields = await self._read_head()
            if status >= 200:
                break
        connection = fields.get("connection", "").lower()
        keeps_alive = "close" not in connection if version == 1 else "keep-alive" in connection
        self._chunked = "chunked" in fields.get("transfer-encoding", "").lower()
        if status in (204, 304):
            self._remaining, self.complete = 0, True
        elif self._chunked:
            self._remaining = 0
        elif "content-length" in fields:
            self._remaining = _parse_length(fields["content-length"])
            self._check_size(self._remaining)
            self.complete = not self._remaining
        else:
            self._remaining, keeps_alive = None, False
        return Head(status, fields, keeps_alive)

    async def body(self) -> Buffer:
        """Read the whole body. A body of known length is received into its final buffer."""
        if self.complete:
            return b""
        if self._chunked or self._remaining is None:
            pieces, size = [], 0
            while piece := await self.piece():
                pieces.append(piece)
                size += len(piece)
                self._check_size(size)
            return b"".join(pieces)
        data = bytearray(self._remaining)
        received = len(self._buffer)
        if received > self._remaining:
            raise InvalidHttp("sends more than it said it would")
        data[:received] = self._buffer
        self._buffer.clear()
        if received < self._remaining:
            view = memoryview(data)[received:]
            if await self._connection.fill(view, self._deadline) < len(view):
                raise ConnectionClosed
        self.complete = True
        return data

    async def piece(self) -> bytes:
        """Return the next piece of the body; b"" at its end."""
        if self.complete:
            return b""
        if self._chunked and not self._remaining:
            self._remaining = await self._read_chunk_size()
            if not self._remaining:
                while await self._read_line():
                    pass  # Trailers.
                self.complete = True
                return b""
        if not self._buffer:
            await self._receive(may_end=self._remaining is None)
            if not self._buffer:
                self.complete = True
                return b""
        size = len(self._buffer) if self._remaining is None else min(self._remaining, len(self._buffer))
        piece = bytes(self._buffer[:size])
        del self._buffer[:size]
        if self._remaining is not None:
            self._remaining -= size
            if self._chunked and not self._remaining:
                await self._read_line()
            elif not self._remaining:
                self.complete = True
        return piece

    async def _read_chunk_size(self) -> int:
        text = (await self._read_line()).partition(b";")[0].strip()
        if not re.fullmatch(rb"[0-9A-Fa-f]{1,15}", text):
            raise InvalidHttp("sends chunks without a size")
        size = int(text, 16)
        self._check_size(size)
        return size

    async def _read_line(self) -> bytes:
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > _MAX_LINE_BYTES:
                raise InvalidHttp("sends lines without an end")
            await self._receive()
        text = bytes(self._buffer[:end]).rstrip(b"\r")
        del self._buffer[: end + 1]
        return text

    async def _receive(self, *, may_end: bool = False) -> None:
        data = await self._connection.receive(self._deadline)
        if not data and not may_end:
            raise ConnectionClosed
        self._buffer += data

    async def _read_head(self) -> tuple[int, int, dict[str, str]]:
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if self._buffer and not b"HTTP/1.".startswith(self._buffer[:7]):
                raise InvalidHttp("does not answer in HTTP/1.1")
            if len(self._buffer) > _MAX_HEAD_BYTES:
                raise InvalidHttp("sends a head without an end")
            await self._receive()
        lines = bytes(self._buffer[:end]).split(b"\r\n")
        del self._buffer[: end + 4]
        status = _STATUS.fullmatch(lines[0])
        if status is None:
            raise InvalidHttp("does not answer in HTTP/1.1")
        fields: dict[str, str] = {}
        for text in lines[1:]:
            name, colon, value = text.decode("latin-1").partition(":")
            if not colon:
                raise InvalidHttp("sends an invalid response head")
            fields[name.strip().lower()] = value.strip()
        return int(status[1]), int(status[2]), fields

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise TooLarge(f"the answer has {size} bytes or more; at most {self._max_bytes} are read")


def _parse_length(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise InvalidHttp("sends an invalid content-length")
    return int(text)


def compress(coding: str, buffers: Sequence[Buffer]) -> list[Buffer]:
    """Compress a request body: gzip or deflate."""
    compressor = zlib.compressobj(1, zlib.DEFLATED, 31 if coding == "gzip" else 15)
    return [*(compressor.compress(buffer) for buffer in buffers), compressor.flush()]


def decompress(coding: str, body: Buffer) -> Buffer:
    """Decompress a response body."""
    if coding in ("", "identity"):
        return body
    if coding not in ("gzip", "deflate"):
        raise InvalidHttp("answers in a coding that was not asked for")
    decompressor = zlib.decompressobj(47)
    try:
        content = decompressor.decompress(body, MAX_BODY_BYTES)
    except zlib.error:
        raise InvalidHttp("answers with compressed data that is damaged") from None
    if not decompressor.eof:
        raise InvalidHttp("answers with compressed data that is cut, or too large")
    return content


_MAX_EVENT_BYTES = 1024**3


class EventReader:
    """A parser of Server-Sent Events; takes pieces of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> None:
        """Add received bytes."""
        self._buffer += piece
        if len(self._buffer) > _MAX_EVENT_BYTES:
            raise TooLarge(f"an event of the stream has more than {_MAX_EVENT_BYTES} bytes")

    def take(self) -> bytes | None:
        """Return the data of the next complete event; None if it is not complete."""
        while (end := self._buffer.find(b"\n", self._searched)) >= 0:
            line = bytes(self._buffer[:end]).removesuffix(b"\r")
            del self._buffer[: end + 1]
            self._searched = 0
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                data, self._data = b"\n".join(self._data), []
                return data
        # Do not search the same bytes again with the next piece.
        self._searched = len(self._buffer)
        return None
