# SPDX-License-Identifier: Apache-2.0
"""v2 over HTTP: what every version has done so far.

Registered by `http`. Turns the engine's counts into Triton's `model_stats`, with two members of our own: `failures`, and
`batching`, which tells why batches have the size they have.
"""

from __future__ import annotations

from typing import Any

from headrace.api.v2.documents import answer_json
from headrace.api.v2.models import MODEL_PATHS, model_of
from headrace.api.v2.shared import V2Shared
from headrace.engine.dataplane import ServingVersion
from headrace.engine.responses import ResponseStats, place_text
from headrace.engine.scheduling.batches import BatchRecord
from headrace.engine.scheduling.delay import AutoDelay
from headrace.engine.statistics import BatchStats, VersionStatistics
from headrace.net.http.exchange import Exchange
from headrace.net.http.routes import Routes

RECENT_BATCHES = 16


class V2Statistics:
    """Handlers over one data plane."""

    def __init__(self, shared: V2Shared) -> None:
        self._plane = shared.plane
        self._gate = shared.http_gate

    def add_to(self, routes: Routes) -> None:
        """Serve the paths."""
        routes.add("GET", "/v2/models/stats", self._gate.http("statistics", self.of_all))
        for path in MODEL_PATHS:
            routes.add("GET", f"{path}/stats", self._gate.http("statistics", self.of_one))

    def of_all(self, exchange: Exchange) -> None:
        """Every version of every model that serves."""
        _answer(exchange, self._plane.statistics())

    def of_one(self, exchange: Exchange) -> None:
        """Every version of one model, or one."""
        _answer(exchange, self._plane.statistics(*model_of(exchange)))


def _answer(exchange: Exchange, versions: list[ServingVersion]) -> None:
    answer_json(exchange, {"model_stats": [stats_json(version) for version in versions]})


def stats_json(version: ServingVersion) -> dict[str, Any]:
    """One entry of `model_stats`."""
    statistics = version.statistics
    return {
        "name": version.name,
        "version": version.version_text,
        "last_inference": statistics.last_inference_ms,
        "inference_count": statistics.inferences,
        "execution_count": statistics.executions,
        "inference_stats": _inference_stats(statistics),
        "response_stats": {
            place_text(place): _response_stats(stats) for place, stats in sorted(statistics.responses.items())
        },
        "batch_stats": [_batch_stats(rows, statistics.batches[rows]) for rows in sorted(statistics.batches)],
        "memory_usage": [],
        "failures": dict(statistics.failures),
        "batching": _batching(version),
    }


def _inference_stats(statistics: VersionStatistics) -> dict[str, dict[str, int]]:
    total = statistics.total()
    computed = total.computed
    return {
        "success": _duration(total.success, total.success_ns),
        "fail": _duration(total.fail, total.fail_ns),
        "queue": _duration(computed, total.queue_ns),
        "compute_input": _duration(computed, total.input_ns),
        "compute_infer": _duration(computed, total.infer_ns),
        "compute_output": _duration(computed, total.output_ns),
        "cache_hit": _duration(total.hit, total.hit_ns),
        "cache_miss": _duration(total.miss, total.miss_ns),
    }


def _batch_stats(rows: int, stats: BatchStats) -> dict[str, Any]:
    return {
        "batch_size": rows,
        "compute_input": _duration(stats.count, stats.input_ns),
        "compute_infer": _duration(stats.count, stats.infer_ns),
        "compute_output": _duration(stats.count, stats.output_ns),
    }


def _response_stats(stats: ResponseStats) -> dict[str, dict[str, int]]:
    """As Triton counts them: an empty response has no output, and a cancelled one neither that nor a computation."""
    full = stats.success + stats.fail
    return {
        "compute_infer": _duration(full + stats.empty, stats.infer_ns),
        "compute_output": _duration(full, stats.output_ns),
        "success": _duration(stats.success, stats.success_ns),
        "fail": _duration(stats.fail, stats.fail_ns),
        "empty_response": _duration(stats.empty, stats.empty_ns),
        "cancel": _duration(stats.cancel, stats.cancel_ns),
    }


def _duration(count: int, nanoseconds: int) -> dict[str, int]:
    return {"count": count, "ns": nanoseconds}


def _batching(version: ServingVersion) -> dict[str, Any]:
    delay, log = version.delay, version.statistics.log
    shown: dict[str, Any] = {
        "in_flight": version.statistics.in_flight,
        "reasons": {reason: count for reason, count in log.reasons.items() if count},
        "recent": [_record(record) for record in list(log.recent)[-RECENT_BATCHES:]],
        "delay_microseconds": delay.nanoseconds // 1000,
        "delay_auto": isinstance(delay, AutoDelay),
    }
    if isinstance(delay, AutoDelay):
        shown["p99_ms"] = delay.p99_ns / 1e6
        shown["rows_per_second"] = delay.rows_per_second
    return shown


def _record(record: BatchRecord) -> dict[str, Any]:
    return {
        "reason": record.reason,
        "requests": record.requests,
        "rows": record.rows,
        "left_waiting": record.left_waiting,
        "oldest_waited_microseconds": record.oldest_waited_ns // 1000,
        "instance": record.instance,
    }
