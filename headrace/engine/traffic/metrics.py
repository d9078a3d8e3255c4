# SPDX-License-Identifier: Apache-2.0
"""The metrics of splits. Counters only: those of several workers add up."""

from __future__ import annotations

from headrace.core.telemetry.metrics import Counter
from headrace.core.telemetry.registry import Registry

_LABELS = ("model", "version")


class TrafficMetrics:
    """Declared once for all splits of a server."""

    def __init__(self, registry: Registry) -> None:
        self._requests = registry.counter(
            "headrace_traffic_requests_total", "Requests without a version that a split gave to this one", _LABELS
        )
        self._errors = registry.counter(
            "headrace_traffic_errors_total", "Of those, the ones that failed by the version's own fault", _LABELS
        )
        self._diverted = registry.counter(
            "headrace_traffic_diverted_total",
            "Requests meant for this version that another got, because it is rolled_back or missing",
            (*_LABELS, "reason"),
        )
        self._rollbacks = registry.counter(
            "headrace_traffic_rollbacks_total", "Times that a version lost its traffic", _LABELS
        )
        self._shadows = registry.counter(
            "headrace_traffic_shadow_requests_total",
            "Copies for a shadow: agreed or differed, failed, or dropped because too many were under way or it is missing",
            (*_LABELS, "outcome"),
        )

    def requests(self, model: str, version: str) -> Counter:
        """Given to a version."""
        return self._requests.labels(model=model, version=version)

    def errors(self, model: str, version: str) -> Counter:
        """Its own errors."""
        return self._errors.labels(model=model, version=version)

    def diverted(self, model: str, version: str, reason: str) -> Counter:
        """Kept from it."""
        return self._diverted.labels(model=model, version=version, reason=reason)

    def rollbacks(self, model: str, version: str) -> Counter:
        """Rolled back."""
        return self._rollbacks.labels(model=model, version=version)

    def shadows(self, model: str, version: str, outcome: str) -> Counter:
        """Copies by what became of them."""
        return self._shadows.labels(model=model, version=version, outcome=outcome)
