# SPDX-License-Identifier: Apache-2.0
"""`headrace models check`: what a check found, as lines that editors and CI can jump to, and a table of the models."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.text import Text

from headrace.cli.tables import open_console, table
from headrace.engine.repository.check import RepositoryReport
from headrace.models.config.problems import Problem


def report_json(report: RepositoryReport) -> dict[str, Any]:
    """The report as JSON."""
    return {
        "models": list(report.models),
        "problems": [asdict(problem) for problem in report.problems],
        "warnings": [asdict(problem) for problem in report.warnings],
    }


def show_report(report: RepositoryReport) -> None:
    """Print the mistakes, one line each, then the models."""
    console = open_console()
    for problem in report.problems:
        # The terminal wraps; a mistake stays one line for whoever copies or parses it.
        console.print(Text(str(problem), "red"), soft_wrap=True)
    for warning in report.warnings:
        console.print(Text(f"warning: {warning}", "yellow"), soft_wrap=True)
    if report.problems or report.warnings:
        console.print()
    rows = [[name, *_verdict(name, report)] for name in report.models]
    if rows:
        console.print(table(["MODEL", "RESULT", "MISTAKES"], rows, right=["MISTAKES"]))
    else:
        console.print(Text("no models found: give the folder whose sub-folders are the models"))


def _verdict(name: str, report: RepositoryReport) -> tuple[Text, int]:
    mistakes = sum(_is_about(problem, name) for problem in report.problems)
    if mistakes:
        return Text("wrong", "red"), mistakes
    if any(_is_about(problem, name) for problem in report.warnings):
        return Text("not wholly checked", "yellow"), 0
    return Text("fine", "green"), 0


def _is_about(problem: Problem, name: str) -> bool:
    return problem.path == name or problem.path.startswith(f"{name}/")
