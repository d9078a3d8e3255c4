# SPDX-License-Identifier: Apache-2.0
"""What a backend answers, read strictly: an answer whose end is not certain must not reach a client.

`upstream` gives the bytes of a head to `Answers.read`, which remembers those it has seen, and a chunked body to
`ChunkedBody`. Knows nothing of connections.
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
    from headrace.net.http.exchange import Buffer

CHUNKED = -1
UNTIL_CLOSE = -2

_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: [^\0\r\n]*)?")
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_BAD_VALUE = re.compile(rb"[\0\r\n]")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_REMEMBERED = 1024
_REMEMBERED_BYTES = 1024
_MOST_FIELDS = 256
_NOT_PASSED_ON = HOP_BY_HOP | {b"content-length", b"date"}
"""The date is written by the wire, which must write one."""
_BODILESS = (204, 304)
_SIZES = {form % size + b"\r\n": size + 4 + len(form % size) for size in range(1, 4096) for form in (b"%x", b"%X")}
"""Bytes of a whole chunk by its first line, for those that events of a stream are as long as."""


class BadAnswer(Exception):
    """What came is no answer that can be passed on; the text is for the log."""


class AnswerHead:
    """The head of an answer, ready to go out. Shared by all answers with the same bytes, so it is never changed."""

    __slots__ = ("head", "keeps", "length", "lines", "outcome", "size", "status", "text", "told", "written")

    def __init__(
        self, text: bytes, head: ResponseHead, length: int, told: bytes | None, keeps: bool, lines: bytes
    ) -> None:
        self.text = text
        """As it came."""
        self.size = len(text) + length if keeps and length >= 0 and head.status >= 200 else -1
        """Bytes of the whole answer, where those are all that comes and another may follow them; else -1."""
        self.head = head
        self.status = head.status
        self.outcome = _outcome(head.status)
        self.length = length
        """Bytes of the body, or CHUNKED or UNTIL_CLOSE. The answer to HEAD has none, whatever this says."""
        self.told = told
        """The content-length: to HEAD, and with 304, it is of a body that does not come."""
        self.keeps = keeps
        """Whether the connection can be used again."""
        self.lines = lines
        """For 101: the fields as they came, but for those of the connection."""
        self.written = b""
        """All of it with the body's length, as HTTP/1.1 has it, but for the date; empty where it may not be sent so, or
        where the body is too long to be copied."""
        if 0 <= length <= JOIN_BYTES and head.status >= 200 and head.status not in _BODILESS:
            self.written = b"%bcontent-length: %d\r\n" % (head.http1, length)


def _outcome(status: int) -> int:
    if status < 500:
        return Outcome.OK
    return Outcome.REFUSED if 502 <= status <= 504 else Outcome.ERRED


class Answers:
    """Reads heads of answers."""

    def __init__(self) -> None:
        self.known: dict[bytes, AnswerHead] = {}
        """Heads seen before, by their bytes. Within a second a backend repeats itself."""
        self._lines: dict[bytes, Field] = {}

    def read(self, text: bytes) -> AnswerHead:
        """What a head means, from its first byte to the empty line. Raises `BadAnswer`."""
        known = self.known.get(text)
        if known is not None:
            return known
        made = self._read(text)
        if len(text) <= _REMEMBERED_BYTES:
            if len(self.known) >= _REMEMBERED:
                self.known.clear()
            self.known[text] = made
        return made

    def _read(self, text: bytes) -> AnswerHead:
        status_line, *lines = text[:-4].split(b"\r\n")
        match = _STATUS_LINE.fullmatch(status_line)
        if match is None:
            raise BadAnswer("the status line is not HTTP/1.1")
        version, status = match[1], int(match[2])
        if len(lines) > _MOST_FIELDS:
            raise BadAnswer(f"more than {_MOST_FIELDS} header fields")
        fields: list[Field] = []
        own: list[Field] = []
        for line in lines:
            # Even where heads differ, most of their lines do not.
            field = self._lines.get(line) or self._field(line)
            (own if field[0] in _NOT_PASSED_ON else fields).append(field)
        by_name = dict(own)
        length = _length(status, version, own)
        nominated = nominated_fields(by_name.get(b"connection"), own)
        keeps = b"close" not in nominated if version == b"1" else b"keep-alive" in nominated
        if nominated:
            fields = [field for field in fields if field[0] not in nominated]
        fields.append((b"via", b"1.%b %b" % (version, VIA_NAME)))
        switching = b"".join(b"%b: %b\r\n" % field for field in fields) if status == 101 else b""
        head = ResponseHead(status, fields, raw=True)
        keeps = keeps and length != UNTIL_CLOSE
        return AnswerHead(text, head, length, by_name.get(b"content-length"), keeps, switching)

    def _field(self, line: bytes) -> Field:
        name, colon, value = line.partition(b":")
        # A line that begins with a space would continue the one before: nobody sends these but to confuse.
        if not colon or not _NAME.fullmatch(name) or _BAD_VALUE.search(value):
            raise BadAnswer("a header field is malformed")
        field = (name.lower(), value.strip(b" \t"))
        if len(line) <= _REMEMBERED_BYTES:
            if len(self._lines) >= _REMEMBERED:
                self._lines.clear()
            self._lines[line] = field
        return field


def _length(status: int, version: bytes, fields: list[Field]) -> int:
    """How the body ends, as RFC 9112, 6.3 has it, but for a request of HEAD."""
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
            raise BadAnswer("its transfer coding leaves open where the answer ends")
        return 0 if bodiless else CHUNKED
    if lengths:
        length = lengths.pop()
        if lengths or not _LENGTH.fullmatch(length):
            raise BadAnswer("its content-length is not one number")
        return 0 if bodiless else int(length)
    return 0 if bodiless else UNTIL_CLOSE


class ChunkedBody:
    """Undoes chunks, by llhttp. Methods named `on_*` are called by httptools."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take
        self._messages = 0
        self.done = False
        """The last chunk has come."""
        self.excess = False
        """Something came after it."""
        self._whole = True
        """No chunk has begun that has not ended."""
        self._parser: Any = httptools.HttpResponseParser(self)
        self._parser.feed_data(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")

    def feed(self, data: Buffer) -> None:
        """More of the body. Raises `BadAnswer`."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            if not self.done:
                raise BadAnswer("its chunks are malformed") from None
            self.excess = True

    def between(self, last: Buffer) -> bool:
        """Whether the next byte begins a chunk; `last` is what was fed last."""
        # After a chunk, only another one's first line, or a part of it, can have come; a whole one would have been heard of.
        return self._whole and (not last or last[-2:] == b"\r\n")

    def close(self) -> None:
        """Let go of the parser, which refers back to this."""
        self._parser = None

    def on_message_begin(self) -> None:
        """The answer, or what should not be there."""
        self._messages += 1
        if self._messages > 1:
            self.excess = True

    def on_body(self, data: bytes) -> None:
        """A piece of a chunk."""
        if not self.done:
            self._take(data)

    def on_chunk_header(self) -> None:
        """A chunk begins, or the last line."""
        self._whole = False

    def on_chunk_complete(self) -> None:
        """A chunk has ended."""
        self._whole = True

    def on_message_complete(self) -> None:
        """The end."""
        self.done = True


def chunk_begins(data: bytes) -> int:
    """Where the text of a chunk begins, if it is all of the data; else 0."""
    begin = data.find(b"\n", 0, 6) + 1
    return begin if _SIZES.get(data[:begin]) == len(data) and data.endswith(b"\r\n") else 0


def read_status(text: bytes) -> int:
    """The status of an answer, from its first line. Raises `BadAnswer`."""
    match = _STATUS_LINE.fullmatch(text.partition(b"\r\n")[0])
    if match is None:
        raise BadAnswer("the status line is not HTTP/1.1")
    return int(match[2])
