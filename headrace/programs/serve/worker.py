# SPDX-License-Identifier: Apache-2.0
"""One of several worker processes: its data plane, its routes, and what it shares with the others."""

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
from headrace.programs.serve.broadcast import Broadcaster, LoadEverywhere
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


class WorkerPolicies:
    """Wraps handlers of one of several workers by their policy: gathers statistics first, or broadcasts the request."""

    def __init__(self, gathering: WorkerStats, repeating: Broadcaster) -> None:
        self._gathering = gathering
        self._repeating = repeating
        # A task without a reference may be collected while it runs.
        self._tasks: set[asyncio.Task[None]] = set()

    def http(self, name: str, workers: Workers, handler: Handler) -> Handler:
        """Wrap the handler of a route."""
        if workers == "one":
            return handler
        self._know(name, workers, handler)

        def begin(exchange: Exchange) -> None:
            request = _Request(name, exchange.head, bytes(exchange.body), exchange.params)
            self._start(self._handle(workers, request, partial(handler, exchange)), exchange.fail)

        return begin

    def unary(self, name: str, workers: Workers, handler: UnaryHandler) -> UnaryHandler:
        """Wrap the handler of a unary gRPC method."""
        if workers == "one":
            return handler
        self._know(name, workers, handler)

        def begin(call: GrpcCall, message: Buffer) -> None:
            request = _Request(name, call.head, bytes(message))
            self._start(self._handle(workers, request, partial(handler, call, request.body)), call.fail)

        return begin

    def rolled_back(self, model: str, version: str, reason: str) -> None:
        """Broadcast a rollback: this worker's share of the traffic was enough to decide it."""
        body = orjson.dumps({"version": version, "reason": reason})
        head = RequestHead(b"POST", ROLLBACK_PATH.replace("{model}", model).encode(), (), version="1.1")

        async def tell() -> None:
            async with self._repeating.alone():
                # Here too: the split may have been set again meanwhile, and all workers must agree.
                await self._repeating.everywhere(f"POST {ROLLBACK_PATH}", head, body, (model,), here=True)

        self._start(tell(), lambda error: log.error("a rollback was not told", exc_info=error))

    def _know(self, name: str, workers: Workers, handler: Handler | UnaryHandler) -> None:
        if workers != "gather":
            self._repeating.know(name, handler, remember=workers != "all-running")

    async def _handle(self, workers: Workers, request: _Request, answer: Callable[[], None]) -> None:
        if workers == "gather":
            await self._gathering.gather()
            self._gathering.show(answer)
            return
        async with self._repeating.alone() if workers == "all-ordered" else nullcontext():
            await self._repeating.everywhere(*request)
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
        self.policies = WorkerPolicies(self.gathering, self.repeating)
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
