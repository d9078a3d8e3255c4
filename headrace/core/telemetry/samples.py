# SPDX-License-Identifier: Apache-2.0
"""What one scrape saw of a metric: plain numbers by their labels, that no longer change.

Made from a registry's families (`samples_of`) and by rooms whose numbers are kept elsewhere; written by `exposition`,
sent from process to process and added up by `merging`. Must not know what a metric means, except how two readings of it
become one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from headrace.core.telemetry.families import AnyFamily, Kind
from headrace.core.telemetry.metrics import Counter, Gauge, Histogram
from headrace.core.telemetry.summaries import Summary

Together = Literal["sum", "max", "min"]
"""What readings of several processes are together: their sum, or the largest or smallest, where each measures the same."""


class HistogramValue(NamedTuple):
    """A histogram at one moment."""

    bounds: tuple[float, ...]
    """Upper ends of the buckets, without infinity."""
    counts: list[int]
    """Of each bucket alone, and of what is over the last bound."""
    sum: float


class SummaryValue(NamedTuple):
    """A summary at one moment: not its quantiles, but what they are worked out from, so that it can be added up."""

    quantiles: tuple[float, ...]
    tally: dict[int, int]
    """See `Summary.tally`."""
    observed: int
    sum: float


Value = float | HistogramValue | SummaryValue


@dataclass(slots=True)
class Samples:
    """One metric."""

    kind: Kind
    name: str
    help: str
    together: Together = "sum"
    series: dict[str, Value] = field(default_factory=dict)
    """By the labels as they are written: `model="m",version="1"`; "" for none."""


def samples_of(family: AnyFamily) -> Samples:
    """Read a family of a registry now."""
    names = family.label_names
    series = {labels_text(zip(names, values, strict=True)): _value(one) for values, one in family.collect()}
    return Samples(family.kind, family.name, family.help, series=series)


def labels_text(labels: Iterable[tuple[str, str]]) -> str:
    """Labels as they are written, without braces."""
    return ",".join(f'{name}="{escape_quotes(escape(value))}"' for name, value in labels)


def histogram_value(histogram: Histogram) -> HistogramValue:
    """A histogram now."""
    return HistogramValue(tuple(histogram.bounds), histogram.counts.copy(), histogram.sum)


def summary_value(summary: Summary) -> SummaryValue:
    """A summary now."""
    return SummaryValue(tuple(summary.quantiles), summary.tally(), summary.count, summary.sum)


def escape(text: str) -> str:
    """As the formats want it in help and label values."""
    return text.replace("\\", r"\\").replace("\n", r"\n")


def escape_quotes(text: str) -> str:
    """As they want it where quotes stand around."""
    return text.replace('"', r"\"")


def _value(series: Counter | Gauge | Histogram | Summary | float) -> Value:
    if isinstance(series, Histogram):
        return histogram_value(series)
    if isinstance(series, Summary):
        return summary_value(series)
    return series.value if isinstance(series, Counter | Gauge) else series
