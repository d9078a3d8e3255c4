# SPDX-License-Identifier: Apache-2.0
"""The routes and services of one of several workers: which requests are for all of them.

Stand in for `Routes` and `Services` where a server has several workers. A request for numbers waits until they are gathered
(`gathering`); one that changes what the server knows is heard by all (`repeating`); any other is served as it would be
without other workers, infer requests first of all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

import orjson

from headrace.net.grpc.call import GrpcCall
from headrace.net.grpc.services import Services, UnaryHandler
from headrace.net.http.exchange import Buffer, Exchange, Handler
from headrace.net.http.heads import RequestHead
from headrace.programs.serve.from_pages import OwnPagesRoutes
from headrace.programs.serve.gathering import Gathering
from headrace.programs.serve.repeating import Repeating

log = logging.getLogger("headrace.apps")

_TRAFFIC = "/admin/traffic/"
_ROLLBACK = f"{_TRAFFIC}{{model}}/rollback"
_WATCH = "/console/api/requests"
_SHARED_MEMORY = ("/v2/systemsharedmemory", "/v2/cudasharedmemory", "/api/sharedmemorycontrol")
_NUMBERS_UNDER = ("/api/status", "/console/api/")
_NUMBERS = ("ModelStatistics", "Status")
_CHANGES = (
    "LogSettings",
    "TraceSetting",
    "SystemSharedMemoryRegister",
    "SystemSharedMemoryUnregister",
    "CudaSharedMemoryRegister",
    "CudaSharedMemoryUnregister",
    "SharedMemoryControl",
)

Tell = Callable[[], None]
Fail = Callable[[BaseException], None]


class WorkersRoutes(OwnPagesRoutes):
    """See the module."""

    def __init__(self, gathering: Gathering, repeating: Repeating) -> None:
        super().__init__()
        self._gathering = gathering
        self._repeating = repeating
        self._waiting = _Waiting()

    def add(self, method: str, path: str, handler: Handler, *, streams_body: bool = False) -> None:
        """See `Routes.add`."""
        if method == "GET" and (path.startswith(_NUMBERS_UNDER) or path.endswith(("/stats", "/report"))):
            handler = self._with_numbers(handler)
        elif method != "GET" and path.startswith(_TRAFFIC):
            self._repeating.know(f"{method} {path}", handler)
            handler = self._in_all_alike(f"{method} {path}", handler)
        elif method == "POST" and _changes(path):
            self._repeating.know(f"{method} {path}", handler)
            handler = self._in_all(f"{method} {path}", handler)
        super().add(method, path, handler, streams_body=streams_body)

    def rolled_back(self, model: str, version: str, reason: str) -> None:
        """This worker's share of the traffic was enough to roll a version back: the others need not find out too."""
        body = orjson.dumps({"version": version, "reason": reason})
        head = RequestHead(b"POST", f"{_TRAFFIC}{model}/rollback".encode(), (), version="1.1")

        async def tell() -> None:
            async with self._repeating.alone():
                # Here too: meanwhile the split may have been set anew, and then all should see the same.
                await self._repeating.everywhere(f"POST {_ROLLBACK}", head, body, (model,), here=True)

        self._waiting.begin(tell(), lambda: None, lambda error: log.error("a rollback was not told", exc_info=error))

    def _with_numbers(self, handler: Handler) -> Handler:
        def begin(exchange: Exchange) -> None:
            tell = partial(self._gathering.show, partial(handler, exchange))
            self._waiting.begin(self._gathering.gather(), tell, exchange.fail)

        return begin

    def _in_all(self, name: str, handler: Handler) -> Handler:
        def begin(exchange: Exchange) -> None:
            heard = self._repeating.everywhere(name, exchange.head, bytes(exchange.body), exchange.params)
            self._waiting.begin(heard, partial(handler, exchange), exchange.fail)

        return begin

    def _in_all_alike(self, name: str, handler: Handler) -> Handler:
        """The same for what must end up equal in all workers, also when several are asked at once."""

        def begin(exchange: Exchange) -> None:
            async def change() -> None:
                async with self._repeating.alone():
                    await self._repeating.everywhere(name, exchange.head, bytes(exchange.body), exchange.params)
                    handler(exchange)

            self._waiting.begin(change(), lambda: None, exchange.fail)

        return begin


class WorkersServices(Services):
    """The same for gRPC."""

    def __init__(self, gathering: Gathering, repeating: Repeating) -> None:
        super().__init__()
        self._gathering = gathering
        self._repeating = repeating
        self._waiting = _Waiting()

    def unary(self, service: str, method: str, handler: UnaryHandler) -> None:
        """See `Services.unary`."""
        if method in _NUMBERS:
            handler = self._with_numbers(handler)
        elif method in _CHANGES:
            self._repeating.know(f"/{service}/{method}", handler)
            handler = self._in_all(f"/{service}/{method}", handler)
        super().unary(service, method, handler)

    def _with_numbers(self, handler: UnaryHandler) -> UnaryHandler:
        def begin(call: GrpcCall, message: Buffer) -> None:
            tell = partial(self._gathering.show, partial(handler, call, bytes(message)))
            self._waiting.begin(self._gathering.gather(), tell, call.fail)

        return begin

    def _in_all(self, name: str, handler: UnaryHandler) -> UnaryHandler:
        def begin(call: GrpcCall, message: Buffer) -> None:
            whole = bytes(message)
            self._waiting.begin(
                self._repeating.everywhere(name, call.head, whole), partial(handler, call, whole), call.fail
            )

        return begin


def _changes(path: str) -> bool:
    return path in ("/v2/logging", _WATCH) or path.endswith("/trace/setting") or path.startswith(_SHARED_MEMORY)


class _Waiting:
    """Requests that wait for other workers."""

    def __init__(self) -> None:
        # A task nobody refers to may be collected while it runs.
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, first: Awaitable[None], then: Tell, fail: Fail) -> None:
        task = asyncio.get_running_loop().create_task(self._work(first, then, fail))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self, first: Awaitable[None], then: Tell, fail: Fail) -> None:
        try:
            await first
            then()
        except Exception as error:
            fail(error)
