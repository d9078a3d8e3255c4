# SPDX-License-Identifier: Apache-2.0
"""The samples of one run, and the numbers computed from them."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt


class Recording:
    """The samples of one run. Times are of `time.perf_counter`."""

    def __init__(self, begins: float, ends: float) -> None:
        self.begins = begins
        self.ends = ends
        self.latencies = array("d")
        """Seconds of successful requests."""
        self.late = array("d")
        """Seconds between the due time and the sending of requests: delays of the load generator itself."""
        self.failed_after = array("d")
        """Seconds of failed requests."""
        self.finished = 0
        """Successful requests within the window."""
        self.errors: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        """The first text of each kind of error."""
        self.most_waiting = 0
        """Maximum number of due requests without a free connection."""

    @property
    def seconds(self) -> float:
        """Return the length of the window."""
        return self.ends - self.begins

    def record(self, began: float, now: float, kind: str, text: str) -> None:
        """Record the end of a request. `began` is when it was due, or sent."""
        if not kind and self.begins <= now < self.ends:
            self.finished += 1
        if not self.begins <= began < self.ends:
            return
        if not kind:
            self.latencies.append(now - began)
            return
        self.errors[kind] += 1
        self.failed_after.append(now - began)
        self.examples.setdefault(kind, text)

    def record_sent(self, due: float, now: float) -> None:
        """Record that a request was sent."""
        if self.begins <= due < self.ends:
            self.late.append(max(now - due, 0.0))


PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)
BUSY_SHARE = 0.9
"""A load generator that uses more of its core may be the bottleneck."""
_LATE_MS = 1.0


def percentile(values: npt.NDArray[np.float64], share: float) -> float:
    """Return the smallest observed value that `share` percent of the values do not exceed; NaN for no values."""
    if not len(values):
        return float("nan")
    # Rounded first: 99.9 percent of 1000 is 999.0000000000001 in floating point.
    rank = math.ceil(round(share * len(values) / 100, 9))
    index = min(max(rank, 1), len(values)) - 1
    return float(np.partition(values, index)[index])


@dataclass(frozen=True, slots=True)
class ClientCpu:
    """CPU use of the load generator, in cores."""

    process: float
    thread: float
    """CPU use of the thread that sends and receives; saturated at 1.0."""


@dataclass(frozen=True)
class RunResults:
    """The results of one run."""

    mode: Literal["closed", "open"]
    load: float
    """Connections of a closed loop, or requests per second of an open one."""
    rows: int
    """Rows in each request."""
    seconds: float
    finished: int
    latencies_ms: npt.NDArray[np.float64]
    """Latencies of successful requests."""
    late_ms: npt.NDArray[np.float64]
    """In an open loop: delay between the due time and the sending of requests."""
    errors: Mapping[str, int]
    examples: Mapping[str, str]
    most_waiting: int
    cpu: ClientCpu
    server: ServerView | None = None
    """The server's statistics of the same time; None if it has none."""

    @property
    def throughput(self) -> float:
        """Successful requests per second."""
        return self.finished / self.seconds

    @property
    def requests(self) -> int:
        """Requests that began within the window."""
        return len(self.latencies_ms) + self.failed

    @property
    def failed(self) -> int:
        """Failed requests."""
        return sum(self.errors.values())

    def at(self, share: float) -> float:
        """Return a percentile of the latency, in milliseconds."""
        return percentile(self.latencies_ms, share)

    @property
    def mean_ms(self) -> float:
        """Mean latency."""
        return float(self.latencies_ms.mean()) if len(self.latencies_ms) else float("nan")

    @property
    def max_ms(self) -> float:
        """Maximum latency."""
        return float(self.latencies_ms.max()) if len(self.latencies_ms) else float("nan")

    def warnings(self) -> list[str]:
        """Return warnings about the validity of the results."""
        warnings = []
        if self.cpu.thread > BUSY_SHARE:
            warnings.append(
                f"the client used {self.cpu.thread:.0%} of its core: it may be the limit, not the server. Run several at "
                "once, or send more --rows in each request"
            )
        if (late := percentile(self.late_ms, 99)) > _LATE_MS:
            warnings.append(
                f"1 in 100 requests was sent {late:.1f} ms or more after it was due: the client fell behind"
            )
        if self.most_waiting:
            warnings.append(
                f"up to {self.most_waiting} requests were due without a free connection: the server does not keep "
                "up with this rate"
            )
        if 0 < len(self.latencies_ms) < 1000:
            warnings.append(
                f"{len(self.latencies_ms)} answers are few for the highest percentiles: p99.9 is their maximum. "
                "A longer --duration says more"
            )
        if self.server is not None and self.server.cache_hits:
            warnings.append(
                f"{self.server.cache_hits} answers came from the response cache, since all requests are the same: "
                "switch the cache off to measure the model"
            )
        return warnings

    def document(self) -> dict[str, Any]:
        """Return the results as JSON."""
        named = {f"p{share:g}": _number(self.at(share)) for share in PERCENTILES}
        fields: dict[str, Any] = {
            "mode": self.mode,
            "concurrency" if self.mode == "closed" else "rate": self.load,
            "rows": self.rows,
            "seconds": round(self.seconds, 3),
            "requests": self.requests,
            "requests_per_second": round(self.throughput, 3),
            "errors": dict(self.errors),
            "error_texts": dict(self.examples),
            "latency_ms": {**named, "max": _number(self.max_ms), "mean": _number(self.mean_ms)},
            "client_cpu": {"process": round(self.cpu.process, 3), "thread": round(self.cpu.thread, 3)},
            "warnings": self.warnings(),
        }
        if self.mode == "open":
            fields["late_ms"] = {
                "p50": _number(percentile(self.late_ms, 50)),
                "p99": _number(percentile(self.late_ms, 99)),
                "max": _number(percentile(self.late_ms, 100)),
            }
            fields["most_waiting"] = self.most_waiting
        fields["server"] = self.server.document() if self.server is not None else None
        return fields


