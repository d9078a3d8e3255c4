# SPDX-License-Identifier: Apache-2.0
"""Receives a large body straight into its own memory.

A connection reads through `data_received`, which is the cheaper way for small requests. For a body that is longer than a
read it puts this protocol in its place: the kernel then writes the body where it will stay, and nothing copies it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.net.http1.protocol import Http1Protocol


class BodyReceiver(asyncio.BufferedProtocol):
    """Stands in for a connection while a body arrives; everything but the body is the connection's."""

    def __init__(self, connection: Http1Protocol) -> None:
        self._connection = connection

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes should go: the rest of the body, and nothing after it."""
        return self._connection.body_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have arrived there."""
        self._connection.body_received(nbytes)

    def eof_received(self) -> bool:
        """See `Http1Protocol.eof_received`."""
        return self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `Http1Protocol.connection_lost`."""
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        """See `Http1Protocol.pause_writing`."""
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        """See `Http1Protocol.resume_writing`."""
        self._connection.resume_writing()
