# SPDX-License-Identifier: Apache-2.0
"""Server-Sent Events as a client reads them: bytes in, the data of events out. Used by `http`; knows no JSON."""

from __future__ import annotations

from headrace.core.errors import TooLarge

_MOST_EVENT_BYTES = 1024**3


class EventReader:
    """Takes pieces as they come, wherever they are cut."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> None:
        """More has come."""
        self._buffer += piece
        if len(self._buffer) > _MOST_EVENT_BYTES:
            raise TooLarge(f"an event of the stream has more than {_MOST_EVENT_BYTES} bytes")

    def take(self) -> bytes | None:
        """The data of the next whole event; None if more has to come."""
        while (end := self._buffer.find(b"\n", self._searched)) >= 0:
            line = bytes(self._buffer[:end]).removesuffix(b"\r")
            del self._buffer[: end + 1]
            self._searched = 0
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                data, self._data = b"\n".join(self._data), []
                return data
        # What has been looked through once need not be looked through again with the next piece.
        self._searched = len(self._buffer)
        return None
