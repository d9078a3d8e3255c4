# SPDX-License-Identifier: Apache-2.0
"""Latency of streams as clients see it: the time to the first token, and the time per further token.

Counted for autoscalers with latency targets (`measure_streams`), for all backends together. An event counts as a token. A
long stream is counted every second, so that a percentile shows what happens now.
"""

from __future__ import annotations

from asyncio import get_running_loop
from typing import TYPE_CHECKING, Any

from headrace.core.telemetry.metrics import Histogram
from headrace.fleet.autoscaling.latency_counts import LATENCY_BOUNDS_SECONDS

if TYPE_CHECKING:
    from headrace.core.telemetry.metrics import Registry
    from headrace.fleet.router.responses import UpstreamHead
    from headrace.net.http.heads import Buffer

_END_OF_EVENT = b"\n\n"
_COUNTED_SECONDS = 1.0
_EVENTS = b"text/event-stream"


class StreamLatency:
    """Latency histograms of a router's streams, and counts of streams."""

    def __init__(self) -> None:
        self.requests = 0
        """Requests that may become a stream."""
        self.generating = 0
        """Open streams that have received their first token."""
        self.first = Histogram(LATENCY_BOUNDS_SECONDS)
        self.next = Histogram(LATENCY_BOUNDS_SECONDS)

    def register_metrics(self, registry: Registry) -> None:
        """Report the counts."""
        self.first = registry.histogram(
            "headrace_router_first_token_seconds",
            "Time from a request to the first event of its stream, without a start from zero replicas.",
            buckets=LATENCY_BOUNDS_SECONDS,
        ).labels()
        self.next = registry.histogram(
            "headrace_router_token_seconds",
            "Mean time between the events of a stream, for each second of it.",
            buckets=LATENCY_BOUNDS_SECONDS,
        ).labels()
        registry.callback("headrace_router_streams", "Streams that have begun and not ended.", lambda: self.generating)

    def as_json(self) -> dict[str, Any]:
        """Return the counts for the status; their buckets are `LATENCY_BOUNDS_SECONDS`."""
        return {
            "requests": self.requests,
            "generating": self.generating,
            "first_token": _histogram_json(self.first),
            "token": _histogram_json(self.next),
        }


class StreamTimer:
    """Times one request."""

    __slots__ = ("_arrived", "_events", "_last", "_latency", "_mark", "_open", "held")

    def __init__(self, latency: StreamLatency) -> None:
        latency.requests += 1
        self._latency = latency
        self._arrived = get_running_loop().time()
        self._last = self._mark = 0.0
        """Times of the last event and of the last counted one."""
        self._events = 0
        """Events since then."""
        self._open = False
        self.held = False
        """Whether it waits for the start of a service that was scaled to zero."""

    def restart(self) -> None:
        """Start timing now: the service has started."""
        self.held, self._arrived = False, get_running_loop().time()

    def piece(self, data: Buffer) -> None:
        """Count a piece of the stream."""
        events = bytes(data).count(_END_OF_EVENT)
        if not events:
            return
        now, latency = get_running_loop().time(), self._latency
        self._last = now
        if not self._open:
            self._open = True
            latency.generating += 1
            if not self._mark:
                latency.first.observe(max(0.0, now - self._arrived))
                events -= 1
            self._mark = now
        self._events += events
        if now - self._mark >= _COUNTED_SECONDS:
            self._count()

    def ended(self) -> None:
        """End the attempt; another backend may continue the stream."""
        if self._open:
            self._open = False
            self._latency.generating -= 1
            self._count()

    def _count(self) -> None:
        if self._events and self._last > self._mark:
            self._latency.next.observe((self._last - self._mark) / self._events)
        self._events, self._mark = 0, self._last


def is_event_stream(head: UpstreamHead) -> bool:
    """Whether a response is a stream of events."""
    return any(name == b"content-type" and value.startswith(_EVENTS) for name, value in head.head.fields)


def _histogram_json(histogram: Histogram) -> dict[str, Any]:
    return {"counts": list(histogram.counts), "seconds": histogram.sum}
