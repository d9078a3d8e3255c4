# SPDX-License-Identifier: Apache-2.0
"""From two looks to what happened between them: rates, quantiles of histograms, shares. Pure; called by `top_polling`.

A counter that is smaller than before began anew, as Prometheus takes it: all that it has is new.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.cli.top_polling import Labels, Look, Metrics

Series = Mapping["Labels", float]


@dataclass(frozen=True)
class Row:
    """A version of a model, or a backend of a router. None: nothing happened that it could be told from."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""
    requests_per_s: float = 0.0
    """Answered well."""
    failures_per_s: float = 0.0
    failures: float = 0.0
    """In all, since it was loaded."""
    p50_ms: float | None = None
    p99_ms: float | None = None
    queue: float = 0.0
    """Requests that wait; of a backend, those it has."""
    queue_ms: float | None = None
    batch: float | None = None
    """Rows for each time the model computed."""
    cache_hits: float | None = None
    """Share of the requests."""
    retries_per_s: float | None = None


@dataclass(frozen=True)
class Gpu:
    """One GPU now."""

    uuid: str
    utilisation: float | None
    used_bytes: float | None
    total_bytes: float | None


@dataclass(frozen=True)
class View:
    """What a table is painted of."""

    url: str
    kind: str
    """`server` or `router`."""
    seconds: float
    rows: list[Row]
    machine: dict[str, float] = field(default_factory=dict)
    gpus: list[Gpu] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def server_view(url: str, before: Look, after: Look) -> View:
    """Every version that the index or the metrics know, the busiest first."""
    seconds = max(after.at - before.at, 0.0)
    now = after.metrics
    states = {(str(each.get("name")), str(each.get("version", ""))): each for each in after.states}
    known = dict.fromkeys(states)
    for labels in now.get("nv_inference_request_success", {}):
        found = dict(labels)
        known[found.get("model", ""), found.get("version", "")] = None
    # A model that is not served has an entry without a version; one that is has one for each.
    served = {name for name, version in known if version}
    was, is_ = grouped(before.metrics, "model", "version"), grouped(now, "model", "version")
    rows = [
        _model(
            name,
            version,
            states.get((name, version), {}),
            was.get((name, version), {}),
            is_.get((name, version), {}),
            seconds,
        )
        for name, version in known
        if version or name not in served
    ]
    rows.sort(key=lambda row: (-row.requests_per_s - row.failures_per_s, row.name, row.version))
    return View(url, "server", seconds, rows, _machine(before.metrics, now, seconds), _gpus(now))


def _model(name: str, version: str, state: Mapping[str, Any], before: Metrics, after: Metrics, seconds: float) -> Row:
    def grown(metric: str) -> float:
        return _grown(before.get(metric, {}), after.get(metric, {}))

    requests, executions = grown("nv_inference_request_success"), grown("nv_inference_exec_count")
    hits, misses = grown("nv_cache_num_hits_per_model"), grown("nv_cache_num_misses_per_model")
    p50, p99 = quantiles("nv_inference_request_histogram_us", before, after, 1e-3)
    computed = requests - hits
    return Row(
        name,
        version,
        str(state.get("state") or ""),
        str(state.get("reason") or ""),
        _rate(requests, seconds),
        _rate(grown("nv_inference_request_failure"), seconds),
        sum(after.get("nv_inference_request_failure", {}).values()),
        p50,
        p99,
        sum(after.get("nv_inference_pending_request_count", {}).values()),
        grown("nv_inference_queue_duration_us") / computed / 1000 if computed > 0 else None,
        grown("nv_inference_count") / executions if executions else None,
        hits / (hits + misses) if hits + misses else None,
    )


