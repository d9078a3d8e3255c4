# SPDX-License-Identifier: Apache-2.0
"""One WebSocket through an application: `receive` and `send` on top of a `WebSocket`. Made by `app`."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from headrace.core.errors import PermissionDenied
from headrace.net.asgi.cycle import report_late, response_fields
from headrace.net.asgi.scope import Application, ClientGone, Message, Scope
from headrace.net.http.heads import Field, ResponseHead
from headrace.net.websocket import closing
from headrace.net.websocket.accept import accept, any_origin

if TYPE_CHECKING:
    from headrace.net.http.exchange import Exchange
    from headrace.net.websocket.contract import WebSocket

_WAITING_MESSAGES = 16
_WAITING_BYTES = 256 * 1024
"""Messages, and bytes of them, kept for an application that has not asked for them; then the client is held back."""


class WebSocketSession:
    """See the module. The application decides about Origin, as ASGI has it: the field is in its scope."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._connection: WebSocket | None = None
        self._messages: deque[Message] = deque([{"type": "websocket.connect"}])
        self._waiting_bytes = 0
        self._incoming = asyncio.Event()
        self._writable = asyncio.Event()
        self._denial: tuple[int, list[Field]] | None = None
        self._denial_body: list[bytes] = []
        self._closed_by_app = False
        self._gone: Message | None = None
        exchange.on_disconnect = lambda: self._on_close(closing.ABNORMAL, "")

    async def run(self, app: Application, scope: Scope) -> None:
        """Call the application and see to it that the client gets an end, whatever the application does."""
        try:
            await app(scope, self.receive, self.send)
        except asyncio.CancelledError:
            if self._connection is not None:
                self._connection.close(closing.GOING_AWAY, "the server is shutting down")
            else:
                self._exchange.abort()
            raise
        except Exception as error:
            if self._gone is not None:
                report_late(error, scope)
            elif self._connection is not None:
                self._connection.fail(error)
            else:
                self._exchange.fail(error)
        else:
            if self._connection is not None:
                self._connection.close(closing.NORMAL)
            elif not self._exchange.closed:
                self._exchange.fail(RuntimeError("the application neither accepted nor refused the WebSocket"))

    async def receive(self) -> Message:
        """The next message, or `websocket.disconnect` for ever after the end."""
        while True:
            if self._messages:
                message = self._messages.popleft()
                self._waiting_bytes -= _size(message)
                if self._connection is not None and not self._is_full():
                    self._connection.resume_messages()
                return message
            if self._gone is not None:
                return self._gone
            self._incoming.clear()
            await self._incoming.wait()

    async def send(self, message: Message) -> None:
        """Take a message; returns when the client has room for more."""
        kind = message["type"]
        if self._closed_by_app:
            raise RuntimeError(f"{kind!r} after the WebSocket was closed or refused")
        if self._gone is not None:
            if kind == "websocket.close":
                return
            raise ClientGone("the client has gone")
        if self._connection is not None:
            await self._send_open(self._connection, kind, message)
        elif kind == "websocket.accept":
            self._accept(message)
        elif kind == "websocket.close":
            self._closed_by_app = True
            self._exchange.fail(PermissionDenied("the application refused the WebSocket"))
        elif kind == "websocket.http.response.start" and self._denial is None:
            self._denial = message["status"], response_fields(message.get("headers", ()))
        elif kind == "websocket.http.response.body" and self._denial is not None:
            self._deny(message)
        else:
            raise RuntimeError(f"{kind!r} is not expected before websocket.accept")

    async def _send_open(self, connection: WebSocket, kind: str, message: Message) -> None:
        if kind == "websocket.send":
            data = message.get("text")
            if data is None:
                data = message["bytes"]
            if not connection.send(data):
                self._writable.clear()
                if self._gone is None:
                    await self._writable.wait()
        elif kind == "websocket.close":
            self._closed_by_app = True
            connection.close(message.get("code", closing.NORMAL), message.get("reason") or "")
        else:
            raise RuntimeError(f"{kind!r} is not expected after websocket.accept")

    def _accept(self, message: Message) -> None:
        chosen = message.get("subprotocol")
        extra = response_fields(message.get("headers", ()))
        connection = accept(
            self._exchange,
            self._opened,
            subprotocols=() if chosen is None else (chosen,),
            check_origin=any_origin,
            extra=extra,
        )
        if connection is None:
            # Refused because the server drains, or the client left while the application was thinking.
            self._on_close(closing.ABNORMAL, "")

    def _opened(self, connection: WebSocket) -> None:
        self._connection = connection
        connection.on_message = self._on_message
        connection.on_close = self._on_close
        connection.on_writable = self._writable.set

    def _deny(self, message: Message) -> None:
        self._denial_body.append(message.get("body", b""))
        if self._denial is None or message.get("more_body", False):
            return
        self._closed_by_app = True
        status, fields = self._denial
        fields = [field for field in fields if field[0] != b"content-length"]
        self._exchange.respond(ResponseHead(status), self._denial_body, fields)

    # Called by the connection.

    def _on_message(self, message: str | bytes) -> None:
        key = "text" if isinstance(message, str) else "bytes"
        self._messages.append({"type": "websocket.receive", key: message})
        self._waiting_bytes += len(message)
        if self._connection is not None and self._is_full():
            self._connection.pause_messages()
        self._incoming.set()

    def _on_close(self, code: int, reason: str) -> None:
        if self._gone is None:
            self._gone = {"type": "websocket.disconnect", "code": code, "reason": reason}
        self._incoming.set()
        self._writable.set()

    def _is_full(self) -> bool:
        return len(self._messages) >= _WAITING_MESSAGES or self._waiting_bytes >= _WAITING_BYTES


def _size(message: Message) -> int:
    return len(message.get("text") or message.get("bytes") or b"")
