# SPDX-License-Identifier: Apache-2.0
"""The latencies of a report as a picture. Called by `headrace ab report --plot`; needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.core.errors import FailedPrecondition, InvalidArgument


def draw(report: dict[str, Any], path: str) -> None:
    """Write a PNG: for each version, which share of its requests took at most so long, and the histogram below."""
    if Path(path).suffix.lower() != ".png":
        raise InvalidArgument(f"--plot {path}: the name must end in .png")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise FailedPrecondition(
            "--plot needs matplotlib: pip install 'headrace[plot]', or leave --plot out for bars in the terminal"
        ) from None
    figure = Figure(figsize=(8, 7), layout="constrained")
    reached, spread = figure.subplots(2, 1, sharex=True)
    for one in (*report["versions"], *report["shadows"]):
        bounds = [bound for bound, _ in one["histogram"]]
        counts = [count for _, count in one["histogram"]]
        whole = sum(counts)
        if not whole:
            continue
        shares = [count / whole for count in counts]
        name = f"{one['version']}{' (shadow)' if 'share' in one else ''}, {whole} requests"
        reached.step(bounds, [sum(shares[: place + 1]) for place in range(len(shares))], where="post", label=name)
        spread.step(bounds, shares, where="pre", label=name)
    reached.set_title(f"{report['model']}: latency by version")
    reached.set_ylabel("share of requests up to")
    spread.set_ylabel("share of requests")
    spread.set_xlabel("milliseconds")
    spread.set_xscale("log")
    if reached.get_legend_handles_labels()[0]:
        reached.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        raise InvalidArgument(f"--plot {path}: {error.strerror or 'cannot be written'}") from None
