# SPDX-License-Identifier: Apache-2.0
"""Decide how many replicas meet latency targets: p95 of the first token, and of each further token. Pure.

A replica's capacity in requests per second is estimated from its latencies under little load, and corrected by evidence: a
load that met the targets is within the capacity (`Evidence.proven`), one that missed them is above it (`Evidence.refuted`).
Replicas are
added for the load that is expected when they will be ready. One replica is removed at a time, when the samples of a window
show that the others meet the targets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile
from math import ceil, inf, sqrt

from headrace.fleet.autoscaling.autoscaler import KNATIVE, Windows
from headrace.fleet.autoscaling.latency_counts import LatencyCounts, add_counts

MODEL_UTILISATION = 0.8
"""Safety margin: share of an estimated capacity, or of a load that missed the targets, that counts as usable."""
_WAIT_FACTOR = 1.5
"""The 95th percentile of the wait for a queue with one server is about so many service times at half load (M/D/1)."""
_OUTLIER = 10.0
"""A latency of more than so many medians is not that of a replica with little load."""
_IDLE_PROMPTS = 0.5
"""A replica with fewer prompts at once, on average, has little load."""
_RATE_SAMPLES = 5
_DEFAULT_SPREAD, _MAX_SPREAD = 1.3, 3.0
"""Percentile of the time per token divided by its mean: until it is known, and at most."""
_SPREAD_SAMPLES = 30
_MIN_COUNT = 10
"""Minimum number of samples for a percentile."""
_PARTS = 4
"""Number of parts of the stable window that are compared to find a trend."""
_MAX_TREND = 1.5
"""The expected load is at most so many times the current one."""
_CALM = 0.7
"""A replica is removed only if the latency would stay below this share of its target."""
_MAX_TRIAL = 1.34
"""When a replica is removed, the load per replica may exceed the highest proven load by this factor."""
_HISTORY_WINDOWS = 10
_TOLERANCE = 1.1
"""A load up to so many times the capacity adds no replica."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class LatencySpec:
    """Latency targets of a component, and the bounds of its replicas."""

    max_replicas: int
    min_replicas: int = 1
    first_seconds: float = 0.0
    """Target for the time to the first token; 0: none."""
    next_seconds: float = 0.0
    """Target for the time per further token; 0: none."""
    percentile: float = 95.0
    windows: Windows = KNATIVE

    @property
    def history_seconds(self) -> float:
        """Age up to which samples are kept."""
        return _HISTORY_WINDOWS * self.windows.stable_seconds

    @property
    def evidence_seconds(self) -> float:
        """Minimum time without scaling before latencies are used as evidence."""
        return self.windows.stable_seconds / 3


@dataclass(frozen=True, slots=True)
class LatencySample:
    """Counts of the routers over an interval that ended at `time`."""

    time: float
    seconds: float
    ready: int
    """Ready replicas."""
    arrivals: int
    """Requests that arrived."""
    streams: float = 0.0
    """Streams that generated at once, on average."""
    first: LatencyCounts = field(default_factory=LatencyCounts)
    """Times to the first token."""
    next: LatencyCounts = field(default_factory=LatencyCounts)
    """Times per further token."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Loads per replica (requests/s) that met or missed the targets, and the times of the last scaling."""

    proven: float = 0.0
    """The highest load that met the targets."""
    refuted: float = inf
    """The last load that missed the targets; expires with the samples."""
    refuted_at: float = -inf
    raised_at: float = -inf
    lowered_at: float = -inf


@dataclass(frozen=True, slots=True)
class LatencyDecision:
    """Desired replicas, the reason, and the evidence for the next decision."""

    replicas: int
    reason: str
    evidence: Evidence
    limited: str = ""
    """Why the targets are missed although nothing changes: `maxReplicas`, or replicas do not help."""


@dataclass(frozen=True, slots=True)
class _Observed:
    """Percentiles of a window, in seconds; 0: too few samples."""

    first: float
    next: float

    def missed(self, spec: LatencySpec) -> bool:
        return (0 < spec.first_seconds < self.first) or (0 < spec.next_seconds < self.next)

    def calm(self, spec: LatencySpec, more: float) -> bool:
        """Whether both percentiles would stay well below their targets if they grew by the same factor as the load."""
        return (not spec.first_seconds or self.first * more <= _CALM * spec.first_seconds) and (
            not spec.next_seconds or self.next * more <= _CALM * spec.next_seconds
        )


