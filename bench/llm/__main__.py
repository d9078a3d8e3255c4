# SPDX-License-Identifier: Apache-2.0
"""Run the same requests against Headrace, vLLM and SGLang, one after the other, and print a table.

    python -m bench.llm.make_model 1b /tmp/models/1b
    python -m bench.llm /tmp/models/1b --output results.json
    python -m bench.llm /tmp/models/1b --servers headrace --workloads one mixed64
    python -m bench.llm /tmp/models/tiny --small            # a few short requests, to try it out on a CPU

A server that is not installed is named and left out. Requests go through HTTP to `/v1/completions`; prompts are token ids,
and every server gets the same ones. Each server has the machine for itself, and is warmed up first. `equal` asks eight
greedy requests twice on the idle server: the second time their prompts are in the prefix cache.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.errors import BenchError
from bench.llm import load
from bench.llm.servers import SERVERS, RunningServer, ServerKind, complete, gpu_memory_mib, serving
from bench.llm.workloads import WARM_UP, WORKLOADS, Workload

EQUAL = "equal"
_EQUAL_REQUESTS, _EQUAL_TOKENS = 8, 64
Figures = dict[str, Any]


def main() -> int:
    """Parse the command line, measure, print; 1 if a server or a request failed."""
    arguments = _parser().parse_args()
    console = Console(stderr=True, highlight=False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are ended
    names = [name for name in arguments.servers if SERVERS[name].installed]
    for name in sorted(set(arguments.servers) - set(names)):
        console.print(f"{name} is not installed: left out")
    results: dict[str, dict[str, Figures]] = {}
    failed = False
    with tempfile.TemporaryDirectory() as logs:
        for name in names:
            try:
                results[name] = _measure(SERVERS[name], arguments, Path(logs), console)
            except BenchError as error:
                console.print(f"[red]bench:[/red] {error}")
                console.print((Path(logs) / f"{name}.log").read_text(errors="replace")[-1500:], markup=False)
                failed = True
    Console().print(_table(arguments.folder.name + (", small workloads" if arguments.small else ""), results))
    if arguments.output:
        document = {"when": datetime.now(UTC).isoformat(), "machine": platform.platform(), "versions": _versions(names)}
        arguments.output.write_text(
            json.dumps({**document, "model": arguments.folder.name, "results": results}, indent=1)
        )
    errors = any(figures.get("errors") for of_server in results.values() for figures in of_server.values())
    return int(failed or errors)


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m bench.llm", description=__doc__, formatter_class=formatter)
    parser.add_argument("folder", type=Path, help="a Hugging Face model folder")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--workloads", nargs="+", choices=[*WORKLOADS, EQUAL], default=[*WORKLOADS, EQUAL])
    parser.add_argument("--small", action="store_true", help="a few short requests of each kind")
    parser.add_argument("--port", type=int, default=8199)
    parser.add_argument(
        "--load-limit", type=float, default=600.0, metavar="SECONDS", help="until a server has to answer"
    )
    parser.add_argument("--output", type=Path, help="write all figures as JSON")
    for name in SERVERS:
        parser.add_argument(f"--{name}-option", action="append", default=[], metavar="WORD", help=f"passed to {name}")
    return parser


def _measure(kind: ServerKind, arguments: argparse.Namespace, logs: Path, console: Console) -> dict[str, Figures]:
    folder, port = arguments.folder.resolve(), arguments.port
    try:
        vocabulary = int(json.loads((folder / "config.json").read_text())["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise BenchError(f"{folder} is not a model folder: config.json cannot be read ({error})") from None
    more = getattr(arguments, f"{kind.name}_option")
    console.print(f"{kind.name}: starting")
    with serving(kind, folder, port, more, logs / f"{kind.name}.log", arguments.load_limit) as server:
        figures: dict[str, Figures] = {"load": {"seconds": server.load_seconds, "gpu_mib": gpu_memory_mib()}}
        for workload in WARM_UP:
            load.run(port, folder.name, workload.smaller() if arguments.small else workload, vocabulary)
        for name in arguments.workloads:
            console.print(f"{kind.name}: {name}")
            if name == EQUAL:
                figures[name] = _equal(port, folder.name, vocabulary)
            else:
                workload = WORKLOADS[name].smaller() if arguments.small else WORKLOADS[name]
                figures[name] = _run(server, port, folder.name, workload, vocabulary)
        figures["end"] = {"gpu_mib": gpu_memory_mib(), "memory_mib": server.memory_mib}
    return figures


def _run(server: RunningServer, port: int, model: str, workload: Workload, vocabulary: int) -> Figures:
    before = 0.0

    def started() -> None:
        nonlocal before
        before = server.cpu_seconds

    figures = load.run(port, model, workload, vocabulary, started)
    if figures.get("tokens"):
        figures["cpu_us_per_token"] = round(1e6 * (server.cpu_seconds - before) / figures["tokens"], 1)
    return figures


def _equal(port: int, model: str, vocabulary: int) -> Figures:
    """Ask greedy requests twice, one at a time."""
    source = Workload(EQUAL, "", 1, _EQUAL_REQUESTS, (100, 100), (_EQUAL_TOKENS, _EQUAL_TOKENS), seed=77)
    prompts = [prompt for prompt, _ in source.prompts(vocabulary)]
    first, second = ([complete(port, model, prompt, _EQUAL_TOKENS) for prompt in prompts] for _ in range(2))
    return {"equal": sum(map(str.__eq__, first, second)), "of": len(prompts)}


def _table(model: str, results: dict[str, dict[str, Figures]]) -> Table:
    table = Table(title=f"{model}: tokens/s (ms to the first token, median; us of server CPU for a token)")
    table.add_column("workload")
    for name in results:
        table.add_column(name, justify="right")
    rows = [name for name in ("load", *WORKLOADS, EQUAL) if any(name in figures for figures in results.values())]
    others = [name for name in results if name != "headrace"]
    compares = "headrace" in results and bool(others)
    if compares:
        table.add_column("headrace / best other", justify="right")
    for row in rows:
        cells = [_cell(row, figures.get(row, {})) for figures in results.values()]
        table.add_row(_title(row), *cells, *([_ratio(row, results, others)] if compares else []))
    return table


def _title(row: str) -> str:
    if row == "load":
        return "start to first answer, s"
    return "greedy requests equal the second time" if row == EQUAL else WORKLOADS[row].description


def _cell(row: str, figures: Figures) -> str:
    if not figures:
        return "-"
    if row == "load":
        return f"{figures['seconds']:.1f}"
    if row == EQUAL:
        return f"{figures['equal']} of {figures['of']}"
    if "tokens_per_second" not in figures:
        return "failed: " + str(figures.get("error", ""))[:60]
    first, cpu = figures["first_token_ms"][0], figures.get("cpu_us_per_token", 0.0)
    failed = f", {figures['errors']} failed" if figures["errors"] else ""
    return f"{figures['tokens_per_second']:,.0f} ({first:.1f}; {cpu:.0f}){failed}"


def _ratio(row: str, results: dict[str, dict[str, Figures]], others: Sequence[str]) -> str:
    rates = {name: results[name].get(row, {}).get("tokens_per_second", 0.0) for name in results}
    best = max(rates[name] for name in others)
    return f"{rates['headrace'] / best:.2f}" if best and rates["headrace"] else "-"


def _versions(names: Sequence[str]) -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in (*names, "torch", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "unknown"
    return versions


if __name__ == "__main__":
    sys.exit(main())
