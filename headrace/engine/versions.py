# SPDX-License-Identifier: Apache-2.0
"""One loaded version of a model: validates requests, passes them to its scheduler and keeps its statistics.

The model loader creates it; the data plane finds it in the repository's directory. Runs in the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from time import monotonic_ns
from typing import Protocol

from headrace.backends.contract import SleepLevel
from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument, Unavailable, Unimplemented
from headrace.core.requests import InferRequest, StepRequest
from headrace.core.telemetry.load_stages import LoadStages
from headrace.core.tensors import Tensor
from headrace.engine.cache import ResponseCache, cache_key
from headrace.engine.express import express_for
from headrace.engine.request_validation import RequestValidator
from headrace.engine.scheduling.dynamic_batcher import AutoDelay, QueueDelay
from headrace.engine.scheduling.pending_request import (
    BatchRecord,
    PendingRequest,
    PendingStream,
    ResponseCallback,
    StreamCallback,
)
from headrace.engine.scheduling.request_timeline import TimelineRecorder
from headrace.engine.scheduling.scheduler import Runner
from headrace.engine.sleep import Sleeper, SleepGate
from headrace.engine.statistics import VersionStatistics
from headrace.models.config.types import DynamicBatching, ModelConfig, SequenceBatching

_load_numbers = count(1)
"""Distinguish two loads of the same version in the cache."""


class Scheduler(Protocol):
    """The scheduler of a version."""

    @property
    def waiting(self) -> int:
        """Number of requests that are not being computed yet."""

    @property
    def active_sequences(self) -> int:
        """Number of open sequences of requests; 0 for a model without state."""

    def add(self, pending: PendingRequest) -> None:
        """Queue a request; raise if it is not accepted."""

    def close(self, reason: HeadraceError) -> None:
        """Cancel all waiting requests and compute nothing more."""


class Drain:
    """Waits until all requests of a version are answered."""

    def __init__(self, statistics: VersionStatistics) -> None:
        self._statistics = statistics
        self._empty = asyncio.Event()
        self.waiting = False

    def settled(self) -> None:
        """Notify of an answered request while `waiting`."""
        if not self._statistics.in_flight:
            self._empty.set()

    async def wait(self, grace_seconds: float) -> None:
        """Return when all requests are answered or the grace period is over."""
        if self._statistics.in_flight:
            self.waiting = True
            try:
                async with asyncio.timeout(grace_seconds):
                    await self._empty.wait()
            except TimeoutError:
                pass


class ModelVersion:
    """A loaded version; implements `repository.directory.LoadedVersion`."""

    def __init__(
        self,
        config: ModelConfig,
        version: int,
        statistics: VersionStatistics,
        scheduler: Scheduler,
        delay: QueueDelay,
        *,
        labels: Mapping[str, Sequence[str]],
        cache: ResponseCache | None = None,
        close: Callable[[], None],
        runners: Sequence[Runner] = (),
        sleeper: Sleeper | None = None,
        wait_seconds: float = 120.0,
        load_stages: LoadStages | None = None,
    ) -> None:
        """`sleeper`: of a model that can sleep. `wait_seconds`: how long requests wait until it is awake again."""
        self.load_stages = load_stages
        """How long each stage of its load took; None if it was not recorded."""
        self.name = config.name
        self.version = version
        self.version_text = str(version)
        self.config = config
        self._statistics = statistics
        self.labels = labels
        """Class labels by output, in the order of its label file."""
        self.delay = delay
        self._validator = RequestValidator(config)
        self._accept = self._validator.accept
        self._scheduler = self._awake_scheduler = scheduler
        self.gate = (
            SleepGate(f"'{config.name}' version {version}", scheduler, statistics, sleeper, wait_seconds, self._switch)
            if sleeper is not None
            else None
        )
        """For a model that can sleep."""
        # A stateful model may give different responses to the same request.
        stateful = isinstance(config.scheduling, SequenceBatching)
        self._cache = cache if config.response_cache and not stateful else None
        self.caches_responses = self._cache is not None
        self._cache_prefix = b"%d/" % next(_load_numbers)
        self._close = close
        self._drain = Drain(statistics)
        self._auto = delay if isinstance(delay, AutoDelay) else None
        self._special = config.decoupled or self._cache is not None
        self.tracks_requests = self._auto is not None or self._cache is not None
        self.express = express_for(self, config, scheduler, runners, statistics, self._validator)
        """The express path (`engine.express`); None if the model has none."""
        self._awake_express = self.express
        self._unrecorded = (self._special, self.tracks_requests, self.express)
        """These attributes while no timelines are recorded."""
        self.recorder: TimelineRecorder | None = None
        self._single_record: BatchRecord | None = None
        """The record of a request on the express path."""
        if runners:
            batched = isinstance(config.scheduling, DynamicBatching)
            self._single_record = runners[0].idle_record if batched else runners[0].single_record

    @property
    def waiting(self) -> int:
        """Number of accepted requests that are not being computed yet."""
        return self._scheduler.waiting

    @property
    def in_use(self) -> bool:
        """Whether a request is in flight, or a sequence of requests is open."""
        return self._statistics.in_flight > 0 or self._scheduler.active_sequences > 0

    @property
    def last_used_ns(self) -> int:
        """When the last request ended, by the monotonic clock; 0 if there was none."""
        return self._statistics.last_used_ns

    @property
    def statistics(self) -> VersionStatistics:
        """The statistics, always the same object; reading this property adds the requests of the express path."""
        if self._single_record is not None:
            self._statistics.add_express(self._single_record)
        return self._statistics

    def infer(self, request: InferRequest, done: ResponseCallback) -> PendingRequest:
        """Compute a request. Raise at once if it is invalid; otherwise `done` gets the response later."""
        arrived_ns = monotonic_ns()
        try:
            rows, key = self._accept(request)
        except InvalidArgument as error:
            self._rejected(request, error, arrived_ns)
            raise
        pending = PendingRequest(self, request, rows, key, done, arrived_ns)
        if self._special:
            return self._add_special(pending)
        self._add(pending)
        return pending

    def infer_stream(self, request: InferRequest, on_response: StreamCallback) -> PendingRequest:
        """Compute a request with any number of responses, none of them before this returns."""
        arrived_ns = monotonic_ns()
        try:
            rows, key = self._accept(request)
        except InvalidArgument as error:
            self._rejected(request, error, arrived_ns)
            raise
        return self._add_special(PendingStream(self, request, rows, key, on_response, arrived_ns))

    def record_timelines(self, recorder: TimelineRecorder | None) -> None:
        """Record the timelines of requests from now on, or (None) stop.

        While timelines are recorded, all requests take the paths of special and tracked requests, so that other models do
        not pay for a check.
        """
        self.recorder = recorder
        recorded = (True, True, None)
        self._special, self.tracks_requests, self.express = self._unrecorded if recorder is None else recorded

    async def sleep(self, level: SleepLevel) -> None:
        """Give the model's memory back when the requests in flight are done; later ones wait and wake it."""
        # A caller that gives up leaves no model half asleep.
        await asyncio.shield(asyncio.get_running_loop().create_task(self.check_sleepable().sleep(level)))

    async def wake(self) -> None:
        """Return when the version is awake."""
        if self.gate is not None and self.gate.report.state != "awake":
            await asyncio.shield(asyncio.get_running_loop().create_task(self.gate.wake()))

    def check_sleepable(self) -> SleepGate:
        """Return the gate; raise for a model that cannot sleep."""
        if self.gate is None:
            raise FailedPrecondition(
                f"model '{self.name}' cannot sleep: backend '{self.config.backend}' does not support it for this model; "
                "unload the model instead"
            )
        return self.gate

    def _switch(self, asleep: bool) -> None:
        """Put the gate in the way of requests, or take it away."""
        express = None
        if asleep and self.gate is not None:
            self._scheduler = self.gate
        else:
            self._scheduler, express = self._awake_scheduler, self._awake_express
        special, tracks, _ = self._unrecorded
        self._unrecorded = (special, tracks, express)
        if self.recorder is None:
            self.express = express

    def _rejected(self, request: InferRequest, error: InvalidArgument, arrived_ns: int) -> None:
        self._statistics.failed(0, error, 0, request.id)
        if self.recorder is not None:
            self.recorder.rejected(request, self.version_text, error, arrived_ns)

    def _add_special(self, pending: PendingRequest) -> PendingRequest:
        """Add a request that streams or is recorded, or whose model is decoupled or has a cache."""
        if self.config.decoupled and not isinstance(pending, PendingStream):
            raise Unimplemented(
                f"model '{self.name}' is decoupled: it may answer several times or not at all. Use a streaming call"
            )
        if self.recorder is not None:
            pending = self.recorder.record(pending, "taken from the cache")
        if self._cache is None or not self._answered_from_cache(pending, self._cache):
            self._add(pending)
        return pending

    def _add(self, pending: PendingRequest) -> None:
        self._statistics.received += 1
        try:
            self._scheduler.add(pending)
        except HeadraceError as error:
            self._statistics.settled += 1
            took_ns = monotonic_ns() - pending.arrived_ns
            self._statistics.failed(pending.rows, error, took_ns, pending.request.id)
            if self.recorder is not None:
                self.recorder.rejected(pending, self.version_text, error, pending.arrived_ns)
            raise

    def settle(self, pending: PendingRequest, outputs: Sequence[Tensor] | BaseException | None) -> None:
        """Count a request that has its last response, and cache its outputs."""
        now_ns = monotonic_ns()
        error = outputs if isinstance(outputs, BaseException) else None
        arrived_ns = pending.arrived_ns
        stats = self._statistics.answered(pending.rows, error, now_ns - arrived_ns, arrived_ns, pending.request.id)
        if pending.cache_key is not None and self._cache is not None and isinstance(outputs, Sequence):
            self._cache.put(pending.cache_key, outputs)
            insert_ns = monotonic_ns() - now_ns
            stats.miss_ns += insert_ns
            if self._statistics.summaries is not None:
                self._statistics.summaries.miss.observe((pending.cache_lookup_ns + insert_ns) / 1000)
        if self._auto is not None:
            self._auto.adjust(monotonic_ns())
        if self._drain.waiting:
            self._drain.settled()

    def _answered_from_cache(self, pending: PendingRequest, cache: ResponseCache) -> bool:
        if isinstance(pending.request, StepRequest):
            pending.request = pending.request.on_host()  # cached tensors must not hold device memory
        key = cache_key(self._cache_prefix, pending.request)
        outputs = cache.get(key, bypass=pending.request.bypass_cache)
        stats = self._statistics.of_rows(pending.rows)
        lookup_ns = monotonic_ns() - pending.arrived_ns
        if outputs is None:
            stats.miss += 1
            stats.miss_ns += lookup_ns
            pending.cache_key = key
            pending.cache_lookup_ns = lookup_ns
            return False
        self._statistics.received += 1

        def hit() -> None:
            if not pending.cancelled:
                stats.hit += 1
                stats.hit_ns += lookup_ns
                if self._statistics.summaries is not None:
                    self._statistics.summaries.hit.observe(lookup_ns / 1000)
                pending.reply(outputs)

        # Not immediately: streams rely on it, and a callback that sends its next request would grow the stack.
        asyncio.get_running_loop().call_soon(hit)
        return True

    async def retire(self, grace_seconds: float) -> None:
        """Wait up to `grace_seconds` for requests in flight, then free everything."""
        self.tracks_requests = True
        self.express = self._awake_express = None
        self._unrecorded = (self._special, True, None)
        if self._single_record is not None:
            self._statistics.add_express(
                self._single_record
            )  # the statistics of a removed version are not read through this object again
        await self._drain.wait(grace_seconds)
        self._scheduler.close(Unavailable(f"model '{self.name}' version {self.version_text} was unloaded"))
        if self._cache is not None:
            self._cache.remove_version(self._cache_prefix)
        await asyncio.to_thread(self._close)
