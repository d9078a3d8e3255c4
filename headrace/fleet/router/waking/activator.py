# SPDX-License-Identifier: Apache-2.0
"""Asleep, waking, awake, falling asleep: what a router with `activation` does when nobody is there, or nobody asks.

Made by `proxy`. The proxies call `hold` with a request that no backend can take; while somebody is awake they never do. A
timer looks at the backends' counts some times a second, and one task changes states.

    asleep -> waking     a request came, or somebody else has started the targets
    waking -> awake      all targets are ready, and a backend answers
    awake -> falling     nothing came for long, or somebody else has put a target to sleep
    falling -> asleep

Falling ends when the targets have no replica that counts as ready: one that is about to end must not be taken for one that
has come. A request that comes meanwhile waits for both.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from headrace.core.telemetry.tracing import NO_TRACING, Tracer
from headrace.fleet.autoscaling.deciding import CALM, KNATIVE, TICK_SECONDS, Panic, decide
from headrace.fleet.autoscaling.meter import Meter
from headrace.fleet.router.waking.holding import Holding
from headrace.fleet.router.waking.parts import Telling, Wake
from headrace.fleet.router.waking.scaler import Replicas, Scaler, ScalerFailed
from headrace.fleet.router.waking.settings import ActivationSettings, Target
from headrace.fleet.router.waking.targets import RETRY_SECONDS, Targets

if TYPE_CHECKING:
    from headrace.core.telemetry.registry import Registry
    from headrace.fleet.router.backend import Backend
    from headrace.fleet.router.backends import Backends
    from headrace.fleet.router.waking.held import Held

log = logging.getLogger("headrace.router")

ASLEEP, WAKING, AWAKE, FALLING = "asleep", "waking", "awake", "falling asleep"

_LOOK_SECONDS = 0.25
"""How often the counts are looked at; oftener where `idle_seconds` is less than a second."""
_PROBE_SECONDS = 0.03
"""How often a backend is asked while it wakes: what a request waits for longer than it must."""
_PATIENT_SECONDS, _PATIENT_PROBE_SECONDS = 30.0, 0.25
"""A backend whose replicas are ready and that has not answered for so long is asked less often."""
_FIRST_LOOK_SECONDS = 3.0
_FALL_SECONDS = 15.0
"""The longest that replicas may count as ready after they should be none: then they are not waited for."""
_LONGEST_RETRY_AFTER = 60.0
_WAKE_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200)


class Activator:
    """See the module. Used from the loop's thread only."""

    def __init__(
        self,
        settings: ActivationSettings,
        backends: Backends,
        scaler: Scaler,
        answers: Callable[[Backend], Awaitable[bool]],
        tracer: Tracer = NO_TRACING,
    ) -> None:
        self._settings = settings
        self.scaler = scaler
        self._backends = backends
        self._answers = answers
        self.state = AWAKE
        self.targets = Targets(settings.targets, scaler, self._target_changed)
        self.told = Telling(tracer)
        self.holding = Holding(settings, self._why, self.told.refused)
        self.wakes = 0
        self.look_around: Callable[[], None] = lambda: None
        """Has the router look for backends: some may have come."""
        self._meter = Meter()
        self._panics: dict[Target, Panic] = {}
        self._active_at = 0.0
        self._count = 0
        self._waking_since = 0.0
        self._idle = False
        """Whether the fall is ours: then all have to sleep, else only those wait to end whom somebody has put to sleep."""
        self._draining = False
        self._changed = asyncio.Event()
        self._on_risen: Callable[[float], None] = _ignore
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def settings(self) -> ActivationSettings:
        """Those that count now."""
        return self._settings

    @property
    def active(self) -> bool:
        """Whether replicas are needed: until nothing has come for `idle_seconds`."""
        return self.state in (WAKING, AWAKE)

    def hold(self, request: Held) -> None:
        """No backend can take the request: it waits until one can."""
        self.holding.add(request)
        if self.state == AWAKE:
            log.info("no backend can take a request: it waits")
            self._backends.rest()
            self._become(WAKING)
        elif self.state == ASLEEP:
            self._become(WAKING)
        else:
            self._changed.set()

    def renew(self, settings: ActivationSettings) -> None:
        """Other settings, whoever waits and whatever sleeps."""
        self._settings = settings
        self._panics.clear()
        self.holding.renew(settings)
        self.targets.renew(settings.targets)
        self._changed.set()

    def joined(self) -> None:
        """A backend has come."""
        self._changed.set()

    async def start(self) -> None:
        """Find out how it stands, and go on finding out."""
        self._active_at = self._now()
        self._count = self._arrived()
        self.targets.start()
        with suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_LOOK_SECONDS):
                while not self.targets.known:
                    await self._next_change()
        for target in self.targets.all:
            seen = self.targets.seen(target)
            if seen is not None and seen.wanted > 1:
                # A minute of samples has to come before anybody is taken away.
                self._panics[target] = Panic(self._now() + KNATIVE.stable_seconds, seen.wanted)
        if not self.targets.ready:
            self._backends.rest()
            self._become(ASLEEP if self.targets.sleeping else WAKING)
        self._look()
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._keep_scale())]

    def drain(self, seconds: float) -> None:
        """The router ends within so long: those who wait are told in time, and it puts nobody to sleep any more."""
        self._draining = True
        self.holding.end_by(self._now() + max(0.0, seconds - min(1.0, seconds / 4)))

    async def close(self) -> None:
        """Stop. What runs goes on."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.holding.close()
        await self.targets.close()

    def as_json(self) -> dict[str, Any]:
        """For the status."""
        return {
            "state": self.state,
            "held": len(self.holding),
            "held_bytes": self.holding.bytes,
            "wakes": self.wakes,
            "last_wake": self.told.last.seconds() if self.told.last is not None else None,
            "refused": self.holding.refused,
            "targets": self.targets.as_json(),
        }

    def declare(self, registry: Registry) -> None:
        """For the metrics."""
        registry.callback("headrace_router_active", "1 unless it sleeps.", lambda: int(self.active))
        registry.callback("headrace_router_held_requests", "Requests that wait for a wake.", lambda: len(self.holding))
        registry.callback("headrace_router_wakes_total", "Times it has woken.", lambda: self.wakes, kind="counter")
        registry.callback(
            "headrace_router_held_refused_total",
            "Requests that could not wait, or not long enough.",
            lambda: self.holding.refused,
            kind="counter",
        )
        family = registry.histogram(
            "headrace_router_wake_seconds", "From the first request to a backend that answers.", buckets=_WAKE_BUCKETS
        )
        self._on_risen = family.labels().observe
        self.told.declare(registry)

    # The timer: no waiting in here.

    def _look(self) -> None:
        now = self._now()
        period = max(0.02, min(_LOOK_SECONDS, self._settings.idle_seconds / 4))
        self._timer = asyncio.get_running_loop().call_later(period, self._look)
        arrived, at_once = self._arrived(), self._at_once()
        if at_once or arrived > self._count:
            self._active_at = now
        self._count = arrived
        if not self.active:
            return
        self._meter.add(now, at_once, arrived)
        self._idle = now - self._active_at >= self._settings.idle_seconds and not self._draining
        if self._idle:
            log.info("nothing came for %g s: putting to sleep %s", self._settings.idle_seconds, self.targets)
        elif self.state == AWAKE and self.targets.sleeping:
            log.warning("somebody has put to sleep %s", ", ".join(map(str, self.targets.sleeping)))
        else:
            return
        # In the same turn as the look: what comes from now on waits.
        self._backends.rest()
        self._become(FALLING)

    def _arrived(self) -> int:
        """Requests that have come so far: given to a backend, waiting, or gone while they waited."""
        given = sum(each.stats.requests - each.stats.retries for each in self._backends.all)
        return given + self._backends.departed_requests + len(self.holding) + self.holding.dropped

    def _at_once(self) -> int:
        backends = (*self._backends.all, *self._backends.leaving)
        waiting = len(self.holding) + self._backends.queued
        return sum(each.outstanding + each.tunnels for each in backends) + waiting

    # One task: from state to state.

    async def _run(self) -> None:
        while True:
            try:
                if self.state == FALLING:
                    await self._fall()
                elif self.state == WAKING:
                    await self._wake()
                else:
                    await self._next_change()
            except Exception:
                log.exception("waking or falling asleep failed; trying again")
                await asyncio.sleep(RETRY_SECONDS[1])

    async def _wake(self) -> None:
        pause = RETRY_SECONDS[0]
        ready_since: float | None = None
        while self.state == WAKING:
            try:
                async with self.targets.scaling:
                    await self.targets.wake()
            except ScalerFailed:
                await self._pause(pause)
                pause = min(2 * pause, RETRY_SECONDS[1])
                continue
            pause = RETRY_SECONDS[0]
            self.told.note(decided=time.time())
            if not self.targets.ready:
                await self._next_change(_LOOK_SECONDS)
                continue
            now = self._now()
            ready_since = now if ready_since is None else ready_since
            self.told.note(seen=time.time(), **self.targets.moments())
            up = await self._who_answers()
            if up and self.state == WAKING and self.targets.ready:
                self._rise(up)
                return
            patient = now - ready_since > _PATIENT_SECONDS
            await self._next_change(_PATIENT_PROBE_SECONDS if patient else _PROBE_SECONDS)

    async def _who_answers(self) -> list[Backend]:
        """The backends that answer: as soon as there is one, without those that take their time."""
        asked = {asyncio.ensure_future(self._answers(backend)): backend for backend in self._backends.all}
        waiting = set(asked)
        up: list[Backend] = []
        try:
            while waiting and not up:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                up = [asked[each] for each in done if each.result()]
        finally:
            for each in waiting:
                each.cancel()
        return up

    def _rise(self, up: list[Backend]) -> None:
        now = self._now()
        seconds = now - min(self.holding.oldest or now, self._waking_since)
        self.wakes += 1
        self._on_risen(seconds)
        self.told.note(connected=time.time())
        self.holding.retry_after_seconds = min(_LONGEST_RETRY_AFTER, max(1.0, seconds))
        self._active_at = now
        self._backends.rise(up, now)
        self._become(AWAKE)
        log.info("awake after %.3f s: %d requests go on", seconds, len(self.holding))
        self.holding.release(lambda: self.state == AWAKE, self.told.answered)

    async def _fall(self) -> None:
        """Put them to sleep, and wait until none counts as ready. What fails is tried again, unless somebody waits."""
        pause = RETRY_SECONDS[0]
        put = set(self.targets.sleeping)
        while self._idle and len(put) < len(self.targets.all):
            try:
                async with self.targets.scaling:
                    for target in self.targets.all:
                        if target not in put:
                            await self.targets.scale(target, 0)
                            put.add(target)
            except ScalerFailed:
                if len(self.holding):
                    break
                await self._pause(pause)
                pause = min(2 * pause, RETRY_SECONDS[1])
        with suppress(TimeoutError):
            async with asyncio.timeout(_FALL_SECONDS):
                while any(self.targets.seen(target) not in (None, _GONE) for target in put):
                    if self.targets.troubled and len(self.holding):
                        break
                    await self._next_change()
        self._meter.forget()
        self._panics.clear()
        called = len(self.holding) or self.targets.wanted
        self._active_at = self._now()
        self._become(WAKING if called else ASLEEP)

    # Another: how many there should be above one.

    async def _keep_scale(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            for target in self.targets.all:
                try:
                    await self._keep_scale_of(target)
                except ScalerFailed:
                    continue  # it is in the log, and the next tick decides anew
                except Exception:
                    log.exception("deciding how many replicas of %s there should be failed", target)

    async def _keep_scale_of(self, target: Target) -> None:
        seen = self.targets.seen(target)
        if target.scale is None or seen is None or not seen.wanted or self._draining:
            return
        panic = self._panics.get(target, CALM)
        decision = decide(self._meter.samples(target.scale.metric), self._now(), target.scale.aim, seen.ready, panic)
        if decision is None:
            return
        self._panics[target] = decision.panic
        async with self.targets.scaling:
            if self.active and decision.replicas != seen.wanted:
                await self.targets.scale(target, decision.replicas)

    # Inside.

    def _target_changed(self) -> None:
        self._changed.set()
        self.look_around()
        if self.state == ASLEEP and self.targets.wanted:
            log.info("somebody has woken %s", self.targets)
            self._active_at = self._now()
            self._become(WAKING)

    def _become(self, state: str) -> None:
        if state == WAKING:
            self._waking_since = now = self._now()
            self.told.last = Wake(time.time() - max(0.0, now - (self.holding.oldest or now)))
        self.state = state
        self._changed.set()

    async def _next_change(self, seconds: float | None = None) -> None:
        """Wait until something has changed, or for so long. One task waits at a time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        self._changed.clear()

    async def _pause(self, seconds: float) -> None:
        """Before something is tried again: shorter if something changes, but never nothing."""
        await asyncio.sleep(RETRY_SECONDS[0])
        await self._next_change(seconds)

    def _why(self) -> str:
        names = ", ".join(each.name for each in self._backends.all)
        return self.targets.why_not() or (
            f"its replicas are ready, but {names} cannot be reached; look at the Service and at network policies"
        )

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


_GONE = Replicas(0, 0)


def _ignore(seconds: float) -> None:
    """Until there are metrics."""
