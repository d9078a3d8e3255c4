# SPDX-License-Identifier: Apache-2.0
"""Output of `headrace doctor`: one line per finding, with the command that fixes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.text import Text

from headrace.cli.tables import line, open_console
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
    """Print the findings; `quiet` leaves out those that are ok."""
    console = open_console()
    shown = [finding for finding in findings if not quiet or finding.state != "ok"]
    width = min(_WIDEST, max((len(finding.name) for finding in shown), default=0))
    for finding in shown:
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
    counts = Counter(finding.state for finding in findings)
    if shown:
        console.print()
    summary = f"{counts['problem']} problem(s), {counts['warning']} warning(s), {counts['ok']} fine"
    console.print(line(summary, _STYLES["problem" if counts["problem"] else "warning" if counts["warning"] else "ok"]))
