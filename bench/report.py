# SPDX-License-Identifier: Apache-2.0
"""Write figures and verdicts as Markdown: latest.md, and the tables of docs/performance.md."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.errors import BenchError
from bench.sentences import sentences
from bench.servers import SERVERS
from bench.summary import Figure, IdleFigure, LoadingFigure, Summary, two_processes_at_most
from bench.verdicts import MLP_WORKLOADS, Verdict
from bench.workloads import LOADINGS, WORKLOADS

DETAILS_HEADING = "## All figures"
START_MARKER, END_MARKER = "<!-- bench:start -->", "<!-- bench:end -->"
OWN_PROTOCOL = "†"
TARGETS_INTRODUCTION = (
    "Headrace against the targets: the ratio of server CPU per request, unless another figure is named. "
    "`processes` is 2 processes against 1, with the load generator on the same cores; `overhead` is what the engine "
    "adds to the CPU of a request that is answered by a bare handler; `resnet50` is ResNet-50 asked by one connection, "
    "against the framework called in a loop, each on one core; `two-instances` is two instances of it against one; "
    "`load-100mb` is its loading and first answer, against the framework's own; `idle` is a server with models and no "
    "requests; `start` is from the start of the process to its first answer; `idle-memory` is a server that has loaded "
    "nothing; `predict` is against the FastAPI example; `router` is the CPU of the router alone; `overload` is three times "
    "what can be served."
)
MLP_INTRODUCTION = (
    "A small ONNX network (16-256-256-16), one row per request from 64 connections, batches of up to 64; the server on "
    "one core, the load generator on the others. Triton runs ONNX Runtime in its Python backend, without and with "
    "a wait of 100 us for batches to fill."
)
# Shown by CPU per request in one table; the others are about something else, and have their own places.
CPU_WORKLOADS = ("json16", "binary16", "grpc16", "binary600k", "grpc600k")
MAIN_PACKAGES = {
    "headrace": ("headrace", "onnxruntime", "torch", "tensorflow"),
    "triton-python": ("nvidia-pytriton", "numpy", "onnxruntime"),
    "grpc-aio": ("grpcio", "uvloop"),
    "fastapi": ("fastapi", "uvicorn", "pydantic"),
    "mosec": ("mosec",),
    "mlserver": ("mlserver", "grpcio"),
    "litserve": ("litserve",),
}


def markdown(document: dict[str, Any], summary: Summary, verdicts: list[Verdict]) -> str:
    """The whole of latest.md; docs/performance.md shows everything above DETAILS_HEADING."""
    figures = summary.figures
    parts = [
        "# Headrace beside its peers",
        _circumstances(document, figures),
        "Server CPU in milliseconds per 1,000 requests, the whole process tree; less is better.",
        _cpu_matrix(figures),
        *_mlp(figures),
        TARGETS_INTRODUCTION,
        _verdict_table(verdicts),
        _processes_note(figures, document["machine"]["cpu_count"]),
        DETAILS_HEADING,
        _figure_table(figures),
        _loadings(summary.loadings),
        _idle(summary.idle),
        *sentences(summary),
        _notes(document),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def put_into_page(page: Path, latest: Path) -> None:
    """Replace the text between the page's two markers by the summary of the last full run."""
    if not latest.is_file():
        raise BenchError(f"{latest} does not exist yet: run 'python -m bench' first")
    text = page.read_text()
    before, start, rest = text.partition(START_MARKER)
    _, end, after = rest.partition(END_MARKER)
    if not start or not end:
        raise BenchError(f"{page} has no {START_MARKER} ... {END_MARKER}")
    page.write_text(f"{before}{start}\n{summary_in(latest.read_text())}\n{end}{after}")


def summary_in(latest: str) -> str:
    """The part of latest.md that docs/performance.md shows: between its title and DETAILS_HEADING."""
    return latest.partition(DETAILS_HEADING)[0].partition("\n")[2].strip()


def _circumstances(document: dict[str, Any], figures: list[Figure]) -> str:
    machine, options = document["machine"], document["options"]
    where = (
        f"{document['date']}, {machine['cpu_model']} ({machine['architecture']}), "
        f"{machine['cpu_count']} cores, {machine['system']}, "
        f"kernel {machine['kernel']}, Python {machine['python']}, "
        f"commit {machine['git_commit']}. Median of {options['rounds']} round(s) of {options['seconds']} s; "
        "server and load generator share the cores."
    )
    lines = [where, "Versions: " + "; ".join(_version_line(document)) + "."]
    noisy = [figure for figure in figures if figure.is_disturbed]
    if noisy:
        worst = max(figure.other_cores for figure in noisy)
        lines.append(
            f"**Disturbed**: something else used up to {worst:.1f} cores during {len(noisy)} of {len(figures)} figures."
        )
    return "\n\n".join(lines)


def _version_line(document: dict[str, Any]) -> Iterable[str]:
    for server, versions in document["versions"].items():
        packages = [f"{name} {versions[name]}" for name in MAIN_PACKAGES.get(server, ()) if name in versions]
        described = [about for name, about in document["self_descriptions"].items() if SERVERS[name].venv == server]
        if server == "triton-python" and described:
            packages.insert(0, f"tritonserver {described[0]['version']}")
        yield f"{server}: {', '.join(packages) or 'unknown'}"


def _cpu_matrix(figures: list[Figure]) -> str:
    columns = [name for name in CPU_WORKLOADS if any(f.workload == name for f in figures)]
    known = {(figure.server, figure.workload): figure for figure in figures}
    rows = []
    for name in SERVERS:
        cells = [known.get((name, column)) for column in columns]
        if any(cells):
            rows.append([_label(name), *(f"{cell.server_cpu_ms_per_1000:,.0f}" if cell else "-" for cell in cells)])
    return _table(["server", *columns], rows)