def decide_for_latency(
    samples: Sequence[LatencySample],
    now: float,
    spec: LatencySpec,
    replicas: int,
    start_seconds: float,
    evidence: Evidence,
) -> LatencyDecision | None:
    """Return `spec.min_replicas` to `spec.max_replicas`; None without a sample in the stable window.

    samples: of `spec.history_seconds`, the oldest first. replicas: desired replicas so far. start_seconds: time that a new
    replica needs until it is ready.
    """
    samples = [sample for sample in samples if now - spec.history_seconds < sample.time <= now]
    window = _newest(samples, now, spec.windows.stable_seconds)
    if not window:
        return None
    observed = _observed(_newest(samples, now, spec.evidence_seconds), spec)
    evidence = _learn(samples, now, spec, evidence)
    capacity, limit = _capacity(samples, spec, evidence)
    expected = _expected_rate(window, now, spec.windows, start_seconds)
    lowest, highest = max(1, spec.min_replicas), max(1, spec.min_replicas, spec.max_replicas)
    if limit and observed.missed(spec):
        # More replicas do not help: keep the current number, within the bounds.
        return LatencyDecision(min(max(replicas, lowest), highest), limit, evidence, limit)
    needed = max(lowest, ceil(expected / capacity - _ROUNDING)) if capacity else max(lowest, replicas)
    summary = _describe(observed, spec, expected, start_seconds, capacity)
    if needed > replicas and capacity and expected <= _TOLERANCE * capacity * replicas:
        needed = max(lowest, replicas)
    if needed > replicas:
        desired = min(needed, highest)
        if desired > replicas:
            summary += f"; maxReplicas is {highest}" if needed > highest else ""
            return LatencyDecision(desired, summary, replace(evidence, raised_at=now))
    elif replicas > highest:
        return LatencyDecision(highest, f"maxReplicas is {highest}", evidence)
    elif (
        replicas > lowest and (load := _load_with_one_less(window, now, spec, replicas, capacity, evidence)) is not None
    ):
        # The load after scaling down counts as proven until it misses a target.
        proven = max(evidence.proven, load)
        return LatencyDecision(replicas - 1, summary, replace(evidence, lowered_at=now, proven=proven))
    limited = f"{summary}; maxReplicas is {highest}" if needed > highest and observed.missed(spec) else ""
    return LatencyDecision(min(max(replicas, lowest), highest), summary, evidence, limited)


def _newest(samples: Sequence[LatencySample], now: float, seconds: float) -> list[LatencySample]:
    return [sample for sample in samples if now - seconds < sample.time]


def _rate(samples: Sequence[LatencySample]) -> float:
    seconds = sum(sample.seconds for sample in samples)
    return sum(sample.arrivals for sample in samples) / seconds if seconds else 0.0


def _observed(samples: Sequence[LatencySample], spec: LatencySpec) -> _Observed:
    first, following = add_counts(sample.first for sample in samples), add_counts(sample.next for sample in samples)
    return _Observed(
        first.percentile(spec.percentile) if first.total >= _MIN_COUNT else 0.0,
        following.percentile(spec.percentile) if following.total >= _MIN_COUNT else 0.0,
    )


# The load


def _expected_rate(window: Sequence[LatencySample], now: float, windows: Windows, ahead: float) -> float:
    """Return the request rate expected `seconds` from now.

    The newest seconds count alone if chance does not explain how many requests came. A load that grew through the whole
    window goes on to grow; one that jumped once does not.
    """
    length = windows.stable_seconds / _PARTS
    parts = [
        _rate([sample for sample in window if begins < now - sample.time <= begins + length])
        for begins in (-1e-6 + length * number for number in range(_PARTS - 1, -1, -1))
    ]
    rate = max(_rate(_newest(window, now, 2 * length)), *_surges(window, now, windows))
    growth = min(after - before for before, after in pairwise(parts))
    if growth <= 0 or parts[-1] - parts[0] <= 3 * sqrt((parts[0] + parts[-1]) / length):
        return rate
    rate = max(rate, parts[-1])
    return min(rate + ahead * growth / length, _MAX_TREND * rate)


