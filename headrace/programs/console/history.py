# SPDX-License-Identifier: Apache-2.0
"""The metrics history of a server: a point every few seconds for the whole server and for each used model.

A ring of fixed size. Points are made from two readings of the server's counts, so requests pay nothing for them. One hour
takes about 3 KB for each series: 30 KB for a model, 60 KB for a language model.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.backends.llm.metrics import FIRST_TOKEN_SECONDS, NEXT_TOKEN_SECONDS

Numbers = dict[str, Any]
Point = dict[str, float | None]

INTERVAL_SECONDS = 5.0
DEFAULT_SECONDS = 3600
_MAX_MODELS = 256
"""Models with a history of their own; the requests of others are in the total."""
_DIGITS = 4
LANGUAGE_BOUNDS_MS = {
    "ttft": [1000 * seconds for seconds in FIRST_TOKEN_SECONDS],
    "itl": [1000 * seconds for seconds in NEXT_TOKEN_SECONDS],
}
"""Buckets of the time to the first token and of the inter-token latency."""
TOTAL = ""
"""Key of the series of the whole server."""


class History:
    """Points of the last `seconds`, by model and series."""

    def __init__(self, bounds_ms: Sequence[float], seconds: float = DEFAULT_SECONDS) -> None:
        self.seconds = seconds
        self._bounds_ms = bounds_ms
        self._size = max(2, round(seconds / INTERVAL_SECONDS))
        self._times = array("d", [0.0]) * self._size
        self._series: dict[str, dict[str, array[float]]] = {}
        self._used: dict[str, int] = {}
        """The number of the last point in which a model had requests."""
        self._count = 0
        self._before: tuple[float, Numbers, dict[str, Numbers]] | None = None
        self.latest: dict[str, Point] = {}
        """The newest point of the server and of each model with a history."""

    def add(self, now: float, total: Numbers, models: Mapping[str, Numbers], machine: Point) -> None:
        """Add a point: the counts of the server and of each model since its start, and the state of the machine."""
        before, self._before = self._before, (now, total, dict(models))
        if before is None or now <= before[0]:
            return
        then, total_before, models_before = before
        seconds = now - then
        points = {TOTAL: point(total_before, total, seconds, self._bounds_ms) | machine}
        for name, numbers in models.items():
            new_point = point(models_before.get(name, {}), numbers, seconds, self._bounds_ms)
            active = bool(new_point["requests"] or new_point["failures"] or new_point["in_flight"])
            if active:
                self._used[name] = self._count
            if active or name in self._series:
                points[name] = new_point
        index = self._count % self._size
        self._times[index] = now
        for name, series in self._series.items():
            for column in series.values():
                column[index] = math.nan
            if name not in points:
                self.latest.pop(name, None)
        for name, new_point in points.items():
            self._write(name, new_point, index)
        self._count += 1
        for name in [name for name, last in self._used.items() if self._count - last > self._size]:
            del self._used[name]
            self._series.pop(name, None)
            self.latest.pop(name, None)

    def _write(self, name: str, point: Point, index: int) -> None:
        if name not in self._series and len(self._series) > _MAX_MODELS:
            return
        series = self._series.setdefault(name, {})
        self.latest[name] = point
        for column, value in point.items():
            if value is None:
                continue
            if column not in series:
                series[column] = array("f", [math.nan]) * self._size
            series[column][index] = value

    def document(self, name: str = TOTAL, seconds: float = math.inf, since: float = 0.0) -> Numbers:
        """Return the points of one model, or of the server: those of the last `seconds`, and after `since`."""
        size = min(self._count, self._size)
        places = [number % self._size for number in range(self._count - size, self._count)]
        newest = self._times[places[-1]] if places else 0.0
        after = max(since, newest - seconds)
        places = [index for index in places if self._times[index] > after]
        return {
            "seconds": self.seconds,
            "interval_seconds": INTERVAL_SECONDS,
            "time": [round(self._times[index], 2) for index in places],
            "series": {
                column: [_rounded(values[index]) for index in places]
                for column, values in self._series.get(name, {}).items()
            },
        }


def _rounded(value: float) -> float | None:
    """Return a value with as many digits as a chart shows; None for a gap."""
    if math.isnan(value):
        return None
    return float(f"{value:.{_DIGITS}g}")


def point(before: Numbers, now: Numbers, seconds: float, bounds_ms: Sequence[float]) -> Point:
    """Return rates, latencies and gauges from two readings of the counts of a model or of a server."""

    def grown(name: str) -> float:
        return max(0.0, float(now.get(name, 0) - before.get(name, 0)))

    took = _less(now.get("took", ()), before.get("took", ()))
    computed = grown("computed")
    batches_before = before.get("batches", {})
    batches = {int(rows): max(0, count - batches_before.get(rows, 0)) for rows, count in now.get("batches", {}).items()}
    executions = sum(batches.values())
    point: Point = {
        "requests": grown("done") / seconds,
        "failures": grown("failed") / seconds,
        "p50": percentile(took, bounds_ms, 0.5),
        "p95": percentile(took, bounds_ms, 0.95),
        "p99": percentile(took, bounds_ms, 0.99),
        "queue": grown("queue_ns") / computed / 1e6 if computed else None,
        "compute": grown("compute_ns") / computed / 1e6 if computed else None,
        "in_flight": now.get("in_flight", 0),
        "waiting": now.get("waiting", 0),
        "batch": sum(rows * count for rows, count in batches.items()) / executions if executions else None,
    }
    if "llm" in now:
        point |= _language_point(before.get("llm", {}), now["llm"], seconds)
    return point


def _language_point(before: Numbers, now: Numbers, seconds: float) -> Point:
    prompt, generated = _less(now["tokens"], before.get("tokens", ()))
    hits, lookups = _less(now["prefix"], before.get("prefix", ()))
    used, caches = now["kv"]
    point: Point = {
        "prompt": prompt / seconds,
        "generated": generated / seconds,
        "prefix": 100 * hits / lookups if lookups else None,
        "kv": 100 * used / caches if caches else None,
        "running": now["running"],
        "queued": now["waiting"],
    }
    for name in ("ttft", "itl"):
        counts, bounds = _less(now[name], before.get(name, ())), LANGUAGE_BOUNDS_MS[name]
        point |= {f"{name}_p50": percentile(counts, bounds, 0.5), f"{name}_p95": percentile(counts, bounds, 0.95)}
    return point


def _less(now: Iterable[float], before: Sequence[float]) -> list[float]:
    return [max(0, value - (before[index] if index < len(before) else 0)) for index, value in enumerate(now)]


def percentile(counts: Sequence[float], bounds: Sequence[float], share: float) -> float | None:
    """Return a percentile from the counts of buckets, interpolated within the bucket; None without observations."""
    rank = share * sum(counts)
    if not rank:
        return None
    for index, count in enumerate(counts):
        if count and rank <= count:
            low = bounds[index - 1] if index else 0.0
            high = bounds[index] if index < len(bounds) else low
            return low + (high - low) * rank / count
        rank -= count
    return bounds[-1]