def _mlp(figures: list[Figure]) -> list[str]:
    rows = [
        [one.workload, _label(one.server), *(FIGURE_COLUMNS[name](one) for name in MLP_COLUMNS)]
        for workload in MLP_WORKLOADS
        for one in sorted(figures, key=lambda figure: -figure.requests_per_second)
        if one.workload == workload
    ]
    return [MLP_INTRODUCTION, _table(["workload", "server", *MLP_COLUMNS], rows)] if rows else []


def _idle(idle: IdleFigure | None) -> str:
    if idle is None:
        return ""
    return (
        f"With {idle.models} models and nothing to do, {idle.server} used {idle.percent_of_core:.2f} % of a core "
        f"({idle.processes} process(es), {idle.pss_mb:,.0f} MB PSS)."
    )


def _loadings(loadings: list[LoadingFigure]) -> str:
    if not loadings:
        return ""
    order = list(LOADINGS)
    ordered = sorted(loadings, key=lambda one: (order.index(one.workload), one.seconds))
    return _table(
        list(LOADING_COLUMNS), [[write(loading) for write in LOADING_COLUMNS.values()] for loading in ordered]
    )


def _verdict_table(verdicts: list[Verdict]) -> str:
    rows = [
        [
            v.workload,
            v.against,
            number(v.ours),
            number(v.theirs),
            v.compared_text,
            v.target,
            v.result,
        ]
        for v in verdicts
    ]
    return _table(["workload", "against", "Headrace", "other", "ratio or figure", "target", "result"], rows)


def _processes_note(figures: list[Figure], cores: int) -> str:
    ceiling = two_processes_at_most(figures, cores)
    if ceiling is None:
        return ""
    return (
        f"Two processes at most: {ceiling:.2f} times one, were the second free of cost, because the load "
        f"generator needs its part of the same {cores} cores."
    )


def _figure_table(figures: list[Figure]) -> str:
    order = list(WORKLOADS)
    ordered = sorted(figures, key=lambda f: (order.index(f.workload), f.server_cpu_ms_per_1000))
    rows = [[write(figure) for write in FIGURE_COLUMNS.values()] for figure in ordered]
    return _table(list(FIGURE_COLUMNS), rows)


def _notes(document: dict[str, Any]) -> str:
    notes = [
        f"- {workload.name}: {workload.what}, {workload.connections} connection(s)." for workload in WORKLOADS.values()
    ]
    notes += [f"- {loading.name}: {loading.what}." for loading in LOADINGS.values()]
    own = '`{"input": [..]}` in JSON, or as bare bytes'
    notes.append(f"- {OWN_PROTOCOL} speaks its own protocol: the same numbers as {own}.")
    notes += [f"- {name}: not installed." for name in document["not_installed"]]
    notes += [f"- Refused: {subject}: {why}" for subject, why in document["refused"].items()]
    return "\n".join(notes)


def _label(server: str) -> str:
    names = {"headrace-2": "headrace, 2 processes", "headrace-1core": "headrace, 1 core"}
    mark = f" {OWN_PROTOCOL}" if SERVERS[server].dialect == "simple" else ""
    return names.get(server, server) + mark


FIGURE_COLUMNS: dict[str, Callable[[Figure], str]] = {
    "workload": lambda f: f.workload,
    "server": lambda f: _label(f.server),
    "requests/s": lambda f: number(f.requests_per_second),
    "p50 ms": lambda f: f"{f.p50_ms:.2f}",
    "p99 ms": lambda f: f"{f.p99_ms:.2f}",
    "server CPU ms/1,000": lambda f: f"{f.server_cpu_ms_per_1000:,.1f}",
    "lowest - highest round": lambda f: f"{f.lowest_cpu_ms_per_1000:,.1f} - {f.highest_cpu_ms_per_1000:,.1f}",
    "client CPU ms/1,000": lambda f: f"{f.client_cpu_ms_per_1000:,.1f}",
    "PSS MB": lambda f: f"{f.pss_mb:,.0f}",
    "RSS MB": lambda f: f"{f.rss_mb:,.0f}",
    "processes": lambda f: str(f.processes),
    "errors": lambda f: str(f.errors),
    "others' cores": lambda f: f"{f.other_cores:.2f}",
}


LOADING_COLUMNS: dict[str, Callable[[LoadingFigure], str]] = {
    "workload": lambda f: f.workload,
    "server": lambda f: f.server,
    "seconds to the first answer": lambda f: f"{f.seconds:.3f}",
    "of that, loading": lambda f: f"{f.load_seconds:.3f}",
    "quickest - slowest": lambda f: f"{f.lowest_seconds:.3f} - {f.highest_seconds:.3f}",
    "CPU s": lambda f: f"{f.cpu_seconds:.3f}",
    "loads": lambda f: str(f.loads),
    "others' cores": lambda f: f"{f.other_cores:.2f}",
}
MLP_COLUMNS = ("requests/s", "p50 ms", "p99 ms", "server CPU ms/1,000")


def number(value: float | None) -> str:
    """With as many decimals as say something."""
    if value is None:
        return "-"
    # Rates and CPU times are in the tens and more; latencies and an idle server's CPU are not.
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}" if value >= 10 else f"{value:,.2f}"


def _table(header: list[str], rows: list[list[str]]) -> str:
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, rule, *rows])
