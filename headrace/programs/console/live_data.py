# SPDX-License-Identifier: Apache-2.0
"""The live data of a server as one small document: counts since its start, and the newest rates.

Read in the event loop's thread whenever a page polls, so it only reads and adds. Values are plain numbers, so that
those of several workers can be added up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from resource import getpagesize
from typing import Any, get_args

from headrace.core.telemetry.metrics import (
    DURATION_BUCKETS_SECONDS,
    Counter,
    Family,
    Gauge,
    Histogram,
    Registry,
    Samples,
)
from headrace.core.telemetry.progress import ProgressEvent
from headrace.engine.dataplane import DataPlane, ServingVersion
from headrace.engine.repository.control import IndexEntry
from headrace.engine.repository.memory_budget import place_text
from headrace.engine.repository.residency import Residency, residency_json
from headrace.engine.repository.states import State
from headrace.engine.scheduling.pending_request import BatchReason
from headrace.models.storage.errors import readable_bytes
from headrace.programs.console.history import LANGUAGE_BOUNDS_MS, History, Numbers, Point
from headrace.version import __version__

Machine = Callable[[], Sequence[Samples]]
"""The last sample of CPUs, memory and GPUs."""
Others = Callable[[], Iterable[Numbers]]
"""`Live.numbers` of the other workers."""
Tasks = Callable[[], Iterable[ProgressEvent]]
"""Running downloads."""

Addresses = Callable[[], Mapping[str, str]]
"""The URLs of the server's ports, by protocol."""

_LANGUAGE = {
    "headrace_llm_prompt_tokens_total": ("tokens", 0),
    "headrace_llm_generated_tokens_total": ("tokens", 1),
    "headrace_llm_prefix_cache_hit_tokens_total": ("prefix", 0),
    "headrace_llm_prefix_cache_looked_tokens_total": ("prefix", 1),
    "headrace_llm_kv_cache_usage_ratio": ("kv", 0),
    "headrace_llm_sequences_running": ("running", None),
    "headrace_llm_requests_waiting": ("waiting", None),
    "headrace_llm_multimodal": ("multimodal", None),
    "headrace_llm_time_to_first_token_seconds": ("ttft", None),
    "headrace_llm_inter_token_latency_seconds": ("itl", None),
}
"""Metrics of language models, and where their values are in a version's numbers."""
BOUNDS_MS = [seconds * 1000 for seconds in DURATION_BUCKETS_SECONDS]
_REASONS: tuple[str, ...] = get_args(BatchReason)
_MEMORY = Path("/proc/self/statm")
_UUID = 'gpu_uuid="'


