# SPDX-License-Identifier: Apache-2.0
"""`headrace models list`: the repository's index and the statistics, side by side."""

from __future__ import annotations

from typing import Any

from headrace.cli.tables import line, open_console, state_cell, table

_COLUMNS = {
    "MODEL": "name",
    "VERSION": "version",
    "STATE": "state",
    "REQUESTS": "requests",
    "EXECUTIONS": "executions",
    "BATCH": "average_batch",
    "QUEUE ms": "average_queue_ms",
    "COMPUTE ms": "average_compute_ms",
    "REASON": "reason",
}
_NUMBERS = ("VERSION", "REQUESTS", "EXECUTIONS", "BATCH", "QUEUE ms", "COMPUTE ms")


def list_rows(index: list[dict[str, str]], stats: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each entry of the index. What a model has not done yet is None."""
    by_version = {(each["name"], each["version"]): each for each in stats["model_stats"]}
    rows = []
    for entry in index:
        name, version = entry["name"], entry.get("version", "")
        row: dict[str, Any] = {"name": name, "version": version, "state": entry.get("state", "")}
        row |= _numbers(by_version.get((name, version)))
        row["reason"] = entry.get("reason", "")
        rows.append(row)
    return rows


def _numbers(stats: dict[str, Any] | None) -> dict[str, Any]:
    if stats is None:
        keys = ("requests", "executions", "average_batch", "average_queue_ms", "average_compute_ms")
        return dict.fromkeys(keys)
    parts = stats["inference_stats"]
    executions = stats["execution_count"]
    computed = parts["queue"]["count"]
    compute_ns = sum(parts[part]["ns"] for part in ("compute_input", "compute_infer", "compute_output"))
    return {
        "requests": parts["success"]["count"] + parts["fail"]["count"],
        "executions": executions,
        "average_batch": stats["inference_count"] / executions if executions else None,
        "average_queue_ms": parts["queue"]["ns"] / computed / 1e6 if computed else None,
        "average_compute_ms": compute_ns / computed / 1e6 if computed else None,
    }


def show_list(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    console = open_console()
    if not rows:
        console.print(line("no models: the repository is empty"))
        return
    cells = [[_cell(key, row[key]) for key in _COLUMNS.values()] for row in rows]
    console.print(table(list(_COLUMNS), cells, right=_NUMBERS))


def _cell(key: str, value: Any) -> object:
    if key == "state":
        return state_cell(value or "not loaded")
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else value
