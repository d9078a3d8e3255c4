# SPDX-License-Identifier: Apache-2.0
"""Counters, gauges, histograms and summaries, and the registry of one server.

A package declares its metrics on the `Registry` it is given, resolves each series once, as in `requests.labels(model="m")`,
and keeps it: an update is then an attribute add, with no look-up and no lock. Several threads may update a series: CPython
does not switch threads inside `x.value += n` on plain numbers. `exposition` writes metrics as text.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import ceil, log
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from headrace.core.clock import Clock

DURATION_BUCKETS_SECONDS = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)
"""From a tenth of a millisecond (small models) to half a minute."""


class Counter:
    """A number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def add(self, amount: float = 1) -> None:
        """Add `amount`, which must not be negative (not checked)."""
        self.value += amount


class Gauge:
    """A number that goes up and down."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def set(self, value: float) -> None:
        """Set the value."""
        self.value = value

    def add(self, amount: float = 1) -> None:
        """Add `amount`, which may be negative."""
        self.value += amount


class Histogram:
    """Counts of observations by bucket."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        """Upper bounds of the buckets, inclusive, in rising order, without infinity."""
        self.counts = [0] * (len(bounds) + 1)
        """Observations in each bucket (not cumulative), and those over the last bound."""
        self.sum: float = 0

    def observe(self, value: float) -> None:
        """Add an observation, which must not be NaN (the sum would stay NaN)."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


def check_bounds(bounds: Sequence[float]) -> tuple[float, ...]:
    """Check bucket bounds and return them without infinity."""
    finite = tuple(float(bound) for bound in bounds if bound != math.inf)
    # OpenMetrics forbids the sum of a histogram with negative bounds.
    if not finite or not all(math.isfinite(bound) and bound >= 0 for bound in finite):
        raise ValueError(f"histogram buckets {list(bounds)} are not allowed: give at least one bound, each 0 or more")
    if any(low >= high for low, high in pairwise(finite)):
        raise ValueError(f"histogram buckets {list(bounds)} are not allowed: each must be larger than the one before")
    return finite


DURATION_BOUNDS_NS = tuple(round(seconds * 1e9) for seconds in DURATION_BUCKETS_SECONDS)
"""Upper bounds of the buckets, inclusive."""

QUICK_NS = DURATION_BOUNDS_NS[0]
"""Durations up to this one are in the first bucket and are not counted."""

LOAD_RATIO_BOUNDS = (1.05, 1.10, 1.25, 1.5, 2.0, 10.0, 50.0)
"""Bounds of a request's duration divided by its compute time, from Triton's first releases."""

LOAD_EXCESSES = tuple(bound - 1 for bound in LOAD_RATIO_BOUNDS)
"""The same bounds, less 1."""


class SlowTally:
    """A histogram of durations that costs a quick request only a comparison.

    Only durations over `QUICK_NS` are counted: the caller knows the total, so the first bucket is the rest.
    """

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts = [0] * len(DURATION_BOUNDS_NS)

    def add(self, duration_ns: int, times: int = 1) -> None:
        """Count a duration over `QUICK_NS`."""
        self._counts[bisect_left(DURATION_BOUNDS_NS, duration_ns) - 1] += times

    def add_all(self, durations_ns: Sequence[int]) -> None:
        """Count the durations of one batch that are over `QUICK_NS`; often all are in one bucket."""
        shortest = bisect_left(DURATION_BOUNDS_NS, min(durations_ns))
        if shortest == bisect_left(DURATION_BOUNDS_NS, max(durations_ns)):
            if shortest:
                self._counts[shortest - 1] += len(durations_ns)
        else:
            for duration_ns in durations_ns:
                if duration_ns > QUICK_NS:
                    self.add(duration_ns)

    def counts(self, total: int) -> list[int]:
        """Return the count of each bucket, given the total number of durations."""
        return [total - sum(self._counts), *self._counts]


RELATIVE_ERROR = 0.01
SMALLEST = 1e-9
LARGEST = 1e12
SLICES = 6

DEFAULT_QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
DEFAULT_WINDOW_SECONDS = 60.0

_GROWTH = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_PER_LOG = 1 / math.log(_GROWTH)
_TOP = math.ceil(math.log(LARGEST) * _PER_LOG)
_ZERO = -(1 << 30)