def _surges(window: Sequence[LatencySample], now: float, windows: Windows) -> Iterator[float]:
    """Yield the rates of the newest sample and of the short window, where chance does not explain them."""
    short = _newest(window, now, windows.panic_seconds) or [window[-1]]
    calm = _rate([sample for sample in window if sample not in short])
    for samples, before, deviations in (
        (short, calm, 3.0),
        (window[-1:], max(calm, _rate(short[:-1])), 4.0),
    ):
        arrivals, usual = sum(sample.arrivals for sample in samples), before * sum(sample.seconds for sample in samples)
        if arrivals >= _MIN_COUNT and arrivals > usual + deviations * sqrt(max(usual, 1.0)):
            yield _rate(samples)
    yield 0.0


# The capacity


def _learn(samples: Sequence[LatencySample], now: float, spec: LatencySpec, evidence: Evidence) -> Evidence:
    """Judge the load of the last window, if the replicas were the same all the time."""
    ready = samples[-1].ready
    recent = list(takewhile(lambda sample: sample.ready == ready, reversed(samples)))
    began = recent[-1].time - recent[-1].seconds
    if not ready or now - began < spec.evidence_seconds or evidence.raised_at > began:
        return evidence
    window = _newest(recent, now, spec.evidence_seconds)
    # Requests that came before these replicas were ready say nothing about them.
    judged = [replace(sample, first=sample.first.up_to(sample.time - began)) for sample in window]
    if sum(sample.first.total for sample in judged) < sum(sample.first.total for sample in window):
        # Nor do the tokens of a replica that still processes such requests.
        judged = [replace(sample, next=LatencyCounts()) for sample in judged]
    observed, load = _observed(judged, spec), _rate(judged) / ready
    if observed.missed(spec):
        # If the load has just grown, its newest rate is the one that is too high.
        load = max(load, _rate(_newest(judged, now, spec.windows.panic_seconds)) / ready)
        return replace(evidence, refuted=load, refuted_at=now, proven=min(evidence.proven, MODEL_UTILISATION * load))
    if now - evidence.refuted_at > spec.history_seconds:
        evidence = replace(evidence, refuted=inf)
    if (spec.first_seconds and not observed.first) or (spec.next_seconds and not observed.next):
        return evidence
    refuted = evidence.refuted if load < evidence.refuted else inf
    return replace(evidence, proven=max(evidence.proven, load), refuted=refuted)


def _capacity(samples: Sequence[LatencySample], spec: LatencySpec, evidence: Evidence) -> tuple[float, str]:
    """Return a replica's capacity in requests/s (0: unknown), and why more replicas would not help ("": they would)."""
    estimates, limits = [], []
    if spec.first_seconds:
        estimate, idle = _by_first_token(samples, spec.first_seconds)
        estimates.append(estimate)
        if idle >= spec.first_seconds:
            limits.append(f"a replica with little load takes {_seconds(idle)} to the first token, the target is "
                          f"{_seconds(spec.first_seconds)}: more replicas do not help")  # fmt: skip
    if spec.next_seconds:
        estimate, idle = _by_next_token(samples, spec)
        estimates.append(estimate)
        if idle >= spec.next_seconds:
            limits.append(f"a replica with little load takes {_seconds(idle)} per token, the target is "
                          f"{_seconds(spec.next_seconds)}: more replicas do not help")  # fmt: skip
    known = [estimate for estimate in estimates if estimate]
    possible = max(MODEL_UTILISATION * min(known) if known else 0.0, evidence.proven)
    refuted = MODEL_UTILISATION * evidence.refuted
    capacity = min(possible, refuted) if possible or refuted == inf else refuted
    return capacity, "; ".join(limits)


