# SPDX-License-Identifier: Apache-2.0
"""Write metrics as text (Prometheus 0.0.4 or OpenMetrics 1.0), and add up the metrics of several processes.

A series has the same name and labels in both formats. A counter whose name lacks `_total` (Triton's do) is therefore
"unknown" in OpenMetrics, which would otherwise rename it.
https://prometheus.io/docs/instrumenting/exposition_formats/ and https://prometheus.io/docs/specs/om/open_metrics_spec/
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from itertools import accumulate
from typing import Any, cast

import orjson

from headrace.core.telemetry.metrics import (
    Aggregation,
    HistogramValue,
    Kind,
    Registry,
    Samples,
    SummaryValue,
    Value,
    escape,
    escape_quotes,
    openmetrics_name,
    quantile_values,
    samples_of,
)

_log = logging.getLogger(__name__)

_SERIES_PER_PIECE = 32


class Format(Enum):
    """A text format; the value is its content type."""

    TEXT = b"text/plain; version=0.0.4; charset=utf-8"
    OPENMETRICS = b"application/openmetrics-text; version=1.0.0; charset=utf-8"


def negotiate(accept: bytes | None) -> Format:
    """Pick the format for an `accept` header: OpenMetrics only for a client that names it, and not as second choice."""
    qualities = {Format.TEXT: 0.0, Format.OPENMETRICS: 0.0}
    for choice in (accept or b"").lower().split(b","):
        media, *settings = (piece.strip() for piece in choice.split(b";"))
        parameters = dict(setting.partition(b"=")[::2] for setting in settings)
        if media == b"text/plain":
            offered = Format.TEXT
        elif media == b"application/openmetrics-text" and parameters.get(b"version", b"1.0.0") == b"1.0.0":
            offered = Format.OPENMETRICS
        else:
            continue
        qualities[offered] = max(qualities[offered], _quality(parameters.get(b"q", b"1")))
    return Format.OPENMETRICS if 0 < qualities[Format.OPENMETRICS] >= qualities[Format.TEXT] else Format.TEXT


def render(registry: Registry, format: Format = Format.TEXT) -> bytes:
    """Return all metrics as text. If a callback fails, only its own metric is left out."""
    return b"".join(pieces(read(registry), format))


def read(registry: Registry) -> Iterator[Samples]:
    """Read every metric of a registry now; leave out those that cannot be read."""
    for family in list(registry.families):
        try:
            samples = samples_of(family)
        except Exception:
            _log.exception("metric %s cannot be read and is left out", family.name)
        else:
            yield samples


def pieces(metrics: Iterable[Samples], format: Format = Format.TEXT) -> Iterator[bytes]:
    """Write metrics in pieces of some kilobytes, so that the event loop can do other work in between."""
    for samples in metrics:
        write = _WRITERS.get(samples.kind, _write_numbers)
        series = list(samples.series.items())
        yield "\n".join((*_head(samples, format), "")).encode("utf-8", "replace")
        for start in range(0, len(series), _SERIES_PER_PIECE):
            text = write(samples.name, series[start : start + _SERIES_PER_PIECE])
            # A label value with half a surrogate pair must not fail the scrape.
            yield text.encode("utf-8", "replace")
    if format is Format.OPENMETRICS:
        yield b"# EOF\n"


def _quality(text: bytes) -> float:
    try:
        quality = float(text)
    except ValueError:
        return 0.0
    return quality if 0 <= quality <= 1 else 0.0


def _head(samples: Samples, format: Format) -> tuple[str, str]:
    help_text = escape(samples.help)
    if format is Format.TEXT:
        return f"# HELP {samples.name} {help_text}", f"# TYPE {samples.name} {samples.kind}"
    name = openmetrics_name(samples)
    kind = "unknown" if samples.kind == "counter" and name == samples.name else samples.kind
    return f"# TYPE {name} {kind}", f"# HELP {name} {escape_quotes(help_text)}"


def _write_numbers(name: str, series: Sequence[tuple[str, Any]]) -> str:
    return "".join([f"{name}{f'{{{labels}}}' if labels else ''} {_number(value)}\n" for labels, value in series])


def _write_histograms(name: str, series: Sequence[tuple[str, Any]]) -> str:
    """Format all lines of a histogram with one pattern: there are many, and they differ little between series."""
    patterns: dict[tuple[float, ...], list[str]] = {}
    ends = (f"{name}_count", f" %d\n{name}_sum", " %s\n")
    text: list[str] = []
    for labels, (bounds, counts, total) in series:
        pattern = patterns.get(bounds)
        if pattern is None:
            front = f"{name}_bucket{{"
            lines = [f'le="{_number(bound)}"}} %d\n' for bound in (*bounds, math.inf)]
            pattern = patterns[bounds] = [front, *(line + front for line in lines[:-1]), lines[-1]]
        cumulative = list(accumulate(counts))
        literal = labels.replace("%", "%%")
        others, own = (f"{literal},", f"{{{literal}}}") if labels else ("", "")
        text.append((others.join(pattern) + own.join(ends)) % (*cumulative, cumulative[-1], _number(total)))
    return "".join(text)


def _write_summaries(name: str, series: Sequence[tuple[str, Any]]) -> str:
    text: list[str] = []
    for labels, (quantiles, tally, count, total) in series:
        others, own = (f"{labels},", f"{{{labels}}}") if labels else ("", "")
        for quantile, value in zip(quantiles, quantile_values(quantiles, tally), strict=True):
            text.append(f'{name}{{{others}quantile="{_number(quantile)}"}} {_number(value)}\n')
        text.append(f"{name}_count{own} {count}\n{name}_sum{own} {_number(total)}\n")
    return "".join(text)


_WRITERS: dict[Kind, Callable[[str, Sequence[tuple[str, Any]]], str]] = {
    "histogram": _write_histograms,
    "summary": _write_summaries,
}


def _number(value: float) -> str:
    if type(value) is int:
        return str(value)
    # Through `float`, because numpy's numbers have a `repr` of their own.
    number = float(value)
    if math.isfinite(number):
        return repr(number)
    return "NaN" if math.isnan(number) else "+Inf" if number > 0 else "-Inf"


def pack(metrics: Iterable[Samples]) -> bytes:
    """Encode metrics as JSON, for another process of the same server."""
    return orjson.dumps(
        [
            [
                samples.kind,
                samples.name,
                samples.help,
                samples.aggregation,
                [[labels, _to_plain(value)] for labels, value in samples.series.items()],
            ]
            for samples in metrics
        ]
    )


def unpack(packed: bytes) -> list[Samples]:
    """Decode what `pack` encoded."""
    return [
        Samples(kind, name, help_text, aggregation, {labels: _from_plain(kind, value) for labels, value in series})
        for kind, name, help_text, aggregation, series in orjson.loads(packed)
    ]


def merge(processes: Iterable[Iterable[Samples]], ended: Iterable[Iterable[Samples]] = ()) -> list[Samples]:
    """Add up the metrics of several processes.

    The metrics of processes that have `ended` (see `retained`) are added only to series that still exist: other series
    belong to models that are no longer loaded.
    """
    merged: dict[str, Samples] = {}
    for metrics in processes:
        for samples in metrics:
            existing = merged.get(samples.name)
            if existing is None:
                merged[samples.name] = Samples(
                    samples.kind, samples.name, samples.help, samples.aggregation, dict(samples.series)
                )
            elif existing.kind == samples.kind:  # else two processes disagree; keep the first
                _add_series(existing, samples)
    for metrics in ended:
        for samples in metrics:
            existing = merged.get(samples.name)
            if existing is not None and existing.kind == samples.kind:
                live = {labels: value for labels, value in samples.series.items() if labels in existing.series}
                _add_series(existing, replace(samples, series=live))
    return list(merged.values())


def retained(metrics: Iterable[Samples]) -> list[Samples]:
    """Return the metrics to keep of a process that has ended: all but gauges.

    Without them the sum of all processes would fall, which Prometheus takes for a restart.
    """
    return [
        replace(samples, series={labels: _without_window(value) for labels, value in samples.series.items()})
        for samples in metrics
        if samples.kind != "gauge"
    ]


def combine(aggregation: Aggregation, first: Value, second: Value) -> Value:
    """Add two readings of the same series."""
    if isinstance(first, HistogramValue):
        return _combine_histograms(first, cast("HistogramValue", second))
    if isinstance(first, SummaryValue):
        summary = cast("SummaryValue", second)
        tally = Tally(first.tally)
        tally.update(summary.tally)
        return SummaryValue(first.quantiles, tally, first.observed + summary.observed, first.sum + summary.sum)
    number = cast("float", second)
    return (
        first + number if aggregation == "sum" else max(first, number) if aggregation == "max" else min(first, number)
    )


def _without_window(value: Value) -> Value:
    return value._replace(tally={}) if isinstance(value, SummaryValue) else value


def _add_series(existing: Samples, samples: Samples) -> None:
    series = existing.series
    for labels, value in samples.series.items():
        previous = series.get(labels)
        series[labels] = value if previous is None else combine(existing.aggregation, previous, value)


def _combine_histograms(first: HistogramValue, second: HistogramValue) -> HistogramValue:
    counts = list(first.counts)
    if first.bounds == second.bounds:
        counts = [count + other_count for count, other_count in zip(counts, second.counts, strict=True)]
    else:
        # The processes have different bounds: count each bucket at the next larger bound.
        for bound, count in zip((*second.bounds, math.inf), second.counts, strict=True):
            counts[bisect_left(first.bounds, bound)] += count
    return HistogramValue(first.bounds, counts, first.sum + second.sum)


def _to_plain(value: Value) -> Any:
    if isinstance(value, HistogramValue):
        return [value.bounds, value.counts, _to_plain(value.sum)]
    if isinstance(value, SummaryValue):
        return [value.quantiles, list(value.tally.items()), value.observed, _to_plain(value.sum)]
    if type(value) is int:
        return value
    number = float(value)
    # JSON cannot write infinity and NaN.
    return number if math.isfinite(number) else repr(number)


def _from_plain(kind: str, plain: Any) -> Value:
    if kind == "histogram":
        bounds, counts, total = plain
        return HistogramValue(tuple(bounds), counts, _parse_number(total))
    if kind == "summary":
        quantiles, tally, observed, total = plain
        return SummaryValue(tuple(quantiles), dict(tally), observed, _parse_number(total))
    return _parse_number(plain)


def _parse_number(plain: float | str) -> float:
    return float(plain) if isinstance(plain, str) else plain
