# SPDX-License-Identifier: Apache-2.0
"""`headrace doctor`: findings as lines, with what to type below those that need it."""

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
    """As JSON has it."""
    counts = Counter(each.state for each in findings)
    return {
        "problems": counts["problem"],
        "warnings": counts["warning"],
        "findings": [asdict(each) for each in findings],
    }


def show_findings(findings: Sequence[Finding], *, quiet: bool = False) -> None:
    """Print them; what is well may be left out."""
    console = open_console()
    shown = [each for each in findings if not quiet or each.state != "ok"]
    width = min(_WIDEST, max((len(each.name) for each in shown), default=0))
    for each in shown:
        text = Text.assemble(
            (f"{each.state:<8}", _STYLES[each.state]), " ", f"{one_line(each.name):<{width}}  ", one_line(each.message)
        )
        # One line each, however wide the terminal: they are searched and copied.
        console.print(text, soft_wrap=True)
        if each.fix:
            word, style = ("more:", "dim") if each.state == "ok" else ("try:", "bold")
            console.print(Text.assemble(" " * 9, (word, "dim"), " ", (one_line(each.fix), style)), soft_wrap=True)
    counts = Counter(each.state for each in findings)
    if shown:
        console.print()
    told = f"{counts['problem']} problem(s), {counts['warning']} warning(s), {counts['ok']} fine"
    console.print(line(told, _STYLES["problem" if counts["problem"] else "warning" if counts["warning"] else "ok"]))
