# SPDX-License-Identifier: Apache-2.0
"""Lines in a picture: SVG, made of text alone, so that a report needs no library where the load runs. Called by `report`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")
_WIDTH, _HEIGHT = 560, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 28, 44
_TICKS = 5

Point = tuple[float, float, str]
"""Across, up, and what is written beside it."""


@dataclass(frozen=True, slots=True)
class Chart:
    """What is drawn."""

    title: str
    across: str
    up: str
    lines: Mapping[str, Sequence[Point]]
    """By name."""
    labelled: bool = False
    """Whether points have their texts beside them; a pointer on one shows it anyway."""


def svg(chart: Chart) -> str:
    """The picture; without a point, its frame and a word about it."""
    lines = {
        name: [each for each in points if all(map(math.isfinite, each[:2]))] for name, points in chart.lines.items()
    }
    points = [each for line in lines.values() for each in line]
    most_x = _nice(max((each[0] for each in points), default=1.0))
    most_y = _nice(max((each[1] for each in points), default=1.0))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" class="chart">',
        _text(_LEFT, 18, chart.title, weight="bold"),
        *_grid(most_x, most_y),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, chart.across, anchor="middle"),
        _text(14, (_TOP + _HEIGHT - _BOTTOM) / 2, chart.up, anchor="middle", turned=True),
    ]
    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [(_x(each[0], most_x), _y(each[1], most_y), each[2]) for each in line]
        way = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
        parts.append(f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y, said in places:
            told = f"<title>{escape(f'{name}: {said}')}</title>"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}">{told}</circle>')
            if chart.labelled:
                parts.append(_text(x + 5, y - 5, said, size=9))
        parts.append(f'<rect x="{_WIDTH - 190}" y="{_TOP + 4 + 14 * number}" width="10" height="3" fill="{colour}"/>')
        parts.append(_text(_WIDTH - 176, _TOP + 10 + 14 * number, name, size=10))
    if not points:
        parts.append(_text(_WIDTH / 2, _HEIGHT / 2, "nothing was measured", anchor="middle"))
    return "".join([*parts, "</svg>"])


def _grid(most_x: float, most_y: float) -> list[str]:
    parts = []
    for step in range(_TICKS + 1):
        share = step / _TICKS
        x, y = _x(share * most_x, most_x), _y(share * most_y, most_y)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_HEIGHT - _BOTTOM}" stroke="#eee"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{share * most_y:g}", anchor="end", size=10))
        parts.append(_text(x, _HEIGHT - _BOTTOM + 14, f"{share * most_x:g}", anchor="middle", size=10))
    return parts


def _x(value: float, most: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * value / most


def _y(value: float, most: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / most


def _nice(most: float) -> float:
    """The next 1, 2, 2.5 or 5 with zeros: where an axis ends."""
    if most <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(most))
    return next(unit * step for step in (1.0, 2.0, 2.5, 5.0, 10.0) if unit * step >= most * 0.999999)


def _text(
    x: float,
    y: float,
    said: str,
    *,
    anchor: str = "start",
    size: int = 12,
    weight: str = "normal",
    turned: bool = False,
) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}"{turn}>'
        f"{escape(said)}</text>"
    )
