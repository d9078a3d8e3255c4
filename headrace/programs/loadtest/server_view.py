# SPDX-License-Identifier: Apache-2.0
"""What the server says of a run: its v2 statistics after, less those before. Called by `running`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Statistics = Sequence[Mapping[str, Any]]

_PHASES = ("queue", "compute_input", "compute_infer", "compute_output")


@dataclass(frozen=True)
class ServerView:
    """Means over the requests of the run; those of others, if there were any, are among them."""

    requests: int
    failed: int
    phases_ms: Mapping[str, float]
    """Mean milliseconds of a request in each phase: queue, compute_input, compute_infer, compute_output."""
    executions: int
    rows: int
    batches: Mapping[int, int]
    """How often the model computed so many rows at once."""
    cache_hits: int

    @property
    def mean_batch(self) -> float:
        """Rows per computation."""
        return self.rows / self.executions if self.executions else 0.0

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
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
    """The difference, over all versions; None where the server counted nothing, or began anew meanwhile."""
    sums = _Sums()
    old = {str(each.get("version", "")): each for each in before}
    for each in after:
        sums.add(each, 1)
        if (was := old.get(str(each.get("version", "")))) is not None:
            sums.add(was, -1)
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
    """Numbers of versions, added up."""

    def __init__(self) -> None:
        self.success = self.fail = self.executions = self.rows = self.cache_hits = 0
        self.nanoseconds = dict.fromkeys(_PHASES, 0)
        self.batches: dict[int, int] = {}

    def add(self, statistics: Mapping[str, Any], sign: int) -> None:
        """Take a version's numbers in, or away."""
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
