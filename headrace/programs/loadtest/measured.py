# SPDX-License-Identifier: Apache-2.0
"""The numbers of one run, from a `recording.Recording`. Shown by the verbs, searched by `search`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headrace.programs.loadtest.recording import Recording
from headrace.programs.loadtest.server_view import ServerView

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)
BUSY_SHARE = 0.9
"""A client that uses more of its core than this may be what is slow."""
_LATE_MS = 1.0


def percentile(values: npt.NDArray[np.float64], share: float) -> float:
    """The smallest value that so many percent of the values do not exceed: one that was seen. NaN for none."""
    if not len(values):
        return float("nan")
    # Rounded first: 99.9 percent of 1000 is 999.0000000000001 to a computer.
    rank = math.ceil(round(share * len(values) / 100, 9))
    place = min(max(rank, 1), len(values)) - 1
    return float(np.partition(values, place)[place])


@dataclass(frozen=True, slots=True)
class ClientCpu:
    """What the load generator itself used, in cores."""

    process: float
    thread: float
    """Of the one thread that sends and receives: at 1.0 it can do no more."""


@dataclass(frozen=True)
class Measured:
    """One run."""

    mode: Literal["closed", "open"]
    load: float
    """Connections of a closed loop, requests per second of an open one."""
    rows: int
    """In each request."""
    seconds: float
    finished: int
    latencies_ms: npt.NDArray[np.float64]
    """Of requests that were answered well."""
    late_ms: npt.NDArray[np.float64]
    """Of an open loop: how much later than due requests were sent."""
    errors: Mapping[str, int]
    examples: Mapping[str, str]
    most_waiting: int
    cpu: ClientCpu
    server: ServerView | None = None
    """What the server says of the same time; None if it does not tell."""

    @property
    def throughput(self) -> float:
        """Requests per second that were answered well."""
        return self.finished / self.seconds

    @property
    def requests(self) -> int:
        """All that began in the time that was looked at."""
        return len(self.latencies_ms) + self.failed

    @property
    def failed(self) -> int:
        """Those without a good answer."""
        return sum(self.errors.values())

    def at(self, share: float) -> float:
        """A percentile of the latency, in milliseconds."""
        return percentile(self.latencies_ms, share)

    @property
    def mean_ms(self) -> float:
        """The average latency."""
        return float(self.latencies_ms.mean()) if len(self.latencies_ms) else float("nan")

    @property
    def max_ms(self) -> float:
        """The worst latency."""
        return float(self.latencies_ms.max()) if len(self.latencies_ms) else float("nan")

    def warnings(self) -> list[str]:
        """What a reader should know before believing the numbers."""
        found = []
        if self.cpu.thread > BUSY_SHARE:
            found.append(
                f"the client used {self.cpu.thread:.0%} of its core: it may be the limit, not the server. Run several at "
                "once, or send more --rows in each request"
            )
        if (late := percentile(self.late_ms, 99)) > _LATE_MS:
            found.append(f"1 in 100 requests was sent {late:.1f} ms or more after it was due: the client fell behind")
        if self.most_waiting:
            found.append(
                f"up to {self.most_waiting} requests were due and had no connection to go on: the server does not keep "
                "up with this rate"
            )
        if 0 < len(self.latencies_ms) < 1000:
            found.append(
                f"{len(self.latencies_ms)} answers are few for the highest percentiles: p99.9 is their maximum. "
                "A longer --duration says more"
            )
        if self.server is not None and self.server.cache_hits:
            found.append(
                f"{self.server.cache_hits} answers came from the response cache, since all requests are the same: "
                "switch the cache off to measure the model"
            )
        return found

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        named = {f"p{share:g}": _number(self.at(share)) for share in PERCENTILES}
        shown: dict[str, Any] = {
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
            shown["late_ms"] = {
                "p50": _number(percentile(self.late_ms, 50)),
                "p99": _number(percentile(self.late_ms, 99)),
                "max": _number(percentile(self.late_ms, 100)),
            }
            shown["most_waiting"] = self.most_waiting
        shown["server"] = self.server.document() if self.server is not None else None
        return shown


def measured(
    recording: Recording,
    *,
    mode: Literal["closed", "open"],
    load: float,
    rows: int,
    cpu: ClientCpu,
    server: ServerView | None,
) -> Measured:
    """Sum a recording up."""
    return Measured(
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
    """JSON has no NaN."""
    return None if value != value else round(value, 4)  # noqa: PLR0124 - what NaN is known by
