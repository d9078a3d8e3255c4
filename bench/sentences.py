# SPDX-License-Identifier: Apache-2.0
"""The figures that are not rows of a table, each as a sentence."""

from bench.overload import TIMEOUT_BUDGET_MS
from bench.summary import MemoryFigure, OverloadFigure, StartFigure, Summary


def sentences(summary: Summary) -> list[str]:
    """Of what was measured."""
    found = []
    if summary.start:
        found.append(_start(summary.start))
    if summary.memory:
        found.append(_memory(summary.memory))
    if summary.overload:
        found.append(_overload(summary.overload))
    return found


def _start(figure: StartFigure) -> str:
    return (
        f"{figure.server} gave its first answer {figure.seconds:.2f} s after its start with the example repository "
        f"({figure.lowest_seconds:.2f} - {figure.highest_seconds:.2f} s in {figure.starts} starts), and had all models "
        f"ready after {figure.ready_seconds:.2f} s; {figure.cpu_seconds:.2f} s of CPU."
    )


def _memory(figure: MemoryFigure) -> str:
    return (
        f"With nothing loaded and nothing to do, {figure.server} took {figure.rss_mb:,.0f} MB RSS, {figure.pss_mb:,.0f} MB "
        f"PSS ({figure.processes} process(es))."
    )


def _overload(figure: OverloadFigure) -> str:
    return (
        f"Asked for {figure.offered:,.0f} answers/s where its peak is {figure.peak:,.0f}, {figure.server} gave "
        f"{figure.goodput:,.0f} ({figure.share_of_peak:.0%} of the peak), p50 {figure.accepted_p50_ms:.1f} ms and p99 "
        f"{figure.accepted_p99_ms:.1f} ms where the budget is {TIMEOUT_BUDGET_MS:.0f} ms; it refused {figure.rejected:,} "
        f"requests, p50 {figure.rejected_p50_ms:.1f} ms and p99 {figure.rejected_p99_ms:.1f} ms; {figure.failed} failed "
        f"otherwise. The client was {figure.late_p99_ms:.1f} ms late at its p99."
    )
