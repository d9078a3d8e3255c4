# SPDX-License-Identifier: Apache-2.0
"""Notices a client that has stopped reading what it is sent. Asked by the sweeps of `http1` and `http2`."""

from __future__ import annotations

import asyncio


class UnreadWatch:
    """Watches one connection's unsent bytes from sweep to sweep."""

    __slots__ = ("_bytes", "_since")

    def __init__(self) -> None:
        self._bytes = 0
        self._since = 0.0

    def begin(self, now: float) -> None:
        """The socket is full: the client's time runs from here."""
        self._since = now

    def gave_up(self, transport: asyncio.WriteTransport, now: float, seconds: float) -> bool:
        """Whether the client has taken nothing for so long. That we have written more meanwhile is no sign of life."""
        unread = transport.get_write_buffer_size()
        if unread < self._bytes:
            self._since = now
        self._bytes = unread
        return now - self._since > seconds
