# SPDX-License-Identifier: Apache-2.0
"""What is counted of pages that are handed over: by those who give them, and by those who take them. Made by `hands`."""

from __future__ import annotations

from headrace.core.telemetry.registry import Registry

_LABELS = ("model", "version", "side")
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
GIVEN, TAKEN = "prefill", "decode"


class HandingMetrics:
    """The families. From any thread."""

    def __init__(self, registry: Registry) -> None:
        self.handings = registry.counter(
            "headrace_llm_handings_total",
            "Prompts whose pages were handed over: kept for others (prefill), or taken from them (decode).",
            (*_LABELS, "way"),
        )
        self.bytes = registry.counter("headrace_llm_handing_bytes_total", "Bytes of their pages.", _LABELS)
        self.tokens = registry.counter("headrace_llm_handing_tokens_total", "Tokens of their pages.", _LABELS)
        self.seconds = registry.histogram(
            "headrace_llm_handing_seconds",
            "Time to keep the pages of a prompt, or to take them.",
            _LABELS,
            buckets=_SECONDS,
        )
        self.fallbacks = registry.counter(
            "headrace_llm_handing_fallbacks_total",
            "Prompts that the decoder had to compute itself although it got a ticket, or that a prefill did not keep.",
            (*_LABELS, "reason"),
        )

    def of(self, model: str, version: str, side: str) -> SideMetrics:
        """The series of one side of a version."""
        return SideMetrics(self, {"model": model, "version": version, "side": side})


class SideMetrics:
    """One side of one version."""

    def __init__(self, families: HandingMetrics, labels: dict[str, str]) -> None:
        self._families = families
        self._labels = labels

    def done(self, way: str, bytes: int, tokens: int, seconds: float) -> None:
        """Pages were handed over."""
        families, labels = self._families, self._labels
        families.handings.labels(**labels, way=way).add()
        families.bytes.labels(**labels).add(bytes)
        families.tokens.labels(**labels).add(tokens)
        families.seconds.labels(**labels).observe(seconds)

    def fell_back(self, reason: str) -> None:
        """They were not."""
        self._families.fallbacks.labels(**self._labels, reason=reason).add()
