# SPDX-License-Identifier: Apache-2.0
"""Poll a server or a router for `headrace top`, compute rates, and print them as a table."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from headrace.cli.client import Refused, ServerClient
from headrace.cli.tables import STATE_STYLES, line, table
from headrace.core.errors import Unavailable, Unimplemented
from headrace.core.telemetry.logs import one_line

Series = Mapping["Labels", float]


@dataclass(frozen=True)
class Row:
    """A model version, or a backend of a router. None: no data in this interval."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""
    requests_per_s: float = 0.0
    """Successful requests."""
    failures_per_s: float = 0.0
    failures: float = 0.0
    """Total since it was loaded."""
    p50_ms: float | None = None
    p99_ms: float | None = None
    queue: float = 0.0
    """Waiting requests; for a backend, its open requests."""
    queue_ms: float | None = None
    batch: float | None = None
    """Rows per execution."""
    cache_hits: float | None = None
    """Share of requests served from the cache."""
    retries_per_s: float | None = None


@dataclass(frozen=True)
class Gpu:
    """The current state of one GPU."""

    uuid: str
    utilisation: float | None
    used_bytes: float | None
    total_bytes: float | None


@dataclass(frozen=True)
class View:
    """The data of one table."""

    url: str
    kind: str
    """`server` or `router`."""
    seconds: float
    rows: list[Row]
    machine: dict[str, float] = field(default_factory=dict)
    gpus: list[Gpu] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Return the document that `--json` prints."""
        return asdict(self)


def server_view(url: str, before: Snapshot, after: Snapshot) -> View:
    """Return every version in the index or the metrics, busiest first."""
    seconds = max(after.at - before.at, 0.0)
    now = after.metrics
    states = {(str(entry.get("name")), str(entry.get("version", ""))): entry for entry in after.states}
    known = dict.fromkeys(states)
    for labels in now.get("nv_inference_request_success", {}):
        label_values = dict(labels)
        known[label_values.get("model", ""), label_values.get("version", "")] = None
    # A model that is not loaded has an entry without a version; a loaded model has one entry per version.
    served = {name for name, version in known if version}
    old, new = grouped(before.metrics, "model", "version"), grouped(now, "model", "version")
    rows = [
        _model(
            name,
            version,
            states.get((name, version), {}),
            old.get((name, version), {}),
            new.get((name, version), {}),
            seconds,
        )
        for name, version in known
        if version or name not in served
    ]
    rows.sort(key=lambda row: (-row.requests_per_s - row.failures_per_s, row.name, row.version))
    return View(url, "server", seconds, rows, _machine(before.metrics, now, seconds), _gpus(now))


def _model(name: str, version: str, state: Mapping[str, Any], before: Metrics, after: Metrics, seconds: float) -> Row:
    def increase(metric: str) -> float:
        return _series_increase(before.get(metric, {}), after.get(metric, {}))

    requests, executions = increase("nv_inference_request_success"), increase("nv_inference_exec_count")
    hits, misses = increase("nv_cache_num_hits_per_model"), increase("nv_cache_num_misses_per_model")
    p50, p99 = quantiles("nv_inference_request_histogram_us", before, after, 1e-3)
    computed = requests - hits
    return Row(
        name,
        version,
        str(state.get("state") or ""),
        str(state.get("reason") or ""),
        _rate(requests, seconds),
        _rate(increase("nv_inference_request_failure"), seconds),
        sum(after.get("nv_inference_request_failure", {}).values()),
        p50,
        p99,
        sum(after.get("nv_inference_pending_request_count", {}).values()),
        increase("nv_inference_queue_duration_us") / computed / 1000 if computed > 0 else None,
        increase("nv_inference_count") / executions if executions else None,
        hits / (hits + misses) if hits + misses else None,
    )


def router_view(url: str, before: Snapshot, after: Snapshot) -> View:
    """Return every backend, in the router's order."""
    seconds = max(after.at - before.at, 0.0)
    old = {str(backend.get("url")): backend for backend in before.states}
    old_metrics, new_metrics = grouped(before.metrics, "backend"), grouped(after.metrics, "backend")
    rows = []
    for backend in after.states:
        name = str(backend.get("url"))
        was = old.get(name, {})

        def increase(*keys: str, now: Mapping[str, Any] = backend, was: Mapping[str, Any] = was) -> float:
            return sum(_increase(float(was.get(key, 0)), float(now.get(key, 0))) for key in keys)

        p50, p99 = quantiles(
            "headrace_router_backend_seconds", old_metrics.get((name,), {}), new_metrics.get((name,), {}), 1e3
        )
        rows.append(
            Row(
                name,
                "",
                str(backend.get("state", "")),
                str(backend.get("reason") or ""),
                _rate(increase("ok"), seconds),
                _rate(increase("refused", "failed"), seconds),
                float(backend.get("refused", 0)) + float(backend.get("failed", 0)),
                p50,
                p99,
                float(backend.get("outstanding", 0)),
                retries_per_s=_rate(increase("retries"), seconds),
            )
        )
    about = {key: after.about.get(key) for key in ("version", "policy", "live")}
    return View(url, "router", seconds, rows, about=about)