class Summary:
    """Quantiles over a sliding window; sum and count are of all time, as in Prometheus.

    Values are counted in buckets whose bounds grow by a constant factor, so the middle of a bucket is within
    `RELATIVE_ERROR` of its values (as in DDSketch, https://arxiv.org/abs/1908.10693). Values under `SMALLEST` count as 0,
    values over `LARGEST` as `LARGEST`, which bounds the number of buckets to about 2,400 per slice. The window consists of
    `SLICES` slices; the oldest is dropped as a whole.
    """

    __slots__ = ("_monotonic", "_slice_ends", "_slice_seconds", "_slices", "count", "quantiles", "sum")

    def __init__(self, clock: Clock, quantiles: Sequence[float], window_seconds: float) -> None:
        self.quantiles = quantiles
        self.count = 0
        self.sum: float = 0
        self._monotonic = clock.monotonic
        self._slice_seconds = window_seconds / SLICES
        self._slice_ends = self._monotonic() + self._slice_seconds
        self._slices: list[dict[int, int]] = [{} for _ in range(SLICES)]

    def observe(self, value: float) -> None:
        """Add an observation, which must not be NaN (the sum would stay NaN)."""
        if self._monotonic() >= self._slice_ends:
            self._drop_expired()
        if value <= SMALLEST:
            bucket = _ZERO
        elif value < LARGEST:
            bucket = ceil(log(value) * _PER_LOG)
        else:
            bucket = _TOP
        newest = self._slices[-1]
        newest[bucket] = newest.get(bucket, 0) + 1
        self.count += 1
        self.sum += value

    def values(self) -> list[float]:
        """Return the value at each quantile; NaN where the window is empty."""
        return quantile_values(self.quantiles, self.tally())

    def tally(self) -> dict[int, int]:
        """Return the window's values as counts by bucket, which can be added up over several summaries."""
        if self._monotonic() >= self._slice_ends:
            self._drop_expired()
        tally: Tally[int] = Tally()
        for part in self._slices:
            tally.update(part.copy())
        return tally

    def _drop_expired(self) -> None:
        """Drop expired slices and begin new ones."""
        late = self._monotonic() - self._slice_ends
        passed = min(int(late / self._slice_seconds) + 1, SLICES)
        self._slices = self._slices[passed:] + [{} for _ in range(passed)]
        self._slice_ends += (int(late / self._slice_seconds) + 1) * self._slice_seconds


def quantile_values(quantiles: Sequence[float], tally: Mapping[int, int]) -> list[float]:
    """Return the value at each quantile of a tally (see `Summary.tally`)."""
    buckets = sorted(tally)
    ranks = list(accumulate(tally[bucket] for bucket in buckets))
    return [_value_at(quantile, buckets, ranks) for quantile in quantiles]


def _value_at(quantile: float, buckets: list[int], ranks: list[int]) -> float:
    if not buckets:
        return math.nan
    rank = math.floor(quantile * (ranks[-1] - 1))
    bucket = next(bucket for bucket, end_rank in zip(buckets, ranks, strict=True) if end_rank > rank)
    return 0.0 if bucket == _ZERO else 2 * _GROWTH**bucket / (_GROWTH + 1)


def check_quantiles(quantiles: Sequence[float]) -> tuple[float, ...]:
    """Check quantiles and return them as floats."""
    if not all(0 <= quantile <= 1 for quantile in quantiles) or len(set(quantiles)) != len(quantiles):
        raise ValueError(f"quantiles {list(quantiles)} are not allowed: each must be from 0 to 1, and only once")
    return tuple(float(quantile) for quantile in quantiles)


Kind = Literal["counter", "gauge", "histogram", "summary"]
LabelValues = tuple[str, ...]
Reading = float | Mapping[LabelValues, float]
"""What a callback returns: one number, or one for each combination of label values."""

Series = TypeVar("Series", Counter, Gauge, Histogram, Summary)


class Family(Generic[Series]):
    """A metric with its series by label values.

    Label values must come from the server (model names, protocols, codes), never freely from a client: each combination is a
    series that stays until it is removed.
    """

    def __init__(
        self, kind: Kind, name: str, help: str, label_names: LabelValues, create: Callable[[], Series]
    ) -> None:
        self.kind = kind
        self.name = name
        self.help = help
        self.label_names = label_names
        self._create: Callable[[], Series] = create
        self._series: dict[LabelValues, Series] = {}
        # Without labels there is exactly one series, at zero from the start.
        if not label_names:
            self.labels()

    def labels(self, **values: str) -> Series:
        """Return the series with these label values, creating it at first use. Resolve it once and keep it."""
        key = self._key(values)
        series = self._series.get(key)
        # `setdefault`: two threads get the same series.
        return series if series is not None else self._series.setdefault(key, self._create())

    def remove(self, **values: str) -> None:
        """Remove a series."""
        self._series.pop(self._key(values), None)

    def collect(self) -> list[tuple[LabelValues, Series]]:
        """Return every series with its label values, in the order of creation."""
        return list(self._series.items())

    def _key(self, values: dict[str, str]) -> LabelValues:
        if values.keys() != set(self.label_names):
            raise ValueError(f"metric {self.name} has labels {list(self.label_names)}, not {list(values)}")
        return tuple(str(values[name]) for name in self.label_names)


