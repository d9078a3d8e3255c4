# SPDX-License-Identifier: Apache-2.0
"""What is counted of models that generate: for each model and version, whatever its instances.

`LlmMetrics` is made once for each registry by `backend`; an engine adds to the series of its version from its thread.
"""

from __future__ import annotations

import threading

from headrace.core.telemetry.metrics import Counter, Gauge, Histogram
from headrace.core.telemetry.registry import Registry

_LABELS = ("model", "version")
_FIRST_TOKEN_SECONDS = (
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
_NEXT_TOKEN_SECONDS = (
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


class LlmMetrics:
    """The families."""

    def __init__(self, registry: Registry) -> None:
        self.first_token = registry.histogram(
            "headrace_llm_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            _LABELS,
            buckets=_FIRST_TOKEN_SECONDS,
        )
        self.next_token = registry.histogram(
            "headrace_llm_inter_token_latency_seconds",
            "From one token of a choice to the next.",
            _LABELS,
            buckets=_NEXT_TOKEN_SECONDS,
        )
        self.prompt_tokens = registry.counter(
            "headrace_llm_prompt_tokens_total", "Tokens of prompts that were started.", _LABELS
        )
        self.tokens = registry.counter("headrace_llm_generated_tokens_total", "Tokens that were generated.", _LABELS)
        self.running = registry.gauge("headrace_llm_sequences_running", "Sequences that are being computed.", _LABELS)
        self.waiting = registry.gauge("headrace_llm_requests_waiting", "Requests and sequences that wait.", _LABELS)
        self.cache_use = registry.gauge(
            "headrace_llm_kv_cache_usage_ratio", "Pages of the KV cache that sequences use, of all.", _LABELS
        )
        self.prefix_hits = registry.counter(
            "headrace_llm_prefix_cache_hit_tokens_total", "Tokens of prompts that were found in the KV cache.", _LABELS
        )
        self.prefix_looked = registry.counter(
            "headrace_llm_prefix_cache_looked_tokens_total", "Tokens of prompts that were looked for there.", _LABELS
        )
        self.preemptions = registry.counter(
            "headrace_llm_preemptions_total", "Sequences that had to give up their pages and start again.", _LABELS
        )
        self.steps = registry.counter("headrace_llm_steps_total", "Steps that were computed.", _LABELS)
        self._users: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()
        """Instances come and go in threads of their own."""

    def of(self, model: str, version: int) -> VersionMetrics:
        """The series of a version, until it closes them."""
        key = (model, str(version))
        with self._lock:
            self._users[key] = self._users.get(key, 0) + 1
            return VersionMetrics(self, model, str(version))

    def leave(self, model: str, version: str) -> None:
        """One user less; after the last the gauges are no longer told. Counters stay: they must not fall."""
        with self._lock:
            self._users[model, version] -= 1
            if not self._users[model, version]:
                for gauge in (self.running, self.waiting, self.cache_use):
                    gauge.remove(model=model, version=version)


class VersionMetrics:
    """The series of one instance of a version."""

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
        self.prefix_looked: Counter = families.prefix_looked.labels(**labels)
        self.preemptions: Counter = families.preemptions.labels(**labels)
        self.steps: Counter = families.steps.labels(**labels)

    def close(self) -> None:
        """The instance is gone."""
        self._families.leave(**self._labels)
