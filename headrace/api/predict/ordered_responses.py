# SPDX-License-Identifier: Apache-2.0
"""Responses in the order of their requests, on a connection that carries many of both.

The WebSocket and `PredictStream` use it. Requests are computed concurrently; a response waits for those before it. A client
that sends faster than the server computes, or does not read, is paused (backpressure).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

MOST_REQUESTS = 64
MOST_REQUEST_BYTES = 16 * 1024 * 1024
"""Unanswered requests of one connection, and their bytes, before the client is paused."""
MOST_UNREAD_BYTES = 16 * 1024 * 1024
"""Unsent bytes of responses, above which `overflow` is called: a decoupled model cannot be paused."""


class ResponseSlot:
    """One request's slot in the order."""

    __slots__ = ("_queue", "_responses", "cancel", "over", "size")

    def __init__(self, responses: OrderedResponses, size: int) -> None:
        self._responses = responses
        self._queue: deque[tuple[Any, int]] = deque()
        self.size = size
        self.cancel: Callable[[], object] | None = None
        """Called if the connection closes before the response."""
        self.over = False

    def put(self, message: Any, size: int = 0, *, last: bool = True) -> None:
        """Add a response."""
        if not self.over:
            self._queue.append((message, size))
            self.over = last
            self._responses.answered(size)

    def end(self) -> None:
        """Finish without another response."""
        if not self.over:
            self.over = True
            self._responses.answered(0)

    def take(self) -> tuple[Any, int] | None:
        """Return the next response to send, if there is one; for `OrderedResponses`."""
        return self._queue.popleft() if self._queue else None


class OrderedResponses:
    """Orders the responses of a connection. `begin` gets each request and its slot; it may respond at once, never raises."""

    def __init__(
        self,
        begin: Callable[[ResponseSlot, Any], None],
        send: Callable[[Any], bool],
        pause: Callable[[], None],
        resume: Callable[[], None],
        overflow: Callable[[], None],
    ) -> None:
        self._begin = begin
        self._send = send
        self._pause = pause
        self._resume = resume
        self._overflow = overflow
        self.on_empty: Callable[[], None] | None = None
        """Called when all requests are answered and all responses sent."""
        self._slots: deque[ResponseSlot] = deque()
        self._backlog: deque[tuple[Any, int]] = deque()
        self._bytes = 0
        self._unsent = 0
        self._writable = True
        self._paused = False
        self._busy = False
        self._closed = False

    @property
    def empty(self) -> bool:
        """Whether no request is unanswered."""
        return not self._slots and not self._backlog

    def submit(self, request: Any, size: int) -> None:
        """Start a request, or queue it if there are too many."""
        if self._closed:
            return
        # Requests that were received before the client was paused still arrive.
        if self._backlog or self._full:
            self._backlog.append((request, size))
        else:
            self._open(request, size)
        if self._full and not self._paused and not self._closed:
            self._paused = True
            self._pause()

    def writable(self) -> None:
        """Continue sending: the client reads again."""
        self._writable = True
        self._flush()

    def answered(self, size: int) -> None:
        """Send what can be sent: a slot has a response; for `ResponseSlot`."""
        self._unsent += size
        self._flush()
        if self._unsent > MOST_UNREAD_BYTES and not self._closed:
            self._overflow()

    def close(self) -> None:
        """Cancel all requests: the connection is closed."""
        self._closed = True
        slots, self._slots = self._slots, deque()
        self._backlog.clear()
        for slot in slots:
            slot.over = True
            if slot.cancel is not None:
                slot.cancel()

    @property
    def _full(self) -> bool:
        return not self._writable or len(self._slots) >= MOST_REQUESTS or self._bytes >= MOST_REQUEST_BYTES

    def _open(self, request: Any, size: int) -> None:
        slot = ResponseSlot(self, size)
        self._slots.append(slot)
        self._bytes += size
        self._begin(slot, request)

    def _flush(self) -> None:
        """Send responses in order, then start queued requests. Never runs recursively."""
        if self._busy or self._closed:
            return
        self._busy = True
        try:
            self._write()
            while self._backlog and not self._full and not self._closed:
                self._open(*self._backlog.popleft())
                self._write()
        finally:
            self._busy = False
        self._resume_if_possible()

    def _resume_if_possible(self) -> None:
        """Resume a paused client if there is capacity; call `on_empty` if nothing is left."""
        if self._closed:
            return
        if self._paused and not self._backlog and not self._full:
            self._paused = False
            self._resume()
        if self.empty and self.on_empty is not None and not self._closed:
            self.on_empty()

    def _write(self) -> None:
        while self._slots and self._writable and not self._closed:
            slot = self._slots[0]
            response = slot.take()
            if response is not None:
                self._unsent -= response[1]
                self._writable = self._send(response[0])
            elif slot.over:
                self._slots.popleft()
                self._bytes -= slot.size
            else:
                return
