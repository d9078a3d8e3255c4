# SPDX-License-Identifier: Apache-2.0
"""Server-Sent Events as they come, in pieces of any size. Called by `answers`; knows nothing of what the events say.

Works on bytes throughout, so that a character cut in two is whole again when its line is.
"""

from __future__ import annotations

from headrace.core.errors import Unavailable


class EventReader:
    """Turns pieces of a stream into events."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._begun: list[bytes] = []
        """Of the line that has not ended."""
        self._size = 0
        """Of that, and of the event's lines so far."""
        self._return = False
        """Whether the last byte was a carriage return: then a line feed belongs to it."""
        self._data: list[bytes] = []
        self._name = b""

    def feed(self, piece: bytes) -> list[tuple[bytes, bytes]]:
        """The events that have come to their end: name (b"" for most) and data."""
        if self._return and piece.startswith(b"\n"):
            piece = piece[1:]
        if piece:
            self._return = piece.endswith(b"\r")
        self._size += len(piece)
        if b"\n" not in piece and b"\r" not in piece:
            self._begun.append(piece)
            self._check()
            return []
        self._begun.append(piece)
        text = b"".join(self._begun)
        lines = text.splitlines()
        self._begun = [] if text.endswith((b"\n", b"\r")) else [lines.pop()]
        events: list[tuple[bytes, bytes]] = []
        for line in lines:
            if line:
                self._line(line)
            elif self._data:
                events.append((self._name, self._taken()))
            else:
                self._name = b""
        self._size = sum(map(len, self._begun)) + sum(map(len, self._data))
        self._check()
        return events

    def finish(self) -> list[tuple[bytes, bytes]]:
        """The stream has ended: an event that only lacks its empty line counts."""
        if self._begun:
            self._line(b"".join(self._begun))
            self._begun = []
        return [(self._name, self._taken())] if self._data else []

    def _line(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._name = value
        elif field == b"error":
            # Older llama.cpp: a field of its own.
            self._name = b"error"
            self._data.append(value)

    def _taken(self) -> bytes:
        data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
        self._data = []
        self._name = b""
        return data

    def _check(self) -> None:
        if self._size > self._most:
            raise Unavailable(f"the engine sent an event of more than {self._most} bytes")
