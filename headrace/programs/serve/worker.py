# SPDX-License-Identifier: Apache-2.0
"""One of several worker processes: its data plane, its routes, and what it shares with the others."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, cast

import orjson

from headrace.api.metrics.http import Metrics, WorkersMetrics
from headrace.api.metrics.settings import MetricsSettings
from headrace.api.v1.status import RequestCounter, V1Settings, V1Statistics
from headrace.core.telemetry.metrics import Registry
from headrace.engine.dataplane import DataPlane, ServingVersion
from headrace.engine.statistics import VersionStatistics
from headrace.net.grpc.call import GrpcCall, UnaryHandler
from headrace.net.grpc.services import Services
from headrace.net.http.exchange import Exchange, Handler
from headrace.net.http.heads import Buffer, RequestHead
from headrace.programs.serve.broadcast import Broadcaster, LoadEverywhere
from headrace.programs.serve.route_scopes import OwnPagesRoutes
from headrace.programs.serve.worker_channel import Busy, WorkerChannel, started_at
from headrace.programs.serve.worker_stats import Numbers, WorkerStats, added_up


class WorkersPlane(DataPlane):
    """One worker's models, with the statistics of all workers."""

    def __init__(self, own: DataPlane, gathering: WorkerStats, everywhere: LoadEverywhere) -> None:
        super().__init__(own._directory, own._control)
        self.strict_readiness = own.strict_readiness
        self._own = own
        self._gathering = gathering
        self._everywhere = everywhere

    def statistics(self, name: str = "", version: str = "") -> list[ServingVersion]:
        """Return the statistics of all workers, as of the last gathering."""
        return [self._of_all(each) for each in super().statistics(name, version)]

    def find(self, name: str, version: str = "") -> ServingVersion | None:
        """Find a version."""
        found = super().find(name, version)
        return self._of_all(found) if found is not None and self._gathering.showing else found

    async def load(self, name: str, config_json: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Load a model in all workers."""
        await self._everywhere.load(name, config_json, files)

    async def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        """Unload a model in all workers."""
        await self._everywhere.unload(name, unload_dependents=unload_dependents)

    def _of_all(self, version: ServingVersion) -> ServingVersion:
        others = self._gathering.of_version(version.name, version.version_text)
        if not others:
            return version
        return cast("ServingVersion", _Everywhere(version, added_up(version.statistics, others)))


class _Everywhere:
    """A version whose statistics are those of all workers."""

    def __init__(self, version: ServingVersion, statistics: VersionStatistics) -> None:
        self._version = version
        self.statistics = statistics

    def __getattr__(self, name: str) -> Any:
        return getattr(self._version, name)


class WorkersAccounts(V1Statistics):
    """The v1 statistics of one worker, shown for all workers."""

    def __init__(self, settings: V1Settings, gathering: WorkerStats, started: float) -> None:
        self._own: dict[str, RequestCounter] = {}
        self._gathering = gathering
        super().__init__(settings)
        # The server's uptime is not that of a worker, which may have been restarted.
        self._started = started
        gathering.tell_also("v1", self._numbers)

    @property
    def counters(self) -> dict[str, RequestCounter]:
        """Return the request counts of all workers."""
        made = {kind: _copied(tally) for kind, tally in self._own.items()}
        for numbers in self._gathering.others("v1"):
            for kind, (count, total_ns) in numbers["tallies"].items():
                tally = made.setdefault(kind, RequestCounter())
                tally.count += count
                tally.total_ns += total_ns
        return made

    @counters.setter
    def counters(self, own: dict[str, RequestCounter]) -> None:
        self._own = own

    def succeeded(self, kind: str, since: float) -> None:
        """Count a successful request."""
        tally = self._own[kind]
        tally.count += 1
        tally.total_ns += int((self.now() - since) * 1e9)

    def _numbers(self) -> Numbers:
        return {"tallies": {kind: [tally.count, tally.total_ns] for kind, tally in self._own.items()}}


def _copied(tally: RequestCounter) -> RequestCounter:
    made = RequestCounter()
    made.count, made.total_ns = tally.count, tally.total_ns
    return made


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
    """The routes of one of several workers: control requests are broadcast, statistics are gathered first."""

    def __init__(self, gathering: WorkerStats, repeating: Broadcaster) -> None:
        super().__init__()
        self._gathering = gathering
        self._repeating = repeating
        self._waiting = _Waiting()

    def add(self, method: str, path: str, handler: Handler, *, streams_body: bool = False) -> None:
        """Add a route."""
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
        """Broadcast a rollback: this worker's share of the traffic was enough to decide it."""
        body = orjson.dumps({"version": version, "reason": reason})
        head = RequestHead(b"POST", f"{_TRAFFIC}{model}/rollback".encode(), (), version="1.1")

        async def tell() -> None:
            async with self._repeating.alone():
                # Here too: the split may have been set again meanwhile, and all workers must agree.
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
        """Broadcast a request that must end up equal in all workers, also when several arrive at once."""

        def begin(exchange: Exchange) -> None:
            async def change() -> None:
                async with self._repeating.alone():
                    await self._repeating.everywhere(name, exchange.head, bytes(exchange.body), exchange.params)
                    handler(exchange)

            self._waiting.begin(change(), lambda: None, exchange.fail)

        return begin


class WorkersServices(Services):
    """The gRPC services of one of several workers."""

    def __init__(self, gathering: WorkerStats, repeating: Broadcaster) -> None:
        super().__init__()
        self._gathering = gathering
        self._repeating = repeating
        self._waiting = _Waiting()

    def unary(self, service: str, method: str, handler: UnaryHandler) -> None:
        """Add a unary method."""
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
        # A task without a reference may be collected while it runs.
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


_SERVING, _METRICS = "serving", "metrics"
_PATIENCE_SECONDS = 1.0
_SCRAPE_SECONDS = 2.0
"""Patience with a worker that computes in its event loop; after that its last numbers are used."""


class Worker:
    """One of several workers, with everything it shares with the others."""

    def __init__(self, folder: str, index: int, count: int, own: DataPlane) -> None:
        self._own = own
        self._parent = os.getppid()
        self._siblings = WorkerChannel(folder, index, count)
        self.gathering = WorkerStats(self._siblings, own)
        self.repeating = Broadcaster(self._siblings)
        self._everywhere = LoadEverywhere(self._siblings, own)
        self._metrics: Metrics | None = None
        self.plane = WorkersPlane(own, self.gathering, self._everywhere)

    @property
    def started(self) -> float:
        """When the server was started, by the monotonic clock."""
        return started_at(self._siblings.folder)

    def metrics(self, plane: DataPlane, registry: Registry, settings: MetricsSettings) -> Metrics:
        """Return this worker's metrics; a scrape covers all workers."""
        ask = partial(self._siblings.ask_all, _METRICS, seconds=_SCRAPE_SECONDS)
        workers = WorkersMetrics(self._siblings.folder, self._siblings.index, ask)
        self._metrics = Metrics(plane, registry, settings, workers=workers)
        return self._metrics

    async def start(self) -> bool:
        """Connect to the other workers; return whether one serves already, or is too busy to answer."""
        self.gathering.start()
        self._everywhere.start()
        self.repeating.start()
        self._siblings.answer(_SERVING, self._serving)
        await self._siblings.start()
        answers = await self._siblings.ask_all(_SERVING, seconds=_PATIENCE_SECONDS)
        return any(answer is True or isinstance(answer, Busy) for answer in answers.values())

    async def catch_up(self) -> None:
        """Repeat what was broadcast before this worker started."""
        await self._everywhere.catch_up()
        await self.repeating.catch_up()
        if self._metrics is not None:
            # Only now: a worker reports its predecessors' counts only for models that it has.
            self._siblings.answer(_METRICS, self._metrics.answer)

    async def close(self) -> None:
        """Save the last numbers."""
        await self.gathering.keep()
        if self._metrics is not None and self._siblings.answers(_METRICS):
            await self._metrics.answer()
        await self._siblings.close()
        if os.getppid() != self._parent:  # Killed: it does not clean up.
            shutil.rmtree(self._siblings.folder, ignore_errors=True)

    async def _serving(self, _arguments: Any) -> bool:
        # Not whether all its models are ready: one that never will be must not keep a port closed.
        return self._own.started and self._own.accepting