def run_results(
    recording: Recording,
    *,
    mode: Literal["closed", "open"],
    load: float,
    rows: int,
    cpu: ClientCpu,
    server: ServerView | None,
) -> RunResults:
    """Compute the results of a recording."""
    return RunResults(
        mode=mode,
        load=load,
        rows=rows,
        seconds=recording.seconds,
        finished=recording.finished,
        latencies_ms=np.array(recording.latencies, np.float64) * 1000,
        late_ms=np.array(recording.late, np.float64) * 1000,
        errors=dict(recording.errors.most_common()),
        examples=dict(recording.examples),
        most_waiting=recording.most_waiting,
        cpu=cpu,
        server=server,
    )


def _number(value: float) -> float | None:
    """Replace NaN, which JSON cannot hold."""
    return None if value != value else round(value, 4)  # noqa: PLR0124 - NaN


Statistics = Sequence[Mapping[str, Any]]


_PHASES = ("queue", "compute_input", "compute_infer", "compute_output")


@dataclass(frozen=True)
class ServerView:
    """Server statistics: means over the requests of the run, including those of other clients."""

    requests: int
    failed: int
    phases_ms: Mapping[str, float]
    """Mean milliseconds of a request in each phase: queue, compute_input, compute_infer, compute_output."""
    executions: int
    rows: int
    batches: Mapping[int, int]
    """How often the model ran each batch size."""
    cache_hits: int

    @property
    def mean_batch(self) -> float:
        """Mean batch size."""
        return self.rows / self.executions if self.executions else 0.0

    def document(self) -> dict[str, Any]:
        """Return the statistics as JSON."""
        return {
            "requests": self.requests,
            "failed": self.failed,
            "mean_ms": {name: round(value, 4) for name, value in self.phases_ms.items()},
            "executions": self.executions,
            "rows": self.rows,
            "mean_batch": round(self.mean_batch, 3),
            "batches": {str(size): count for size, count in sorted(self.batches.items())},
            "cache_hits": self.cache_hits,
        }


def server_view(before: Statistics, after: Statistics) -> ServerView | None:
    """Return the difference over all versions; None if the server counted nothing, or restarted meanwhile."""
    sums = _Sums()
    old = {str(version.get("version", "")): version for version in before}
    for version in after:
        sums.add(version, 1)
        if (previous := old.get(str(version.get("version", "")))) is not None:
            sums.add(previous, -1)
    requests = sums.success
    if requests <= 0 or sums.executions < 0:
        return None
    return ServerView(
        requests=requests,
        failed=sums.fail,
        phases_ms={name: sums.nanoseconds[name] / requests / 1e6 for name in _PHASES},
        executions=sums.executions,
        rows=sums.rows,
        batches={size: count for size, count in sorted(sums.batches.items()) if count > 0},
        cache_hits=sums.cache_hits,
    )


class _Sums:
    """Sums over versions."""

    def __init__(self) -> None:
        self.success = self.fail = self.executions = self.rows = self.cache_hits = 0
        self.nanoseconds = dict.fromkeys(_PHASES, 0)
        self.batches: dict[int, int] = {}

    def add(self, statistics: Mapping[str, Any], sign: int) -> None:
        """Add or subtract a version's numbers."""
        inference = statistics.get("inference_stats") or {}
        self.success += sign * _of(inference, "success", "count")
        self.fail += sign * _of(inference, "fail", "count")
        self.cache_hits += sign * _of(inference, "cache_hit", "count")
        for name in _PHASES:
            self.nanoseconds[name] += sign * _of(inference, name, "ns")
        self.executions += sign * int(statistics.get("execution_count") or 0)
        self.rows += sign * int(statistics.get("inference_count") or 0)
        for batch in statistics.get("batch_stats") or ():
            size = int(batch.get("batch_size") or 0)
            self.batches[size] = self.batches.get(size, 0) + sign * _of(batch, "compute_infer", "count")


def _of(statistics: Mapping[str, Any], name: str, member: str) -> int:
    return int((statistics.get(name) or {}).get(member) or 0)
