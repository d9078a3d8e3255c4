# SPDX-License-Identifier: Apache-2.0
"""An HTML report of runs with SVG charts, and writing results to a folder or an object store."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from headrace.core.errors import InvalidArgument
from headrace.models.storage.locations import LocalLocation, ObjectLocation, parse_location
from headrace.models.storage.object_stores import upload
from headrace.programs.loadtest.chat.runner import ChatRun, at

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")
_WIDTH, _HEIGHT = 560, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 28, 44
_TICKS = 5
_PROBE = ".headrace-bench"

Point = tuple[float, float, str]
"""X, Y, and the label of the point."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A line chart."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[Point]]
    """By the name of the line."""
    labelled: bool = False
    """Whether labels are drawn beside the points; tooltips show them anyway."""


def svg(chart: Chart) -> str:
    """Return the chart as SVG; without points, a frame with a note."""
    lines = {
        name: [point for point in points if all(map(math.isfinite, point[:2]))] for name, points in chart.lines.items()
    }
    points = [point for line in lines.values() for point in line]
    max_x = _nice(max((point[0] for point in points), default=1.0))
    max_y = _nice(max((point[1] for point in points), default=1.0))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" class="chart">',
        _text(_LEFT, 18, chart.title, weight="bold"),
        *_grid(max_x, max_y),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, chart.x_label, anchor="middle"),
        _text(14, (_TOP + _HEIGHT - _BOTTOM) / 2, chart.y_label, anchor="middle", rotated=True),
    ]
    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        placed = [(_x(point[0], max_x), _y(point[1], max_y), point[2]) for point in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in placed)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y, label in placed:
            tooltip = f"<title>{escape(f'{name}: {label}')}</title>"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}">{tooltip}</circle>')
            if chart.labelled:
                parts.append(_text(x + 5, y - 5, label, size=9))
        parts.append(f'<rect x="{_WIDTH - 190}" y="{_TOP + 4 + 14 * number}" width="10" height="3" fill="{colour}"/>')
        parts.append(_text(_WIDTH - 176, _TOP + 10 + 14 * number, name, size=10))
    if not points:
        parts.append(_text(_WIDTH / 2, _HEIGHT / 2, "nothing was measured", anchor="middle"))
    return "".join([*parts, "</svg>"])


def _grid(max_x: float, max_y: float) -> list[str]:
    parts = []
    for step in range(_TICKS + 1):
        share = step / _TICKS
        x, y = _x(share * max_x, max_x), _y(share * max_y, max_y)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_HEIGHT - _BOTTOM}" stroke="#eee"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{share * max_y:g}", anchor="end", size=10))
        parts.append(_text(x, _HEIGHT - _BOTTOM + 14, f"{share * max_x:g}", anchor="middle", size=10))
    return parts


def _x(value: float, axis_end: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * value / axis_end


def _y(value: float, axis_end: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / axis_end


def _nice(maximum: float) -> float:
    """Return the end of an axis: the next 1, 2, 2.5 or 5 times a power of ten."""
    if maximum <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(maximum))
    return next(unit * step for step in (1.0, 2.0, 2.5, 5.0, 10.0) if unit * step >= maximum * 0.999999)


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    size: int = 12,
    weight: str = "normal",
    rotated: bool = False,
) -> str:
    transform = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if rotated else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}"{transform}>'
        f"{escape(text)}</text>"
    )


