# SPDX-License-Identifier: Apache-2.0
"""A metric by name, and its series by their label values.

Made by `registry`; rooms keep the families they declared and resolve series from them; `exposition` reads them when
scraped. Must not know what any metric means, nor whether its name is free.

Label values must come from the server (model names, protocols, codes), never freely from a client: each combination is
a series that stays until it is removed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, Literal, TypeVar

from headrace.core.telemetry.metrics import Counter, Gauge, Histogram
from headrace.core.telemetry.summaries import Summary

Kind = Literal["counter", "gauge", "histogram", "summary"]
LabelValues = tuple[str, ...]
Reading = float | Mapping[LabelValues, float]
"""What a callback answers: one number, or a number for each combination of label values."""

Series = TypeVar("Series", Counter, Gauge, Histogram, Summary)


class Family(Generic[Series]):
    """A metric that is added to."""

    def __init__(self, kind: Kind, name: str, help: str, label_names: LabelValues, make: Callable[[], Series]) -> None:
        self.kind = kind
        self.name = name
        self.help = help
        self.label_names = label_names
        self._make: Callable[[], Series] = make
        self._series: dict[LabelValues, Series] = {}
        # Without labels there is exactly one series, and it is there from the start, at zero.
        if not label_names:
            self.labels()

    def labels(self, **values: str) -> Series:
        """The series with these label values, made at first use. Resolve it once and keep it."""
        key = self._key(values)
        series = self._series.get(key)
        # `setdefault`, so that two threads that come first together end up with the same one.
        return series if series is not None else self._series.setdefault(key, self._make())

    def remove(self, **values: str) -> None:
        """Forget a series, because what it counted is gone; whoever kept it adds to a number nobody reads."""
        self._series.pop(self._key(values), None)

    def collect(self) -> list[tuple[LabelValues, Series]]:
        """Every series with its label values, in the order they were made."""
        return list(self._series.items())

    def _key(self, values: dict[str, str]) -> LabelValues:
        if values.keys() != set(self.label_names):
            raise ValueError(f"metric {self.name} has labels {list(self.label_names)}, not {list(values)}")
        return tuple(str(values[name]) for name in self.label_names)


class Callback:
    """A metric that is read from somewhere else when scraped."""

    def __init__(self, kind: Kind, name: str, help: str, label_names: LabelValues, read: Callable[[], Reading]) -> None:
        self.kind = kind
        self.name = name
        self.help = help
        self.label_names = label_names
        self._read = read

    def collect(self) -> list[tuple[LabelValues, float]]:
        """Ask for the numbers now."""
        reading = self._read()
        series: Mapping[LabelValues, float] = reading if isinstance(reading, Mapping) else {(): reading}
        for values in series:
            if len(values) != len(self.label_names):
                raise ValueError(f"metric {self.name} has labels {list(self.label_names)}, but was read as {values}")
        return list(series.items())


AnyFamily = Family[Counter] | Family[Gauge] | Family[Histogram] | Family[Summary] | Callback
