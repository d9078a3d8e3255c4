# SPDX-License-Identifier: Apache-2.0
"""Several processes, one scrape: what is added up, and what must never fall."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from metrics_scrape import QUIET, Scraped, metrics_of, scrape

from headrace.api.metrics.http import Metrics, WorkersMetrics, merged_text
from headrace.core.clock import ManualClock
from headrace.core.telemetry.exposition import Format, merge, pack, pieces, retained, unpack
from headrace.core.telemetry.metrics import HistogramValue, Registry, Samples, SummaryValue, samples_of
from headrace.engine.dataplane import DataPlane
from headrace.engine.repository.directory import Directory
from support.engines import ask, builtin_plane


def full_registry() -> Registry:
    registry = Registry(ManualClock())
    registry.counter("jobs_total", "Jobs.", ["kind"]).labels(kind='a"b\\').add(3)
    registry.gauge("depth", "Depth.").labels().set(2.5)
    histogram = registry.histogram("sizes", "Sizes.", ["k"], buckets=[1, 2]).labels(k="%s")
    for value in (0.5, 1.5, 99):
        histogram.observe(value)
    summary = registry.summary("times", "Times.", quantiles=[0.5, 1.0]).labels()
    for value in range(1, 101):
        summary.observe(value)
    return registry


def read(registry: Registry) -> list[Samples]:
    return [samples_of(family) for family in registry.families]


@pytest.mark.parametrize("format", list(Format))
def test_packing_changes_nothing(format: Format) -> None:
    metrics = read(full_registry())
    assert unpack(pack(metrics)) == metrics
    text = b"".join(pieces(metrics, format))
    assert merged_text([pack(metrics)], format) == text
    assert Scraped(text, format)("sizes_count", k="%s") == 3


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 0, 1 << 60, 1e300, np.float32(1.5)])
def test_every_number_can_be_packed(value: float) -> None:
    metrics = [Samples("gauge", "g", "G.", "sum", {"": value})]
    (back,) = unpack(pack(metrics))
    assert back.series[""] == value or (math.isnan(value) and math.isnan(back.series[""]))  # type: ignore[arg-type]


def test_counters_histograms_and_summaries_are_added_up() -> None:
    one, other = read(full_registry()), read(full_registry())
    metrics = Scraped(merged_text([pack(one), pack(other)]))
    assert metrics("jobs_total", kind='a"b\\') == 6
    assert metrics("depth") == 5
    assert metrics.buckets("sizes") == [2, 2, 2]
    assert metrics("sizes_sum") == 202
    assert metrics("times_count") == 200
    assert metrics("times", quantile="0.5") == pytest.approx(50, rel=0.02)
    assert metrics("times", quantile="1.0") == pytest.approx(100, rel=0.02)


def test_quantiles_of_unlike_processes() -> None:
    def process(low: int, high: int) -> bytes:
        registry = Registry(ManualClock())
        summary = registry.summary("times", "Times.", quantiles=[0.5]).labels()
        for value in range(low, high):
            summary.observe(value)
        return pack(read(registry))

    metrics = Scraped(merged_text([process(1, 11), process(1000, 1100)]))
    assert metrics("times", quantile="0.5") == pytest.approx(1045, rel=0.02)


@pytest.mark.parametrize(("aggregation", "value"), [("sum", 6), ("max", 3), ("min", 1)])
def test_gauges_by_their_sense(aggregation: Any, value: float) -> None:
    metrics = [[Samples("gauge", "g", "G.", aggregation, {"": number})] for number in (2, 3, 1)]
    (merged,) = merge(metrics)
    assert merged.series == {"": value}
    assert metrics[0][0].series == {"": 2}  # those given are as they were


def test_series_and_metrics_that_only_some_have() -> None:
    one = [Samples("counter", "a", "A.", "sum", {'m="1"': 1}), Samples("counter", "x", "X.", "sum", {"": 1})]
    other = [Samples("counter", "a", "A.", "sum", {'m="2"': 2}), Samples("gauge", "x", "X.", "sum", {"": 5})]
    merged = {samples.name: samples for samples in merge([one, other])}
    assert merged["a"].series == {'m="1"': 1, 'm="2"': 2}
    assert (merged["x"].kind, merged["x"].series) == ("counter", {"": 1})


def test_histograms_with_other_buckets_keep_every_observation() -> None:
    one = Samples("histogram", "h", "H.", "sum", {"": HistogramValue((10.0, 100.0), [1, 1, 1], 5)})
    other = Samples("histogram", "h", "H.", "sum", {"": HistogramValue((5.0, 50.0, 500.0), [1, 2, 3, 4], 7)})
    (merged,) = merge([[one], [other]])
    assert merged.series[""] == HistogramValue((10.0, 100.0), [2, 3, 8], 12)


def test_what_lasts_of_a_process_that_ended() -> None:
    left = {samples.name: samples for samples in retained(read(full_registry()))}
    assert left.keys() == {"jobs_total", "sizes", "times"}
    times = left["times"].series[""]
    assert isinstance(times, SummaryValue)
    assert (times.tally, times.observed) == ({}, 100)
    live = [Samples("counter", "jobs_total", "Jobs.", "sum", {'kind="other"': 1})]
    (merged,) = merge([live], [left.values()])
    assert merged.series == {'kind="other"': 1}  # what only the dead had is gone
    metrics = Scraped(merged_text([pack(read(full_registry()))], ended=[pack(read(full_registry()))]))
    assert (metrics("jobs_total"), metrics("depth"), metrics("times_count")) == (6, 2.5, 200)


class InProcessWorkers:
    """Workers in one process, as if they were several: each with an engine of its own, asked through JSON."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.planes: dict[int, Any] = {}
        self.metrics: dict[int, Metrics] = {}
        self.away: set[int] = set()

    async def start(self, index: int) -> None:
        async def ask_others() -> Mapping[int, Any]:
            return {
                other: ConnectionError("away") if other in self.away else await metrics.answer()
                for other, metrics in self.metrics.items()
                if other != index
            }

        self.planes[index] = await builtin_plane()
        workers = WorkersMetrics(self.folder, index, ask_others)
        self.metrics[index] = metrics_of(self.planes[index], QUIET, workers=workers)
        self.away.discard(index)

    async def requests(self, index: int, count: int) -> None:
        for _ in range(count):
            await ask(self.planes[index], "identity", INPUT0=np.zeros((1, 1), np.float32))

    async def scrape(self, index: int, format: Format = Format.TEXT) -> Scraped:
        return await scrape(self.metrics[index], format)


