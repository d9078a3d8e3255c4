# SPDX-License-Identifier: Apache-2.0
"""Output of `headrace doctor`: one line per finding, with the command that fixes it; problems first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from headrace.cli.tables import heading, line, open_console
from headrace.core.telemetry.logs import one_line
from headrace.programs.doctor.finding import Finding

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
_WIDEST = 24


def as_document(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings as the document that `--json` prints."""
    counts = Counter(finding.state for finding in findings)
    return {
        "problems": counts["problem"],
        "warnings": counts["warning"],
        "findings": [asdict(finding) for finding in findings],
    }


def show_findings(findings: Sequence[Finding], *, quiet: bool = False) -> None:
    """Print problems and warnings first, then what is ok under headings; `quiet` leaves out the latter."""
    console = open_console()
    bad = [finding for state in ("problem", "warning") for finding in findings if finding.state == state]
    good = [] if quiet else [finding for finding in findings if finding.state == "ok"]
    width = min(_WIDEST, max((len(finding.name) for finding in (*bad, *good)), default=0))
    _show(console, bad, width)
    for group in dict.fromkeys(finding.group for finding in good):
        if bad or group != good[0].group:
            console.print()
        console.print(heading(group))
        _show(console, [finding for finding in good if finding.group == group], width)
    counts = Counter(finding.state for finding in findings)
    if bad or good:
        console.print()
    summary = f"{counts['problem']} problem(s), {counts['warning']} warning(s), {counts['ok']} fine"
    console.print(line(summary, _STYLES["problem" if counts["problem"] else "warning" if counts["warning"] else "ok"]))


def _show(console: Console, findings: Sequence[Finding], width: int) -> None:
    for finding in findings:
        text = Text.assemble(
            (f"{finding.state:<8}", _STYLES[finding.state]),
            " ",
            f"{one_line(finding.name):<{width}}  ",
            one_line(finding.message),
        )
        # One line per finding, however wide the terminal: people search and copy them.
        console.print(text, soft_wrap=True)
        if finding.fix:
            word, style = ("more:", "dim") if finding.state == "ok" else ("try:", "bold")
            console.print(Text.assemble(" " * 9, (word, "dim"), " ", (one_line(finding.fix), style)), soft_wrap=True)
