# SPDX-License-Identifier: Apache-2.0
"""`headrace top`: a view as a table, with the machine above it."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from headrace.cli.tables import STATE_STYLES, line, table
from headrace.cli.top_rates import Gpu, Row, View
from headrace.core.telemetry.logs import one_line

_BACKEND_STYLES = {"up": "green", "starting": "yellow", "ejected": "yellow", "down": "red", "asleep": "blue"}
_MODELS = {
    "MODEL": 0,
    "VER": 0,
    "STATE": 0,
    "REQ/s": 0,
    "FAIL/s": 0,
    "FAILED": 110,
    "P50 ms": 0,
    "P99 ms": 0,
    "QUEUE": 0,
    "QUEUE ms": 110,
    "BATCH": 0,
    "HITS": 95,
}
"""How wide the terminal must be for a column: the names of models need what is left."""
_BACKENDS = ("BACKEND", "STATE", "REQ/s", "FAIL/s", "FAILED", "RETRY/s", "P50 ms", "P99 ms", "HAS")


def painted(view: View, width: int) -> Group:
    """The whole of it; narrow terminals get fewer columns."""
    requests = sum(row.requests_per_s for row in view.rows)
    failures = sum(row.failures_per_s for row in view.rows)
    head = f"{view.url}   {requests:.1f} requests/s   {failures:.1f} failures/s   over {view.seconds:.1f} s"
    lines: list[object] = [line(head, "bold")]
    if view.kind == "router":
        lines.append(
            line(f"router {view.about.get('version')}, by {view.about.get('policy')}, {view.about.get('live')} live")
        )
        rows = [_backend(row) for row in view.rows]
        lines += [Text(), table((*_BACKENDS, "WHY"), rows, right=_BACKENDS[2:])]
    else:
        lines += [line(each) for each in (_machine(view), *map(_gpu, view.gpus)) if each]
        lines += [Text(), _models(view, width) if view.rows else line("no models")]
    return Group(*lines)  # type: ignore[arg-type]


def lost(url: str, why: str) -> Group:
    """Instead of a table, while nobody answers."""
    return Group(line(url, "bold"), line(why, "red"), line("asking again; Ctrl-C ends", "dim"))


def _models(view: View, width: int) -> Table:
    reasons = any(row.reason and row.state != "READY" for row in view.rows)
    chosen = [place for place, least in enumerate(_MODELS.values()) if width >= least]
    names = list(_MODELS)
    rows = []
    for row in view.rows:
        cells = _model(row)
        why = [row.reason if row.state != "READY" else ""] if reasons else []
        rows.append([*(cells[place] for place in chosen), *why])
    columns = [*(names[place] for place in chosen), *(["WHY"] if reasons else [])]
    return table(columns, rows, right=("VER", *names[3:]))


def _model(row: Row) -> list[object]:
    state = one_line(row.state) or "-"
    return [
        row.name,
        row.version or "-",
        Text(state, STATE_STYLES.get(state, "dim")),
        f"{row.requests_per_s:.1f}",
        _failures(row),
        f"{row.failures:.0f}",
        _number(row.p50_ms),
        _number(row.p99_ms),
        f"{row.queue:.0f}",
        _number(row.queue_ms),
        _number(row.batch, 1),
        "-" if row.cache_hits is None else f"{row.cache_hits:.0%}",
    ]


def _backend(row: Row) -> list[object]:
    return [
        row.name,
        Text(one_line(row.state), _BACKEND_STYLES.get(row.state, "dim")),
        f"{row.requests_per_s:.1f}",
        _failures(row),
        f"{row.failures:.0f}",
        _number(row.retries_per_s, 1),
        _number(row.p50_ms),
        _number(row.p99_ms),
        f"{row.queue:.0f}",
        row.reason,
    ]


def _failures(row: Row) -> Text:
    return Text(f"{row.failures_per_s:.1f}", "bold red" if row.failures_per_s else "")


def _machine(view: View) -> str:
    told, found = [], view.machine
    if "server_cores" in found:
        told.append(f"server {found['server_cores']:.2f} cores")
    if "server_bytes" in found:
        told.append(f"{_gib(found['server_bytes'])} GiB")
    if "cpu" in found:
        told.append(f"machine CPU {found['cpu']:.0%}")
    if "memory_used_bytes" in found and "memory_total_bytes" in found:
        told.append(f"memory {_gib(found['memory_used_bytes'])} of {_gib(found['memory_total_bytes'])} GiB")
    return "   ".join(told)


def _gpu(gpu: Gpu) -> str:
    used = "-" if gpu.used_bytes is None else _gib(gpu.used_bytes)
    total = "-" if gpu.total_bytes is None else _gib(gpu.total_bytes)
    busy = "-" if gpu.utilisation is None else f"{gpu.utilisation:.0%}"
    return f"{gpu.uuid[:12]}   GPU {busy}   memory {used} of {total} GiB"


def _gib(count: float) -> str:
    return f"{count / 2**30:.2f}"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
