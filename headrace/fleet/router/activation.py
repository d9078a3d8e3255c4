# SPDX-License-Identifier: Apache-2.0
"""Scale to zero and back: the state machine of a router that holds requests while its replicas start.

The proxies call `Activator.hold` with a request that no backend can take. While backends are up they never do, so that a
request to an active service costs nothing more. A timer samples the load several times a second, one task changes states,
and another scales targets above one replica.

    scaled to zero -> activating    a request came, or another client has scaled the targets up
    activating -> active            all targets are ready, and a backend answers
    active -> deactivating          no request came for `idle_seconds`, or another client has scaled a target to zero
    deactivating -> scaled to zero  no replica counts as ready: a stopping replica must not be taken for a starting one

A request that arrives during deactivation waits until the service is active again. Only one router may scale a service to
zero: a second one could not know that the first is busy. Others may start its replicas, too: the shared activator of a
cluster does so, and never
scales to zero. With `shared`, that router takes the requests held by others into account.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.core.telemetry.tracing import NO_TRACING, Tracer
from headrace.fleet.autoscaling.autoscaler import (
    KNATIVE,
    NO_PANIC,
    TICK_SECONDS,
    LoadMeter,
    PanicState,
    decide_replicas,
)
from headrace.fleet.router.request_queue import HeldRequests
from headrace.fleet.router.scale_targets import (
    RETRY_SECONDS,
    ReplicaCounts,
    Scaler,
    ScalerError,
    ScaleTargets,
    put_models_to_sleep,
)
from headrace.fleet.router.settings import ActivationSettings, ScaleTarget

if TYPE_CHECKING:
    from headrace.core.telemetry.metrics import Registry
    from headrace.fleet.router.backend import Backend
    from headrace.fleet.router.backends import Backends
    from headrace.fleet.router.request_queue import QueuedRequest

log = logging.getLogger("headrace.router")

SCALED_TO_ZERO, ACTIVATING, ACTIVE, DEACTIVATING = "asleep", "waking", "awake", "falling asleep"
"""States, by their names in `/router/status`."""

_SAMPLE_SECONDS = 0.25
"""How often the load is sampled; more often if `idle_seconds` is less than a second."""
_PROBE_SECONDS = 0.03
"""Interval of probes during activation; it delays requests by at most as much."""
_SLOW_PROBE_AFTER_SECONDS, _SLOW_PROBE_SECONDS = 30.0, 0.25
"""Time without an answer after which a backend with ready replicas is probed less often."""
_FIRST_WATCH_SECONDS = 3.0
_DEACTIVATION_SECONDS = 15.0
"""How long to wait for replicas to stop counting as ready after a scale to zero."""
_MAX_RETRY_AFTER_SECONDS = 60.0
_ACTIVATION_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200)
_PART_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200)
_NO_REPLICAS = ReplicaCounts(0, 0)

PARTS = ("decided", "started", "loading", "seen", "connected", "first_byte")
"""The parts of a cold start, in order: the scale-up was requested, the process started, the replica was found ready (the
time that the model takes to load), the router learned of it, a backend accepted a connection, the response started. Where
the start of the process is unknown, as on Kubernetes, it counts as part of `loading`."""


class Activator:
    """Holds requests and scales targets. Used from the loop's thread only."""

    def __init__(
        self,
        settings: ActivationSettings,
        backends: Backends,
        scaler: Scaler,
        is_answering: Callable[[Backend], Awaitable[bool]],
        tracer: Tracer = NO_TRACING,
    ) -> None:
        """is_answering: whether a backend answers a health check now."""
        self._settings = settings
        self.scaler = scaler
        self._backends = backends
        self._is_answering = is_answering
        self.state = ACTIVE
        self.targets = ScaleTargets(settings.targets, scaler, self._target_changed)
        self.cold_starts = ColdStartReporter(tracer)
        self.held = HeldRequests(settings, self._inactive_reason, self.cold_starts.request_refused)
        self.activations = 0
        self.refresh_discovery: Callable[[], None] = lambda: None
        """Called when targets have changed: discovery may find new backends."""
        self._meter = LoadMeter()
        self._panics: dict[ScaleTarget, PanicState] = {}
        self._last_active = 0.0
        self._requests = 0
        self._activating_since = 0.0
        self._is_idle = False
        """Whether this router deactivates the service: then all targets go to zero. Otherwise another client has scaled
        some of them to zero, and only these are waited for."""
        self._draining = False
        self.models_asleep: list[str] = []
        """Models that were put to sleep when no request came (`ActivationSettings.sleep_level`)."""
        self._sleeping: asyncio.Task[None] | None = None
        self._cannot_sleep = False
        """Whether no model could be put to sleep, so that the targets are scaled to zero."""
        self._changed = asyncio.Event()
        self._observe_seconds: Callable[[float], None] = lambda _seconds: None
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def settings(self) -> ActivationSettings:
        """The current settings."""
        return self._settings

    @property
    def active(self) -> bool:
        """Whether replicas are needed: until no request came for `idle_seconds`."""
        return self.state in (ACTIVATING, ACTIVE)

    def hold(self, request: QueuedRequest) -> None:
        """Hold a request that no backend can take, and activate the service."""
        self.held.add(request)
        if self.state == ACTIVE:
            log.info("No backend can take a request: holding it")
            self._backends.suspend()
            self._set_state(ACTIVATING)
        elif self.state == SCALED_TO_ZERO:
            self._set_state(ACTIVATING)
        else:
            self._changed.set()

    def update(self, settings: ActivationSettings) -> None:
        """Apply new settings, in any state."""
        self._settings = settings
        self._cannot_sleep = False
        self._panics.clear()
        self.held.update(settings)
        self.targets.update(settings.targets)
        self._changed.set()

    def backend_added(self) -> None:
        """Probe a backend that was added."""
        self._cannot_sleep = False
        self._changed.set()

    async def start(self) -> None:
        """Observe the targets, set the first state, and start the tasks."""
        self._last_active = self._now()
        self._requests = self._total_requests()
        self.targets.start()
        with suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_WATCH_SECONDS):
                while not self.targets.known:
                    await self._next_change()
        for target in self.targets.all:
            counts = self.targets.counts(target)
            if counts is not None and counts.desired > 1:
                # Do not scale down before there is a minute of samples.
                self._panics[target] = PanicState(self._now() + KNATIVE.stable_seconds, counts.desired)
        if not self.targets.ready:
            self._backends.suspend()
            self._set_state(SCALED_TO_ZERO if self.targets.at_zero else ACTIVATING)
        self._sample()
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._autoscale())]

    def drain(self, seconds: float) -> None:
        """Prepare to stop within some seconds: refuse held requests in time, and no longer scale to zero."""
        self._draining = True
        self.held.set_deadline(self._now() + max(0.0, seconds - min(1.0, seconds / 4)))

    async def close(self) -> None:
        """Stop. Replicas keep running."""
        if self._timer is not None:
            self._timer.cancel()
        tasks = [*self._tasks, *([self._sleeping] if self._sleeping is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.held.close()
        await self.targets.close()

    def as_json(self) -> dict[str, Any]:
        """Return the state, for the status."""
        last = self.cold_starts.last
        return {
            "state": self.state,
            "held": len(self.held),
            "held_bytes": self.held.bytes,
            "wakes": self.activations,
            "last_wake": last.seconds() if last is not None else None,
            "refused": self.held.refused,
            "targets": self.targets.as_json(),
            **({"models_asleep": self.models_asleep} if self._settings.sleep_level else {}),
        }

    def register_metrics(self, registry: Registry) -> None:
        """Register the metrics of activation."""
        registry.callback("headrace_router_active", "0 while the service is scaled to zero.", lambda: int(self.active))
        registry.callback(
            "headrace_router_held_requests", "Requests held until the service is active.", lambda: len(self.held)
        )
        registry.callback(
            "headrace_router_wakes_total", "Activations from zero.", lambda: self.activations, kind="counter"
        )
        registry.callback(
            "headrace_router_held_refused_total",
            "Requests refused because too many were held or they waited too long.",
            lambda: self.held.refused,
            kind="counter",
        )
        family = registry.histogram(
            "headrace_router_wake_seconds",
            "Time from the first held request to a backend that answers.",
            buckets=_ACTIVATION_BUCKETS,
        )
        self._observe_seconds = family.labels().observe
        self.cold_starts.register_metrics(registry)

    # The timer. It never waits.

    def _sample(self) -> None:
        now = self._now()
        period = max(0.02, min(_SAMPLE_SECONDS, self._settings.idle_seconds / 4))
        self._timer = asyncio.get_running_loop().call_later(period, self._sample)
        requests, concurrency = self._total_requests(), self._concurrency()
        if concurrency or requests > self._requests:
            self._last_active = now
            self.models_asleep = []
        self._requests = requests
        if not self.active:
            return
        self._meter.add(now, concurrency, requests)
        idle_seconds = self._idle_seconds()
        self._is_idle = now - self._last_active >= idle_seconds and not self._draining
        if self._is_idle and self._sleeps_instead():
            self._is_idle = False
            if not self.models_asleep and self._sleeping is None:
                self._sleeping = asyncio.create_task(self._put_to_sleep(idle_seconds))
            return
        if self._is_idle:
            log.info("No request for %g s: scaling to zero %s", idle_seconds, self.targets)
        elif self.state == ACTIVE and self.targets.at_zero:
            level = logging.INFO if self._settings.shared else logging.WARNING
            log.log(level, "Another client has scaled to zero %s", ", ".join(map(str, self.targets.at_zero)))
        else:
            return
        # In the same turn of the loop as the sample: requests from now on are held.
        self._backends.suspend()
        self._set_state(DEACTIVATING)

    def _sleeps_instead(self) -> bool:
        """Whether an idle service keeps its replicas, with their models asleep."""
        settings = self._settings
        return bool(settings.sleep_level and settings.local is not None) and not self._cannot_sleep

    async def _put_to_sleep(self, idle_seconds: float) -> None:
        """Put the models of all backends to sleep. A request meanwhile waits in its server, which wakes the model."""
        try:
            urls = [backend.address.url for backend in self._backends.all]
            model_names = await asyncio.gather(*(put_models_to_sleep(url, self._settings.sleep_level) for url in urls))
            names = sorted({name for names in model_names for name in names})
            if not names:
                log.warning("No model of %s can sleep: scaling to zero instead", self.targets)
                self._cannot_sleep = True
            elif self._now() - self._last_active >= idle_seconds:
                log.info("No request for %g s: asleep are %s", idle_seconds, ", ".join(names))
                self.models_asleep = names
        finally:
            self._sleeping = None

    def _idle_seconds(self) -> float:
        """Return the idle time after which the targets are scaled to zero."""
        settings = self._settings
        if settings.shared and self.state == ACTIVATING:
            # Another router may hold the request that these replicas are started for. It waits no longer than this.
            return max(settings.idle_seconds, settings.wait_seconds)
        return settings.idle_seconds

    def _total_requests(self) -> int:
        """Return all requests so far: sent to a backend, held, or dropped while they were held."""
        sent = sum(backend.stats.requests - backend.stats.retries for backend in self._backends.all)
        return sent + self._backends.removed_requests + len(self.held) + self.held.dropped

    def _concurrency(self) -> int:
        backends = (*self._backends.all, *self._backends.draining)
        waiting = len(self.held) + self._backends.queued
        return sum(backend.outstanding + backend.tunnels for backend in backends) + waiting

    # The task that changes states.

    async def _run(self) -> None:
        while True:
            try:
                if self.state == DEACTIVATING:
                    await self._deactivate()
                elif self.state == ACTIVATING:
                    await self._activate()
                else:
                    await self._next_change()
            except Exception:
                log.exception("Activation or deactivation failed; trying again")
                await asyncio.sleep(RETRY_SECONDS[1])

    async def _activate(self) -> None:
        pause = RETRY_SECONDS[0]
        ready_since: float | None = None
        while self.state == ACTIVATING:
            try:
                async with self.targets.lock:
                    await self.targets.scale_from_zero()
            except ScalerError:
                await self._pause(pause)
                pause = min(2 * pause, RETRY_SECONDS[1])
                continue
            pause = RETRY_SECONDS[0]
            self.cold_starts.record(decided=time.time())
            if not self.targets.ready:
                await self._next_change(_SAMPLE_SECONDS)
                continue
            now = self._now()
            ready_since = now if ready_since is None else ready_since
            self.cold_starts.record(seen=time.time(), **self.targets.start_times())
            up = await self._probe()
            if up and self.state == ACTIVATING and self.targets.ready:
                self._activated(up)
                return
            slow = now - ready_since > _SLOW_PROBE_AFTER_SECONDS
            await self._next_change(_SLOW_PROBE_SECONDS if slow else _PROBE_SECONDS)

    async def _probe(self) -> list[Backend]:
        """Return backends that answer: as soon as there is one, without waiting for slow ones."""
        probes = {asyncio.ensure_future(self._is_answering(backend)): backend for backend in self._backends.all}
        pending = set(probes)
        up: list[Backend] = []
        try:
            while pending and not up:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                up = [probes[probe] for probe in done if probe.result()]
        finally:
            for probe in pending:
                probe.cancel()
        return up

    def _activated(self, up: list[Backend]) -> None:
        now = self._now()
        seconds = now - min(self.held.oldest or now, self._activating_since)
        self.activations += 1
        self._observe_seconds(seconds)
        self.cold_starts.record(connected=time.time())
        self.held.retry_after_seconds = min(_MAX_RETRY_AFTER_SECONDS, max(1.0, seconds))
        self._last_active = now
        self._backends.resume(up, now)
        self._set_state(ACTIVE)
        log.info("Active after %.3f s: releasing %d requests", seconds, len(self.held))
        self.held.release(lambda: self.state == ACTIVE, self.cold_starts.response_started)

    async def _deactivate(self) -> None:
        """Scale to zero, and wait until no replica counts as ready. Failures are retried unless requests are held."""
        pause = RETRY_SECONDS[0]
        at_zero = set(self.targets.at_zero)
        while self._is_idle and len(at_zero) < len(self.targets.all):
            try:
                async with self.targets.lock:
                    for target in self.targets.all:
                        if target not in at_zero:
                            await self.targets.scale(target, 0)
                            at_zero.add(target)
            except ScalerError:
                if len(self.held):
                    break
                await self._pause(pause)
                pause = min(2 * pause, RETRY_SECONDS[1])
        with suppress(TimeoutError):
            async with asyncio.timeout(_DEACTIVATION_SECONDS):
                while any(self.targets.counts(target) not in (None, _NO_REPLICAS) for target in at_zero):
                    if self.targets.has_failures and len(self.held):
                        break
                    await self._next_change()
        self._meter.clear()
        self._panics.clear()
        needed = len(self.held) or self.targets.are_scaled_up
        self._last_active = self._now()
        self._set_state(ACTIVATING if needed else SCALED_TO_ZERO)

    # The task that scales above one replica.

    async def _autoscale(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            for target in self.targets.all:
                try:
                    await self._autoscale_target(target)
                except ScalerError:
                    continue  # it is logged, and the next tick decides again
                except Exception:
                    log.exception("Autoscaling of %s failed", target)

    async def _autoscale_target(self, target: ScaleTarget) -> None:
        counts = self.targets.counts(target)
        if target.scale is None or counts is None or not counts.desired or self._draining:
            return
        panic = self._panics.get(target, NO_PANIC)
        samples = self._meter.samples(target.scale.metric)
        decision = decide_replicas(samples, self._now(), target.scale.spec, counts.ready, panic)
        if decision is None:
            return
        self._panics[target] = decision.panic
        async with self.targets.lock:
            if self.active and decision.replicas != counts.desired:
                await self.targets.scale(target, decision.replicas)

    # Private.

    def _target_changed(self) -> None:
        self._changed.set()
        self.refresh_discovery()
        if self.state == SCALED_TO_ZERO and self.targets.are_scaled_up:
            log.info("Another client has scaled up %s", self.targets)
            self._last_active = self._now()
            self._set_state(ACTIVATING)

    def _set_state(self, state: str) -> None:
        if state == ACTIVATING:
            self._activating_since = now = self._now()
            self.cold_starts.last = ColdStart(time.time() - max(0.0, now - (self.held.oldest or now)))
        self.state = state
        self._changed.set()

    async def _next_change(self, seconds: float | None = None) -> None:
        """Wait until something has changed, at most for some seconds. Only one task may wait."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        self._changed.clear()

    async def _pause(self, seconds: float) -> None:
        """Pause before a retry; a change ends the pause early, but not at once."""
        await asyncio.sleep(RETRY_SECONDS[0])
        await self._next_change(seconds)

    def _inactive_reason(self) -> str:
        names = ", ".join(backend.name for backend in self._backends.all)
        return self.targets.not_ready_reason() or (
            f"its replicas are ready, but {names} cannot be reached; look at the Service and at network policies"
        )

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


@dataclass
class ColdStart:
    """When each part of a cold start ended, since the epoch; 0 if unknown or not yet. See `PARTS`."""

    held: float
    """When the first request was held."""
    decided: float = 0.0
    started: float = 0.0
    loading: float = 0.0
    seen: float = 0.0
    connected: float = 0.0
    first_byte: float = 0.0

    def spans(self, since: float = 0.0) -> Iterator[tuple[str, float, float]]:
        """Yield name, start and end of each part so far, in order; for a later request, from `since` on."""
        before = max(self.held, since)
        for name in PARTS:
            ended: float = getattr(self, name)
            if ended:
                # Replicas that another client started may have started before the request came.
                yield name, before, max(before, ended)
                before = max(before, ended)

    def seconds(self) -> dict[str, float]:
        """Return how long each part took."""
        return {name: round(ended - began, 6) for name, began, ended in self.spans()}


class ColdStartReporter:
    """Reports cold starts to metrics, traces and a callback. Used from the loop's thread only."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self.last: ColdStart | None = None
        """The last cold start, or the current one."""
        self.on_cold_start: Callable[[ColdStart], None] = lambda _: None
        """Called when the first response after a cold start has started."""
        self._observe_part: Callable[[str, float], None] = lambda _name, _seconds: None

    def register_metrics(self, registry: Registry) -> None:
        """Register the metric of the parts."""
        parts = registry.histogram(
            "headrace_router_wake_part_seconds",
            "Duration of each part of a cold start.",
            ("part",),
            buckets=_PART_BUCKETS,
        )
        self._observe_part = lambda name, seconds: parts.labels(part=name).observe(seconds)

    def record(self, **times: float) -> None:
        """Record when parts ended. The first time of each part counts."""
        for name, moment in times.items():
            if self.last is not None and not getattr(self.last, name):
                setattr(self.last, name, moment)

    def response_started(self, request: QueuedRequest) -> None:
        """Report a held request whose response starts."""
        cold_start, now = self.last, time.time()
        if cold_start is None:
            return
        if not cold_start.first_byte:
            cold_start.first_byte = now
            for name, seconds in cold_start.seconds().items():
                self._observe_part(name, seconds)
            self.on_cold_start(cold_start)
        self._trace(request, cold_start, now)

    def request_refused(self, request: QueuedRequest, reason: str) -> None:
        """Report a held request that is refused."""
        if self.last is not None:
            self._trace(request, self.last, time.time(), reason)

    def _trace(self, request: QueuedRequest, cold_start: ColdStart, now: float, failure: str = "") -> None:
        """Record the wait of one request as a span, with a child span for each part."""
        if not self._tracer.enabled:
            return
        waited = asyncio.get_running_loop().time() - request.queued_since if request.queued_since else 0.0
        since = now - waited
        parent = self._tracer.start("cold start", request.traceparent() or None, at=since)
        for name, began, ended in cold_start.spans(since):
            self._tracer.start(name.replace("_", " "), parent, at=began).end(at=ended)
        parent.end(failure, at=now)
