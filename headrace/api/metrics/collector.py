# SPDX-License-Identifier: Apache-2.0
"""Collect all metrics for a scrape, in short turns of the event loop.

The numbers are the engine's own, so they are read in the event loop, where they change. With a thousand versions that takes
tens of milliseconds, so the collector yields to the loop after each millisecond. The numbers of one version are read
together.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator
from time import perf_counter

from headrace.api.metrics.hardware import COLLECTIONS, CPU, GPU, PROCESS, Sampler, process_samples
from headrace.api.metrics.model_metrics import COLUMNS, LOAD_SECONDS, PENDING, Column, Group, Row, add_rows, row_of
from headrace.api.metrics.settings import MetricsSettings
from headrace.core.clock import Clock
from headrace.core.telemetry.exposition import Format, pieces, read
from headrace.core.telemetry.metrics import Kind, Registry, Samples, Value, labels_text
from headrace.engine.dataplane import DataPlane, ServingVersion
from headrace.engine.statistics import VersionStatistics
from headrace.models.config.types import ModelConfig

TURN_SECONDS = 0.001

_PINNED = (
    ("nv_pinned_memory_pool_total_bytes", "Pinned memory pool total memory size, in bytes"),
    ("nv_pinned_memory_pool_used_bytes", "Pinned memory pool used memory size, in bytes"),
)
_INVALID_IN_LABEL = re.compile(r"[^a-zA-Z0-9_]")


KEPT_SECONDS = 300.0
Key = tuple[str, int]
"""A model name and a version number."""


class LoopYield:
    """Tells a long computation when to yield to the event loop."""

    def __init__(self) -> None:
        self._ends = perf_counter() + TURN_SECONDS

    @property
    def due(self) -> bool:
        """Whether to yield now."""
        return perf_counter() >= self._ends

    async def yield_loop(self) -> None:
        """Let the event loop run."""
        await asyncio.sleep(0)
        self._ends = perf_counter() + TURN_SECONDS


class Collector:
    """Collects the metrics of one data plane and one registry, and reserves the names that it uses."""

    def __init__(
        self, plane: DataPlane, registry: Registry, settings: MetricsSettings, clock: Clock, sampler: Sampler
    ) -> None:
        self._plane = plane
        self._registry = registry
        self._counters = VersionCounters(clock)
        self._sampler = sampler
        self._namespaces = settings.namespaces
        self._groups: set[Group] = {"always"}
        if settings.counter_latencies:
            self._groups.add("counters")
        if settings.histogram_latencies:
            self._groups.add("histograms")
        if settings.first_response_histogram:
            self._groups.add("first_response")
        if settings.summary_latencies:
            self._groups.add("summaries")
        for kind, name in _own_names():
            registry.reserve(kind, name)

    async def collect(self) -> list[Samples]:
        """Return all metrics."""
        loop_yield = LoopYield()
        if not self._sampler.is_ready:
            await asyncio.to_thread(self._sampler.wait_for_first)
        metrics = await self._versions(loop_yield)
        metrics += [Samples("gauge", name, help_text, "sum", {"": 0}) for name, help_text in _PINNED]
        metrics += self._sampler.samples
        metrics += await asyncio.to_thread(process_samples)
        for samples in read(self._registry):
            metrics.append(samples)
            if loop_yield.due:
                await loop_yield.yield_loop()
        return metrics

    async def _versions(self, loop_yield: LoopYield) -> list[Samples]:
        metrics: dict[str, Samples] = {}
        chosen: list[tuple[int, dict[str, Value], str]] = []
        for place, column in enumerate(COLUMNS):
            if column.group in self._groups:
                series = metrics.setdefault(column.name, _empty(column)).series
                chosen.append((place, series, f",{column.labels}" if column.labels else ""))
        pending, load = _empty(PENDING), _empty(LOAD_SECONDS)
        uuids = self._sampler.gpu_uuids
        for counter, version in self._counters.update(self._plane.statistics()):
            labels = version_labels(counter, uuids, self._plane.repository_of(counter.name) if self._namespaces else "")
            row = counter.row()
            for place, series, more in chosen:
                value = row[place]
                if value is not None:
                    series[labels + more] = value
            if version is not None:
                pending.series[labels] = version.waiting
                load.series[labels] = self._plane.load_seconds(counter.name, counter.version)
            if loop_yield.due:
                await loop_yield.yield_loop()
        # As in Triton, a metric that no model has is not named: those of caches, of decoupled models.
        return [samples for samples in (*metrics.values(), pending, load) if samples.series]


async def render(metrics: list[Samples], format: Format) -> list[bytes]:
    """Render metrics as text, in pieces, yielding to the event loop in between."""
    loop_yield = LoopYield()
    text = []
    for piece in pieces(metrics, format):
        text.append(piece)
        if loop_yield.due:
            await loop_yield.yield_loop()
    return text


def version_labels(counter: VersionCounter, gpu_uuids: tuple[str, ...], namespace: str = "") -> str:
    """Return the labels of a version's series.

    They have `gpu_uuid` if all GPU instances are on the same GPU: instances are counted together.
    """
    config = counter.config
    labels = [("model", counter.name), ("version", counter.version_text)]
    gpus = {gpu for group in config.instance_groups if group.kind == "gpu" for gpu in group.gpus}
    if len(gpus) == 1 and max(gpus) < len(gpu_uuids):
        labels.append(("gpu_uuid", gpu_uuids[max(gpus)]))
    if namespace:
        labels.append(("namespace", namespace))
    return labels_text([*labels, *_tags(config)])


def _tags(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Return the labels of a configuration's `metric_tags`: Triton's `_<key>`, with underscores for invalid characters."""
    seen: set[str] = set()
    for key, value in sorted(config.metric_tags.items()):
        # Names that start with two underscores are reserved by Prometheus.
        name = "_" + _INVALID_IN_LABEL.sub("_", key).lstrip("_")
        if len(name) > 1 and name not in seen:
            seen.add(name)
            yield name, value


