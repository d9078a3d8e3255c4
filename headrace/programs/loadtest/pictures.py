# SPDX-License-Identifier: Apache-2.0
"""Runs as a PNG. Called by the verbs for `--plot`; needs matplotlib, which is imported here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.programs.loadtest.measured import Measured
from headrace.programs.loadtest.search import Trial


def check_picture(path: str) -> None:
    """Refuse before a long measurement what would fail after it."""
    if Path(path).suffix.lower() != ".png":
        raise InvalidArgument(f"--plot {path}: the name must end in .png")
    if not Path(path).absolute().parent.is_dir():
        raise InvalidArgument(f"--plot {path}: there is no such folder")
    _figure(1)


def draw_runs(title: str, runs: Sequence[Measured], path: str) -> None:
    """Latency of one run, or of several beside their throughput."""
    figure = _figure(2 if len(runs) == 1 else 3)
    axes = figure.subplots(2 if len(runs) == 1 else 3, 1)
    for run in runs:
        if not len(run.latencies_ms):
            continue
        name = f"{run.load:g} {'connections' if run.mode == 'closed' else 'requests/s'}"
        ordered = np.sort(run.latencies_ms)
        axes[0].hist(ordered, bins=_edges(ordered), histtype="step", label=name)
        # Against 1 / (1 - share): the tail gets as much room as the rest.
        beyond = len(ordered) / np.arange(len(ordered), 0, -1)
        axes[1].step(beyond, ordered, where="post", label=name)
    axes[0].set(title=title, xlabel="milliseconds", ylabel="requests", xscale="log")
    axes[1].set(xlabel="percentile", ylabel="milliseconds", xscale="log", yscale="log")
    axes[1].set_xticks([2, 10, 100, 1000, 10_000], ["50", "90", "99", "99.9", "99.99"])
    if len(runs) > 1:
        _beside(axes[2], runs)
    if axes[0].get_legend_handles_labels()[0]:
        axes[0].legend()
    _save(figure, path)


def draw_trials(title: str, trials: Sequence[Trial], target_ms: float, share: float, path: str) -> None:
    """Every trial of a search: throughput beside the latency that counts, and the line it must not cross."""
    figure = _figure(1)
    axis = figure.subplots()
    for kept, colour, name in ((True, "tab:blue", "within the target"), (False, "tab:red", "beyond it")):
        chosen = [trial for trial in trials if trial.ok is kept and trial.measured is not None]
        if chosen:
            across = [trial.latency_ms for trial in chosen]
            axis.scatter(across, [trial.throughput for trial in chosen], color=colour, label=name)
    axis.axvline(target_ms, color="grey", linestyle="--")
    axis.set(title=title, xlabel=f"p{share:g} in milliseconds", ylabel="requests/s", xscale="log")
    if axis.get_legend_handles_labels()[0]:
        axis.legend()
    _save(figure, path)


def _beside(axis: Any, runs: Sequence[Measured]) -> None:
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
        raise FailedPrecondition(
            "--plot needs matplotlib: pip install 'headrace[plot]', or leave --plot out for bars in the terminal"
        ) from None
    return Figure(figsize=(8, 3.5 * parts), layout="constrained")


def _save(figure: Any, path: str) -> None:
    try:
        figure.savefig(path)
    except OSError as error:
        raise InvalidArgument(f"--plot {path}: {error.strerror or 'cannot be written'}") from None