class Live:
    """Live data over one data plane and one registry."""

    def __init__(
        self,
        plane: DataPlane,
        registry: Registry,
        machine: Machine,
        others: Others,
        tasks: Tasks,
        control: bool,
        history: History,
        started: float,
    ) -> None:
        self._plane = plane
        self._registry = registry
        self._machine = machine
        self._others = others
        self._tasks = tasks
        self._control = control
        self._history = history
        self._started = started
        self._cpu: tuple[float, float] | None = None
        """The time of the last point, and the CPU seconds then."""
        self.addresses: Addresses = dict
        """Set when the ports are known."""

    def sample(self) -> None:
        """Add a point to the history: the counts of all workers, as they were gathered last."""
        total = self._total()
        models: dict[str, Numbers] = {}
        for version, numbers in total["versions"].items():
            name = version.rpartition("/")[0]
            models[name] = add_counts(models.get(name), numbers)
        everything: Numbers = {}
        for numbers in models.values():
            everything = add_counts(everything, numbers)
        process: Numbers = total["process"]
        machine = _machine_point(_machine(self._machine())) | {
            "process_cpu": self._process_cpu(process["cpu_seconds"]),
            "process_memory": process["memory_bytes"],
        }
        self._history.add(time.time(), everything, models, machine)

    def _process_cpu(self, cpu_seconds: float) -> float | None:
        """Return the percent of one core since the last point."""
        now, before = time.monotonic(), self._cpu
        self._cpu = now, cpu_seconds
        return None if before is None else 100 * max(0.0, cpu_seconds - before[1]) / max(0.001, now - before[0])

    def _sleep(self, entry: IndexEntry) -> dict[str, bool]:
        """Return the sleep state of a version; {} if it does not support sleeping."""
        report = self._plane.sleep_reports(entry.name).get(entry.version)
        return {} if report is None else {"asleep": report.state != "awake"}

    def _total(self) -> Numbers:
        total = self.numbers()
        for counts in self._others():
            total = add_counts(total, counts)
        return total

    def document(self) -> dict[str, Any]:
        """Return everything that the page shows."""
        total = self._total()
        versions: dict[str, Numbers] = total["versions"]
        on_demand = {residency.name: residency for residency in self._plane.residencies()}
        models = [
            {
                "name": entry.name,
                "version": entry.version,
                **_state(entry, on_demand.get(entry.name)),
                **self._sleep(entry),
                "numbers": versions.get(f"{entry.name}/{entry.version}"),
                **_loading(entry.progress),
            }
            for entry in self._plane.states()
        ]
        return {
            "time": time.time(),
            "server": {
                "version": __version__,
                "started": self._started,
                "addresses": self.addresses(),
                "history_seconds": self._history.seconds,
            },
            "rates": self._history.latest,
            "ready": self._plane.ready,
            "control": self._control,
            "bounds_ms": BOUNDS_MS,
            "reasons": _REASONS,
            "process": total["process"],
            "machine": _machine(self._machine()),
            "tasks": [_progress(event) for event in self._tasks()],
            "models": models,
        }

    def numbers(self) -> Numbers:
        """Return the counts of this process."""
        language = self._language()
        versions = {
            f"{version.name}/{version.version_text}": _counts(version, language) for version in self._plane.statistics()
        }
        return {"versions": versions, "process": {"cpu_seconds": time.process_time(), "memory_bytes": _memory()}}

    def _language(self) -> dict[tuple[str, ...], Numbers]:
        """Return the metrics of language models, by model and version."""
        numbers_by_version: dict[tuple[str, ...], Numbers] = {}
        for family in self._registry.families:
            metric = _LANGUAGE.get(family.name)
            if metric is None or not isinstance(family, Family):
                continue
            name, index = metric
            for labels, series in family.collect():
                numbers = numbers_by_version.setdefault(labels, _no_language())
                if isinstance(series, Histogram):
                    numbers[name] = list(series.counts)
                elif isinstance(series, Counter | Gauge) and index is not None:
                    numbers[name][index] = series.value
                    if name == "kv":
                        numbers["kv"][1] = 1
                elif isinstance(series, Counter | Gauge):
                    numbers[name] = series.value
        return numbers_by_version


def _state(entry: IndexEntry, residency: Residency | None) -> dict[str, Any]:
    """Return the state and reason of a version; of a model that loads on demand, whether and why it is in memory."""
    state, reason = (entry.state.value if entry.state is not None else ""), entry.reason
    if residency is None:
        return {"state": state, "reason": reason}
    if residency.state in ("evicted", "not loaded"):
        state = "EVICTED" if residency.state == "evicted" else ""  # the page shows an empty state as "not loaded"
    elif entry.state is State.READY:
        used = residency.last_used_seconds
        parts = ["pinned" if residency.pinned else "resident"]
        parts += [f"{readable_bytes(size)} of {place_text(place)}" for place, size in residency.use.items()]
        parts += [] if used is None else [f"last used {used:.0f} s ago"]
        reason = reason or ", ".join(parts)
    elif residency.state == "loading":
        reason = f"{residency.reason}; {residency.waiting} request(s) wait" if residency.waiting else residency.reason
    return {"state": state, "reason": reason, "residency": residency_json(residency)}


