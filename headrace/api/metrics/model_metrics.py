# SPDX-License-Identifier: Apache-2.0
"""The metrics of a model version: Triton's names, and their values from the engine's statistics.

A version is a row of values, one for each of `COLUMNS`. Rows of the same version can be added, so that a reloaded version
continues its counters. Microseconds are integers, as in Triton.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from headrace.core.telemetry.exposition import combine
from headrace.core.telemetry.metrics import (
    DURATION_BUCKETS_SECONDS,
    LOAD_RATIO_BOUNDS,
    Aggregation,
    HistogramValue,
    Kind,
    SlowTally,
    SummaryValue,
    Value,
    histogram_value,
    summary_value,
)
from headrace.engine.statistics import FAILURE_REASONS, FIRST_RESPONSE, LatencySummaries, VersionStatistics

Group = Literal["always", "counters", "histograms", "first_response", "summaries"]
"""The setting that enables a column."""

Row = list[Value | None]
"""A version's values in the order of `COLUMNS`; None for a missing value."""


_US = "in microseconds"
_BOUNDS_US = tuple(seconds * 1e6 for seconds in DURATION_BUCKETS_SECONDS)
_NO_CACHE = (None,) * 4
_NO_SUMMARIES = (None,) * 7


class Column(NamedTuple):
    """One series of every version."""

    group: Group
    kind: Kind
    name: str
    help: str
    aggregation: Aggregation = "sum"
    labels: str = ""
    """Labels besides those of the version."""


COLUMNS: tuple[Column, ...] = (
    Column("always", "counter", "nv_inference_request_success", "Number of successful inference requests"),
    *(
        Column(
            "always",
            "counter",
            "nv_inference_request_failure",
            "Number of failed inference requests, by the reason",
            labels=f'reason="{reason}"',
        )
        for reason in FAILURE_REASONS
    ),
    Column("always", "counter", "nv_inference_count", "Number of inferences performed (a batch of n counts n)"),
    Column("always", "counter", "nv_inference_exec_count", "Number of model executions performed"),
    Column("counters", "counter", "nv_inference_request_duration_us", f"Cumulative time of requests {_US}"),
    Column("counters", "counter", "nv_inference_queue_duration_us", f"Cumulative time requests waited {_US}"),
    Column("counters", "counter", "nv_inference_compute_duration_us", f"Cumulative time of computing {_US}"),
    Column("counters", "counter", "nv_inference_compute_input_duration_us", f"Cumulative time of inputs {_US}"),
    Column("counters", "counter", "nv_inference_compute_infer_duration_us", f"Cumulative time of the model {_US}"),
    Column("counters", "counter", "nv_inference_compute_output_duration_us", f"Cumulative time of outputs {_US}"),
    Column("histograms", "histogram", "nv_inference_request_histogram_us", f"Time of requests {_US}"),
    Column("histograms", "histogram", "nv_inference_queue_histogram_us", f"Time requests waited {_US}"),
    Column("histograms", "histogram", "nv_inference_compute_histogram_us", f"Time of computing {_US}"),
    Column(
        "histograms",
        "histogram",
        "nv_inference_load_ratio",
        "Ratio of a request's time to its time of computing; 1 for requests of at most 100 us",
    ),
    Column(
        "first_response",
        "histogram",
        FIRST_RESPONSE,
        "Time to the first response of decoupled models in milliseconds",
    ),
    Column("always", "counter", "nv_cache_num_hits_per_model", "Number of response cache hits per model"),
    Column("always", "counter", "nv_cache_num_misses_per_model", "Number of response cache misses per model"),
    Column("counters", "counter", "nv_cache_hit_duration_per_model", f"Cumulative time of cache hits {_US}"),
    Column("counters", "counter", "nv_cache_miss_duration_per_model", f"Cumulative time of cache misses {_US}"),
    Column("summaries", "summary", "nv_inference_request_summary_us", f"Time of requests {_US}"),
    Column("summaries", "summary", "nv_inference_queue_summary_us", f"Time requests waited {_US}"),
    Column("summaries", "summary", "nv_inference_compute_input_summary_us", f"Time of inputs {_US}"),
    Column("summaries", "summary", "nv_inference_compute_infer_summary_us", f"Time of the model {_US}"),
    Column("summaries", "summary", "nv_inference_compute_output_summary_us", f"Time of outputs {_US}"),
    Column("summaries", "summary", "nv_cache_hit_summary_per_model", f"Time of cache hits {_US}"),
    Column("summaries", "summary", "nv_cache_miss_summary_per_model", f"Time of cache misses {_US}"),
)

PENDING = Column(
    "always", "gauge", "nv_inference_pending_request_count", "Requests that are received and not being computed yet"
)
LOAD_SECONDS = Column("always", "gauge", "nv_model_load_duration_secs", "Time the last load took in seconds", "max")
"""PENDING and LOAD_SECONDS are of a serving version and not added up."""


def row_of(statistics: VersionStatistics, *, cached: bool) -> Row:
    """Return the values of one loaded copy of a version. Call it in the event loop, so that the numbers are consistent."""
    success = success_ns = queue_ns = input_ns = infer_ns = output_ns = 0
    hit = hit_ns = miss = miss_ns = 0
    for stats in statistics.by_rows.values():
        success += stats.success
        success_ns += stats.success_ns
        queue_ns += stats.queue_ns
        input_ns += stats.input_ns
        infer_ns += stats.infer_ns
        output_ns += stats.output_ns
        if cached:
            hit += stats.hit
            hit_ns += stats.hit_ns
            miss += stats.miss
            miss_ns += stats.miss_ns
    compute_ns = input_ns + infer_ns + output_ns
    failures, computed, loads = statistics.failures, statistics.computed, statistics.loads
    inferences = executions = 0
    for rows, batches in statistics.batches.items():
        executions += batches.count
        inferences += rows * batches.count
    return [
        success,
        *[failures[reason] for reason in FAILURE_REASONS],
        inferences,
        executions,
        success_ns // 1000,
        queue_ns // 1000,
        compute_ns // 1000,
        input_ns // 1000,
        infer_ns // 1000,
        output_ns // 1000,
        _durations(statistics.slow_requests, success, success_ns),
        _durations(statistics.slow_queues, computed, queue_ns),
        _durations(statistics.slow_computes, computed, compute_ns),
        HistogramValue(LOAD_RATIO_BOUNDS, [computed - sum(loads[1:]), *loads[1:]], computed + statistics.excess),
        None if statistics.first_responses is None else histogram_value(statistics.first_responses),
        *((hit, miss, hit_ns // 1000, miss_ns // 1000) if cached else _NO_CACHE),
        *(_NO_SUMMARIES if statistics.summaries is None else _summaries(statistics.summaries, cached)),
    ]


def add_rows(one: Row, other: Row) -> Row:
    """Add the values of two copies of a version."""
    return [
        left if right is None else right if left is None else combine("sum", left, right)
        for left, right in zip(one, other, strict=True)
    ]


def _durations(slow: SlowTally, total: int, total_ns: int) -> HistogramValue:
    return HistogramValue(_BOUNDS_US, slow.counts(total), total_ns / 1000)


def _summaries(summaries: LatencySummaries, cached: bool) -> list[SummaryValue | None]:
    """Return the summaries; as in Triton, none of whole requests for a cached model, whose hits and misses differ."""
    return [
        None if cached else summary_value(summaries.request),
        summary_value(summaries.queue),
        summary_value(summaries.input),
        summary_value(summaries.infer),
        summary_value(summaries.output),
        summary_value(summaries.hit) if cached else None,
        summary_value(summaries.miss) if cached else None,
    ]
