# SPDX-License-Identifier: Apache-2.0
"""What versions have counted in several workers, as one."""

from __future__ import annotations

import json
from dataclasses import fields

from headrace.core.errors import Internal, Unavailable
from headrace.engine.scheduling.pending_request import BatchRecord
from headrace.engine.statistics import ResponseTimer, VersionStatistics
from headrace.programs.serve.worker_stats import merge_counts, numbers_of, sum_statistics, without_in_flight


def counted(times: int) -> VersionStatistics:
    """A version with something in every number that statistics and status show."""
    statistics = VersionStatistics(received=5 * times, settled=3 * times)
    for _ in range(times):
        statistics.executed(2, 1, 2, 3)
        statistics.failed(1, Internal("x"), 7)
        statistics.failed(0, Unavailable("x"), 0)
        statistics.log.add(BatchRecord("full", 1, 2, 0, 0, "i"))
        stats = statistics.of_rows(2)
        stats.success += 1
        stats.success_ns += 10
        stats.hit += 1
        ResponseTimer(statistics.responses, 0).record([], 3, cancelled=False)
    for response in statistics.responses.values():
        response.output_ns = response.success_ns = 5 * times  # by the clock; the same for all here
    return statistics


def sent(statistics: VersionStatistics) -> dict[str, object]:
    """As it arrives at another worker."""
    arrived: dict[str, object] = json.loads(json.dumps(numbers_of(statistics)))
    return arrived


def test_counts_are_added() -> None:
    own = counted(1)
    total = sum_statistics(own, [sent(counted(2)), sent(counted(4))])
    assert numbers_of(total) | {"last": 0} == numbers_of(counted(7)) | {"last": 0}
    assert (total.executions, total.inferences, total.in_flight) == (7, 14, 14)
    assert total.total().success_ns == 70
    assert numbers_of(own) | {"last": 0} == numbers_of(counted(1)) | {"last": 0}
    assert total.log.recent is own.log.recent


def test_the_last_inference_is_the_latest_of_all() -> None:
    early, late = counted(1), counted(1)
    assert sum_statistics(early, [sent(late)])._last_ns == late._last_ns
    assert sum_statistics(late, [sent(early)])._last_ns == late._last_ns
    assert merge_counts(sent(late), sent(early))["last"] == late._last_ns


def test_nothing_is_in_flight_in_a_dead_worker() -> None:
    dead = without_in_flight(sent(counted(3)))
    assert sum_statistics(VersionStatistics(), [dead]).in_flight == 0


def test_the_numbers_of_predecessors_are_one() -> None:
    one = {"versions": {"a/1": sent(counted(1)), "b/1": sent(counted(2))}}
    two = {"versions": {"a/1": sent(counted(4))}, "v1": {"tallies": {"health": [1, 2]}}}
    versions = merge_counts(one, two)["versions"]
    assert versions["a/1"] | {"last": 0} == sent(counted(5)) | {"last": 0}
    assert versions["b/1"]["received"] == 10
    assert merge_counts(merge_counts(one, two), two)["v1"] == {"tallies": {"health": [2, 4]}}


def test_nothing_new_is_counted_unnoticed() -> None:
    """A field that statistics or status come to show must be added in `numbers_of` too. Metrics go another way."""
    shown = {"received", "settled", "_last_ns", "by_rows", "batches", "responses", "failures", "log"}
    metrics_only = {"computed", "quick_ns", "slow_requests", "slow_queues", "slow_computes", "loads", "excess"}
    metrics_only |= {"first_responses", "summaries"}
    taken_in_first = {"express_tally"}
    console_only = {"recent", "recent_failures"}
    assert {field.name for field in fields(VersionStatistics)} == shown | metrics_only | taken_in_first | console_only
