# SPDX-License-Identifier: Apache-2.0
"""The metrics of one server: declared once, read when scraped.

Made by a composition root and passed to every room that counts something; there is no global one. Refuses at the
declaration what Prometheus would refuse at the scrape. Must not know how the numbers are written (`exposition`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeVar

from headrace.core.clock import Clock
from headrace.core.telemetry.families import AnyFamily, Callback, Family, Kind, Reading
from headrace.core.telemetry.metrics import DURATION_BUCKETS_SECONDS, Counter, Gauge, Histogram, check_bounds
from headrace.core.telemetry.summaries import DEFAULT_QUANTILES, DEFAULT_WINDOW_SECONDS, Summary, check_quantiles

AFamily = TypeVar("AFamily", bound=AnyFamily)

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
# Two underscores in front are Prometheus's own.
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_OWN_LABEL = {"histogram": "le", "summary": "quantile"}
# What a name stands for besides itself. `_created` is never written here, but readers of OpenMetrics look for it.
_SUFFIXES: dict[Kind, tuple[str, ...]] = {
    "counter": (),
    "gauge": (),
    "histogram": ("_bucket", "_count", "_sum", "_created"),
    "summary": ("_count", "_sum", "_created"),
}


class Named(Protocol):
    """What has a kind and a name."""

    kind: Kind
    name: str


class Registry:
    """Every metric of one server, in the order they were declared. The clock is for the windows of summaries."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._families: list[AnyFamily] = []
        self._owners: dict[str, str] = {}

    @property
    def families(self) -> Sequence[AnyFamily]:
        """What is declared so far."""
        return self._families

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Family[Counter]:
        """Declare a counter. End the name in `_total`, unless existing dashboards know it without."""
        return self._declare(Family("counter", name, help, tuple(labels), Counter))

    def gauge(self, name: str, help: str, labels: Sequence[str] = ()) -> Family[Gauge]:
        """Declare a gauge."""
        return self._declare(Family("gauge", name, help, tuple(labels), Gauge))

    def histogram(
        self, name: str, help: str, labels: Sequence[str] = (), *, buckets: Sequence[float] = DURATION_BUCKETS_SECONDS
    ) -> Family[Histogram]:
        """Declare a histogram with these upper bounds of its buckets; the one to infinity is added."""
        bounds = check_bounds(buckets)
        return self._declare(Family("histogram", name, help, tuple(labels), lambda: Histogram(bounds)))

    def summary(
        self,
        name: str,
        help: str,
        labels: Sequence[str] = (),
        *,
        quantiles: Sequence[float] = DEFAULT_QUANTILES,
        window_seconds: float = DEFAULT_WINDOW_SECONDS,
    ) -> Family[Summary]:
        """Declare a summary: quantiles of the last `window_seconds`."""
        checked = check_quantiles(quantiles)
        if not window_seconds > 0:
            raise ValueError(f"summary {name} needs a window of more than {window_seconds} seconds")
        return self._declare(
            Family("summary", name, help, tuple(labels), lambda: Summary(self._clock, checked, window_seconds))
        )

    def callback(
        self,
        name: str,
        help: str,
        read: Callable[[], Reading],
        labels: Sequence[str] = (),
        *,
        kind: Literal["gauge", "counter"] = "gauge",
    ) -> None:
        """Declare a metric that is read by calling `read` at every scrape; it should be quick and not wait."""
        self._declare(Callback(kind, name, help, tuple(labels), read))

    def reserve(self, kind: Kind, name: str) -> None:
        """Keep a name, and what it stands for, for one who writes it without the registry; nobody else can have it."""
        self._claim(Callback(kind, name, "", (), dict))

    def _declare(self, family: AFamily) -> AFamily:
        self._claim(family)
        self._families.append(family)
        return family

    def _claim(self, family: AnyFamily) -> None:
        _check_names(family)
        claims = _claims(family)
        for claim in claims:
            if claim in self._owners:
                raise ValueError(f"metric {family.name} clashes with {self._owners[claim]}: both stand for {claim}")
        self._owners.update(dict.fromkeys(claims, family.name))


def openmetrics_name(family: Named) -> str:
    """The name of the family in OpenMetrics, where the `_total` of a counter belongs to the sample only."""
    return family.name.removesuffix("_total") if family.kind == "counter" else family.name


def _claims(family: AnyFamily) -> set[str]:
    base = openmetrics_name(family)
    claims = {family.name, base} | {family.name + suffix for suffix in _SUFFIXES[family.kind]}
    return claims if base == family.name else claims | {f"{base}_created"}


def _check_names(family: AnyFamily) -> None:
    if not _NAME.fullmatch(family.name) or not openmetrics_name(family):
        raise ValueError(f"metric name {family.name!r} is not allowed: use letters, digits, '_' and ':'")
    if len(set(family.label_names)) != len(family.label_names):
        raise ValueError(f"metric {family.name} has a label twice: {list(family.label_names)}")
    for label in family.label_names:
        if not _LABEL.fullmatch(label) or label == _OWN_LABEL.get(family.kind):
            raise ValueError(f"label {label!r} of metric {family.name} is not allowed: use letters, digits and '_'")