def grouped(metrics: Metrics, *names: str) -> dict[tuple[str, ...], Metrics]:
    """Group the series that have these labels by their values."""
    groups: dict[tuple[str, ...], Metrics] = {}
    for metric, series in metrics.items():
        for labels, value in series.items():
            label_values = dict(labels)
            if all(name in label_values for name in names):
                groups.setdefault(tuple(label_values[name] for name in names), {}).setdefault(metric, {})[labels] = (
                    value
                )
    return groups


def quantiles(metric: str, before: Metrics, after: Metrics, scale: float) -> tuple[float | None, float | None]:
    """Return the median and p99 of a histogram in the interval; None if it is empty."""
    counts: dict[float, float] = {}
    old = before.get(f"{metric}_bucket", {})
    for labels, value in after.get(f"{metric}_bucket", {}).items():
        bound = float(dict(labels).get("le", "inf"))
        counts[bound] = counts.get(bound, 0.0) + _increase(old.get(labels, 0.0), value)
    middle, high = (quantile(share, counts) for share in (0.5, 0.99))
    return (None if middle is None else middle * scale), (None if high is None else high * scale)


def quantile(share: float, counts: Mapping[float, float]) -> float | None:
    """Interpolate within a bucket; above the last bound, return that bound."""
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
    result: dict[str, float] = {}
    for key, metric in (
        ("cpu", "nv_cpu_utilization"),
        ("memory_used_bytes", "nv_cpu_memory_used_bytes"),
        ("memory_total_bytes", "nv_cpu_memory_total_bytes"),
        ("server_bytes", "process_resident_memory_bytes"),
        ("open_files", "process_open_fds"),
    ):
        if after.get(metric):
            result[key] = sum(after[metric].values())
    metric = "process_cpu_seconds_total"
    if metric in after and seconds:
        cpu_seconds = _increase(sum(before.get(metric, {}).values()), sum(after[metric].values()))
        result["server_cores"] = cpu_seconds / seconds
    return result


def _gpus(metrics: Metrics) -> list[Gpu]:
    series = [
        metrics.get(name, {})
        for name in ("nv_gpu_utilization", "nv_gpu_memory_used_bytes", "nv_gpu_memory_total_bytes")
    ]
    known = dict.fromkeys(labels for values in series for labels in values)
    return [Gpu(dict(labels).get("gpu_uuid", ""), *(values.get(labels) for values in series)) for labels in known]


def _series_increase(before: Series, after: Series) -> float:
    return sum(_increase(before.get(labels, 0.0), value) for labels, value in after.items())


def _increase(before: float, after: float) -> float:
    return after - before if after >= before else after


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


Labels = tuple[tuple[str, str], ...]
Metrics = dict[str, dict[Labels, float]]

_LINE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)(?: \S+)?")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}
_WANTED = ("nv_", "process_", "headrace_router_")


