# SPDX-License-Identifier: Apache-2.0
"""Server-Sent Events on an exchange: one event is one `send` of a streamed response.

Made by handlers that stream text (tokens, progress); works on every HTTP version because it only uses `Exchange`.
Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import lru_cache

from headrace.core.errors import ResourceExhausted
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import CONTENT_TYPE, Fields, ResponseHead

EVENT_STREAM = b"text/event-stream; charset=utf-8"

# x-accel-buffering: otherwise nginx buffers events until its buffer is full.
_HEAD = ResponseHead(
    200, [(CONTENT_TYPE, EVENT_STREAM), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
)
_LINE_END = re.compile(rb"\r\n|\r|\n")
_PING = b": ping\n\n"


class EventStream:
    """A streamed response of events. Uses the exchange's `on_writable` and `on_disconnect`; set them here instead."""

    def __init__(self, exchange: Exchange, *, extra: Fields = (), ping_seconds: float | None = None) -> None:
        """Send the response head. `ping_seconds` keeps proxies from closing a silent stream."""
        self.on_writable: Callable[[], None] | None = None
        """Called when `send` may be called again after it returned False."""
        self.on_disconnect: Callable[[], None] | None = exchange.on_disconnect
        """Called once if the client disconnects before `finish`."""
        self._exchange = exchange
        self._blocked = False
        self._unread = 0
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        exchange.on_writable = self._writable
        exchange.on_disconnect = self._disconnected
        exchange.start(_HEAD, extra)
        if ping_seconds is not None:
            self._ping_after(ping_seconds)

    @property
    def closed(self) -> bool:
        """Whether the stream is finished or the client has disconnected."""
        return self._exchange.closed

    def send(self, data: str | bytes, event: str | None = None, id: str | None = None) -> bool:
        """Send one event. False asks the caller to wait for `on_writable`."""
        return self._write(encode_event(data, event, id))

    def send_within(self, most_unread_bytes: int, data: str | bytes, event: str | None = None) -> None:
        """Send one event from a sender that cannot wait; abort if the client leaves more than this unread."""
        if self._blocked:
            self._unread += len(data)
            if self._unread > most_unread_bytes:
                self.abort()
                raise ResourceExhausted(f"the client left {self._unread} bytes of its stream unread")
        self.send(data, event)

    async def send_wait(self, data: str | bytes, event: str | None = None, id: str | None = None) -> bool:
        """Send one event and wait until another may be sent. Return False if the client has disconnected."""
        if not self.send(data, event, id) and not self.closed:
            if self._waiter is None:
                self._waiter = asyncio.get_running_loop().create_future()
            # Shielded: a cancelled caller must not cancel what others wait for.
            await asyncio.shield(self._waiter)
        return not self.closed

    def ping(self) -> bool:
        """Send a comment, which readers ignore. Nothing is sent while the client does not read."""
        return False if self._blocked else self._write(_PING)

    def finish(self) -> None:
        """End the stream."""
        self._stop()
        self._exchange.finish()

    def abort(self) -> None:
        """Abort the stream, so that the client sees that it was not finished."""
        self._stop()
        self._exchange.abort()

    def _write(self, data: bytes) -> bool:
        if self._exchange.closed:
            return False
        self._blocked = not self._exchange.send(data)
        return not self._blocked

    def _writable(self) -> None:
        self._blocked = False
        self._unread = 0
        self._wake()
        if self.on_writable is not None:
            self.on_writable()

    def _disconnected(self) -> None:
        self._stop()
        if self.on_disconnect is not None:
            self.on_disconnect()

    def _ping_after(self, seconds: float) -> None:
        def fire() -> None:
            self.ping()
            self._ping_after(seconds)

        self._timer = asyncio.get_running_loop().call_later(seconds, fire)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def encode_event(data: str | bytes, event: str | None = None, id: str | None = None) -> bytes:
    """Return the bytes of one event; every line of `data` gets its own field, and readers join them again."""
    head = b"" if event is None else _event_line(event)
    if id is not None:
        if "\0" in id:
            raise ValueError("an event's id must not contain NUL: readers would ignore it")
        head += b"id: %b\n" % _one_line("id", id)
    body = data.encode() if isinstance(data, str) else data
    if b"\n" in body or b"\r" in body:
        body = b"\ndata: ".join(_LINE_END.split(body))
    return b"%bdata: %b\n\n" % (head, body)


@lru_cache(maxsize=128)
def _event_line(event: str) -> bytes:
    """Return the field of an event's name. Streams have few names, and repeat them for every token."""
    return b"event: %b\n" % _one_line("event", event)


def _one_line(name: str, value: str) -> bytes:
    if "\n" in value or "\r" in value:
        raise ValueError(f"an event's {name} must not contain line breaks")
    return value.encode()
