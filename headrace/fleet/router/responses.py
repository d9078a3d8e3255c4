# SPDX-License-Identifier: Apache-2.0
"""Parse HTTP/1.1 response heads and chunked bodies of backends, strictly: a response with an uncertain end is rejected.

`UpstreamHeadParser` remembers heads it has seen. Knows nothing of connections.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httptools

from headrace.fleet.router.backend import Outcome
from headrace.fleet.router.requests import HOP_BY_HOP, JOIN_BYTES, VIA_NAME, nominated_fields
from headrace.net.http.heads import Field, ResponseHead

if TYPE_CHECKING:
    from headrace.net.http.heads import Buffer

CHUNKED = -1
UNTIL_CLOSE = -2

_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: [^\0\r\n]*)?")
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_BAD_VALUE = re.compile(rb"[\0\r\n]")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_MAX_KNOWN = 1024
_MAX_KNOWN_BYTES = 1024
_MAX_FIELDS = 256
_DROPPED = HOP_BY_HOP | {b"content-length", b"date"}
"""The server side writes its own date."""
_BODILESS = (204, 304)
_SIZES = {form % size + b"\r\n": size + 4 + len(form % size) for size in range(1, 4096) for form in (b"%x", b"%X")}
"""Bytes of a whole chunk by its first line, up to the usual length of a server-sent event."""


class BadResponse(Exception):
    """The response cannot be passed on; the message is for the log."""


class UpstreamHead:
    """The head of a response, ready to be sent on. Shared by all responses with the same head, so it never changes."""

    __slots__ = (
        "content_length",
        "head",
        "http1_bytes",
        "keep_alive",
        "length",
        "lines",
        "outcome",
        "size",
        "status",
        "text",
    )

    def __init__(
        self, text: bytes, head: ResponseHead, length: int, content_length: bytes | None, keep_alive: bool, lines: bytes
    ) -> None:
        self.text = text
        """The bytes as received."""
        self.size = len(text) + length if keep_alive and length >= 0 and head.status >= 200 else -1
        """Bytes of the whole response if its length is known and another may follow on the connection; else -1."""
        self.head = head
        self.status = head.status
        self.outcome = _outcome(head.status)
        self.length = length
        """Bytes of the body, or CHUNKED or UNTIL_CLOSE. A response to HEAD has no body, whatever this says."""
        self.content_length = content_length
        """Content-Length as sent: for HEAD and 304 it describes a body that does not come."""
        self.keep_alive = keep_alive
        """Whether the connection can be reused."""
        self.lines = lines
        """For 101: the fields as received, without those of the connection."""
        self.http1_bytes = b""
        """The HTTP/1.1 head with Content-Length, without the date; empty if it cannot be sent like this, or if the body is
        too long to be copied."""
        if 0 <= length <= JOIN_BYTES and head.status >= 200 and head.status not in _BODILESS:
            self.http1_bytes = b"%bcontent-length: %d\r\n" % (head.http1, length)


def _outcome(status: int) -> int:
    if status < 500:
        return Outcome.OK
    return Outcome.REFUSED if 502 <= status <= 504 else Outcome.ERRED


class UpstreamHeadParser:
    """Parses response heads."""

    def __init__(self) -> None:
        self.known: dict[bytes, UpstreamHead] = {}
        """Heads seen before, by their bytes. Within a second a backend repeats its head."""
        self._lines: dict[bytes, Field] = {}

    def parse(self, text: bytes) -> UpstreamHead:
        """Parse a head, from its first byte to the empty line. Raises `BadResponse`."""
        cached = self.known.get(text)
        if cached is not None:
            return cached
        head = self._parse(text)
        if len(text) <= _MAX_KNOWN_BYTES:
            if len(self.known) >= _MAX_KNOWN:
                self.known.clear()
            self.known[text] = head
        return head

    def _parse(self, text: bytes) -> UpstreamHead:
        status_line, *lines = text[:-4].split(b"\r\n")
        match = _STATUS_LINE.fullmatch(status_line)
        if match is None:
            raise BadResponse("the status line is not HTTP/1.1")
        version, status = match[1], int(match[2])
        if len(lines) > _MAX_FIELDS:
            raise BadResponse(f"more than {_MAX_FIELDS} header fields")
        fields: list[Field] = []
        dropped: list[Field] = []
        for line in lines:
            # Heads differ, but most of their lines do not.
            field = self._lines.get(line) or self._parse_field(line)
            (dropped if field[0] in _DROPPED else fields).append(field)
        by_name = dict(dropped)
        length = _length(status, version, dropped)
        nominated = nominated_fields(by_name.get(b"connection"), dropped)
        keep_alive = b"close" not in nominated if version == b"1" else b"keep-alive" in nominated
        if nominated:
            fields = [field for field in fields if field[0] not in nominated]
        fields.append((b"via", b"1.%b %b" % (version, VIA_NAME)))
        switching = b"".join(b"%b: %b\r\n" % field for field in fields) if status == 101 else b""
        head = ResponseHead(status, fields, raw=True)
        keep_alive = keep_alive and length != UNTIL_CLOSE
        return UpstreamHead(text, head, length, by_name.get(b"content-length"), keep_alive, switching)

    def _parse_field(self, line: bytes) -> Field:
        name, colon, value = line.partition(b":")
        # A line that starts with a space (obsolete line folding) fails the name check and is rejected.
        if not colon or not _NAME.fullmatch(name) or _BAD_VALUE.search(value):
            raise BadResponse("a header field is malformed")
        field = (name.lower(), value.strip(b" \t"))
        if len(line) <= _MAX_KNOWN_BYTES:
            if len(self._lines) >= _MAX_KNOWN:
                self._lines.clear()
            self._lines[line] = field
        return field


def _length(status: int, version: bytes, fields: list[Field]) -> int:
    """Return how the body ends (RFC 9112, 6.3), for requests other than HEAD."""
    codings: list[bytes] = []
    lengths: set[bytes] = set()
    for name, value in fields:
        if name == b"content-length":
            lengths.add(value)
        elif name == b"transfer-encoding":
            codings.append(value.lower())
    bodiless = status < 200 or status in _BODILESS
    if codings:
        if codings != [b"chunked"] or version == b"0" or lengths:
            raise BadResponse("its transfer coding does not say where the response ends")
        return 0 if bodiless else CHUNKED
    if lengths:
        length = lengths.pop()
        if lengths or not _LENGTH.fullmatch(length):
            raise BadResponse("its content-length is not one number")
        return 0 if bodiless else int(length)
    return 0 if bodiless else UNTIL_CLOSE


class ChunkDecoder:
    """Decodes a chunked body with llhttp. httptools calls the methods named `on_*`."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._on_data = take
        self._messages = 0
        self.done = False
        """Whether the last chunk has arrived."""
        self.excess = False
        """Whether something followed it."""
        self._chunk_complete = True
        """Whether no chunk is incomplete."""
        self._parser: Any = httptools.HttpResponseParser(self)
        self._parser.feed_data(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")

    def feed(self, data: Buffer) -> None:
        """Decode more of the body. Raises `BadResponse`."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            if not self.done:
                raise BadResponse("its chunks are malformed") from None
            self.excess = True

    def is_between(self, last: Buffer) -> bool:
        """Return whether the next byte starts a chunk; `last` is what was fed last."""
        # After a chunk, only a part of the next chunk's first line can follow: a whole line calls `on_chunk_header`.
        return self._chunk_complete and (not last or last[-2:] == b"\r\n")

    def close(self) -> None:
        """Release the parser, which refers back to this object."""
        self._parser = None

    def on_message_begin(self) -> None:
        """Count messages: a second one is excess."""
        self._messages += 1
        if self._messages > 1:
            self.excess = True

    def on_body(self, data: bytes) -> None:
        """Take a piece of a chunk."""
        if not self.done:
            self._on_data(data)

    def on_chunk_header(self) -> None:
        """Note that a chunk, or the last line, starts."""
        self._chunk_complete = False

    def on_chunk_complete(self) -> None:
        """Note that a chunk is complete."""
        self._chunk_complete = True

    def on_message_complete(self) -> None:
        """Note the end of the body."""
        self.done = True


def chunk_data_start(data: bytes) -> int:
    """Return where the data of a chunk starts if the bytes are exactly one chunk; else 0."""
    begin = data.find(b"\n", 0, 6) + 1
    return begin if _SIZES.get(data[:begin]) == len(data) and data.endswith(b"\r\n") else 0


def parse_status(text: bytes) -> int:
    """Return the status in the first line of a response. Raises `BadResponse`."""
    match = _STATUS_LINE.fullmatch(text.partition(b"\r\n")[0])
    if match is None:
        raise BadResponse("the status line is not HTTP/1.1")
    return int(match[2])
