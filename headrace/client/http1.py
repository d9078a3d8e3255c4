# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 as a client speaks it, and Server-Sent Events. Knows no tensors.

Follows no redirect, and bounds the head and the body of an answer.
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

MOST_BODY_BYTES = 8 * 1024**3
"""Larger answers are refused."""
_MOST_HEAD_BYTES = 64 * 1024
_MOST_LINE_BYTES = 4096
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: .*)?")
_FIELD_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_FIELD_VALUE = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f]*")
_RESERVED = frozenset(
    {"host", "connection", "content-length", "transfer-encoding", "content-encoding", "accept-encoding", "content-type"}
    | {"inference-header-content-length", "x-request-id", "expect", "upgrade", "te"}
)


class NotHttp(Exception):
    """Raised when a server does not answer in HTTP/1.1; the text says what was received."""


class ConnectionCut(Exception):
    """Raised when the connection ends before the end of an answer."""


@dataclass(frozen=True, slots=True)
class Head:
    """Status and fields of an answer; names in lower case."""

    status: int
    fields: Mapping[str, str]
    keeps_alive: bool
    """Whether the server keeps_alive the connection open."""


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


class Answer:
    """One answer: read `head`, then `body`, or `piece` by piece."""

    def __init__(self, connection: Connection, deadline: Deadline, *, most_bytes: int = MOST_BODY_BYTES) -> None:
        self._connection = connection
        self._deadline = deadline
        self._most = most_bytes
        self._buffer = bytearray()
        self._left: int | None = 0
        """Bytes of the body, or of its chunk, that are still to come; None: until the connection ends."""
        self._chunked = False
        self.complete = False
        """Whether everything has been read."""

    @property
    def is_reusable(self) -> bool:
        """Whether the connection can be reused: the answer is complete, and nothing follows it."""
        return self.complete and not self._buffer

    async def head(self) -> Head:
        """Read status and fields; interim answers are skipped."""
        while True:
            version, status, fields = await self._read_head()
            if status >= 200:
                break
        connection = fields.get("connection", "").lower()
        keeps_alive = "close" not in connection if version == 1 else "keep-alive" in connection
        self._chunked = "chunked" in fields.get("transfer-encoding", "").lower()
        if status in (204, 304):
            self._left, self.complete = 0, True
        elif self._chunked:
            self._left = 0
        elif "content-length" in fields:
            self._left = _length(fields["content-length"])
            self._check(self._left)
            self.complete = not self._left
        else:
            self._left, keeps_alive = None, False
        return Head(status, fields, keeps_alive)

    async def body(self) -> Buffer:
        """Read the whole body. A body of known length is received into its final buffer."""
        if self.complete:
            return b""
        if self._chunked or self._left is None:
            pieces, size = [], 0
            while piece := await self.piece():
                pieces.append(piece)
                size += len(piece)
                self._check(size)
            return b"".join(pieces)
        whole = bytearray(self._left)
        have = len(self._buffer)
        if have > self._left:
            raise NotHttp("sends more than it said it would")
        whole[:have] = self._buffer
        self._buffer.clear()
        if have < self._left:
            view = memoryview(whole)[have:]
            if await self._connection.fill(view, self._deadline) < len(view):
                raise ConnectionCut
        self.complete = True
        return whole

    async def piece(self) -> bytes:
        """Return the next piece of the body; nothing at its end."""
        if self.complete:
            return b""
        if self._chunked and not self._left:
            self._left = await self._chunk_size()
            if not self._left:
                while await self._text_line():
                    pass  # Trailers.
                self.complete = True
                return b""
        if not self._buffer:
            await self._more(may_end=self._left is None)
            if not self._buffer:
                self.complete = True
                return b""
        size = len(self._buffer) if self._left is None else min(self._left, len(self._buffer))
        piece = bytes(self._buffer[:size])
        del self._buffer[:size]
        if self._left is not None:
            self._left -= size
            if self._chunked and not self._left:
                await self._text_line()
            elif not self._left:
                self.complete = True
        return piece

    async def _chunk_size(self) -> int:
        text = (await self._text_line()).partition(b";")[0].strip()
        if not re.fullmatch(rb"[0-9A-Fa-f]{1,15}", text):
            raise NotHttp("sends chunks without a size")
        size = int(text, 16)
        self._check(size)
        return size

    async def _text_line(self) -> bytes:
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > _MOST_LINE_BYTES:
                raise NotHttp("sends lines without an end")
            await self._more()
        text = bytes(self._buffer[:end]).rstrip(b"\r")
        del self._buffer[: end + 1]
        return text

    async def _more(self, *, may_end: bool = False) -> None:
        data = await self._connection.receive(self._deadline)
        if not data and not may_end:
            raise ConnectionCut
        self._buffer += data

    async def _read_head(self) -> tuple[int, int, dict[str, str]]:
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if self._buffer and not b"HTTP/1.".startswith(self._buffer[:7]):
                raise NotHttp("does not answer in HTTP/1.1")
            if len(self._buffer) > _MOST_HEAD_BYTES:
                raise NotHttp("sends a head without an end")
            await self._more()
        lines = bytes(self._buffer[:end]).split(b"\r\n")
        del self._buffer[: end + 4]
        status = _STATUS.fullmatch(lines[0])
        if status is None:
            raise NotHttp("does not answer in HTTP/1.1")
        fields: dict[str, str] = {}
        for text in lines[1:]:
            name, colon, value = text.decode("latin-1").partition(":")
            if not colon:
                raise NotHttp("sends a head that is none")
            fields[name.strip().lower()] = value.strip()
        return int(status[1]), int(status[2]), fields

    def _check(self, size: int) -> None:
        if size > self._most:
            raise TooLarge(f"the answer has {size} bytes or more; at most {self._most} are read")


def _length(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise NotHttp("sends a length that is none")
    return int(text)


def compressed(coding: str, buffers: Sequence[Buffer]) -> list[Buffer]:
    """Compress a request's body: gzip or deflate."""
    packer = zlib.compressobj(1, zlib.DEFLATED, 31 if coding == "gzip" else 15)
    return [*(packer.compress(buffer) for buffer in buffers), packer.flush()]


def inflated(coding: str, body: Buffer) -> Buffer:
    """Decompress an answer's body."""
    if coding in ("", "identity"):
        return body
    if coding not in ("gzip", "deflate"):
        raise NotHttp("answers in a coding that was not asked for")
    unpacker = zlib.decompressobj(47)
    try:
        whole = unpacker.decompress(body, MOST_BODY_BYTES)
    except zlib.error:
        raise NotHttp("answers with compressed data that is damaged") from None
    if not unpacker.eof:
        raise NotHttp("answers with compressed data that is cut, or too large")
    return whole


_MOST_EVENT_BYTES = 1024**3


class EventReader:
    """A parser of Server-Sent Events; takes pieces of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> None:
        """Add received bytes."""
        self._buffer += piece
        if len(self._buffer) > _MOST_EVENT_BYTES:
            raise TooLarge(f"an event of the stream has more than {_MOST_EVENT_BYTES} bytes")

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
