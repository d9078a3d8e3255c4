# SPDX-License-Identifier: Apache-2.0
"""Percentiles, warnings and JSON of a run, and its bars of text."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from load_fakes import run_of

from headrace.programs.loadtest.plots import bar, bins, curve, histogram, milliseconds, sweep
from headrace.programs.loadtest.results import PERCENTILES, percentile, server_view


@pytest.mark.parametrize("count", [1, 2, 10, 999, 1000, 1001, 20_000])
def test_percentiles_are_measured_values(count: int) -> None:
    values = np.random.default_rng(count).lognormal(size=count)
    ordered = sorted(values)
    for share in PERCENTILES:
        # Nearest rank, the textbook's way, in whole numbers.
        assert percentile(values, share) == ordered[-(-round(share * 10) * count // 1000) - 1]
        assert percentile(values, share) >= np.percentile(values, share, method="lower")
        assert percentile(values, share) <= np.percentile(values, share, method="higher")


def test_no_values_have_no_percentile() -> None:
    run = run_of([], throughput=0, errors={"timeout": 3})
    assert math.isnan(run.at(99))
    document = run.document()
    assert document["latency_ms"]["p99"] is None
    assert document["errors"] == {"timeout": 3}
    json.dumps(document, allow_nan=False)


def test_requests_are_all_that_began() -> None:
    run = run_of([1.0] * 7, errors={"HTTP 429": 2, "timeout": 1})
    assert (run.requests, run.failed) == (10, 3)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (run_of([1.0] * 1000, thread=0.95), "95% of its core"),
        (run_of([1.0] * 1000, late_ms=[0.0] * 98 + [5.0] * 2), "fell behind"),
        (run_of([1.0] * 1000, late_ms=[0.0], waiting=3), "up to 3 requests were due"),
        (run_of([1.0] * 10), "10 answers are few"),
    ],
)
def test_caveats_are_reported(run: object, said: str) -> None:
    (warning,) = run.warnings()  # type: ignore[attr-defined]
    assert said in warning


def test_a_good_run_has_no_warnings() -> None:
    assert run_of([1.0] * 1000, late_ms=[0.1] * 1000).warnings() == []


def version(number: str, requests: int, executions: int, queue_ns: int, batches: dict[int, int]) -> dict[str, object]:
    return {
        "version": number,
        "inference_count": requests,
        "execution_count": executions,
        "inference_stats": {"success": {"count": requests, "ns": 0}, "queue": {"count": requests, "ns": queue_ns}},
        "batch_stats": [{"batch_size": size, "compute_infer": {"count": n, "ns": 5}} for size, n in batches.items()],
    }


def test_the_servers_view_is_the_difference() -> None:
    before = [version("1", 10, 10, 1_000_000, {1: 10})]
    after = [version("1", 30, 15, 41_000_000, {1: 10, 4: 5}), version("2", 20, 10, 0, {2: 10})]
    view = server_view(before, after)
    assert view is not None
    assert (view.requests, view.executions, view.rows) == (40, 15, 40)
    assert view.phases_ms["queue"] == 1.0
    assert view.batches == {2: 10, 4: 5}
    assert view.mean_batch == pytest.approx(40 / 15)


def test_a_server_that_counted_nothing_has_no_view() -> None:
    same = [version("1", 10, 10, 0, {})]
    assert server_view(same, same) is None
    assert server_view([], []) is None
    # Loaded anew meanwhile: its counts began at 0.
    assert server_view([version("1", 100, 100, 0, {})], [version("1", 5, 5, 0, {})]) is None


def test_bars_are_exact_to_the_eighth() -> None:
    assert bar(0.0, 10) == ""
    assert bar(0.5, 10) == "█████"
    assert bar(0.0001, 10) == "▏"
    assert bar(0.55, 10) == "█████▌"
    assert bar(7.0, 10) == "█" * 10


def test_the_histogram_has_every_request() -> None:
    values = np.random.default_rng(0).lognormal(size=5000)
    assert sum(count for _, _, count in bins(values)) == 5000
    assert len(histogram(values)) == 14
    assert histogram(np.array([2.0, 2.0]))[0].split()[4] == "2"
    assert histogram(np.array([])) == []


def test_the_curve_shows_no_percentile_that_few_requests_cannot_have() -> None:
    names = [line.split()[0] for line in curve(np.linspace(1, 100, 200))]
    assert names == ["min", "p25", "p50", "p75", "p90", "p95", "p99", "p99.5", "max"]
    assert curve(np.array([])) == []


def test_a_sweep_has_a_line_for_each_run() -> None:
    lines = sweep([run_of([1.0], throughput=10, load=1), run_of([], throughput=0, load=8, errors={"timeout": 1})])
    assert len(lines) == 3
    assert lines[1].split()[:2] == ["1", "10.0"]
    assert "█" not in lines[2]


@pytest.mark.parametrize(
    ("value", "text"), [(0.12345, "0.123"), (12.3456, "12.35"), (123.456, "123.5"), (1234.5, "1234"), (math.nan, "-")]
)
def test_milliseconds_have_significant_digits(value: float, text: str) -> None:
    assert milliseconds(value) == text