def _by_first_token(samples: Sequence[LatencySample], target: float) -> tuple[float, float]:
    """Return the capacity of a replica that computes one prompt after the other, and the seconds that one takes.

    While there is little load, that is the time to the first token; 0 if there never was little load. A replica that always
    has prompts waiting takes no longer than the time between its first tokens.
    """
    counted = [sample for sample in samples if sample.first.counts and sample.ready]
    quiet = sorted(counted, key=lambda sample: sample.arrivals / sample.ready)[: (len(counted) + 2) // 3]
    idle = add_counts(sample.first for sample in quiet)
    # Without the requests that waited in a burst before there were more replicas.
    idle_seconds = idle.up_to(_OUTLIER * idle.percentile(50)).mean
    if not idle_seconds:
        return 0.0, 0.0
    seconds = min(idle_seconds, 1 / max(_answered_rates(samples)))
    waiting = idle_seconds * sum(sample.arrivals for sample in quiet)
    is_idle = waiting <= _IDLE_PROMPTS * sum(sample.ready * sample.seconds for sample in quiet)
    room = max(0.0, target - seconds) / (_WAIT_FACTOR * seconds)
    return room / (1 + room) / seconds, idle_seconds if is_idle else 0.0


def _answered_rates(samples: Sequence[LatencySample]) -> Iterator[float]:
    """Yield the first tokens per second and replica, of several samples in a row."""
    for end in range(0, len(samples), _RATE_SAMPLES):
        row = samples[end : end + _RATE_SAMPLES]
        seconds = sum(sample.ready * sample.seconds for sample in row)
        yield sum(sample.first.total for sample in row) / seconds if seconds else 0.0


def _by_next_token(samples: Sequence[LatencySample], spec: LatencySpec) -> tuple[float, float]:
    """Return the capacity of a replica whose time per token grows with its streams, and its time without load."""
    points = [
        (sample.streams / sample.ready, sample.next.mean, sample.next.total)
        for sample in samples
        if sample.ready and sample.next.counts
    ]
    weight = sum(count for _, _, count in points)
    if not weight:
        return 0.0, 0.0
    mean_streams = sum(streams * count for streams, _, count in points) / weight
    mean_seconds = sum(seconds * count for _, seconds, count in points) / weight
    variance = sum(count * (streams - mean_streams) ** 2 for streams, _, count in points) / weight
    covariance = sum(count * (x - mean_streams) * (y - mean_seconds) for x, y, count in points) / weight
    target = spec.next_seconds / (spread := _spread(samples, spec.percentile))
    # Streams differ too little for a line, or it falls: take the time as proportional, which says too little.
    slope = covariance / variance if variance > 0.25 and covariance > 0 else mean_seconds / max(mean_streams, 1.0)
    base = max(0.0, mean_seconds - slope * mean_streams)
    arrivals = sum(sample.arrivals for sample in samples)
    stream_seconds = sum(sample.streams * sample.seconds for sample in samples) / max(arrivals, 1)
    if base >= target or not stream_seconds:
        return 0.0, base * spread
    return (target - base) / slope / stream_seconds, base * spread


def _spread(samples: Sequence[LatencySample], percentile: float) -> float:
    """Return the percentile of the time per token divided by its mean, at one load: of each newest sample for itself."""
    newest = [sample.next for sample in samples[-_SPREAD_SAMPLES:] if sample.next.counts and sample.next.sum]
    weight = sum(counts.total for counts in newest)
    if weight < _MIN_COUNT:
        return _DEFAULT_SPREAD
    spread = sum(counts.total * counts.percentile(percentile) / counts.mean for counts in newest) / weight
    return min(max(spread, 1.0), _MAX_SPREAD)


# Removing replicas


def _load_with_one_less(
    window: Sequence[LatencySample],
    now: float,
    spec: LatencySpec,
    replicas: int,
    capacity: float,
    evidence: Evidence,
) -> float | None:
    """Return the load per replica after removing one, if the targets would be met with a margin; None if not, or not yet."""
    oldest = window[0].time - window[0].seconds
    if now - oldest < 0.9 * spec.windows.stable_seconds or now - evidence.raised_at < spec.windows.stable_seconds:
        return None
    observed = _observed(window, spec)
    if now - evidence.lowered_at < spec.evidence_seconds or observed.missed(spec):
        return None
    step = max(1, len(window) // 3)
    load = max(_rate(window[start : start + step]) for start in range(0, len(window), step)) / (replicas - 1)
    if not load or load <= _CALM * capacity:
        return load
    more = replicas / (replicas - 1)
    measured = bool(observed.first or observed.next)
    # Latencies are low, the load per replica grows little, and no evidence is against it: try it.
    is_trial = measured and more <= _MAX_TRIAL and observed.calm(spec, more)
    return load if is_trial and load < MODEL_UTILISATION * evidence.refuted else None


# Text of decisions


def _describe(observed: _Observed, spec: LatencySpec, expected: float, ahead: float, capacity: float) -> str:
    parts = [
        f"{name} p{spec.percentile:g} {_seconds(seconds)} is {'above' if seconds > target else 'within'} {_seconds(target)}"
        for name, seconds, target in (
            ("first token", observed.first, spec.first_seconds),
            ("per token", observed.next, spec.next_seconds),
        )
        if seconds and target
    ]
    load = f"{expected:.3g} requests/s expected in {ahead:.0f} s"
    return "; ".join([*parts, f"{load}, {capacity:.2g}/s per replica" if capacity else load])


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
