# SPDX-License-Identifier: Apache-2.0
"""A WebSocket whose connection another server has: messages go and come as ASGI's. Made by `exchange`, fed by `app`."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from headrace.net.websocket import closing
from headrace.net.websocket.contract import WebSocket

if TYPE_CHECKING:
    from headrace.net.hosted.exchange import HostedExchange
    from headrace.net.http.exchange import Buffer


class HostedWebSocket(WebSocket):
    """See `WebSocket`. Pings, and clients that fall silent, are the host's business."""

    def __init__(self, exchange: HostedExchange, subprotocol: str | None) -> None:
        self.head = exchange.head
        self.peer = exchange.peer
        self.subprotocol = subprotocol
        self._exchange = exchange
        self._closed = False
        self._arrived: deque[str | bytes] = deque()

    @property
    def closed(self) -> bool:
        """See `WebSocket.closed`."""
        return self._closed or self._exchange.gone

    def send(self, message: str | Buffer) -> bool:
        """See `WebSocket.send`."""
        if self.closed:
            return False
        if isinstance(message, str):
            return self._exchange.put({"type": "websocket.send", "text": message}, len(message))
        return self._exchange.put({"type": "websocket.send", "bytes": bytes(message)}, len(message))

    def close(self, code: int = closing.NORMAL, reason: str = "") -> None:
        """See `WebSocket.close`."""
        if not closing.may_be_sent(code):
            raise ValueError(f"{code} may not be sent in a close frame: use 1000 to 1014 or 3000 to 4999")
        if not self.closed:
            self._closed = True
            self._exchange.flowing.set()
            message = {"type": "websocket.close", "code": code, "reason": closing.fit_reason(reason)}
            self._exchange.put(message, 0)

    def pause_messages(self) -> None:
        """See `WebSocket.pause_messages`."""
        if not self._closed:
            self._exchange.flowing.clear()

    def resume_messages(self) -> None:
        """See `WebSocket.resume_messages`."""
        self._exchange.flowing.set()
        self._deliver()

    # Called by `app`.

    def arrived(self, message: str | bytes) -> None:
        """A message has come."""
        self._arrived.append(message)
        self._deliver()

    def ended(self, code: int, reason: str) -> None:
        """The connection is gone."""
        self._closed = True
        self.told_closed(code, reason)

    def _deliver(self) -> None:
        while self._arrived and self._exchange.flowing.is_set() and not self._closed:
            message = self._arrived.popleft()
            if self.on_message is not None:
                self.guard(self.on_message, message)