def _empty(column: Column) -> Samples:
    return Samples(column.kind, column.name, column.help, column.aggregation)


def _own_names() -> dict[tuple[Kind, str], None]:
    names: dict[tuple[Kind, str], None] = {
        (column.kind, column.name): None for column in (*COLUMNS, PENDING, LOAD_SECONDS)
    }
    names.update(dict.fromkeys((kind, name) for kind, name, _ in GPU))
    names.update(dict.fromkeys((kind, name) for kind, name, _, _ in PROCESS))
    names.update(
        {("gauge", name): None for name in (*(metric[0] for metric in CPU), *(metric[0] for metric in _PINNED))}
    )
    names["counter", COLLECTIONS[0]] = None
    return names


class VersionCounter:
    """The totals of one version of a model, over all loaded copies of it.

    A counter must not fall, because Prometheus reads that as a restart. So a version that is reloaded continues from the
    totals of the copy before it, which may still have requests in flight.
    """

    def __init__(self, version: ServingVersion) -> None:
        self.name = version.name
        self.version = version.version
        self.version_text = version.version_text
        self.config: ModelConfig = version.config
        self.unloaded_at: float | None = None
        self._statistics: VersionStatistics = version.statistics
        self._cached = version.caches_responses
        self._retiring: list[tuple[VersionStatistics, bool]] = []
        self._finished: Row | None = None
        """The totals of copies that have no requests in flight."""

    def switch_to(self, version: ServingVersion) -> None:
        """Count with this copy of the version from now on."""
        self.unloaded_at = None
        if version.statistics is not self._statistics:
            self._retiring.append((self._statistics, self._cached))
            self._statistics, self.config = version.statistics, version.config
            self._cached = version.caches_responses

    def row(self) -> Row:
        """Return the totals."""
        self._fold_finished()
        row = row_of(self._statistics, cached=self._cached)
        for statistics, cached in self._retiring:
            row = add_rows(row, row_of(statistics, cached=cached))
        return row if self._finished is None else add_rows(row, self._finished)

    def _fold_finished(self) -> None:
        for copy in list(self._retiring):
            statistics, cached = copy
            if not statistics.in_flight:
                self._retiring.remove(copy)
                row = row_of(statistics, cached=cached)
                self._finished = row if self._finished is None else add_rows(self._finished, row)


class VersionCounters:
    """The totals of all versions; those of an unloaded version are reported for `kept_seconds` more."""

    def __init__(self, clock: Clock, kept_seconds: float = KEPT_SECONDS) -> None:
        self._clock = clock
        self._kept_seconds = kept_seconds
        self._by_version: dict[Key, VersionCounter] = {}

    def update(self, versions: Iterable[ServingVersion]) -> list[tuple[VersionCounter, ServingVersion | None]]:
        """Return the versions to report, each with its serving copy; None for an unloaded version."""
        counters = self._by_version
        reported: dict[Key, tuple[VersionCounter, ServingVersion | None]] = {}
        for version in versions:
            key = (version.name, version.version)
            counter = counters.get(key) or counters.setdefault(key, VersionCounter(version))
            counter.switch_to(version)
            reported[key] = counter, version
        now = self._clock.monotonic()
        for key in [key for key in counters if key not in reported]:
            counter = counters[key]
            if counter.unloaded_at is None:
                counter.unloaded_at = now
            if now - counter.unloaded_at > self._kept_seconds:
                del counters[key]
            else:
                reported[key] = counter, None
        return list(reported.values())