@dataclass(frozen=True)
class Snapshot:
    """The state at one moment."""

    at: float
    """By a monotonic clock."""
    metrics: Metrics
    states: tuple[Mapping[str, Any], ...] = ()
    """Index of a server's repository, or backends of a router."""
    about: Mapping[str, Any] = field(default_factory=dict)


class Client(ServerClient):
    """A client that also reads a metrics page."""

    def _read(self, status: int, content: bytes, path: str) -> Any:
        if status == 200 and path.endswith("/metrics"):
            return content.decode(errors="replace")
        try:
            return super()._read(status, content, path)
        except Unavailable as error:
            raise NotJson(error.message) from None


class NotJson(Unavailable):
    """Raised if a response is not JSON."""


class Poller:
    """Polls one server or router."""

    def __init__(self, client: Client, *, is_router: bool) -> None:
        self._client = client
        self._is_router = is_router
        self.url = client.url

    def poll(self) -> Snapshot:
        """Fetch the current state. Raise a HeadraceError if the server does not answer as expected."""
        if self._is_router:
            status = self._client.get("/router/status")
            metrics = read_metrics(self._client.get("/router/metrics"))
            return Snapshot(time.monotonic(), metrics, tuple(status.get("backends") or ()), status)
        try:
            metrics = read_metrics(self._client.get("/metrics"))
        except Refused as refused:
            if refused.status != 404:  # a missing API key or scope: the error says so
                raise
            raise Unimplemented(
                f"{self.url} has no /metrics: use the metrics port, or start the server without --allow-metrics=false"
            ) from None
        now = time.monotonic()
        if not any(name.startswith("nv_") for name in metrics):
            raise Unavailable(f"{self.url}/metrics has no metrics of a model server: is it a Headrace server?")
        return Snapshot(now, metrics, self._index())

    def view(self, before: Snapshot, after: Snapshot) -> View:
        """Return what happened between two snapshots."""
        build_view = router_view if self._is_router else server_view
        return build_view(self.url, before, after)

    def _index(self) -> tuple[Mapping[str, Any], ...]:
        try:
            index = self._client.post("/v2/repository/index", {})
        except (Refused, NotJson):  # a metrics port, or an API that needs another key: the metrics are enough
            return ()
        return tuple(entry for entry in index or () if isinstance(entry, dict))


def open_poller(url: str) -> Poller:
    """Detect whether a server or a router answers. Raise a HeadraceError if neither does."""
    client = Client(url)
    try:
        status = client.get("/router/status")
    except (Refused, NotJson):
        return Poller(client, is_router=False)
    return Poller(client, is_router=isinstance(status, dict) and "backends" in status)


def read_metrics(text: str) -> Metrics:
    """Parse Prometheus text into values by name and labels. Other lines and unused metrics are skipped."""
    metrics: Metrics = {}
    for text_line in text.splitlines():
        if not text_line.startswith(_WANTED):
            continue
        parts = _LINE.fullmatch(text_line)
        if parts is None:
            continue
        try:
            value = float(parts[3])
        except ValueError:
            continue
        labels = tuple((name, _unescaped(value_)) for name, value_ in _LABEL.findall(parts[2] or ""))
        metrics.setdefault(parts[1], {})[labels] = value
    return metrics


def _unescaped(text: str) -> str:
    return re.sub(r"\\.", lambda match: _ESCAPES.get(match[0], match[0]), text) if "\\" in text else text


_BACKEND_STYLES = {"up": "green", "starting": "yellow", "ejected": "yellow", "down": "red", "asleep": "blue"}
_MODELS = {
    "MODEL": 0,
    "VER": 0,
    "STATE": 0,
    "REQ/s": 0,
    "FAIL/s": 0,
    "FAILED": 110,
    "P50 ms": 0,
    "P99 ms": 0,
    "QUEUE": 0,
    "QUEUE ms": 110,
    "BATCH": 0,
    "HITS": 95,
}
"""Minimum terminal width of a column: model names take the rest."""
_BACKENDS = ("BACKEND", "STATE", "REQ/s", "FAIL/s", "FAILED", "RETRY/s", "P50 ms", "P99 ms", "HAS")


