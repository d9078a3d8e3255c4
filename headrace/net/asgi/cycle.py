# SPDX-License-Identifier: Apache-2.0
"""One HTTP request through an application: `receive` and `send` on top of an exchange's callbacks. Made by `app`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

from headrace.net.asgi.scope import Application, ClientGone, Message, Scope
from headrace.net.http.heads import Field, ResponseHead, check_field

if TYPE_CHECKING:
    from headrace.net.http.exchange import Exchange

log = logging.getLogger("headrace.net.asgi")

_WAITING_BYTES = 256 * 1024
"""Body bytes kept for an application that has not asked for them; then the client is held back."""

_OURS = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"date"))
"""Response fields that are the server's business and not the application's."""


class HttpCycle:
    """See the module."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._pieces: list[bytes] = []
        self._waiting_bytes = 0
        self._body_ended = False
        self._end_told = False
        self._held_back = False
        self._gone = False
        self._incoming = asyncio.Event()
        self._writable = asyncio.Event()
        self._response: tuple[int, list[Field]] | None = None
        self._streaming = False
        self._complete = False
        self._length: int | None = None
        exchange.on_body = self._on_body
        exchange.on_body_end = self._on_body_end
        exchange.on_disconnect = self._on_disconnect
        exchange.on_writable = self._writable.set

    async def run(self, app: Application, scope: Scope) -> None:
        """Call the application and see to it that the client gets an end, whatever the application does."""
        try:
            await app(scope, self.receive, self.send)
        except asyncio.CancelledError:
            if not self._complete:
                self._exchange.abort()
            raise
        except Exception as error:
            if self._gone:
                report_late(error, scope)
            elif self._complete:
                log.error("an application failed after it had answered", exc_info=error, extra={"path": scope["path"]})
            else:
                self._exchange.fail(error)
        else:
            if not self._complete and not self._gone:
                self._exchange.fail(RuntimeError("the application returned without a whole response"))
        finally:
            self._complete = True
            self._let_body_come()

    async def receive(self) -> Message:
        """The next piece of the body, or `http.disconnect` once there is nobody to talk to."""
        while True:
            if self._pieces:
                body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
                self._pieces = []
                self._waiting_bytes = 0
                self._let_body_come()
                self._end_told = self._body_ended
                return {"type": "http.request", "body": body, "more_body": not self._body_ended}
            if self._gone or self._complete:
                return {"type": "http.disconnect"}
            if self._body_ended and not self._end_told:
                self._end_told = True
                return {"type": "http.request", "body": b"", "more_body": False}
            self._incoming.clear()
            await self._incoming.wait()

    async def send(self, message: Message) -> None:
        """Take a piece of the response; returns when the client has room for more."""
        kind = message["type"]
        if kind == "http.response.start":
            if self._response is not None:
                raise RuntimeError("http.response.start was sent twice")
            self._response = message["status"], response_fields(message.get("headers", ()))
        elif kind != "http.response.body":
            raise RuntimeError(f"{kind!r} is not a message for an HTTP response")
        elif self._response is None or self._complete:
            raise RuntimeError("http.response.body belongs between http.response.start and the last body message")
        else:
            await self._send_body(*self._response, message.get("body", b""), message.get("more_body", False))

    async def _send_body(self, status: int, fields: list[Field], body: bytes, more: bool) -> None:
        if self._gone:
            # Only a stream has to be stopped; a response that is whole by now leaves its background tasks to run.
            if more:
                raise ClientGone("the client has gone")
            self._complete = True
            return
        exchange = self._exchange
        if not self._streaming:
            if not more and exchange.head.method != b"HEAD" and not _names(fields, b"content-encoding"):
                whole = [field for field in fields if field[0] != b"content-length"]
                exchange.respond(_head(status), body, whole)
                self._completed()
                return
            self._streaming = True
            self._length = _length(fields) if exchange.head.method != b"HEAD" else None
            exchange.start(_head(status), fields)
        self._count(len(body), more)
        has_room = exchange.send(body) if body and exchange.head.method != b"HEAD" else True
        if not more:
            exchange.finish()
            self._completed()
        elif not has_room:
            self._writable.clear()
            await self._writable.wait()

    def _completed(self) -> None:
        # Only after the exchange took it: a body that is no bytes, say, can still be answered by an error.
        self._complete = True
        self._incoming.set()

    def _count(self, size: int, more: bool) -> None:
        if self._length is None:
            return
        self._length -= size
        if self._length < 0 or (self._length and not more):
            # On a kept connection the client would take what follows for the body, or the body for what follows.
            raise RuntimeError("the body is not as long as the application's content-length says")

    # Called by the exchange.

    def _on_body(self, piece: bytes) -> None:
        if self._complete:
            return
        self._pieces.append(piece)
        self._waiting_bytes += len(piece)
        if self._waiting_bytes > _WAITING_BYTES and not self._held_back:
            self._held_back = True
            self._exchange.pause_body()
        self._incoming.set()

    def _on_body_end(self) -> None:
        self._body_ended = True
        self._incoming.set()

    def _on_disconnect(self) -> None:
        self._gone = True
        self._incoming.set()
        self._writable.set()

    def _let_body_come(self) -> None:
        if self._held_back:
            self._held_back = False
            self._exchange.resume_body()


def report_late(error: Exception, scope: Scope) -> None:
    """Log what an application let fly after its client had gone: frameworks raise when they notice that."""
    log.info("an application stopped after its client had gone", exc_info=error, extra={"path": scope["path"]})


def response_fields(headers: Iterable[Iterable[bytes]]) -> list[Field]:
    """An application's response fields without those that are ours; refuses what would split a head."""
    fields: list[Field] = []
    for name, value in headers:
        field = bytes(name).lower(), bytes(value)
        check_field(*field)
        if field[0] not in _OURS:
            fields.append(field)
    return fields


def _names(fields: list[Field], wanted: bytes) -> bool:
    return any(name == wanted for name, _ in fields)


def _length(fields: list[Field]) -> int | None:
    for name, value in fields:
        if name == b"content-length":
            return int(value)
    return None


@lru_cache(maxsize=64)
def _head(status: int) -> ResponseHead:
    return ResponseHead(status)
