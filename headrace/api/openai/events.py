# SPDX-License-Identifier: Apache-2.0
"""A stream of chunks on an exchange: the head goes out with the first of them, so that an error before it has a status.

Used by `streams` and `passing`. A model cannot be held back, so a client that leaves too much unread is cut off.
"""

from __future__ import annotations

import logging

from headrace.api.openai.errors import error_json, fail
from headrace.core.errors import HeadraceError
from headrace.net.http.exchange import Exchange
from headrace.net.http.sse import EventStream

log = logging.getLogger("headrace.api")

_DONE = b"[DONE]"


class Chunks:
    """One streamed response."""

    def __init__(self, exchange: Exchange, most_unread_bytes: int) -> None:
        self._exchange = exchange
        self._most = most_unread_bytes
        self._events: EventStream | None = None

    def send(self, chunk: bytes) -> None:
        """Send one."""
        events = self._events
        if events is None:
            events = self._events = EventStream(self._exchange)
        events.send_within(self._most, chunk)

    def finish(self) -> None:
        """All were sent."""
        self.send(_DONE)
        if self._events is not None and not self._events.closed:
            self._events.finish()

    def fail(self, error: BaseException) -> None:
        """Tell an error: by a status, or as the stream's last event."""
        if self._events is None:
            fail(self._exchange, error)
            return
        if not isinstance(error, HeadraceError):
            log.error("a stream of answers failed", exc_info=error)
        if not self._events.closed:
            self._events.send(error_json(error)[1])
            self._events.finish()
