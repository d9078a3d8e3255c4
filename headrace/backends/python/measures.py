# SPDX-License-Identifier: Apache-2.0
"""Metrics that models declare, on the server's registry.

`Families` is made by `backend`, once per registry: instances and models that name the same metric count together.
`Measures` is made by `calls`, one per instance.
"""

from __future__ import annotations

import sys
from collections import Counter as Count
from typing import Any

from headrace.backends.python.frames import Meta
from headrace.core.errors import InvalidArgument
from headrace.core.telemetry.families import Family
from headrace.core.telemetry.metrics import Counter, Gauge, Histogram, check_bounds
from headrace.core.telemetry.registry import Registry

_Labels = tuple[tuple[str, str], ...]
_Key = tuple[str, _Labels]
_Series = Counter | Gauge | Histogram


class Families:
    """What models have declared, and who still uses it."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._kinds: dict[str, tuple[str, str]] = {}
        self._families: dict[str, Family[Any]] = {}
        self._users: Count[_Key] = Count()

    def name(self, name: str, help: str, kind: str) -> None:
        """Claim a name for a kind of metric; the first words about it stay."""
        known = self._kinds.setdefault(name, (kind, help))
        if known[0] != kind:
            raise InvalidArgument(f"metric {name} is a {known[0]} already: use another name for the {kind}")

    def take(self, meta: Meta) -> tuple[_Key, _Series]:
        """A series, made if it is not there, and of its family the first that was declared."""
        name, labels = meta["name"], meta["labels"]
        # A histogram without buckets counts and adds up; the registry wants one bound.
        buckets = meta["buckets"] or [sys.float_info.max]
        self.name(name, meta["help"], meta["kind"])
        try:
            family = self._families.get(name)
            if family is None:
                family = self._families[name] = self._declared(name, sorted(labels), buckets)
            series: _Series = family.labels(**labels)
            if isinstance(series, Histogram) and tuple(series.bounds) != check_bounds(buckets):
                raise InvalidArgument(f"metric {name} has buckets {list(series.bounds)}; others are not possible")
        except (ValueError, TypeError) as error:
            # The registry's own words, about names the model chose.
            raise InvalidArgument(str(error)) from None
        key = (name, tuple(sorted(labels.items())))
        self._users[key] += 1
        return key, series

    def drop(self, key: _Key) -> None:
        """One user less; a series without users is forgotten."""
        self._users[key] -= 1
        if self._users[key] <= 0:
            del self._users[key]
            self._families[key[0]].remove(**dict(key[1]))

    def _declared(self, name: str, labels: list[str], buckets: list[float]) -> Family[Any]:
        kind, words = self._kinds[name]
        if kind == "counter":
            return self._registry.counter(name, words, labels)
        if kind == "gauge":
            return self._registry.gauge(name, words, labels)
        return self._registry.histogram(name, words, labels, buckets=buckets)


class Measures:
    """The series of one instance, by the numbers its process knows them by."""

    def __init__(self, families: Families) -> None:
        self._families = families
        self._series: list[tuple[_Key, _Series]] = []
        self._left: list[_Key] = []

    def name(self, meta: Meta) -> None:
        """A model declares a family."""
        self._families.name(meta["name"], meta["help"], meta["kind"])

    def declare(self, meta: Meta) -> int:
        """A model makes a series; its number."""
        self._series.append(self._families.take(meta))
        return len(self._series) - 1

    def value(self, number: int) -> float:
        """What a counter or gauge has."""
        series = self._series[number][1]
        return series.sum if isinstance(series, Histogram) else series.value

    def update(self, updates: list[list[Any]]) -> None:
        """Take what the model measured."""
        for number, deed, value in updates:
            key, series = self._series[number]
            if deed == "drop":
                self._families.drop(key)
                # Its number stays taken, and nobody uses it again.
                self._series[number] = (_NONE, Gauge())
            elif isinstance(series, Histogram):
                series.observe(value)
            elif deed == "set" and isinstance(series, Gauge):
                series.set(value)
            else:
                series.add(value)

    def process_died(self) -> None:
        """Numbers begin anew with the next process; what the last one counted stays until the instance is closed."""
        self._left += [key for key, _ in self._series if key != _NONE]
        self._series = []

    def close(self) -> None:
        """The instance is gone, and with it what only it measured."""
        self.process_died()
        for key in self._left:
            self._families.drop(key)
        self._left = []


_NONE: _Key = ("", ())
