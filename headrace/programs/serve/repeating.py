# SPDX-License-Identifier: Apache-2.0
"""Requests that change what a server knows, repeated in every worker: log and trace settings, shared memory, traffic.

A client speaks to one worker; its next connection may reach another, which has to know the same. So the worker that is
asked has the others hear the request as it came, and then answers it itself. What was repeated is remembered, for a worker
that starts later. Knows nothing of what such a request says.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

from headrace.net.grpc.call import GrpcCall
from headrace.net.grpc.services import UnaryHandler
from headrace.net.http.exchange import Body, Exchange, Handler
from headrace.net.http.heads import Fields, RequestHead, ResponseHead
from headrace.programs.serve.loading import only_one
from headrace.programs.serve.siblings import Siblings

log = logging.getLogger("headrace.apps")

_REPEAT, _SO_FAR = "repeat", "repeated so far"
_PATIENCE_SECONDS = 5.0
_REMEMBERED = 4096
"""Requests for workers that start later; of more, the oldest are forgotten."""

Deed = dict[str, Any]
"""A request, as JSON."""


class Repeating:
    """One worker's part in it."""

    def __init__(self, siblings: Siblings) -> None:
        self._siblings = siblings
        self._handlers: dict[str, Handler | UnaryHandler] = {}
        self._so_far: dict[str, Deed] = {}

    def start(self) -> None:
        """Do what the others are asked to."""
        self._siblings.answer(_REPEAT, self._repeat)
        self._siblings.answer(_SO_FAR, self._tell)

    async def catch_up(self) -> None:
        """Do what the others were asked to before this worker started."""
        answers = await self._siblings.ask_all(_SO_FAR, seconds=_PATIENCE_SECONDS)
        known = [answer for answer in answers.values() if isinstance(answer, list)]
        for deed in max(known, key=len, default=[]):
            await self._repeat(deed)

    def know(self, name: str, handler: Handler | UnaryHandler) -> None:
        """Whom to give a request of this name that another worker has received."""
        self._handlers[name] = handler

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Keep other workers from doing the same: else two who are asked at once would do it in different orders."""
        async with only_one(self._siblings.folder / "repeating.lock"):
            yield

    async def everywhere(
        self, name: str, head: RequestHead, body: bytes, params: tuple[str, ...] = (), *, here: bool = False
    ) -> None:
        """Have all other workers hear a request, and this one too if it is to. One that is away hears it when it is back."""
        deed = {
            "name": name,
            "method": head.method.decode("latin-1"),
            "target": head.path.decode("latin-1"),
            "fields": [[key.decode("latin-1"), value.decode("latin-1")] for key, value in head.fields],
            "version": head.version,
            "body": base64.b64encode(body).decode(),
            "params": params,
        }
        self._remember(deed)
        await self._siblings.ask_all(_REPEAT, deed, seconds=_PATIENCE_SECONDS)
        if here:
            await self._repeat({**deed, "params": list(params)})

    async def _tell(self, _arguments: Any) -> list[Deed]:
        return list(self._so_far.values())

    async def _repeat(self, deed: Deed) -> None:
        self._remember(deed)
        handler = self._handlers[deed["name"]]
        fields = [(key.encode("latin-1"), value.encode("latin-1")) for key, value in deed["fields"]]
        target = deed["target"].encode("latin-1")
        head = RequestHead(deed["method"].encode("latin-1"), target, fields, version=deed["version"])
        body = base64.b64decode(deed["body"])
        answered = asyncio.Event()
        if deed["name"].startswith("/"):
            call = cast("GrpcCall", _QuietCall(head, answered.set))
            _guarded(lambda: cast("UnaryHandler", handler)(call, body), call.fail)
        else:
            exchange = _QuietExchange(head, body, tuple(deed["params"]), answered.set)
            _guarded(lambda: cast("Handler", handler)(exchange), exchange.fail)
        await answered.wait()

    def _remember(self, deed: Deed) -> None:
        if deed["target"].startswith("/console/"):
            return  # what somebody watches for a minute is nothing for a worker that starts later
        # To register and to unregister a region are about the same thing: only the last one counts.
        about = f"{deed['method']} {deed['target']} {deed['body']}"
        if "region" in deed["target"] and not deed["target"].startswith("/admin/"):
            about = deed["target"].rpartition("/")[0]
        self._so_far.pop(about, None)
        self._so_far[about] = deed
        if len(self._so_far) > _REMEMBERED:
            del self._so_far[next(iter(self._so_far))]


def _guarded(do: Callable[[], None], fail: Callable[[BaseException], None]) -> None:
    try:
        do()
    except Exception as error:
        fail(error)


class _QuietExchange(Exchange):
    """A request that was received elsewhere and is answered there."""

    on_disconnect = on_body = on_body_end = on_writable = None
    peer = "another worker"
    started = False
    closed = False

    def __init__(self, head: RequestHead, body: bytes, params: tuple[str, ...], answered: Callable[[], None]) -> None:
        self.head, self.body, self.params = head, body, params
        self._answered = answered

    def respond(self, head: ResponseHead, body: Body = b"", extra: Fields = ()) -> None:
        if head.status >= 400:  # as it will be where it was received
            log.debug("%s was answered with status %d in this worker", self.head.path, head.status)
        self._answered()


class _QuietCall:
    """The same for a gRPC call."""

    over = False
    peer = "another worker"

    def __init__(self, head: RequestHead, answered: Callable[[], None]) -> None:
        self.head = head
        self._answered = answered

    def reply(self, message: object) -> None:
        self._answered()

    def fail(self, error: BaseException) -> None:
        log.debug("%s failed in this worker: %s", self.head.path, error)
        self._answered()
