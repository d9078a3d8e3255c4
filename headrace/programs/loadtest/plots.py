# SPDX-License-Identifier: Apache-2.0
"""Runs as lines of text: a histogram, the percentiles, and throughput beside latency. Shown by the verbs in a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.programs.loadtest.measured import Measured, percentile

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_BINS = 14
_CURVE = (0.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.99, 100.0)


def bar(share: float, width: int) -> str:
    """A bar of a share of the width, to the eighth of a letter; what is not nothing shows."""
    eighths = round(max(0.0, min(share, 1.0)) * width * 8)
    if share > 0:
        eighths = max(eighths, 1)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (_EIGHTHS[rest] if rest else "")


def bins(values: npt.NDArray[np.float64], count: int = _BINS) -> list[tuple[float, float, int]]:
    """Lower edge, upper edge and count, at even distances on a logarithmic scale, from the smallest to the largest."""
    if not len(values):
        return []
    low, high = float(values.min()), float(values.max())
    if low <= 0 or high / low < 1.001:
        return [(low, high, len(values))]
    edges = np.geomspace(low, high, count + 1)
    # Rounding must not leave the largest outside.
    edges[0], edges[-1] = low, high
    counts, _ = np.histogram(values, edges)
    return [(float(edges[i]), float(edges[i + 1]), int(counts[i])) for i in range(count)]


def histogram(values: npt.NDArray[np.float64], width: int = 48) -> list[str]:
    """How often requests took how long, in milliseconds."""
    found = bins(values)
    most = max((count for _, _, count in found), default=0)
    return [
        f"{milliseconds(low):>8} - {milliseconds(high):>8} ms  {count:>8}  {bar(count / most, width)}".rstrip()
        for low, high, count in found
    ]


def curve(values: npt.NDArray[np.float64], width: int = 48) -> list[str]:
    """Percentile by percentile, on a scale on which a tail can be seen beside the rest."""
    if not len(values):
        return []
    reached = [
        (share, percentile(values, share)) for share in _CURVE if share == 100 or len(values) >= 100 / (100 - share)
    ]
    low, high = reached[0][1], reached[-1][1]

    def place(value: float) -> float:
        if low <= 0 or high / low < 1.001:
            return 1.0
        # The smallest must be seen, too.
        return 0.05 + 0.95 * math.log(value / low) / math.log(high / low)

    named = {0.0: "min", 100.0: "max"}
    return [
        f"{named.get(share, f'p{share:g}'):>8}  {milliseconds(value):>8} ms  {bar(place(value), width)}"
        for share, value in reached
    ]


def sweep(runs: Sequence[Measured], width: int = 30) -> list[str]:
    """Throughput and p99 of each run, side by side."""
    fastest = max((run.throughput for run in runs), default=0.0) or 1.0
    tails = [0.0 if math.isnan(run.at(99)) else run.at(99) for run in runs]
    slowest = max(tails, default=0.0) or 1.0
    lines = [f"{'load':>8}  {'requests/s':>10}  {'':<{width}}  {'p99 ms':>8}"]
    for run, tail in zip(runs, tails, strict=True):
        ahead = f"{run.load:>8g}  {run.throughput:>10.1f}  {bar(run.throughput / fastest, width):<{width}}"
        lines.append(f"{ahead}  {milliseconds(tail):>8}  {bar(tail / slowest, width)}".rstrip())
    return lines


def milliseconds(value: float) -> str:
    """With as many digits as say something."""
    if math.isnan(value):
        return "-"
    return (
        f"{value:.0f}"
        if value >= 1000
        else f"{value:.1f}"
        if value >= 100
        else f"{value:.2f}"
        if value >= 10
        else f"{value:.3f}"
    )
