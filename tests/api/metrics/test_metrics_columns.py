# SPDX-License-Identifier: Apache-2.0
"""A version's numbers in a scrape, after known times: every column, exactly."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headrace.api.metrics.model_metrics import COLUMNS, add_rows, row_of
from headrace.core.clock import ManualClock
from headrace.core.errors import Internal, InvalidArgument
from headrace.core.telemetry.metrics import HistogramValue, SummaryValue, quantile_values
from headrace.engine.statistics import VersionStatistics

US, MS = 1000, 1_000_000
BOUNDS_US = (
    100, 250, 500, 1e3, 2.5e3, 5e3, 1e4, 2.5e4, 5e4, 1e5, 2.5e5, 5e5, 1e6, 2.5e6, 5e6, 1e7, 3e7
)  # fmt: skip


def named(statistics: VersionStatistics, *, cached: bool = False) -> dict[str, Any]:
    row = row_of(statistics, cached=cached)
    return {
        column.name + (f"/{column.labels}" if column.labels else ""): value
        for column, value in zip(COLUMNS, row, strict=True)
    }


def histogram(bounds: tuple[float, ...], observed: list[float]) -> list[int]:
    """Counted the plain way."""
    ends = (*bounds, float("inf"))
    counts = [0] * len(ends)
    for value in observed:
        counts[next(place for place, end in enumerate(ends) if value <= end)] += 1
    return counts


def test_a_version_that_did_nothing_has_every_number_at_zero() -> None:
    values = named(VersionStatistics())
    for name, value in values.items():
        if isinstance(value, HistogramValue):
            assert not any(value.counts), name
            assert value.sum == 0
        else:
            assert value in (0, None), name
    assert [name for name, value in values.items() if name.startswith("nv_inference_request_failure")] == [
        f'nv_inference_request_failure/reason="{reason}"' for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER")
    ]


def test_known_times_of_every_way_through_the_engine() -> None:
    statistics = VersionStatistics()
    # At once: computed for 40 us. Alone: waited 300 us, computed 150 + 50 us.
    statistics.answered_at_once(1, 40 * US, 5)
    statistics.received += 5
    statistics.answered_single(2, 1000, 1000 + 300 * US, 1000 + 450 * US, 1000 + 500 * US)
    # Two together: waited 2 ms and 0, computed 1 + 3 + 1 ms.
    for queue_ns in (2 * MS, 0):
        stats = statistics.of_rows(1)
        stats.queue_ns += queue_ns
        stats.input_ns, stats.infer_ns, stats.output_ns = (
            stats.input_ns + MS,
            stats.infer_ns + 3 * MS,
            stats.output_ns + MS,
        )
    statistics.waited([2 * MS, 0], MS, 3 * MS, MS)
    statistics.executed(2, MS, 3 * MS, MS)
    statistics.answered(1, None, 7 * MS)
    statistics.answered(1, None, 5 * MS)
    statistics.answered(1, Internal("broken"), 9 * MS)
    statistics.failed(0, InvalidArgument("wrong"), 0)

    values = named(statistics)
    assert values["nv_inference_request_success"] == 4
    assert values['nv_inference_request_failure/reason="BACKEND"'] == 1
    assert values['nv_inference_request_failure/reason="OTHER"'] == 1
    assert values['nv_inference_request_failure/reason="REJECTED"'] == 0
    assert (values["nv_inference_count"], values["nv_inference_exec_count"]) == (5, 3)
    assert values["nv_inference_request_duration_us"] == 40 + 500 + 7000 + 5000
    assert values["nv_inference_queue_duration_us"] == 300 + 2000
    assert values["nv_inference_compute_input_duration_us"] == 2000
    assert values["nv_inference_compute_infer_duration_us"] == 40 + 150 + 6000
    assert values["nv_inference_compute_output_duration_us"] == 50 + 2000
    assert values["nv_inference_compute_duration_us"] == 40 + 200 + 10_000

    for name, observed in (
        ("request", [40.0, 500, 7000, 5000]),
        ("queue", [0.0, 300, 2000, 0]),
        ("compute", [40.0, 200, 5000, 5000]),
    ):
        value = values[f"nv_inference_{name}_histogram_us"]
        assert value.bounds == BOUNDS_US
        assert value.counts == histogram(BOUNDS_US, observed), name
        assert value.sum == pytest.approx(sum(observed))
    ratio = values["nv_inference_load_ratio"]
    observed = [1.0, 500 / 200, 7000 / 5000, 1.0]
    assert ratio.counts == histogram((1.05, 1.1, 1.25, 1.5, 2, 10, 50), observed)
    assert ratio.sum == pytest.approx(sum(observed))


def test_histograms_are_exact_for_any_times() -> None:
    chance = random.Random(5)
    statistics = VersionStatistics()
    requests, queues, computes = [], [], []
    for _ in range(3000):
        queue, compute = (round(10 ** chance.uniform(2, 10.7)) for _ in range(2))
        if chance.random() < 0.3:
            queue = 0
            statistics.answered_at_once(1, compute, 1)
        else:
            statistics.received += 1
            statistics.answered_single(1, 0, queue, queue + compute, queue + compute)
        requests.append((queue + compute) / US)
        queues.append(queue / US)
        computes.append(compute / US)
    values = named(statistics)
    assert values["nv_inference_request_histogram_us"].counts == histogram(BOUNDS_US, requests)
    assert values["nv_inference_queue_histogram_us"].counts == histogram(BOUNDS_US, queues)
    assert values["nv_inference_compute_histogram_us"].counts == histogram(BOUNDS_US, computes)
    ratios = [1.0 if r <= 100 else r / c for r, c in zip(requests, computes, strict=True)]
    assert values["nv_inference_load_ratio"].counts == histogram((1.05, 1.1, 1.25, 1.5, 2, 10, 50), ratios)
    assert values["nv_inference_load_ratio"].sum == pytest.approx(sum(ratios))


@pytest.mark.parametrize("bound_us", BOUNDS_US)
def test_a_bound_belongs_to_its_bucket(bound_us: float) -> None:
    statistics = VersionStatistics()
    for ns in (round(bound_us * US), round(bound_us * US) + 1):
        statistics.answered_at_once(1, ns, 1)
    counts = named(statistics)["nv_inference_compute_histogram_us"].counts
    place = BOUNDS_US.index(bound_us)
    assert counts[place : place + 2] == [1, 1]


def test_cache_columns_are_shown_only_with_a_cache() -> None:
    statistics = VersionStatistics()
    stats = statistics.of_rows(1)
    stats.success, stats.hit, stats.hit_ns, stats.miss, stats.miss_ns = 5, 3, 30 * US, 2, 20 * US
    names = [
        "nv_cache_num_hits_per_model",
        "nv_cache_num_misses_per_model",
        "nv_cache_hit_duration_per_model",
        "nv_cache_miss_duration_per_model",
    ]
    assert [named(statistics, cached=True)[name] for name in names] == [3, 2, 30, 20]
    assert [named(statistics)[name] for name in names] == [None] * 4


def test_summaries_see_every_request() -> None:
    statistics = VersionStatistics()
    statistics.summarise(ManualClock(), (0.0, 1.0))
    statistics.answered_at_once(1, 40 * US, 5)
    statistics.answered_single(1, 0, 300 * US, 400 * US, 420 * US)
    statistics.waited([2 * MS], MS, 3 * MS, MS)
    statistics.answered(1, None, 7 * MS)
    values = named(statistics)
    expected = {
        "request": (3, 40, 7000),
        "queue": (3, 0, 2000),
        "compute_input": (3, 0, 1000),
        "compute_infer": (3, 40, 3000),
        "compute_output": (3, 0, 1000),
    }
    for name, (count, least, most) in expected.items():
        value = values[f"nv_inference_{name}_summary_us"]
        assert value.observed == count
        assert quantile_values(value.quantiles, value.tally) == pytest.approx([least, most], rel=0.01)
    # And the histograms as without them.
    assert values["nv_inference_request_histogram_us"].counts[:7] == [1, 0, 1, 0, 0, 0, 1]
    assert values["nv_cache_hit_summary_per_model"] is None
    cached = named(statistics, cached=True)
    assert cached["nv_inference_request_summary_us"] is None
    assert isinstance(cached["nv_cache_hit_summary_per_model"], SummaryValue)


def test_warm_up_leaves_no_trace() -> None:
    statistics = VersionStatistics()
    statistics.answered_single(1, 0, 300 * US, 5 * MS, 6 * MS)
    statistics.reset_executions()
    values = named(statistics)
    for name in ("request", "queue", "compute"):
        assert not any(values[f"nv_inference_{name}_histogram_us"].counts)
    assert not any(values["nv_inference_load_ratio"].counts)
    assert values["nv_inference_load_ratio"].sum == 0


def test_rows_are_added_column_by_column() -> None:
    one, other = VersionStatistics(), VersionStatistics()
    one.answered_at_once(3, 40 * US, 5)
    other.answered_at_once(4, 400 * US, 5)
    row = add_rows(row_of(one, cached=True), row_of(other, cached=False))
    values = {column.name: value for column, value in zip(COLUMNS, row, strict=True)}
    assert values["nv_inference_count"] == 7
    assert values["nv_inference_request_duration_us"] == 440
    request = values["nv_inference_request_histogram_us"]
    assert isinstance(request, HistogramValue)
    assert request.counts[:3] == [1, 0, 1]
    assert values["nv_cache_num_hits_per_model"] == 0
    assert values[COLUMNS[-1].name] is None
