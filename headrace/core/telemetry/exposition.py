# SPDX-License-Identifier: Apache-2.0
"""Metrics as text for a scrape: Prometheus 0.0.4 or OpenMetrics 1.0.

The metrics route calls `negotiate` and `pieces`. A series has the same name and labels in both formats, so that a
dashboard does not care which one a scraper asked for: a counter whose name lacks `_total` (Triton's do) is therefore
"unknown" in OpenMetrics, which would otherwise rename it. Must not know sockets or routes.
https://prometheus.io/docs/instrumenting/exposition_formats/ and https://prometheus.io/docs/specs/om/open_metrics_spec/
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from itertools import accumulate
from typing import Any

from headrace.core.telemetry.families import Kind
from headrace.core.telemetry.registry import Registry, openmetrics_name
from headrace.core.telemetry.samples import Samples, escape, escape_quotes, samples_of
from headrace.core.telemetry.summaries import quantile_values

_log = logging.getLogger(__name__)

_SERIES_PER_PIECE = 32


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
    return b"".join(pieces(read(registry), format))


def read(registry: Registry) -> Iterator[Samples]:
    """Every metric of a registry as it is now, without those that cannot be read."""
    for family in list(registry.families):
        try:
            samples = samples_of(family)
        except Exception:
            _log.exception("metric %s could not be read and is left out", family.name)
        else:
            yield samples


def pieces(metrics: Iterable[Samples], format: Format = Format.TEXT) -> Iterator[bytes]:
    """Write metrics piece by piece, each of some kilobytes, so that who has other things to do can do them between."""
    for samples in metrics:
        write = _WRITERS.get(samples.kind, _write_numbers)
        series = list(samples.series.items())
        yield "\n".join((*_head(samples, format), "")).encode("utf-8", "replace")
        for start in range(0, len(series), _SERIES_PER_PIECE):
            text = write(samples.name, series[start : start + _SERIES_PER_PIECE])
            # Label values can hold anything that was once a name; half a surrogate pair must not stop the scrape.
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
    words = escape(samples.help)
    if format is Format.TEXT:
        return f"# HELP {samples.name} {words}", f"# TYPE {samples.name} {samples.kind}"
    name = openmetrics_name(samples)
    kind = "unknown" if samples.kind == "counter" and name == samples.name else samples.kind
    return f"# TYPE {name} {kind}", f"# HELP {name} {escape_quotes(words)}"


def _write_numbers(name: str, series: Sequence[tuple[str, Any]]) -> str:
    return "".join([f"{name}{f'{{{labels}}}' if labels else ''} {_number(value)}\n" for labels, value in series])


def _write_histograms(name: str, series: Sequence[tuple[str, Any]]) -> str:
    """All lines of a histogram by one pattern: there are many, and most of each is the same for all series."""
    patterns: dict[tuple[float, ...], list[str]] = {}
    ends = (f"{name}_count", f" %d\n{name}_sum", " %s\n")
    text: list[str] = []
    for labels, (bounds, counts, total) in series:
        pattern = patterns.get(bounds)
        if pattern is None:
            front = f"{name}_bucket{{"
            lines = [f'le="{_number(bound)}"}} %d\n' for bound in (*bounds, math.inf)]
            pattern = patterns[bounds] = [front, *(line + front for line in lines[:-1]), lines[-1]]
        upto = list(accumulate(counts))
        literal = labels.replace("%", "%%")
        others, own = (f"{literal},", f"{{{literal}}}") if labels else ("", "")
        text.append((others.join(pattern) + own.join(ends)) % (*upto, upto[-1], _number(total)))
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