def _no_language() -> Numbers:
    counts = {name: [0] * (len(bounds) + 1) for name, bounds in LANGUAGE_BOUNDS_MS.items()}
    return {"tokens": [0, 0], "prefix": [0, 0], "kv": [0, 0], "running": 0, "waiting": 0, "multimodal": 0, **counts}


def _counts(version: ServingVersion, language: dict[tuple[str, ...], Numbers]) -> Numbers:
    statistics = version.statistics
    done = failed = queue_ns = compute_ns = 0
    for requests in statistics.by_rows.values():
        done += requests.success
        failed += requests.fail
        queue_ns += requests.queue_ns
        compute_ns += requests.input_ns + requests.infer_ns + requests.output_ns
    counts: Numbers = {
        "done": done,
        "failed": failed,
        "in_flight": statistics.in_flight,
        "waiting": version.waiting,
        "computed": statistics.computed,
        "queue_ns": queue_ns,
        "compute_ns": compute_ns,
    }
    if done:
        # Most of many models are idle: all-zero rows are not sent.
        counts["took"] = statistics.slow_requests.counts(done)
        counts["batches"] = {str(rows): stats.count for rows, stats in statistics.batches.items()}
        counts["reasons"] = [statistics.log.reasons.get(reason, 0) for reason in _REASONS]
    llm = language.get((version.name, version.version_text))
    if llm is not None:
        counts["llm"] = llm
    return counts


def _machine(hardware: Sequence[Samples]) -> dict[str, Any]:
    """Return the hardware metrics as JSON, without the prefixes of their names."""
    cpu: dict[str, Any] = {}
    gpus: dict[str, dict[str, float]] = {}
    for samples in hardware:
        for labels, value in samples.series.items():
            if not isinstance(value, int | float):
                continue
            if samples.name.startswith("nv_gpu_") and _UUID in labels:
                uuid = labels.partition(_UUID)[2].partition('"')[0]
                gpus.setdefault(uuid, {})[samples.name.removeprefix("nv_gpu_")] = value
            elif samples.name.startswith("nv_cpu_"):
                cpu[samples.name.removeprefix("nv_")] = value
    return cpu | {"gpus": [{"uuid": uuid, **values} for uuid, values in gpus.items()]}


def _machine_point(machine: Mapping[str, Any]) -> Point:
    """Return the machine's part of a point; of several GPUs, the mean."""
    rows: Point = {}
    if "cpu_utilization" in machine:
        rows["cpu"] = 100 * machine["cpu_utilization"]
    if "cpu_memory_used_bytes" in machine:
        rows["memory"] = machine["cpu_memory_used_bytes"]
    gpus = machine["gpus"]
    if gpus:
        rows["gpu"] = 100 * sum(gpu.get("utilization", 0.0) for gpu in gpus) / len(gpus)
        used = [gpu.get("memory_used_bytes", 0) / (gpu.get("memory_total_bytes") or 1) for gpu in gpus]
        rows["gpu_memory"] = 100 * sum(used) / len(gpus)
    return rows


def _loading(event: ProgressEvent | None) -> dict[str, Any]:
    """Return the loading progress of versions that are being loaded."""
    return {} if event is None or event.state != "running" else {"progress": _progress(event)}


def _progress(event: ProgressEvent) -> dict[str, Any]:
    return {
        "task": event.task,
        "done": event.done,
        "total": event.total,
        "unit": event.unit,
        "message": event.message,
    }


def _memory() -> int:
    try:
        return int(_MEMORY.read_text().split()[1]) * getpagesize()
    except (OSError, ValueError, IndexError):  # Not Linux: the page leaves the number out.
        return 0


def add_counts(first: Any, second: Any) -> Any:
    """Add up two results of `Live.numbers`, or parts of them."""
    if first is None or second is None:
        return second if first is None else first
    if isinstance(first, dict):
        return {name: add_counts(first.get(name), second.get(name)) for name in first.keys() | second.keys()}
    if isinstance(first, list):
        return [add_counts(left, right) for left, right in zip(first, second, strict=True)]
    return first + second
