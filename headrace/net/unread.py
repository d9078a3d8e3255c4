# SPDX-License-Identifier: Apache-2.0
"""Notices a client that has stopped reading, or does not hang up. Asked by the sweeps of `http1` and `http2`."""

from __future__ import annotations

import asyncio
from typing import Protocol

LINGER_SECONDS = 2.0
"""How long a closing connection still reads, so that a reset does not eat the response on its way."""


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


class Swept(Protocol):
    """A connection, as far as it is swept while it is being closed."""

    def sweep_unread(self, now: float) -> None:
        """Cut it if the client has stopped reading."""

    def abort(self) -> None:
        """Cut it."""


def sweep_closing(connection: Swept, transport: asyncio.WriteTransport, closing_at: float, now: float) -> float:
    """Cut a connection that is being closed if its time is over; returns when that will be."""
    if transport.get_write_buffer_size():
        # Answers are still on their way: they have the time that every answer has, and the linger begins after it.
        connection.sweep_unread(now)
        return now + LINGER_SECONDS
    if now >= closing_at:
        connection.abort()
    return closing_at
