# SPDX-License-Identifier: Apache-2.0
"""Metrics of models in memory, read at each scrape: loads on demand, sleep, and the stages of loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headrace.core.telemetry.metrics import Registry
from headrace.engine.dataplane import DataPlane
from headrace.engine.repository.on_demand import OnDemandModels
from headrace.engine.repository.residency import Residency
from headrace.engine.sleep import SleepReport

_Series = Mapping[tuple[str, ...], float]


def add_residency_metrics(registry: Registry, models: OnDemandModels) -> None:
    """Declare the metrics of the models that load on demand."""

    def by_model(value: Callable[[Residency], float]) -> Callable[[], _Series]:
        return lambda: {(residency.name,): value(residency) for residency in models.residencies()}

    def loads() -> _Series:
        series: dict[tuple[str, ...], float] = {}
        for residency in models.residencies():
            series[residency.name, "loaded"] = residency.loads
            series[residency.name, "failed"] = residency.failed_loads
        return series

    def memory() -> _Series:
        return {
            (residency.name, place): size
            for residency in models.residencies()
            if residency.counted
            for place, size in residency.use.items()
        }

    def limits() -> _Series:
        return {(place,): size for place, size in models.memory.budget.limits.items()}

    registry.callback(
        "headrace_model_loads_total",
        "Loads of a model on demand, by result: loaded or failed",
        loads,
        ["model", "result"],
        kind="counter",
    )
    registry.callback(
        "headrace_model_evictions_total",
        "Evictions of a model that loads on demand",
        by_model(lambda residency: residency.evictions),
        ["model"],
        kind="counter",
    )
    registry.callback(
        "headrace_model_waiting_requests",
        "Requests that wait until their model is loaded",
        by_model(lambda residency: residency.waiting),
        ["model"],
    )
    registry.callback(
        "headrace_model_memory_bytes",
        "Memory that a loaded model counts for, by place: host, or a GPU (models that load on demand)",
        memory,
        ["model", "place"],
    )
    registry.callback(
        "headrace_model_memory_limit_bytes",
        "Memory limit of models that load on demand, by place: host, or a GPU",
        limits,
        ["place"],
    )


def add_sleep_metrics(registry: Registry, plane: DataPlane) -> None:
    """Declare the metrics of the models that can sleep."""

    def by_version(value: Callable[[SleepReport], float]) -> Callable[[], _Series]:
        return lambda: {
            (name, version): value(report)
            for name in plane.model_names()
            for version, report in plane.sleep_reports(name).items()
        }

    def freed() -> _Series:
        return {
            (name, version, place): size
            for name in plane.model_names()
            for version, report in plane.sleep_reports(name).items()
            for place, size in (report.freed or {}).items()
        }

    registry.callback(
        "headrace_model_asleep",
        "Level at which a model sleeps: 1, 2, or 0 while it is awake (models that can sleep)",
        by_version(lambda report: report.level),
        ["model", "version"],
    )
    registry.callback(
        "headrace_model_wakes_total",
        "How often a model that can sleep has woken",
        by_version(lambda report: report.wakes),
        ["model", "version"],
        kind="counter",
    )
    registry.callback(
        "headrace_model_sleep_freed_bytes",
        "Memory that a sleeping model has given back, by place: host, or a GPU",
        freed,
        ["model", "version", "place"],
    )


def add_load_metrics(registry: Registry, plane: DataPlane) -> None:
    """Declare the metric of the stages of loads."""

    def stages() -> _Series:
        return {
            (version.name, version.version_text, name): seconds
            for version in plane.statistics()
            if version.load_stages is not None
            for name, seconds in version.load_stages.seconds.items()
        }

    registry.callback(
        "headrace_model_load_stage_seconds",
        "How long a stage of the load of a model took: reading its weights, moving them to the device, and others",
        stages,
        ["model", "version", "stage"],
    )
