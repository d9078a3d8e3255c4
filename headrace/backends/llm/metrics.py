# SPDX-License-Identifier: Apache-2.0
"""Metrics of generating models, per model and version.

`backend` creates one `LlmMetrics` per registry; the engine cores of a version add to its series from their threads.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from headrace.core.telemetry.metrics import Counter, Gauge, Histogram, Registry

_LABELS = ("model", "version")
_LEVEL_LABELS = (*_LABELS, "level")
GPU, HOST, DISK = "gpu", "host", "disk"
"""Levels of the KV cache."""
FIRST_TOKEN_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
NEXT_TOKEN_SECONDS = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
)


ADAPTER_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


@dataclass(slots=True)
class LevelCounts:
    """What happened at one level since the start."""

    lookups: int = 0
    """Prompts that were looked up there."""
    hits: int = 0
    """... and of which pages were found."""
    tokens: int = 0
    """Tokens of these pages."""
    written: int = 0
    """Pages that were saved there."""
    dropped: int = 0
    """Pages that were to be saved there, and were not."""


class LlmMetrics:
    """The metric families."""

    def __init__(self, registry: Registry) -> None:
        self.first_token = registry.histogram(
            "headrace_llm_time_to_first_token_seconds",
            "Time from a request's arrival to its first token.",
            _LABELS,
            buckets=FIRST_TOKEN_SECONDS,
        )
        self.next_token = registry.histogram(
            "headrace_llm_inter_token_latency_seconds",
            "Time from one token of a choice to the next.",
            _LABELS,
            buckets=NEXT_TOKEN_SECONDS,
        )
        self.prompt_tokens = registry.counter(
            "headrace_llm_prompt_tokens_total", "Prompt tokens of started requests.", _LABELS
        )
        self.tokens = registry.counter("headrace_llm_generated_tokens_total", "Generated tokens.", _LABELS)
        self.running = registry.gauge("headrace_llm_sequences_running", "Running sequences.", _LABELS)
        self.waiting = registry.gauge("headrace_llm_requests_waiting", "Waiting sequences.", _LABELS)
        self.cache_use = registry.gauge(
            "headrace_llm_kv_cache_usage_ratio", "Fraction of the KV cache pages in use.", _LABELS
        )
        self.prefix_hits = registry.counter(
            "headrace_llm_prefix_cache_hit_tokens_total", "Prompt tokens found in the prefix cache.", _LABELS
        )
        self.prefix_queries = registry.counter(
            "headrace_llm_prefix_cache_looked_tokens_total", "Prompt tokens looked up in the prefix cache.", _LABELS
        )
        self.level_lookups = registry.counter(
            "headrace_llm_kv_level_lookups_total",
            "Prompts looked up in a level of the KV cache: gpu (the KV cache itself, also on a CPU), host or disk.",
            _LEVEL_LABELS,
        )
        self.level_hits = registry.counter(
            "headrace_llm_kv_level_hits_total", "Prompts of which a level of the KV cache had pages.", _LEVEL_LABELS
        )
        self.level_tokens = registry.counter(
            "headrace_llm_kv_level_hit_tokens_total", "Prompt tokens found in a level of the KV cache.", _LEVEL_LABELS
        )
        self.level_written = registry.counter(
            "headrace_llm_kv_level_written_pages_total",
            "Evicted pages saved to the host or the disk level.",
            _LEVEL_LABELS,
        )
        self.level_dropped = registry.counter(
            "headrace_llm_kv_level_dropped_pages_total",
            "Pages not saved to the host or the disk level, because too many waited to be copied or the level is off.",
            _LEVEL_LABELS,
        )
        self.level_bytes = registry.gauge(
            "headrace_llm_kv_level_bytes", "Bytes of the pages in the host or the disk level.", _LEVEL_LABELS
        )
        self.preemptions = registry.counter(
            "headrace_llm_preemptions_total", "Sequences preempted for lack of KV cache pages.", _LABELS
        )
        self.steps = registry.counter("headrace_llm_steps_total", "Computed steps.", _LABELS)
        self.drafts = registry.counter(
            "headrace_llm_speculation_drafts_total", "Drafts that the model verified (speculative decoding).", _LABELS
        )
        self.draft_tokens = registry.counter(
            "headrace_llm_speculation_draft_tokens_total", "Tokens of these drafts.", _LABELS
        )
        self.accepted_tokens = registry.counter(
            "headrace_llm_speculation_accepted_tokens_total",
            "Drafted tokens that were accepted, by their position in the draft, from 0.",
            (*_LABELS, "position"),
        )
        self.multimodal = registry.gauge(
            "headrace_llm_multimodal", "1 if the model takes images and videos, 0 if only text.", _LABELS
        )
        self.adapters = registry.gauge(
            "headrace_llm_adapters_resident", "Adapters on demand in device memory (in slots).", _LABELS
        )
        self.adapter_requests = registry.gauge(
            "headrace_llm_adapter_requests_waiting", "Requests whose adapter waits for a slot.", _LABELS
        )
        self.adapter_loads = registry.counter("headrace_llm_adapter_loads_total", "Loads of adapters.", _LABELS)
        self.adapter_failures = registry.counter(
            "headrace_llm_adapter_load_failures_total", "Loads of adapters that failed.", _LABELS
        )
        self.adapter_seconds = registry.histogram(
            "headrace_llm_adapter_load_seconds",
            "Time to load an adapter into host memory, downloading included.",
            _LABELS,
            buckets=ADAPTER_SECONDS,
        )
        self.adapter_evictions = registry.counter(
            "headrace_llm_adapter_evictions_total",
            "Adapters that were evicted for others, from device or host memory.",
            (*_LABELS, "memory"),
        )
        self._users: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()
        """Instances open and close in several threads."""

    def for_version(self, model: str, version: int) -> VersionMetrics:
        """Return the series of a model version; the caller closes them."""
        key = (model, str(version))
        with self._lock:
            self._users[key] = self._users.get(key, 0) + 1
            return VersionMetrics(self, model, str(version))

    def for_adapters(self, model: str, version: int) -> AdapterMetrics:
        """Return the series of a model version that loads adapters on demand."""
        return AdapterMetrics(self, {"model": model, "version": str(version)})

    def release(self, model: str, version: str) -> None:
        """Remove the gauges after the last instance of a version. Counters stay: they must not decrease."""
        with self._lock:
            self._users[model, version] -= 1
            if not self._users[model, version]:
                gauges = (self.running, self.waiting, self.cache_use, self.multimodal)
                for gauge in (*gauges, self.adapters, self.adapter_requests):
                    gauge.remove(model=model, version=version)
                for level in (HOST, DISK):
                    self.level_bytes.remove(model=model, version=version, level=level)


class VersionMetrics:
    """The series of a model version, as one instance uses them."""

    def __init__(self, families: LlmMetrics, model: str, version: str) -> None:
        self._families = families
        self._labels = {"model": model, "version": version}
        labels = self._labels
        self.first_token: Histogram = families.first_token.labels(**labels)
        self.next_token: Histogram = families.next_token.labels(**labels)
        self.prompt_tokens: Counter = families.prompt_tokens.labels(**labels)
        self.tokens: Counter = families.tokens.labels(**labels)
        self.running: Gauge = families.running.labels(**labels)
        self.waiting: Gauge = families.waiting.labels(**labels)
        self.cache_use: Gauge = families.cache_use.labels(**labels)
        self.prefix_hits: Counter = families.prefix_hits.labels(**labels)
        self.prefix_queries: Counter = families.prefix_queries.labels(**labels)
        self.preemptions: Counter = families.preemptions.labels(**labels)
        self.steps: Counter = families.steps.labels(**labels)
        self.multimodal: Gauge = families.multimodal.labels(**labels)
        self.drafts: Counter = families.drafts.labels(**labels)
        self.draft_tokens: Counter = families.draft_tokens.labels(**labels)
        self._accepted_tokens: list[Counter] = []
        self._levels: dict[str, LevelCounts] = {}
        """What was added to the counters of each level."""
        self._level_bytes: dict[str, float] = {}

    def add_accepted_tokens(self, position: int, count: int) -> None:
        """Count accepted tokens at a position of their drafts."""
        while position >= len(self._accepted_tokens):
            number = str(len(self._accepted_tokens))
            self._accepted_tokens.append(self._families.accepted_tokens.labels(**self._labels, position=number))
        self._accepted_tokens[position].add(count)

    def report_levels(self, counts: Mapping[str, LevelCounts], held: Mapping[str, int]) -> None:
        """Bring the series of the levels of the KV cache up to date. `held`: bytes by level."""
        families = self._families
        for level, now in counts.items():
            before = self._levels.get(level)
            if now == before:
                continue
            labels = {**self._labels, "level": level}
            series = [
                (families.level_lookups, "lookups"),
                (families.level_hits, "hits"),
                (families.level_tokens, "tokens"),
            ]
            if level != GPU:
                series += [(families.level_written, "written"), (families.level_dropped, "dropped")]
            for family, name in series:
                family.labels(**labels).add(getattr(now, name) - (getattr(before, name) if before is not None else 0))
            self._levels[level] = replace(now)
        for level, size in held.items():
            if size != self._level_bytes.get(level):
                # Instances of a version have series in common.
                families.level_bytes.labels(**self._labels, level=level).add(size - self._level_bytes.get(level, 0))
                self._level_bytes[level] = size

    def close(self) -> None:
        """Release the series: the instance is closed."""
        self.report_levels({}, dict.fromkeys(self._level_bytes, 0))
        self._families.release(**self._labels)


class AdapterMetrics:
    """The series of a model version about adapters on demand. From any thread."""

    def __init__(self, families: LlmMetrics, labels: Mapping[str, str]) -> None:
        self.resident: Gauge = families.adapters.labels(**labels)
        self.waiting: Gauge = families.adapter_requests.labels(**labels)
        self._loads: Counter = families.adapter_loads.labels(**labels)
        self._failures: Counter = families.adapter_failures.labels(**labels)
        self._seconds: Histogram = families.adapter_seconds.labels(**labels)
        self._evictions: dict[str, Counter] = {
            memory: families.adapter_evictions.labels(**labels, memory=memory) for memory in ("device", "host")
        }

    def loaded(self, seconds: float) -> None:
        """Count a load."""
        self._loads.add()
        self._seconds.observe(seconds)

    def load_failed(self) -> None:
        """Count a load that failed."""
        self._failures.add()

    def evicted(self, memory: Literal["device", "host"]) -> None:
        """Count an eviction."""
        self._evictions[memory].add()
