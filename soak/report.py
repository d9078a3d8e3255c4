# SPDX-License-Identifier: Apache-2.0
"""The report of a run: a table of verdicts, a plot, and files."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from headrace.programs.loadtest.chat.report import Chart, svg
from soak.sampling import MEASURES, Samples
from soak.slopes import WARM_UP_SHARE, Allowance, Verdict, judge

ALLOWED: Mapping[str, Allowance] = {
    "RSS": Allowance(0.01, 0.02, share=True),
    "descriptors": Allowance(1.0, 2.0),
    "threads": Allowance(1.0, 2.0),
    "p99 of v2": Allowance(0.25, 0.5, share=True),
}
"""RSS: a hundredth of it an hour, and less than two hundredths in all cannot be distinguished from an allocator's noise."""


def verdicts_of(samples: Samples) -> list[Verdict]:
    """What is said of each measure."""
    return [judge(name, unit, samples.seconds, samples.values[name], ALLOWED[name]) for name, unit in MEASURES.items()]


def table_of(verdicts: list[Verdict]) -> Table:
    """For a terminal."""
    table = Table("measure", "level", "slope an hour", "surely between", "verdict", box=None)
    for verdict in verdicts:
        slope = verdict.slope
        verdict_text = f"[bold red]grows: {verdict.why}" if verdict.grows else f"[green]steady[/] ({verdict.why})"
        bounds = f"{slope.low:+.3g} and {slope.high:+.3g}"
        table.add_row(
            verdict.name,
            f"{verdict.level:.4g} {verdict.unit}",
            f"{slope.an_hour:+.3g} {verdict.unit}",
            bounds,
            verdict_text,
        )
    return table


def picture(samples: Samples, verdicts: list[Verdict]) -> str:
    """A page of one chart for each measure: SVG in HTML, which every browser shows."""
    charts = []
    for verdict in verdicts:
        values = zip(samples.seconds, samples.values[verdict.name], strict=True)
        points = [(x / 60, y, f"{y:.4g} at {x / 60:.1f} min") for x, y in values if math.isfinite(y)]
        title = f"{verdict.name}: {'GROWS' if verdict.grows else 'steady'}, {verdict.slope.an_hour:+.3g} an hour"
        charts.append(svg(Chart(title, "minutes", verdict.unit or verdict.name, {verdict.name: points})))
    style = "body{display:flex;flex-wrap:wrap;font-family:sans-serif}svg{width:48%;min-width:420px}"
    return f"<!doctype html><meta charset=utf-8><title>soak</title><style>{style}</style>{''.join(charts)}\n"


def write(
    folder: Path, samples: Samples, verdicts: list[Verdict], requests: Counter[str], wrong: Counter[str]
) -> tuple[Path, Path]:
    """`soak.html` with the picture and `soak.json` with everything."""
    folder.mkdir(parents=True, exist_ok=True)
    page, numbers = folder / "soak.html", folder / "soak.json"
    page.write_text(picture(samples, verdicts))
    document = {
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "asked": dict(requests),
        "wrong": dict(wrong),
        "warm_up_share": WARM_UP_SHARE,
        "seconds": samples.seconds,
        "values": samples.values,
    }
    numbers.write_text(json.dumps(document))
    return page, numbers