def successes(told: Scraped) -> float:
    return told("nv_inference_request_success", model="identity")


def test_any_worker_reports_the_metrics_of_all(tmp_path: Path) -> None:
    async def main() -> None:
        team = InProcessWorkers(tmp_path)
        for index in range(3):
            await team.start(index)
            await team.requests(index, index + 1)
        for index in range(3):
            for wanted in Format:
                reported = await team.scrape(index, wanted)
                assert successes(reported) == 6
                assert reported("nv_inference_request_histogram_us_count", model="identity") == 6
                assert reported("process_open_fds") > 3 * 3
                assert reported("process_start_time_seconds") < 1e11

    asyncio.run(main())


def test_numbers_never_fall_when_a_worker_dies_and_is_started_again(tmp_path: Path) -> None:
    async def main() -> None:
        team = InProcessWorkers(tmp_path)
        for index in range(2):
            await team.start(index)
            await team.requests(index, 5)
        assert successes(await team.scrape(0)) == 10
        await team.requests(1, 2)
        assert successes(await team.scrape(1)) == 12
        team.away.add(1)
        assert successes(await team.scrape(0)) == 12
        for lives in range(1, 3):
            await team.start(1)
            assert successes(await team.scrape(0)) == successes(await team.scrape(1)) == 11 + lives
            await team.requests(1, 1)
            reported = await team.scrape(1)
            assert successes(reported) == 12 + lives
            assert reported("nv_inference_load_ratio_count", model="identity") == 12 + lives
            team.away.add(1)

    asyncio.run(main())


def test_a_worker_that_dies_before_its_models_are_loaded_loses_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        team = InProcessWorkers(tmp_path)
        await team.start(0)
        await team.requests(0, 5)
        assert successes(await team.scrape(0)) == 5
        empty = metrics_of(DataPlane(Directory()), QUIET, workers=WorkersMetrics(tmp_path, 0, nobody))
        metrics = await scrape(empty)
        assert not metrics.labels("nv_inference_request_success")
        await team.start(0)
        assert successes(await team.scrape(0)) == 5

    async def nobody() -> Mapping[int, Any]:
        return {}

    asyncio.run(main())


def test_a_removed_folder_loses_only_the_memory_metric(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        team = InProcessWorkers(tmp_path / "gone")
        await team.start(0)
        await team.requests(0, 1)
        assert successes(await team.scrape(0)) == 1

    asyncio.run(main())
    assert "cannot store" in caplog.text


def test_one_alone_answers_with_its_own() -> None:
    async def main() -> None:
        metrics = metrics_of(await builtin_plane())
        packed = (await metrics.answer()).encode()
        assert Scraped(merged_text([packed])).types == (await scrape(metrics)).types

    asyncio.run(main())