def render(view: View, width: int) -> Group:
    """Render the view; narrow terminals get fewer columns."""
    requests = sum(row.requests_per_s for row in view.rows)
    failures = sum(row.failures_per_s for row in view.rows)
    head = f"{view.url}   {requests:.1f} requests/s   {failures:.1f} failures/s   over {view.seconds:.1f} s"
    lines: list[object] = [line(head, "bold")]
    if view.kind == "router":
        lines.append(
            line(f"router {view.about.get('version')}, by {view.about.get('policy')}, {view.about.get('live')} live")
        )
        rows = [_backend(row) for row in view.rows]
        lines += [Text(), table((*_BACKENDS, "WHY"), rows, right=_BACKENDS[2:])]
    else:
        lines += [line(text) for text in (_machine_line(view), *map(_gpu, view.gpus)) if text]
        lines += [Text(), _models(view, width) if view.rows else line("no models")]
    return Group(*lines)  # type: ignore[arg-type]


def render_error(url: str, reason: str) -> Group:
    """Render an error while the server does not answer."""
    return Group(line(url, "bold"), line(reason, "red"), line("retrying; press Ctrl-C to quit", "dim"))


def _models(view: View, width: int) -> Table:
    reasons = any(row.reason and row.state != "READY" for row in view.rows)
    chosen = [index for index, min_width in enumerate(_MODELS.values()) if width >= min_width]
    names = list(_MODELS)
    rows = []
    for row in view.rows:
        cells = _model_row(row)
        reason = [row.reason if row.state != "READY" else ""] if reasons else []
        rows.append([*(cells[index] for index in chosen), *reason])
    columns = [*(names[index] for index in chosen), *(["WHY"] if reasons else [])]
    return table(columns, rows, right=("VER", *names[3:]))


def _model_row(row: Row) -> list[object]:
    state = one_line(row.state) or "-"
    return [
        row.name,
        row.version or "-",
        Text(state, STATE_STYLES.get(state, "dim")),
        f"{row.requests_per_s:.1f}",
        _failures(row),
        f"{row.failures:.0f}",
        _number(row.p50_ms),
        _number(row.p99_ms),
        f"{row.queue:.0f}",
        _number(row.queue_ms),
        _number(row.batch, 1),
        "-" if row.cache_hits is None else f"{row.cache_hits:.0%}",
    ]


def _backend(row: Row) -> list[object]:
    return [
        row.name,
        Text(one_line(row.state), _BACKEND_STYLES.get(row.state, "dim")),
        f"{row.requests_per_s:.1f}",
        _failures(row),
        f"{row.failures:.0f}",
        _number(row.retries_per_s, 1),
        _number(row.p50_ms),
        _number(row.p99_ms),
        f"{row.queue:.0f}",
        row.reason,
    ]


def _failures(row: Row) -> Text:
    return Text(f"{row.failures_per_s:.1f}", "bold red" if row.failures_per_s else "")


def _machine_line(view: View) -> str:
    parts, machine = [], view.machine
    if "server_cores" in machine:
        parts.append(f"server {machine['server_cores']:.2f} cores")
    if "server_bytes" in machine:
        parts.append(f"{_gib(machine['server_bytes'])} GiB")
    if "cpu" in machine:
        parts.append(f"machine CPU {machine['cpu']:.0%}")
    if "memory_used_bytes" in machine and "memory_total_bytes" in machine:
        parts.append(f"memory {_gib(machine['memory_used_bytes'])} of {_gib(machine['memory_total_bytes'])} GiB")
    return "   ".join(parts)


def _gpu(gpu: Gpu) -> str:
    used = "-" if gpu.used_bytes is None else _gib(gpu.used_bytes)
    total = "-" if gpu.total_bytes is None else _gib(gpu.total_bytes)
    busy = "-" if gpu.utilisation is None else f"{gpu.utilisation:.0%}"
    return f"{gpu.uuid[:12]}   GPU {busy}   memory {used} of {total} GiB"


def _gib(count: float) -> str:
    return f"{count / 2**30:.2f}"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
