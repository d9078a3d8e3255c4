# SPDX-License-Identifier: Apache-2.0
"""Runs as one HTML page that stands alone: pictures, a table, and what was asked. Called by the verb. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from headrace.programs.loadtest.chat.charts import Chart, Point, svg
from headrace.programs.loadtest.chat.measured import ChatRun, at

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
    """The page."""
    pictures = "".join(f"<figure>{svg(each)}</figure>" for each in charts(runs))
    rows = "".join(_row(each) for each in runs)
    heads = "".join(f"<th>{escape(each)}</th>" for each in _COLUMNS)
    told = "".join(
        f"<tr><th>{escape(str(name))}</th><td>{escape(str(value))}</td></tr>" for name, value in about.items()
    )
    wrong = "".join(f'<p class="wrong">{escape(each)}</p>' for each in _wrong(runs))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f'<table class="about">{told}</table>{wrong}<div class="charts">{pictures}</div>'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
        "<p>Times in milliseconds. A token's is the mean of those after the first of an answer.</p></body></html>\n"
    )


def charts(runs: Sequence[ChatRun]) -> list[Chart]:
    """Throughput against latency, first token, time of a token; and both rates against how many ask."""
    scenarios = list(dict.fromkeys(each.scenario for each in runs))

    def lines(across: Callable[[ChatRun], float], up: Callable[[ChatRun], float]) -> dict[str, list[Point]]:
        return {
            name: [(across(run), up(run), f"{run.concurrency}") for run in runs if run.scenario == name]
            for name in scenarios
        }

    def asking(run: ChatRun) -> float:
        return run.concurrency

    writes = any(run.answer_tokens_per_second for run in runs)
    rate = (lambda run: run.answer_tokens_per_second) if writes else (lambda run: run.requests_per_second)
    unit = "answer tokens/s" if writes else "requests/s"
    latency = lines(lambda run: at(run.whole_ms, 50), rate)
    made = [Chart(f"{unit[0].upper()}{unit[1:]} against latency", "answer, p50, ms", unit, latency, labelled=True)]
    if writes:
        made += [
            Chart("Time to first token", "requests at a time", "p50, ms",
                  lines(asking, lambda run: at(run.first_token_ms, 50))),
            Chart("Time of a token", "requests at a time", "p50, ms", lines(asking, lambda run: at(run.token_ms, 50))),
            Chart("First token, the slowest of a hundred", "requests at a time", "p99, ms",
                  lines(asking, lambda run: at(run.first_token_ms, 99))),
        ]  # fmt: skip
    return [*made, Chart("Rate", "requests at a time", unit, lines(asking, rate))]


def _row(run: ChatRun) -> str:
    times = [at(values, share) for values in (run.first_token_ms, run.token_ms, run.whole_ms) for share in (50, 99)]
    cells = [
        run.scenario,
        f"{run.concurrency}",
        *(
            f"{each:.1f}"
            for each in (run.requests_per_second, run.answer_tokens_per_second, run.prompt_tokens_per_second)
        ),
        *("-" if each != each else f"{each:.1f}" for each in times),  # noqa: PLR0124 - what NaN is known by
        f"{len(run.answers)}",
        f"{sum(run.errors.values())}",
    ]
    return "<tr>" + "".join(f"<td>{escape(each)}</td>" for each in cells) + "</tr>"


def _wrong(runs: Sequence[ChatRun]) -> list[str]:
    return [
        f"{run.scenario}, {run.concurrency} at a time: {count} x {kind}: {run.examples.get(kind, '')}"
        for run in runs
        for kind, count in run.errors.items()
    ]
