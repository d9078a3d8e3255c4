# SPDX-License-Identifier: Apache-2.0
"""What a split of traffic can be told. Filled from the configuration file and by the admin API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StickyBy:
    """Where the key is by which one user always sees one version; the first that a request has. None of them: by chance."""

    header: str = ""
    cookie: str = ""
    field: str = ""
    """A field of the body of `/predict`, or a parameter of other protocols."""


@dataclass(frozen=True, slots=True)
class Rollback:
    """When a version loses its traffic by itself. Rates and times are of the last `window_seconds`."""

    error_rate: float = 0.0
    """Errors per request, above which it goes; 0 for never."""
    p99_ms: float = 0.0
    """Latency above which it goes; 0 for never."""
    least_requests: int = 50
    """Before so many are seen, nothing is judged."""
    window_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class Split:
    """The versions of one model that share its traffic. Versions are numbers or labels, as clients write them."""

    weights: Mapping[str, float]
    """Shares of the traffic, which sum to 1 (or to 100, as percentages)."""
    sticky: StickyBy = field(default_factory=StickyBy)
    shadows: Mapping[str, float] = field(default_factory=dict)
    """Versions that get a copy of so large a share of the requests; their answers are compared and never returned."""
    tolerance: float = 1e-5
    """How far numbers of two versions may lie apart, relative and absolute, and still agree."""
    baseline: str = ""
    """The version that gets the traffic of one that is rolled back; "" for the one of the largest weight."""
    rollback: Rollback | None = None


@dataclass(frozen=True, slots=True)
class TrafficSettings:
    """All splits, by model."""

    splits: Mapping[str, Split] = field(default_factory=dict)
