# SPDX-License-Identifier: Apache-2.0
"""Scaling by latency targets on one machine: the samples of one workload, and the decisions on them.

Has no clock of its own. The numbers come from the status of the routers that measure streams: those of the service's entry.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.fleet.autoscaling.latency_counts import LatencyCounts, add_counts, parse_counts
from headrace.fleet.autoscaling.latency_target import (
    Evidence,
    LatencyDecision,
    LatencySample,
    LatencySpec,
    decide_for_latency,
)
from headrace.platforms.kubernetes_client.objects import get_mapping

_START_SECONDS = 30.0
"""Time that a new replica is expected to need, until one was seen to start."""


@dataclass(frozen=True)
class _Reading:
    """The counters of one router."""

    requests: int = 0
    first: LatencyCounts = field(default_factory=LatencyCounts)
    next: LatencyCounts = field(default_factory=LatencyCounts)


class LatencyScaling:
    """Samples of one workload, and the evidence of earlier decisions."""

    def __init__(self, spec: LatencySpec) -> None:
        self._spec = spec
        self._samples: deque[LatencySample] = deque(maxlen=int(spec.history_seconds / spec.windows.tick_seconds) + 1)
        self._evidence = Evidence()
        self._known: dict[str, _Reading] = {}
        self._begun: float | None = None
        """When the current sample began; None before the first reading."""
        self._readings = self._generating = self._requests = 0
        """Readings of the current sample, and their sums."""
        self._first = self._next = LatencyCounts()
        self._desired: int | None = None
        self._raised: tuple[float, int] | None = None
        """When replicas were added, and how many there should be, until they are ready."""
        self.start_seconds = _START_SECONDS
        """Time from a decision until the replicas are ready."""
        self.busy = False
        """Whether there were requests at the last reading."""

    def add_statuses(self, now: float, statuses: Mapping[str, Mapping[str, Any] | None]) -> bool:
        """Add the status of each router, by name; None if it does not answer. Return whether any router measures streams."""
        readings: dict[str, _Reading] = {}
        generating = requests = 0
        for router, status in statuses.items():
            if status is None:
                if router in self._known:
                    readings[router] = self._known[router]
                continue
            streams = get_mapping(status, "streams")
            if not streams:
                continue
            reading = readings[router] = _read(streams)
            generating += _number(streams, "generating")
            # The first reading has what an earlier daemon saw; later, a new router counts from 0.
            before = self._known.get(router, _Reading() if self._begun is not None else reading)
            requests += reading.requests - (before.requests if reading.requests >= before.requests else 0)
            self._first = add_counts((self._first, reading.first.since(before.first)))
            self._next = add_counts((self._next, reading.next.since(before.next)))
        if not readings:
            return False
        self._begun = now if self._begun is None else self._begun
        self._known = readings
        self._readings += 1
        self._generating += generating
        self._requests += requests
        self.busy = generating > 0 or requests > 0
        return True

    def decide(self, now: float, desired: int, ready: int) -> LatencyDecision | None:
        """Return the decision on all samples; None without any. desired: replicas so far."""
        if self._desired is not None and self._desired != desired:
            # A user set it: keep it for a window.
            self._evidence = Evidence(self._evidence.proven, self._evidence.refuted, raised_at=now)
        self._desired = desired
        if self._raised is not None and ready >= self._raised[1]:
            self.start_seconds = (self.start_seconds + now - self._raised[0]) / 2
            self._raised = None
        self._close_sample(now, ready)
        decision = decide_for_latency(
            tuple(self._samples), now, self._spec, desired, self.start_seconds, self._evidence
        )
        if decision is None:
            return None
        self._evidence = decision.evidence
        if decision.replicas > desired:
            self._raised = (now, decision.replicas) if self._raised is None else (self._raised[0], decision.replicas)
        elif decision.replicas < desired:
            self._raised = None
        self._desired = decision.replicas
        return decision

    def _close_sample(self, now: float, ready: int) -> None:
        if self._begun is None or now <= self._begun or not self._readings:
            return
        seconds, streams = now - self._begun, self._generating / self._readings
        # A longer start is that of a service that was scaled to zero.
        if seconds <= self._spec.windows.stable_seconds:
            self._samples.append(LatencySample(now, seconds, ready, self._requests, streams, self._first, self._next))
        self._begun = now
        self._readings = self._generating = self._requests = 0
        self._first = self._next = LatencyCounts()


def _read(streams: Mapping[str, Any]) -> _Reading:
    first, following = get_mapping(streams, "first_token"), get_mapping(streams, "token")
    return _Reading(
        _number(streams, "requests"),
        parse_counts(first.get("counts"), first.get("seconds")),
        parse_counts(following.get("counts"), following.get("seconds")),
    )


def _number(mapping: Mapping[str, Any], name: str) -> int:
    value = mapping.get(name)
    return value if isinstance(value, int) else 0
