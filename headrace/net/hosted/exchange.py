# SPDX-License-Identifier: Apache-2.0
"""One request that came through ASGI, and its response as ASGI messages. Made by `app`, used by handlers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from headrace.net.hosted.websocket import HostedWebSocket
from headrace.net.http.exchange import Body, Buffer, Exchange, encoded, listed
from headrace.net.http.heads import Fields, RequestHead, ResponseHead, check_field

if TYPE_CHECKING:
    from headrace.net.websocket.accept import OnOpen
    from headrace.net.websocket.contract import WebSocket

_WAITING_BYTES = 256 * 1024
"""What may wait to be sent before a handler is asked to wait."""


class HostedExchange(Exchange):
    """See `Exchange`. Messages go to `outgoing`, which `app` empties in order."""

    def __init__(self, head: RequestHead, peer: str, params: tuple[str, ...]) -> None:
        self.head = head
        self.body = b""
        self.params = params
        self.on_disconnect = None
        self.on_body = None
        self.on_body_end = None
        self.on_writable = None
        self._peer = peer
        self.outgoing: deque[dict[str, Any]] = deque()
        self.changed = asyncio.Event()
        """Set when there is something to send, or to end."""
        self.flowing = asyncio.Event()
        """Set while the handler, or the WebSocket's owner, takes what the client sends."""
        self.flowing.set()
        self.gone = False
        """The client, or the response: nothing more will be sent."""
        self._started = False
        self.finished = False
        self._waiting_bytes = 0
        self._full = False
        self.websocket: HostedWebSocket | None = None

    @property
    def peer(self) -> str:
        """See `Exchange.peer`."""
        return self._peer

    @property
    def started(self) -> bool:
        """See `Exchange.started`."""
        return self._started

    @property
    def closed(self) -> bool:
        """See `Exchange.closed`."""
        return self.finished or self.gone

    def respond(self, head: ResponseHead, body: Body = b"", extra: Fields = ()) -> None:
        """See `Exchange.respond`."""
        if self._started or self.closed:
            return
        buffers = listed(body)
        accept = self.head.get(b"accept-encoding")
        if accept is not None:
            buffers, extra = encoded(accept, head, buffers, extra)
        whole = buffers[0] if len(buffers) == 1 else b"".join(buffers)
        length = (b"content-length", b"%d" % len(whole))
        self._start(head, (*extra, length) if head.status >= 200 and head.status not in (204, 304) else extra)
        self._put_body(b"" if self.head.method == b"HEAD" else whole, more=False)
        self._end()

    def start(self, head: ResponseHead, extra: Fields = ()) -> None:
        """See `Exchange.start`."""
        if not self._started and not self.closed:
            self._start(head, extra)
            self.changed.set()

    def send(self, data: Buffer) -> bool:
        """See `Exchange.send`."""
        if self._started and not self.closed and len(data) and self.head.method != b"HEAD":
            self._put_body(data, more=True)
            self.changed.set()
        return not self._full

    def finish(self) -> None:
        """See `Exchange.finish`."""
        if self._started and not self.closed:
            self._put_body(b"", more=False)
            self._end()

    def abort(self) -> None:
        """See `Exchange.abort`. The host cuts what an application leaves unfinished."""
        if not self.closed:
            self.gone = True
            self.outgoing.clear()
            self._end()

    def pause_body(self) -> None:
        """See `Exchange.pause_body`."""
        self.flowing.clear()

    def resume_body(self) -> None:
        """See `Exchange.resume_body`."""
        self.flowing.set()

    def open_websocket(self, on_open: OnOpen, subprotocols: Sequence[str], extra: Fields) -> WebSocket | None:
        """See `websocket.accept.OpensWebSockets`."""
        if self._started or self.closed:
            return None
        self._started = True
        offered = [
            text.strip() for text in (self.head.get(b"sec-websocket-protocol") or b"").decode("latin-1").split(",")
        ]
        chosen = next((name for name in subprotocols if name in offered), None)
        self.websocket = HostedWebSocket(self, chosen)
        fields = _checked((*extra, *_fields(self.more_lines)))
        self.outgoing.append({"type": "websocket.accept", "subprotocol": chosen, "headers": fields})
        self.websocket.guard(on_open, self.websocket)
        self.changed.set()
        return self.websocket

    # Called by `app` and `websocket`.

    def put(self, message: dict[str, Any], size: int) -> bool:
        """Line a message up; False when enough are waiting."""
        self.outgoing.append(message)
        self._waiting_bytes += size
        if self._waiting_bytes > _WAITING_BYTES:
            self._full = True
        self.changed.set()
        return not self._full

    def sent(self) -> None:
        """Everything lined up has been sent."""
        self._waiting_bytes = 0
        if self._full:
            self._full = False
            told = self.websocket.on_writable if self.websocket is not None else self.on_writable
            if told is not None and not self.closed:
                self.guard(told)

    def disconnected(self) -> None:
        """The client has gone."""
        if not self.closed:
            self.gone = True
            self._end()
            if self.on_disconnect is not None:
                self.guard(self.on_disconnect)

    def guard(self, callback: Callable[..., object], *arguments: object) -> None:
        """Call the handler's room; what it raises is the answer, or the end."""
        try:
            callback(*arguments)
        except Exception as error:
            self.fail(error)

    def _start(self, head: ResponseHead, extra: Fields) -> None:
        fields = [*head.fields, *_checked((*extra, *_fields(self.more_lines)))]
        self._started = True
        self.outgoing.append({"type": "http.response.start", "status": head.status, "headers": fields})

    def _put_body(self, data: Buffer, *, more: bool) -> None:
        self.put({"type": "http.response.body", "body": bytes(data), "more_body": more}, len(data))

    def _end(self) -> None:
        self.finished = True
        self.changed.set()
        if self.on_over is not None:
            self.on_over()


def _fields(lines: bytes) -> list[tuple[bytes, bytes]]:
    """`Exchange.more_lines`, one by one."""
    pairs = (line.partition(b": ") for line in lines.split(b"\r\n") if line)
    return [(name, value) for name, _, value in pairs]


def _checked(fields: Fields) -> list[tuple[bytes, bytes]]:
    for name, value in fields:
        check_field(name, value)
    return list(fields)
