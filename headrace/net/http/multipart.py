# SPDX-License-Identifier: Apache-2.0
"""multipart/form-data request bodies (RFC 7578), read piece by piece, so that a large file need not be held in memory.

`MultipartReader` is for routes that stream their body; `read_form` is for a complete body.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple

from headrace.core.errors import InvalidArgument, TooLarge
from headrace.net.http.heads import Buffer

PARTS = 64
"""Parts of one body."""
HEAD_BYTES = 8192
"""Fields of one part: its name, the name of its file, its type."""

_BOUNDARY_BYTES = 70
"""RFC 2046 allows no longer boundary."""
_BOUNDARY = re.compile(rb';\s*boundary=(?:"([^"\r\n]+)"|([^\s;"]+))', re.IGNORECASE)
_PARAMETER = re.compile(r';\s*([A-Za-z*]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))')
_ESCAPED = re.compile(r'\\(["\\])')
_PLAIN_ENCODINGS = ("", "7bit", "8bit", "binary")
_TRUNCATED = "the multipart body ends before its last boundary: send all of it"


class PartHead(NamedTuple):
    """The fields of one part."""

    name: str
    filename: str | None
    """None: a plain field."""
    content_type: str


PartSink = Callable[[bytes], None]
"""Receives the content of a part, piece by piece."""


class FormField(NamedTuple):
    """A part and its content."""

    head: PartHead
    content: bytes


class _State(Enum):
    PREAMBLE = auto()
    DELIMITER = auto()
    HEAD = auto()
    CONTENT = auto()
    EPILOGUE = auto()


class MultipartReader:
    """Reads one body. Every method raises InvalidArgument or TooLarge for a body that is not right."""

    def __init__(self, content_type: bytes, open_part: Callable[[PartHead], PartSink]) -> None:
        """`open_part`: called at the start of each part; returns what receives its content."""
        self._delimiter = b"\r\n--" + _boundary_of(content_type)
        self._open_part = open_part
        self._sink: PartSink = _drop
        self._parts = 0
        self._state = _State.PREAMBLE
        # The first delimiter may be at the very start: as if a line had ended before it.
        self._unread = b"\r\n"

    def feed(self, data: Buffer) -> None:
        """Read the next piece of the body."""
        self._unread += data
        while self._step():
            pass

    def finish(self) -> None:
        """End the body."""
        if self._state is not _State.EPILOGUE:
            raise InvalidArgument(_TRUNCATED)

    def _step(self) -> bool:
        """Read one element; return whether another may follow in the bytes at hand."""
        match self._state:
            case _State.PREAMBLE | _State.CONTENT:
                return self._read_content()
            case _State.DELIMITER:
                return self._read_delimiter_end()
            case _State.HEAD:
                return self._read_head()
            case _:
                self._unread = b""
                return False

    def _read_content(self) -> bool:
        unread, delimiter = self._unread, self._delimiter
        end = unread.find(delimiter)
        found = end >= 0
        if not found:
            # The last bytes may be the start of a delimiter.
            end = max(0, len(unread) - len(delimiter) + 1)
        if end and self._state is _State.CONTENT:
            self._sink(unread[:end])
        self._unread = unread[end + len(delimiter) :] if found else unread[end:]
        if found:
            self._state = _State.DELIMITER
        return found

    def _read_delimiter_end(self) -> bool:
        unread = self._unread
        if len(unread) < 2:
            return False
        if unread.startswith(b"--"):
            self._state = _State.EPILOGUE
            return True
        line_end = unread.find(b"\r\n", 0, HEAD_BYTES)
        if line_end < 0 and len(unread) < HEAD_BYTES:
            return False
        if line_end < 0 or unread[:line_end].strip(b" \t"):
            raise InvalidArgument("the multipart body has text behind a boundary: check how it is made")
        # The line's end stays: a part without fields has only the empty line.
        self._unread = unread[line_end:]
        self._state = _State.HEAD
        return True

    def _read_head(self) -> bool:
        end = self._unread.find(b"\r\n\r\n", 0, HEAD_BYTES)
        if end < 0:
            if len(self._unread) >= HEAD_BYTES:
                raise TooLarge(f"a part of the multipart body has more than {HEAD_BYTES} bytes of fields: send fewer")
            return False
        self._parts += 1
        if self._parts > PARTS:
            raise TooLarge(f"the multipart body has more than {PARTS} parts: send fewer")
        self._sink = self._open_part(_parse_head(self._unread[:end]))
        self._unread = self._unread[end + 4 :]
        self._state = _State.CONTENT
        return True


def read_form(content_type: bytes, body: Buffer) -> list[FormField]:
    """Return the parts of a complete body."""
    contents: list[tuple[PartHead, list[bytes]]] = []

    def open_part(head: PartHead) -> PartSink:
        pieces: list[bytes] = []
        contents.append((head, pieces))
        return pieces.append

    reader = MultipartReader(content_type, open_part)
    reader.feed(body)
    reader.finish()
    return [FormField(head, b"".join(pieces)) for head, pieces in contents]


def _boundary_of(content_type: bytes) -> bytes:
    kind = content_type.partition(b";")[0].strip().lower()
    if kind != b"multipart/form-data":
        raise InvalidArgument("the Content-Type must be multipart/form-data: send the fields as a form with files")
    match = _BOUNDARY.search(content_type)
    boundary = (match[1] or match[2]) if match is not None else b""
    if not 0 < len(boundary) <= _BOUNDARY_BYTES:
        raise InvalidArgument(f"the Content-Type needs a boundary of 1 to {_BOUNDARY_BYTES} characters")
    return boundary


def _parse_head(text: bytes) -> PartHead:
    fields: dict[str, str] = {}
    try:
        for line in text.decode().split("\r\n"):
            name, _, value = line.partition(":")
            fields[name.strip().lower()] = value.strip()
    except UnicodeDecodeError:
        raise InvalidArgument("the fields of a part of the multipart body are not UTF-8") from None
    disposition = fields.get("content-disposition", "")
    parameters = {
        match[1].lower(): _ESCAPED.sub(r"\1", match[2]) if match[2] is not None else match[3]
        for match in _PARAMETER.finditer(disposition)
    }
    if disposition.partition(";")[0].strip().lower() != "form-data" or not parameters.get("name"):
        raise InvalidArgument("each part of the multipart body needs 'Content-Disposition: form-data; name=\"...\"'")
    if fields.get("content-transfer-encoding", "").lower() not in _PLAIN_ENCODINGS:
        raise InvalidArgument("a part of the multipart body has a Content-Transfer-Encoding: send it as it is")
    return PartHead(parameters["name"], parameters.get("filename"), fields.get("content-type", ""))


def _drop(content: bytes) -> None:
    """Receive the text before the first part, which means nothing."""