_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1180px; color: #222; padding: 0 1rem }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 1rem }
.chart { width: 100%; font-family: system-ui, sans-serif }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .6rem; text-align: right }
th:first-child, td:first-child, .about td, .about th { text-align: left }
.wrong { color: #a00 }
"""
_COLUMNS = (
    "scenario", "at a time", "requests/s", "answer tokens/s", "prompt tokens/s", "first token p50", "p99",
    "token p50", "p99", "answer p50", "p99", "answered", "failed",
)  # fmt: skip


def report(title: str, about: Mapping[str, Any], runs: Sequence[ChatRun]) -> str:
    """Return the report as an HTML page."""
    figures = "".join(f"<figure>{svg(chart)}</figure>" for chart in charts(runs))
    rows = "".join(_row(run) for run in runs)
    heads = "".join(f"<th>{escape(column)}</th>" for column in _COLUMNS)
    facts = "".join(
        f"<tr><th>{escape(str(name))}</th><td>{escape(str(value))}</td></tr>" for name, value in about.items()
    )
    errors = "".join(f'<p class="wrong">{escape(text)}</p>' for text in _errors(runs))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f'<table class="about">{facts}</table>{errors}<div class="charts">{figures}</div>'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
        "<p>Times in milliseconds. A token's is the mean of those after the first of an answer.</p></body></html>\n"
    )


def charts(runs: Sequence[ChatRun]) -> list[Chart]:
    """Return the charts: throughput against latency; latencies and throughput against concurrency."""
    scenarios = list(dict.fromkeys(run.scenario for run in runs))

    def lines(x: Callable[[ChatRun], float], y: Callable[[ChatRun], float]) -> dict[str, list[Point]]:
        return {
            name: [(x(run), y(run), f"{run.concurrency}") for run in runs if run.scenario == name] for name in scenarios
        }

    def concurrency(run: ChatRun) -> float:
        return run.concurrency

    has_tokens = any(run.answer_tokens_per_second for run in runs)
    rate = (lambda run: run.answer_tokens_per_second) if has_tokens else (lambda run: run.requests_per_second)
    unit = "answer tokens/s" if has_tokens else "requests/s"
    latency = lines(lambda run: at(run.latency_ms, 50), rate)
    drawn = [Chart(f"{unit[0].upper()}{unit[1:]} against latency", "answer, p50, ms", unit, latency, labelled=True)]
    if has_tokens:
        drawn += [
            Chart("Time to first token", "requests at a time", "p50, ms",
                  lines(concurrency, lambda run: at(run.first_token_ms, 50))),
            Chart("Time of a token", "requests at a time", "p50, ms", lines(concurrency, lambda run: at(run.token_ms, 50))),
            Chart("First token, the slowest of a hundred", "requests at a time", "p99, ms",
                  lines(concurrency, lambda run: at(run.first_token_ms, 99))),
        ]  # fmt: skip
    return [*drawn, Chart("Rate", "requests at a time", unit, lines(concurrency, rate))]


def _row(run: ChatRun) -> str:
    times = [at(values, share) for values in (run.first_token_ms, run.token_ms, run.latency_ms) for share in (50, 99)]
    cells = [
        run.scenario,
        f"{run.concurrency}",
        *(
            f"{value:.1f}"
            for value in (run.requests_per_second, run.answer_tokens_per_second, run.prompt_tokens_per_second)
        ),
        *("-" if value != value else f"{value:.1f}" for value in times),  # noqa: PLR0124 - what NaN is known by
        f"{len(run.answers)}",
        f"{sum(run.errors.values())}",
    ]
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _errors(runs: Sequence[ChatRun]) -> list[str]:
    return [
        f"{run.scenario}, {run.concurrency} at a time: {count} x {kind}: {run.examples.get(kind, '')}"
        for run in runs
        for kind, count in run.errors.items()
    ]


def check_output(output: str) -> None:
    """Write a small file before a long measurement, so that errors show early. In an object store it stays."""
    location = _parse_output(output)
    if isinstance(location, ObjectLocation):
        upload(_below(location, _PROBE), b"", None)
        return
    try:
        location.path.mkdir(parents=True, exist_ok=True)
        probe = location.path / _PROBE
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise InvalidArgument(f"--output {output}: cannot be written ({error.strerror})") from None


def write_results(output: str, files: Mapping[str, bytes]) -> None:
    """Write files; existing ones are replaced."""
    location = _parse_output(output)
    for name, content in files.items():
        if isinstance(location, ObjectLocation):
            upload(_below(location, name), content, None)
            continue
        try:
            (location.path / name).write_bytes(content)
        except OSError as error:
            raise InvalidArgument(f"--output {Path(output) / name}: {error.strerror}") from None


def _parse_output(output: str) -> LocalLocation | ObjectLocation:
    location = parse_location(output)
    if isinstance(location, LocalLocation | ObjectLocation):
        return location
    raise InvalidArgument(f"--output {location}: cannot be written; give a folder, s3://, gs:// or az://")


def _below(location: ObjectLocation, name: str) -> ObjectLocation:
    return replace(location, key=f"{location.key}/{name}" if location.key else name)
