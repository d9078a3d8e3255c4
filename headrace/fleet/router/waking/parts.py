# SPDX-License-Identifier: Apache-2.0
"""One cold start in parts: from the request that was held to the first byte of its answer. Kept by `activator`.

    decided      somebody was asked to start what sleeps
    started      its process began
    loading      it was found to be ready: what the model takes, and less than one look of a probe
    seen         the router heard of it
    connected    a backend took a connection
    first_byte   the answer began

Where nobody tells when a process began, as on Kubernetes, its part is in the one after it. Moments are seconds since the
epoch: some of them are another process's. `Telling` passes them on: to metrics, to traces, to who wants to know.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.core.telemetry.registry import Registry
    from headrace.core.telemetry.tracing import Tracer
    from headrace.fleet.router.waking.held import Held

_PART_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200)
PARTS = ("decided", "started", "loading", "seen", "connected", "first_byte")


@dataclass
class Wake:
    """When each part ended; 0 for what is not known, or has not come."""

    held: float
    """When the first request began to wait."""
    decided: float = 0.0
    started: float = 0.0
    loading: float = 0.0
    seen: float = 0.0
    connected: float = 0.0
    first_byte: float = 0.0

    def spans(self, since: float = 0.0) -> Iterator[tuple[str, float, float]]:
        """Name, begin and end of each part that has come, one after the other; for a request that came later, from then."""
        before = max(self.held, since)
        for name in PARTS:
            ended: float = getattr(self, name)
            if ended:
                # What was started by somebody else may have begun before.
                yield name, before, max(before, ended)
                before = max(before, ended)

    def seconds(self) -> dict[str, float]:
        """How long each part took."""
        return {name: round(ended - began, 6) for name, began, ended in self.spans()}


class Telling:
    """See the module. Used from the loop's thread only."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self.last: Wake | None = None
        """The last time that somebody was woken, or the one under way."""
        self.on_woken: Callable[[Wake], None] = lambda _: None
        """Called when the first answer after a wake has begun."""
        self._on_part: Callable[[str, float], None] = lambda _name, _seconds: None

    def declare(self, registry: Registry) -> None:
        """For the metrics."""
        parts = registry.histogram(
            "headrace_router_wake_part_seconds",
            "Of a wake: what each part of it took.",
            ("part",),
            buckets=_PART_BUCKETS,
        )
        self._on_part = lambda name, seconds: parts.labels(part=name).observe(seconds)

    def note(self, **moments: float) -> None:
        """Parts have ended. The first time counts."""
        for name, moment in moments.items():
            if self.last is not None and not getattr(self.last, name):
                setattr(self.last, name, moment)

    def answered(self, request: Held) -> None:
        """The answer to a request that has waited begins."""
        wake, now = self.last, time.time()
        if wake is None:
            return
        if not wake.first_byte:
            wake.first_byte = now
            for name, seconds in wake.seconds().items():
                self._on_part(name, seconds)
            self.on_woken(wake)
        self._trace(request, wake, now)

    def refused(self, request: Held, why: str) -> None:
        """Nobody will answer it."""
        if self.last is not None:
            self._trace(request, self.last, time.time(), why)

    def _trace(self, request: Held, wake: Wake, now: float, failure: str = "") -> None:
        """One request's wait as spans: all of it, and below that its parts."""
        if not self._tracer.enabled:
            return
        waited = asyncio.get_running_loop().time() - request.since if request.since else 0.0
        since = now - waited
        whole = self._tracer.start("cold start", request.traceparent() or None, at=since)
        for name, began, ended in wake.spans(since):
            self._tracer.start(name.replace("_", " "), whole, at=began).end(at=ended)
        whole.end(failure, at=now)
