# SPDX-License-Identifier: Apache-2.0
"""Metrics as text for a scrape: Prometheus 0.0.4 or OpenMetrics 1.0.

The metrics route calls `negotiate` and `render`. A series has the same name and labels in both formats, so that a
dashboard does not care which one a scraper asked for: a counter whose name lacks `_total` (Triton's do) is therefore
"unknown" in OpenMetrics, which would otherwise rename it. Must not know sockets or routes.
https://prometheus.io/docs/instrumenting/exposition_formats/ and https://prometheus.io/docs/specs/om/open_metrics_spec/
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from enum import Enum
from itertools import accumulate

from headrace.telemetry.families import AnyFamily
from headrace.telemetry.metrics import Counter, Gauge, Histogram
from headrace.telemetry.registry import Registry, openmetrics_name
from headrace.telemetry.summaries import Summary

_log = logging.getLogger(__name__)


class Format(Enum):
    """A text format; the value is its content type."""

    TEXT = b"text/plain; version=0.0.4; charset=utf-8"
    OPENMETRICS = b"application/openmetrics-text; version=1.0.0; charset=utf-8"


def negotiate(accept: bytes | None) -> Format:
    """Pick the format for a request's `accept` field: OpenMetrics only for who names it, and not as second choice."""
    wanted = {Format.TEXT: 0.0, Format.OPENMETRICS: 0.0}
    for choice in (accept or b"").lower().split(b","):
        media, *settings = (piece.strip() for piece in choice.split(b";"))
        parameters = dict(setting.partition(b"=")[::2] for setting in settings)
        if media == b"text/plain":
            found = Format.TEXT
        elif media == b"application/openmetrics-text" and parameters.get(b"version", b"1.0.0") == b"1.0.0":
            found = Format.OPENMETRICS
        else:
            continue
        wanted[found] = max(wanted[found], _quality(parameters.get(b"q", b"1")))
    return Format.OPENMETRICS if 0 < wanted[Format.OPENMETRICS] >= wanted[Format.TEXT] else Format.TEXT


def render(registry: Registry, format: Format = Format.TEXT) -> bytes:
    """Write every metric as it is now. A callback that fails costs its own metric, not the scrape."""
    lines: list[str] = []
    for family in registry.families:
        try:
            samples = list(_lines(family))
        except Exception:
            _log.exception("metric %s could not be read and is left out", family.name)
            continue
        lines += _head(family, format)
        lines += samples
    if format is Format.OPENMETRICS:
        lines.append("# EOF")
    # Label values can hold anything that was once a name; half a surrogate pair must not stop the scrape.
    lines.append("")
    return "\n".join(lines).encode("utf-8", "replace")


def _quality(text: bytes) -> float:
    try:
        quality = float(text)
    except ValueError:
        return 0.0
    return quality if 0 <= quality <= 1 else 0.0


def _head(family: AnyFamily, format: Format) -> tuple[str, str]:
    words = _escape(family.help)
    if format is Format.TEXT:
        return f"# HELP {family.name} {words}", f"# TYPE {family.name} {family.kind}"
    name = openmetrics_name(family)
    kind = "unknown" if family.kind == "counter" and name == family.name else family.kind
    return f"# TYPE {name} {kind}", f"# HELP {name} {_escape_quotes(words)}"


def _lines(family: AnyFamily) -> Iterator[str]:
    name = family.name
    bucket_ends: list[str] = []
    for values, series in family.collect():
        labels = ",".join(map(_label, family.label_names, values))
        own = f"{{{labels}}}" if labels else ""
        # In front of the label that a line of a histogram or summary adds.
        others = f"{labels}," if labels else ""
        if isinstance(series, Histogram):
            # Added up from one copy, so that the count agrees with the buckets however fast they grow.
            counts = list(accumulate(series.counts.copy()))
            bucket_ends = bucket_ends or [f'le="{_number(bound)}"}} ' for bound in (*series.bounds, math.inf)]
            front = f"{name}_bucket{{{others}"
            yield from [f"{front}{end}{count}" for end, count in zip(bucket_ends, counts, strict=True)]
            yield f"{name}_count{own} {counts[-1]}"
            yield f"{name}_sum{own} {_number(series.sum)}"
        elif isinstance(series, Summary):
            for quantile, value in zip(series.quantiles, series.values(), strict=True):
                yield f'{name}{{{others}quantile="{_number(quantile)}"}} {_number(value)}'
            yield f"{name}_count{own} {series.count}"
            yield f"{name}_sum{own} {_number(series.sum)}"
        else:
            yield f"{name}{own} {_number(series.value if isinstance(series, Counter | Gauge) else series)}"


def _label(name: str, value: str) -> str:
    return f'{name}="{_escape_quotes(_escape(value))}"'


def _number(value: float) -> str:
    if type(value) is int:
        return str(value)
    # Through `float`, because numpy's numbers have a `repr` of their own.
    number = float(value)
    if math.isfinite(number):
        return repr(number)
    return "NaN" if math.isnan(number) else "+Inf" if number > 0 else "-Inf"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _escape_quotes(text: str) -> str:
    return text.replace('"', r"\"")
