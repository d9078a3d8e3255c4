# SPDX-License-Identifier: Apache-2.0
"""The live data of a server as one small document: counts since its start, from which the page computes rates.

Read in the event loop's thread whenever a page polls, so it only reads and adds. Values are plain numbers, so that
those of several workers can be added up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from resource import getpagesize
from typing import Any, get_args

from headrace.core.telemetry.metrics import DURATION_BUCKETS_SECONDS, Counter, Family, Registry, Samples
from headrace.core.telemetry.progress import ProgressEvent
from headrace.engine.dataplane import DataPlane, ServingVersion
from headrace.engine.scheduling.pending_request import BatchReason

Numbers = dict[str, Any]
Machine = Callable[[], Sequence[Samples]]
"""The last sample of CPUs, memory and GPUs."""
Others = Callable[[], Iterable[Numbers]]
"""`Live.numbers` of the other workers."""
Tasks = Callable[[], Iterable[ProgressEvent]]
"""Running downloads."""

_TOKENS = ("headrace_llm_prompt_tokens_total", "headrace_llm_generated_tokens_total")
_REASONS: tuple[str, ...] = get_args(BatchReason)
_MEMORY = Path("/proc/self/statm")
_UUID = 'gpu_uuid="'


class Live:
    """Live data over one data plane and one registry."""

    def __init__(
        self, plane: DataPlane, registry: Registry, machine: Machine, others: Others, tasks: Tasks, control: bool
    ) -> None:
        self._plane = plane
        self._registry = registry
        self._machine = machine
        self._others = others
        self._tasks = tasks
        self._control = control

    def document(self) -> dict[str, Any]:
        """Return everything that the page shows."""
        total = self.numbers()
        for counts in self._others():
            total = add_counts(total, counts)
        versions: dict[str, Numbers] = total["versions"]
        models = [
            {
                "name": entry.name,
                "version": entry.version,
                "state": entry.state.value if entry.state is not None else "",
                "reason": entry.reason,
                "numbers": versions.get(f"{entry.name}/{entry.version}"),
                **_loading(entry.progress),
            }
            for entry in self._plane.states()
        ]
        return {
            "time": time.time(),
            "ready": self._plane.ready,
            "control": self._control,
            "bounds_ms": [seconds * 1000 for seconds in DURATION_BUCKETS_SECONDS],
            "reasons": _REASONS,
            "process": total["process"],
            "machine": _machine(self._machine()),
            "tasks": [_progress(event) for event in self._tasks()],
            "models": models,
        }

    def numbers(self) -> Numbers:
        """Return the counts of this process."""
        tokens = self._tokens()
        versions = {
            f"{version.name}/{version.version_text}": _counts(version, tokens) for version in self._plane.statistics()
        }
        return {"versions": versions, "process": {"cpu_seconds": time.process_time(), "memory_bytes": _memory()}}

    def _tokens(self) -> dict[tuple[str, ...], list[int]]:
        """Return tokens read and written, by model and version."""
        tokens: dict[tuple[str, ...], list[int]] = {}
        for family in self._registry.families:
            if family.name in _TOKENS and isinstance(family, Family):
                place = _TOKENS.index(family.name)
                for labels, series in family.collect():
                    if isinstance(series, Counter):
                        tokens.setdefault(labels, [0, 0])[place] = int(series.value)
        return tokens


def _counts(version: ServingVersion, tokens: dict[tuple[str, ...], list[int]]) -> Numbers:
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
    read_and_written = tokens.get((version.name, version.version_text))
    if read_and_written is not None:
        counts["tokens"] = read_and_written
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
        return [add_counts(one, other) for one, other in zip(first, second, strict=True)]
    return first + second
