# SPDX-License-Identifier: Apache-2.0
"""Plots of runs: as text for a terminal, and as PNG by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.errors import InvalidArgument
from headrace.core.extras import MissingExtra
from headrace.programs.loadtest.results import RunResults, percentile
from headrace.programs.loadtest.search import Trial

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_BINS = 14
_CURVE = (0.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.99, 100.0)


def bar(share: float, width: int) -> str:
    """Return a bar for a share of the width, in eighths of a character; more than zero is always visible."""
    eighths = round(max(0.0, min(share, 1.0)) * width * 8)
    if share > 0:
        eighths = max(eighths, 1)
    full, rest = divmod(eighths, 8)
    return "█" * full + (_EIGHTHS[rest] if rest else "")


def bins(values: npt.NDArray[np.float64], count: int = _BINS) -> list[tuple[float, float, int]]:
    """Return lower bound, upper bound and count of buckets on a logarithmic scale."""
    if not len(values):
        return []
    low, high = float(values.min()), float(values.max())
    if low <= 0 or high / low < 1.001:
        return [(low, high, len(values))]
    edges = np.geomspace(low, high, count + 1)
    # Rounding must not leave the largest value outside.
    edges[0], edges[-1] = low, high
    counts, _ = np.histogram(values, edges)
    return [(float(edges[i]), float(edges[i + 1]), int(counts[i])) for i in range(count)]


def histogram(values: npt.NDArray[np.float64], width: int = 48) -> list[str]:
    """Return a histogram of latencies, in milliseconds."""
    buckets = bins(values)
    highest = max((count for _, _, count in buckets), default=0)
    return [
        f"{milliseconds(low):>8} - {milliseconds(high):>8} ms  {count:>8}  {bar(count / highest, width)}".rstrip()
        for low, high, count in buckets
    ]


def curve(values: npt.NDArray[np.float64], width: int = 48) -> list[str]:
    """Return the percentiles, on a scale that shows the tail."""
    if not len(values):
        return []
    reached = [
        (share, percentile(values, share)) for share in _CURVE if share == 100 or len(values) >= 100 / (100 - share)
    ]
    low, high = reached[0][1], reached[-1][1]

    def position(value: float) -> float:
        if low <= 0 or high / low < 1.001:
            return 1.0
        # The smallest must be visible, too.
        return 0.05 + 0.95 * math.log(value / low) / math.log(high / low)

    named = {0.0: "min", 100.0: "max"}
    return [
        f"{named.get(share, f'p{share:g}'):>8}  {milliseconds(value):>8} ms  {bar(position(value), width)}"
        for share, value in reached
    ]


def sweep(runs: Sequence[RunResults], width: int = 30) -> list[str]:
    """Return throughput and p99 of each run, side by side."""
    fastest = max((run.throughput for run in runs), default=0.0) or 1.0
    tails = [0.0 if math.isnan(run.at(99)) else run.at(99) for run in runs]
    slowest = max(tails, default=0.0) or 1.0
    lines = [f"{'load':>8}  {'requests/s':>10}  {'':<{width}}  {'p99 ms':>8}"]
    for run, tail in zip(runs, tails, strict=True):
        left = f"{run.load:>8g}  {run.throughput:>10.1f}  {bar(run.throughput / fastest, width):<{width}}"
        lines.append(f"{left}  {milliseconds(tail):>8}  {bar(tail / slowest, width)}".rstrip())
    return lines


def milliseconds(value: float) -> str:
    """Format milliseconds with significant digits only."""
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


def check_plot_file(path: str) -> None:
    """Check the file name before a long measurement."""
    if Path(path).suffix.lower() != ".png":
        raise InvalidArgument(f"--plot {path}: the name must end in .png")
    if not Path(path).absolute().parent.is_dir():
        raise InvalidArgument(f"--plot {path}: there is no such folder")
    _figure(1)


def draw_runs(title: str, runs: Sequence[RunResults], path: str) -> None:
    """Plot the latency of one run, or throughput and latency of several."""
    figure = _figure(2 if len(runs) == 1 else 3)
    axes = figure.subplots(2 if len(runs) == 1 else 3, 1)
    for run in runs:
        if not len(run.latencies_ms):
            continue
        name = f"{run.load:g} {'connections' if run.mode == 'closed' else 'requests/s'}"
        ordered = np.sort(run.latencies_ms)
        axes[0].hist(ordered, bins=_edges(ordered), histtype="step", label=name)
        # Against 1 / (1 - share): the tail gets as much space as the rest.
        beyond = len(ordered) / np.arange(len(ordered), 0, -1)
        axes[1].step(beyond, ordered, where="post", label=name)
    axes[0].set(title=title, xlabel="milliseconds", ylabel="requests", xscale="log")
    axes[1].set(xlabel="percentile", ylabel="milliseconds", xscale="log", yscale="log")
    axes[1].set_xticks([2, 10, 100, 1000, 10_000], ["50", "90", "99", "99.9", "99.99"])
    if len(runs) > 1:
        _plot_runs(axes[2], runs)
    if axes[0].get_legend_handles_labels()[0]:
        axes[0].legend()
    _save(figure, path)


def draw_trials(title: str, trials: Sequence[Trial], target_ms: float, share: float, path: str) -> None:
    """Plot every trial of a search: throughput against latency, with the target."""
    figure = _figure(1)
    axis = figure.subplots()
    for within_target, colour, name in ((True, "tab:blue", "within the target"), (False, "tab:red", "beyond it")):
        matching = [trial for trial in trials if trial.ok is within_target and trial.results is not None]
        if matching:
            across = [trial.latency_ms for trial in matching]
            axis.scatter(across, [trial.throughput for trial in matching], color=colour, label=name)
    axis.axvline(target_ms, color="grey", linestyle="--")
    axis.set(title=title, xlabel=f"p{share:g} in milliseconds", ylabel="requests/s", xscale="log")
    if axis.get_legend_handles_labels()[0]:
        axis.legend()
    _save(figure, path)


def _plot_runs(axis: Any, runs: Sequence[RunResults]) -> None:
    axis.plot([run.throughput for run in runs], [run.at(50) for run in runs], marker="o", label="p50")
    axis.plot([run.throughput for run in runs], [run.at(99) for run in runs], marker="o", label="p99")
    for run in runs:
        axis.annotate(f"{run.load:g}", (run.throughput, run.at(99)), textcoords="offset points", xytext=(4, 4))
    axis.set(xlabel="requests/s", ylabel="milliseconds", yscale="log")
    axis.legend()


def _edges(ordered: Any) -> Any:
    low, high = float(ordered[0]), float(ordered[-1])
    return np.geomspace(low, high, 60) if 0 < low < high else 10


def _figure(parts: int) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("--plot", "plot", "leave --plot out for bars in the terminal") from None
    return Figure(figsize=(8, 3.5 * parts), layout="constrained")


def _save(figure: Any, path: str) -> None:
    try:
        figure.savefig(path)
    except OSError as error:
        raise InvalidArgument(f"--plot {path}: {error.strerror or 'cannot be written'}") from None
