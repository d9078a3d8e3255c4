# SPDX-License-Identifier: Apache-2.0
"""Decide how many replicas a load needs, by the rules of Knative's autoscaler. Pure: samples and time are passed in.

The rules and numbers are those of https://knative.dev/docs/serving/autoscaling/kpa-specific/, so that a service scales alike
with and without Knative. The average of a minute decides. A short window that needs twice the ready replicas starts a panic:
the short window decides too, and nothing is scaled down until a minute after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

UTILISATION = 0.7
"""Share of a replica's target that is used: the rest is for load that comes while another replica starts."""
MAX_SCALE_UP = 1000.0
MAX_SCALE_DOWN = 2.0
"""Largest factor in one step, up and down."""
TICK_SECONDS = 2.0
CONCURRENCY, RPS = "concurrency", "rps"
_BUCKET_SECONDS = 1.0
_ROUNDING = 1e-9
"""7 requests for a target of 10 need one replica, although 10 * 0.7 is less than 7 in binary."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Time windows of a decision."""

    stable_seconds: float = 60.0
    panic_seconds: float = 6.0
    panic_threshold: float = 2.0
    """A panic starts when the short window needs so many times the ready replicas."""

    @property
    def tick_seconds(self) -> float:
        """Time between two decisions."""
        return min(TICK_SECONDS, self.panic_seconds / 3)


KNATIVE = Windows()


@dataclass(frozen=True, slots=True)
class AutoscalerSpec:
    """Target value and bounds of the replicas."""

    target: float
    """Target value per replica."""
    max_replicas: int
    min_replicas: int = 1
    utilisation: float = UTILISATION
    tolerance: float = 0.0
    """Relative difference from the current replicas that changes nothing."""
    windows: Windows = KNATIVE


@dataclass(frozen=True, slots=True)
class Sample:
    """A measured value."""

    time: float
    value: float


@dataclass(frozen=True, slots=True)
class PanicState:
    """State between decisions: until when nothing is scaled down, and the minimum until then."""

    until: float = -inf
    min_replicas: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """Desired replicas, the state for the next decision, and the reason."""

    replicas: int
    panic: PanicState
    average: float
    """Average of the window that decided."""
    seconds: float
    """Length of that window."""


NO_PANIC = PanicState()


def decide_replicas(
    samples: Iterable[Sample],
    now: float,
    spec: AutoscalerSpec,
    ready: int,
    panic: PanicState = NO_PANIC,
    desired: int = 0,
) -> Decision | None:
    """Return `spec.min_replicas` to `spec.max_replicas`; None without a sample in the stable window.

    ready: ready replicas. wanted: desired replicas so far, which a load within the tolerance does not change.
    """
    windows = spec.windows
    recent = [sample for sample in samples if now - windows.stable_seconds < sample.time <= now]
    if not recent:
        return None
    newest = [sample for sample in recent if now - windows.panic_seconds < sample.time] or recent
    current = max(1, ready)
    slow, fast = _average(recent), _average(newest)
    stable, urgent = _replicas_for(slow, spec, desired), _replicas_for(fast, spec, desired)
    until = now + windows.stable_seconds if urgent >= windows.panic_threshold * current else panic.until
    lowest, highest = int(current / MAX_SCALE_DOWN), ceil(current * MAX_SCALE_UP)
    calm = min(max(stable, lowest), highest)
    if now >= until:
        return Decision(_within(calm, spec), NO_PANIC, slow, windows.stable_seconds)
    hasty = min(max(urgent, lowest), highest)
    replicas = max(calm, hasty, panic.min_replicas if now < panic.until else 0)
    state = PanicState(until, min(replicas, spec.max_replicas))
    decision = Decision(_within(replicas, spec), state, slow, windows.stable_seconds)
    return replace(decision, average=fast, seconds=windows.panic_seconds) if hasty > calm else decision


def _within(replicas: int, spec: AutoscalerSpec) -> int:
    return max(1, spec.min_replicas, min(replicas, spec.max_replicas))


def _average(samples: list[Sample]) -> float:
    return sum(sample.value for sample in samples) / len(samples)


def _replicas_for(average: float, spec: AutoscalerSpec, desired: int) -> int:
    exact = average / (spec.target * spec.utilisation)
    if abs(exact - desired) <= spec.tolerance * desired:
        return desired
    return ceil(exact - _ROUNDING)


class LoadMeter:
    """Samples of the load: concurrent requests and requests per second, one per second for the last minute.

    Fed from counters that exist anyway: requests pay nothing for it.
    """

    def __init__(self, windows: Windows = KNATIVE) -> None:
        self._bucket = min(_BUCKET_SECONDS, windows.panic_seconds / 3)
        max_samples = int(windows.stable_seconds / self._bucket) + 1
        self._concurrency: deque[Sample] = deque(maxlen=max_samples)
        self._rps: deque[Sample] = deque(maxlen=max_samples)
        self._started: float | None = None
        self._total = 0.0
        self._measurements = 0
        self._requests = 0

    def add(self, now: float, concurrency: int, requests: int) -> None:
        """Add a measurement: open requests now, and all requests so far."""
        if self._started is None:
            self._started, self._requests = now, requests
        self._total += concurrency
        self._measurements += 1
        passed = now - self._started
        if passed < self._bucket:
            return
        self._append(self._concurrency, now, self._total / self._measurements, passed)
        self._append(self._rps, now, max(0, requests - self._requests) / passed, passed)
        self._started, self._requests = now, requests
        self._total, self._measurements = 0.0, 0

    def samples(self, metric: str) -> Sequence[Sample]:
        """Return the samples of a metric, the oldest first."""
        return self._concurrency if metric == CONCURRENCY else self._rps

    def clear(self) -> None:
        """Remove all samples: the load before a scale to zero says nothing about the load after it."""
        self._concurrency.clear()
        self._rps.clear()
        self._started = None
        self._total, self._measurements = 0.0, 0

    def _append(self, samples: deque[Sample], now: float, value: float, passed: float) -> None:
        """Append one sample per second that has passed, so that all seconds count alike."""
        buckets = min(int(passed / self._bucket), samples.maxlen or 1)
        samples.extend(Sample(now - age * self._bucket, value) for age in range(buckets - 1, -1, -1))