def router_view(url: str, before: Look, after: Look) -> View:
    """Every backend, in the router's order."""
    seconds = max(after.at - before.at, 0.0)
    old = {str(each.get("url")): each for each in before.states}
    had, has = grouped(before.metrics, "backend"), grouped(after.metrics, "backend")
    rows = []
    for each in after.states:
        name = str(each.get("url"))
        was = old.get(name, {})

        def grown(*keys: str, now: Mapping[str, Any] = each, was: Mapping[str, Any] = was) -> float:
            return sum(_step(float(was.get(key, 0)), float(now.get(key, 0))) for key in keys)

        p50, p99 = quantiles("headrace_router_backend_seconds", had.get((name,), {}), has.get((name,), {}), 1e3)
        rows.append(
            Row(
                name,
                "",
                str(each.get("state", "")),
                str(each.get("reason") or ""),
                _rate(grown("ok"), seconds),
                _rate(grown("refused", "failed"), seconds),
                float(each.get("refused", 0)) + float(each.get("failed", 0)),
                p50,
                p99,
                float(each.get("outstanding", 0)),
                retries_per_s=_rate(grown("retries"), seconds),
            )
        )
    about = {key: after.about.get(key) for key in ("version", "policy", "live")}
    return View(url, "router", seconds, rows, about=about)


def grouped(metrics: Metrics, *names: str) -> dict[tuple[str, ...], Metrics]:
    """The series that have labels of these names, by their values."""
    groups: dict[tuple[str, ...], Metrics] = {}
    for metric, series in metrics.items():
        for labels, value in series.items():
            found = dict(labels)
            if all(name in found for name in names):
                groups.setdefault(tuple(found[name] for name in names), {}).setdefault(metric, {})[labels] = value
    return groups


def quantiles(metric: str, before: Metrics, after: Metrics, scale: float) -> tuple[float | None, float | None]:
    """The median and the 99th percentile of what a histogram took in meanwhile; None where that was nothing."""
    counts: dict[float, float] = {}
    old = before.get(f"{metric}_bucket", {})
    for labels, value in after.get(f"{metric}_bucket", {}).items():
        bound = float(dict(labels).get("le", "inf"))
        counts[bound] = counts.get(bound, 0.0) + _step(old.get(labels, 0.0), value)
    middle, high = (quantile(share, counts) for share in (0.5, 0.99))
    return (None if middle is None else middle * scale), (None if high is None else high * scale)


def quantile(share: float, counts: Mapping[float, float]) -> float | None:
    """Within the bucket it falls into, as if that were evenly filled; the last bound for what is above it."""
    bounds = sorted(counts)
    total = counts[bounds[-1]] if bounds else 0.0
    if total <= 0:
        return None
    below, low = 0.0, 0.0
    for bound in bounds:
        upto = counts[bound]
        if upto >= share * total and upto > below:
            return low if math.isinf(bound) else low + (bound - low) * (share * total - below) / (upto - below)
        below, low = max(below, upto), bound if not math.isinf(bound) else low
    return low


def _machine(before: Metrics, after: Metrics, seconds: float) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, metric in (
        ("cpu", "nv_cpu_utilization"),
        ("memory_used_bytes", "nv_cpu_memory_used_bytes"),
        ("memory_total_bytes", "nv_cpu_memory_total_bytes"),
        ("server_bytes", "process_resident_memory_bytes"),
        ("open_files", "process_open_fds"),
    ):
        if after.get(metric):
            found[key] = sum(after[metric].values())
    metric = "process_cpu_seconds_total"
    if metric in after and seconds:
        grown = _step(sum(before.get(metric, {}).values()), sum(after[metric].values()))
        found["server_cores"] = grown / seconds
    return found


def _gpus(metrics: Metrics) -> list[Gpu]:
    series = [
        metrics.get(name, {})
        for name in ("nv_gpu_utilization", "nv_gpu_memory_used_bytes", "nv_gpu_memory_total_bytes")
    ]
    known = dict.fromkeys(labels for each in series for labels in each)
    return [Gpu(dict(labels).get("gpu_uuid", ""), *(each.get(labels) for each in series)) for labels in known]


def _grown(before: Series, after: Series) -> float:
    return sum(_step(before.get(labels, 0.0), value) for labels, value in after.items())


def _step(before: float, after: float) -> float:
    return after - before if after >= before else after


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