class Callback:
    """A metric whose value is read by a function at each scrape."""

    def __init__(self, kind: Kind, name: str, help: str, label_names: LabelValues, read: Callable[[], Reading]) -> None:
        self.kind = kind
        self.name = name
        self.help = help
        self.label_names = label_names
        self._read = read

    def collect(self) -> list[tuple[LabelValues, float]]:
        """Read the values now."""
        reading = self._read()
        series: Mapping[LabelValues, float] = reading if isinstance(reading, Mapping) else {(): reading}
        for values in series:
            if len(values) != len(self.label_names):
                raise ValueError(f"metric {self.name} has labels {list(self.label_names)}, but was read as {values}")
        return list(series.items())


AnyFamily = Family[Counter] | Family[Gauge] | Family[Histogram] | Family[Summary] | Callback


FamilyType = TypeVar("FamilyType", bound=AnyFamily)

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
# Prometheus reserves names that start with two underscores.
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_OWN_LABEL = {"histogram": "le", "summary": "quantile"}
# Suffixes that belong to a name. `_created` is never written here, but OpenMetrics parsers look for it.
_SUFFIXES: dict[Kind, tuple[str, ...]] = {
    "counter": (),
    "gauge": (),
    "histogram": ("_bucket", "_count", "_sum", "_created"),
    "summary": ("_count", "_sum", "_created"),
}


class Named(Protocol):
    """Anything with a kind and a name."""

    kind: Kind
    name: str


class Registry:
    """Every metric of one server, in the order of declaration. Rejects names that Prometheus would reject."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._families: list[AnyFamily] = []
        self._owners: dict[str, str] = {}

    @property
    def families(self) -> Sequence[AnyFamily]:
        """The metrics declared so far."""
        return self._families

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Family[Counter]:
        """Declare a counter. Its name ends in `_total`, unless existing dashboards use it without."""
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
        """Declare a metric that is read by calling `read` at every scrape; `read` must not block."""
        self._declare(Callback(kind, name, help, tuple(labels), read))

    def reserve(self, kind: Kind, name: str) -> None:
        """Reserve a name and its suffixes for a metric that is written without the registry."""
        self._claim(Callback(kind, name, "", (), dict))

    def _declare(self, family: FamilyType) -> FamilyType:
        self._claim(family)
        self._families.append(family)
        return family

    def _claim(self, family: AnyFamily) -> None:
        _check_names(family)
        claims = _claims(family)
        for claim in claims:
            if claim in self._owners:
                raise ValueError(f"metric {family.name} clashes with {self._owners[claim]}: both use {claim}")
        self._owners.update(dict.fromkeys(claims, family.name))


def openmetrics_name(family: Named) -> str:
    """Return the family's name in OpenMetrics, where the `_total` of a counter belongs to the sample only."""
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


Aggregation = Literal["sum", "max", "min"]
"""How to combine the readings of several processes."""


class HistogramValue(NamedTuple):
    """A histogram as one scrape reads it."""

    bounds: tuple[float, ...]
    """Upper bounds of the buckets, without infinity."""
    counts: list[int]
    """Not cumulative; the last one counts values over the last bound."""
    sum: float


class SummaryValue(NamedTuple):
    """A summary as one scrape reads it: its tally rather than its quantiles, so that several can be added up."""

    quantiles: tuple[float, ...]
    tally: dict[int, int]
    """Counts by bucket, from `Summary.tally`."""
    observed: int
    sum: float


Value = float | HistogramValue | SummaryValue


@dataclass(slots=True)
class Samples:
    """One metric as a scrape reads it: plain values by their labels."""

    kind: Kind
    name: str
    help: str
    aggregation: Aggregation = "sum"
    series: dict[str, Value] = field(default_factory=dict)
    """By label text: `model="m",version="1"`; "" without labels."""


def samples_of(family: AnyFamily) -> Samples:
    """Read a family of a registry now."""
    names = family.label_names
    series = {labels_text(zip(names, values, strict=True)): _value(item) for values, item in family.collect()}
    return Samples(family.kind, family.name, family.help, series=series)


def labels_text(labels: Iterable[tuple[str, str]]) -> str:
    """Return labels as text, without braces."""
    return ",".join(f'{name}="{escape_quotes(escape(value))}"' for name, value in labels)


def histogram_value(histogram: Histogram) -> HistogramValue:
    """Read a histogram."""
    return HistogramValue(tuple(histogram.bounds), histogram.counts.copy(), histogram.sum)


def summary_value(summary: Summary) -> SummaryValue:
    """Read a summary."""
    return SummaryValue(tuple(summary.quantiles), summary.tally(), summary.count, summary.sum)


def escape(text: str) -> str:
    """Escape help texts and label values."""
    return text.replace("\\", r"\\").replace("\n", r"\n")


def escape_quotes(text: str) -> str:
    """Escape quotes in a quoted text."""
    return text.replace('"', r"\"")


def _value(series: Counter | Gauge | Histogram | Summary | float) -> Value:
    if isinstance(series, Histogram):
        return histogram_value(series)
    if isinstance(series, Summary):
        return summary_value(series)
    return series.value if isinstance(series, Counter | Gauge) else series
