# SPDX-License-Identifier: Apache-2.0
"""The metrics of several processes as one: packed by each, added up by whoever answers the scrape.

Counters, histograms and summaries are added up; gauges as their `Samples.together` says. `pack` and `unpack` carry them
between processes of one server. What a process has counted must not be lost when it ends, or its sum would fall, which
Prometheus reads as a restart of everything: who starts processes again keeps what `lasting` leaves of the last pack.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import orjson

from headrace.core.telemetry.samples import HistogramValue, Samples, SummaryValue, Together, Value


def pack(metrics: Iterable[Samples]) -> bytes:
    """Metrics as bytes (JSON), for another process of the same server."""
    return orjson.dumps(
        [
            [
                one.kind,
                one.name,
                one.help,
                one.together,
                [[labels, _plain(value)] for labels, value in one.series.items()],
            ]
            for one in metrics
        ]
    )


def unpack(packed: bytes) -> list[Samples]:
    """What `pack` has packed."""
    return [
        Samples(kind, name, words, together, {labels: _value(kind, value) for labels, value in series})
        for kind, name, words, together, series in orjson.loads(packed)
    ]


def merge(processes: Iterable[Iterable[Samples]], ended: Iterable[Iterable[Samples]] = ()) -> list[Samples]:
    """The metrics of several processes as one, in the order in which they are met first.

    What processes that have `ended` left (`lasting`) is added where there is something to add it to: a model that only
    they had is gone.
    """
    merged: dict[str, Samples] = {}
    for metrics in processes:
        for samples in metrics:
            known = merged.get(samples.name)
            if known is None:
                merged[samples.name] = Samples(
                    samples.kind, samples.name, samples.help, samples.together, dict(samples.series)
                )
            elif known.kind == samples.kind:  # else models of two processes disagree, and the first is right
                _add_series(known, samples)
    for metrics in ended:
        for samples in metrics:
            known = merged.get(samples.name)
            if known is not None and known.kind == samples.kind:
                left = {labels: value for labels, value in samples.series.items() if labels in known.series}
                _add_series(known, replace(samples, series=left))
    return list(merged.values())


def lasting(metrics: Iterable[Samples]) -> list[Samples]:
    """What stays true of a process that has ended: all that only grows."""
    return [
        replace(samples, series={labels: _without_window(value) for labels, value in samples.series.items()})
        for samples in metrics
        if samples.kind != "gauge"
    ]


def added(together: Together, one: Value, other: Value) -> Value:
    """Two readings of the same series as one."""
    if isinstance(one, HistogramValue):
        return _histograms(one, cast("HistogramValue", other))
    if isinstance(one, SummaryValue):
        more = cast("SummaryValue", other)
        tally = Tally(one.tally)
        tally.update(more.tally)
        return SummaryValue(one.quantiles, tally, one.observed + more.observed, one.sum + more.sum)
    number = cast("float", other)
    return one + number if together == "sum" else max(one, number) if together == "max" else min(one, number)


def _without_window(value: Value) -> Value:
    return value._replace(tally={}) if isinstance(value, SummaryValue) else value


def _add_series(known: Samples, samples: Samples) -> None:
    series = known.series
    for labels, value in samples.series.items():
        before = series.get(labels)
        series[labels] = value if before is None else added(known.together, before, value)


def _histograms(one: HistogramValue, other: HistogramValue) -> HistogramValue:
    counts = list(one.counts)
    if one.bounds == other.bounds:
        counts = [mine + theirs for mine, theirs in zip(counts, other.counts, strict=True)]
    else:
        # One process has loaded another configuration: what was at most a bound is at most the next larger one.
        for bound, count in zip((*other.bounds, math.inf), other.counts, strict=True):
            counts[bisect_left(one.bounds, bound)] += count
    return HistogramValue(one.bounds, counts, one.sum + other.sum)


def _plain(value: Value) -> Any:
    if isinstance(value, HistogramValue):
        return [value.bounds, value.counts, _plain(value.sum)]
    if isinstance(value, SummaryValue):
        return [value.quantiles, list(value.tally.items()), value.observed, _plain(value.sum)]
    if type(value) is int:
        return value
    number = float(value)
    # JSON has no words for the others.
    return number if math.isfinite(number) else repr(number)


def _value(kind: str, plain: Any) -> Value:
    if kind == "histogram":
        bounds, counts, total = plain
        return HistogramValue(tuple(bounds), counts, _read(total))
    if kind == "summary":
        quantiles, tally, observed, total = plain
        return SummaryValue(tuple(quantiles), dict(tally), observed, _read(total))
    return _read(plain)


def _read(plain: float | str) -> float:
    return float(plain) if isinstance(plain, str) else plain
