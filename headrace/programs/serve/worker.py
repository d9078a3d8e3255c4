# SPDX-License-Identifier: Apache-2.0
"""One of several worker processes: its data plane, its routes, and the state that it shares with the other workers."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Callable, Coroutine, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import orjson

from headrace.api.admin import ROLLBACK_PATH
from headrace.api.metrics.http import Metrics, WorkersMetrics
from headrace.api.metrics.settings import MetricsSettings
from headrace.api.v1.status import RequestCounter, V1Settings, V1Statistics
from headrace.core.telemetry.metrics import Registry
from headrace.engine.dataplane import DataPlane, ServingVersion
from headrace.engine.statistics import VersionStatistics
from headrace.net.grpc.call import GrpcCall, UnaryHandler
from headrace.net.http.exchange import Exchange, Handler
from headrace.net.http.heads import Buffer, RequestHead
from headrace.net.http.routes import Workers
from headrace.programs.serve.broadcast import Broadcaster, LoadBroadcaster
from headrace.programs.serve.worker_channel import WorkerChannel, WorkerTimeout, started_at
from headrace.programs.serve.worker_stats import Numbers, WorkerStats, sum_statistics


class WorkersPlane(DataPlane):
    """One worker's models, with the statistics of all workers."""

    def __init__(self, plane: DataPlane, stats: WorkerStats, broadcaster: LoadBroadcaster) -> None:
        super().__init__(plane._directory, plane._control, plane._adapters)
        self.strict_readiness = plane.strict_readiness
        self._own = plane
        self._stats = stats
        self._load_broadcaster = broadcaster

    def statistics(self, name: str = "", version: str = "") -> list[ServingVersion]:
        """Return the statistics of all workers, as of the last `WorkerStats.gather`."""
        return [self._summed(serving) for serving in super().statistics(name, version)]

    def find(self, name: str, version: str = "") -> ServingVersion | None:
        """Find a version; while `WorkerStats.show` runs, with the statistics of all workers."""
        loaded = super().find(name, version)
        return self._summed(loaded) if loaded is not None and self._stats.showing else loaded

    async def load(self, name: str, config_json: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Load a model in all workers."""
        await self._load_broadcaster.load(name, config_json, files)

    async def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        """Unload a model in all workers."""
        await self._load_broadcaster.unload(name, unload_dependents=unload_dependents)

    def _summed(self, version: ServingVersion) -> ServingVersion:
        others = self._stats.of_version(version.name, version.version_text)
        if not others:
            return version
        return cast("ServingVersion", _SummedVersion(version, sum_statistics(version.statistics, others)))


class _SummedVersion:
    """A version whose statistics are those of all workers."""

    def __init__(self, version: ServingVersion, statistics: VersionStatistics) -> None:
        self._version = version
        self.statistics = statistics

    def __getattr__(self, name: str) -> Any:
        return getattr(self._version, name)


class WorkersV1Statistics(V1Statistics):
    """The v1 statistics of one worker, shown for all workers."""

    def __init__(self, settings: V1Settings, stats: WorkerStats, started: float) -> None:
        self._own: dict[str, RequestCounter] = {}
        self._stats = stats
        super().__init__(settings)
        # The uptime of the server: this worker may have been restarted.
        self._started = started
        stats.add_source("v1", self._numbers)

    @property
    def counters(self) -> dict[str, RequestCounter]:
        """Return the request counts of all workers."""
        counters = {kind: _copy_of(tally) for kind, tally in self._own.items()}
        for numbers in self._stats.others("v1"):
            for kind, (count, total_ns) in numbers["tallies"].items():
                tally = counters.setdefault(kind, RequestCounter())
                tally.count += count
                tally.total_ns += total_ns
        return counters

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


def _copy_of(tally: RequestCounter) -> RequestCounter:
    copy = RequestCounter()
    copy.count, copy.total_ns = tally.count, tally.total_ns
    return copy


log = logging.getLogger("headrace.apps")


class WorkerPolicies:
    """Wraps the handlers of one of several workers by their policy: gather statistics first, or broadcast the request."""

    def __init__(self, stats: WorkerStats, broadcaster: Broadcaster) -> None:
        self._stats = stats
        self._broadcaster = broadcaster
        # A task without a reference may be collected while it runs.
        self._tasks: set[asyncio.Task[None]] = set()

    def http(self, name: str, workers: Workers, handler: Handler) -> Handler:
        """Wrap the handler of a route."""
        if workers == "one":
            return handler
        self._register(name, workers, handler)
        protocol_fail: Callable[[Exchange, BaseException], None] | None = getattr(handler, "fail", None)

        def begin(exchange: Exchange) -> None:
            request = _Request(name, exchange.head, bytes(exchange.body), exchange.params)
            failed = exchange.fail if protocol_fail is None else partial(protocol_fail, exchange)
            self._start(self._handle(workers, request, partial(handler, exchange)), failed)

        if protocol_fail is not None:
            begin.fail = protocol_fail  # type: ignore[attr-defined]  # guards before it call this one
        return begin

    def unary(self, name: str, workers: Workers, handler: UnaryHandler) -> UnaryHandler:
        """Wrap the handler of a unary gRPC method."""
        if workers == "one":
            return handler
        self._register(name, workers, handler)

        def begin(call: GrpcCall, message: Buffer) -> None:
            request = _Request(name, call.head, bytes(message))
            self._start(self._handle(workers, request, partial(handler, call, request.body)), call.fail)

        return begin

    def rolled_back(self, model: str, version: str, reason: str) -> None:
        """Broadcast a rollback that this worker decided by its share of the traffic."""
        body = orjson.dumps({"version": version, "reason": reason})
        head = RequestHead(b"POST", ROLLBACK_PATH.replace("{model}", model).encode(), (), version="1.1")

        async def broadcast() -> None:
            async with self._broadcaster.lock():
                # In this worker, too: the split may have been replaced meanwhile, and all workers must agree.
                await self._broadcaster.broadcast(f"POST {ROLLBACK_PATH}", head, body, (model,), include_self=True)

        self._start(broadcast(), lambda error: log.error("Could not broadcast a rollback", exc_info=error))

    def _register(self, name: str, workers: Workers, handler: Handler | UnaryHandler) -> None:
        if workers != "gather":
            self._broadcaster.register(name, handler, remember=workers != "all-running")

    async def _handle(self, workers: Workers, request: _Request, answer: Callable[[], None]) -> None:
        if workers == "gather":
            await self._stats.gather()
            self._stats.show(answer)
            return
        async with self._broadcaster.lock() if workers == "all-ordered" else nullcontext():
            await self._broadcaster.broadcast(*request)
            answer()

    def _start(self, work: Coroutine[Any, Any, None], fail: Callable[[BaseException], None]) -> None:
        async def run() -> None:
            try:
                await work
            except Exception as error:
                fail(error)

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Request(NamedTuple):
    """A request to broadcast."""

    name: str
    head: RequestHead
    body: bytes
    params: tuple[str, ...] = ()


_SERVING, _METRICS = "serving", "metrics"
_TIMEOUT_SECONDS = 1.0
_SCRAPE_SECONDS = 2.0
"""Timeout for the numbers of a worker whose event loop is busy; after it, its last known numbers are used."""


class Worker:
    """One of several workers, with everything that it shares with the others."""

    def __init__(self, folder: str, index: int, count: int, plane: DataPlane) -> None:
        self._own = plane
        self._parent = os.getppid()
        self._channel = WorkerChannel(folder, index, count)
        self.stats = WorkerStats(self._channel, plane)
        self.broadcaster = Broadcaster(self._channel)
        self.policies = WorkerPolicies(self.stats, self.broadcaster)
        self._load_broadcaster = LoadBroadcaster(self._channel, plane)
        self._metrics: Metrics | None = None
        self.plane = WorkersPlane(plane, self.stats, self._load_broadcaster)

    @property
    def started(self) -> float:
        """When the server started, by the monotonic clock."""
        return started_at(self._channel.folder)

    def metrics(self, plane: DataPlane, registry: Registry, settings: MetricsSettings) -> Metrics:
        """Return this worker's metrics; a scrape covers all workers."""
        ask = partial(self._channel.request_all, _METRICS, seconds=_SCRAPE_SECONDS)
        workers = WorkersMetrics(self._channel.folder, self._channel.index, ask)
        self._metrics = Metrics(plane, registry, settings, workers=workers)
        return self._metrics

    async def start(self) -> bool:
        """Connect to the other workers; return whether one serves already, or is too busy to answer."""
        self.stats.start()
        self._load_broadcaster.start()
        self.broadcaster.start()
        self._channel.register_handler(_SERVING, self._serving)
        await self._channel.start()
        answers = await self._channel.request_all(_SERVING, seconds=_TIMEOUT_SECONDS)
        return any(answer is True or isinstance(answer, WorkerTimeout) for answer in answers.values())

    async def catch_up(self) -> None:
        """Repeat the requests that were broadcast before this worker started."""
        await self._load_broadcaster.catch_up()
        await self.broadcaster.catch_up()
        if self._metrics is not None:
            # Only now: a worker reports the counts of its predecessors only for models that it has.
            self._channel.register_handler(_METRICS, self._metrics.answer)

    async def close(self) -> None:
        """Save the last numbers and close the channel."""
        await self.stats.save()
        if self._metrics is not None and self._channel.has_handler(_METRICS):
            await self._metrics.answer()
        await self._channel.close()
        if os.getppid() != self._parent:  # The supervisor was killed and cannot clean up.
            shutil.rmtree(self._channel.folder, ignore_errors=True)

    async def _serving(self, _arguments: Any) -> bool:
        # Not when all models are ready: a model that fails must not keep the ports closed.
        return self._own.started and self._own.accepting
