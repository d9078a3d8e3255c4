# SPDX-License-Identifier: Apache-2.0
"""Run `headrace bench`: build the requests, send the load, print and write the results."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import typer
import uvloop
from rich.console import Console
from rich.text import Text

from headrace.cli.bench_inputs import Prepared, prepare
from headrace.cli.checks import FAILED
from headrace.cli.common_options import print_json
from headrace.cli.infer_run import show_note
from headrace.cli.progress import LoadingBars
from headrace.cli.tables import heading, line, open_console, table
from headrace.client import Client
from headrace.client.sockets import Address
from headrace.core.errors import FailedPrecondition, InvalidArgument, NotFound
from headrace.core.names import check_name
from headrace.core.telemetry.progress import Progress, silent
from headrace.fleet.benchmarks.scenarios import DEFAULTS, TASKS, Scenario, parse_scenario
from headrace.fleet.client.contract import kind_named
from headrace.fleet.client.tables import summary
from headrace.fleet.names import SERVICE
from headrace.fleet.planning.context import CLUSTER_DOMAIN
from headrace.programs.loadtest.chat.report import check_output, report, write_results
from headrace.programs.loadtest.chat.requests import read_dataset
from headrace.programs.loadtest.chat.runner import ChatRun, ChatTest, Limits, at
from headrace.programs.loadtest.plots import check_plot_file, curve, draw_runs, histogram, milliseconds, sweep
from headrace.programs.loadtest.results import PERCENTILES, RunResults, ServerView, percentile
from headrace.programs.loadtest.runner import Access, LoadTest, Plan, resolve_protocol
from headrace.version import __version__

if TYPE_CHECKING:
    from headrace.fleet.client.contract import Fleet


async def service_at(fleet: Fleet, namespace: str, name: str, url: str) -> tuple[str, tuple[str, ...]]:
    """Return the URL of a service (`url` if given) and NAME=VALUE facts for the report."""
    bare, space = name.rpartition("/")[2], namespace or fleet.namespace
    flag = fleet.commands.flag
    service = await fleet.get(kind_named(SERVICE), space, bare)
    if service is None:
        raise NotFound(
            f"there is no InferenceService {bare} in namespace {space}: `headrace get isvc -A{flag}` lists all"
        )
    status = summary(service)
    if status.ready != "True" or not status.url:
        reason = status.reason or "it has no URL yet"
        raise FailedPrecondition(f"{bare} is not ready: {reason}; see `headrace describe isvc {bare} -n {space}{flag}`")
    about = {
        "service": f"{space}/{bare}",
        "served model": status.model,
        "runtime": status.runtime,
        "mode": status.mode,
        "replicas": f"{status.ready_replicas} of {status.replicas} ready",
    }
    return url or _reachable(fleet, space, status.url), tuple(f"{key}={value}" for key, value in about.items() if value)


def _reachable(fleet: Fleet, namespace: str, url: str) -> str:
    host = urlsplit(url).hostname or ""
    if not host.endswith(CLUSTER_DOMAIN) or "KUBERNETES_SERVICE_HOST" in os.environ:
        return url
    names = {"namespace": namespace, "service": host.partition(".")[0], "port": urlsplit(url).port or 80}
    forward = fleet.commands.forward.format(**names)
    raise FailedPrecondition(
        f"{url} is only reachable inside the cluster: run `{forward}`, and add --url http://localhost:8080"
    )


_MOST_BATCHES = 8


def show_run(title: str, run: RunResults) -> None:
    """Print one run in detail."""
    console = open_console()
    console.print(heading(title))
    console.print(line(_what(run)))
    console.print()
    rate = f"{run.throughput:.1f} requests/s"
    if run.rows > 1:
        rate += f", {run.throughput * run.rows:.1f} rows/s"
    console.print(line(f"{rate}, {run.requests} requests, {run.failed} failed", "bold"))
    _show_errors(console, run)
    console.print()
    console.print(table([*_names(), "MAX", "MEAN"], [_latencies(run)], right=[*_names(), "MAX", "MEAN"]))
    console.print(line("milliseconds", "dim"))
    _show_server(console, run.server)
    _show_client(console, run)
    if len(run.latencies_ms):
        console.print()
        _show_lines(console, "Latency histogram", histogram(run.latencies_ms))
        console.print()
        _show_lines(console, "Percentiles", curve(run.latencies_ms))
    _show_warnings(console, run.warnings())


def show_sweep(title: str, runs: Sequence[RunResults]) -> None:
    """Print several runs side by side."""
    console = open_console()
    console.print(heading(title))
    console.print()
    load = "CONNECTIONS" if runs[0].mode == "closed" else "DUE/S"
    columns = [load, "REQUESTS/S", "ERRORS", *_names(), "MAX", "QUEUE", "COMPUTE", "BATCH", "CLIENT CPU"]
    console.print(table(columns, [_row(run) for run in runs], right=columns))
    console.print(line("latencies, queue and compute in milliseconds; queue and compute are means per request", "dim"))
    for run in runs:
        _show_errors(console, run)
    console.print()
    _show_lines(console, "Throughput and latency", sweep(runs))
    _show_warnings(console, [f"{run.load:g}: {text}" for run in runs for text in run.warnings()])


def _row(run: RunResults) -> list[str]:
    view = run.server
    server = ["-", "-", "-"]
    if view is not None:
        compute = sum(value for name, value in view.phases_ms.items() if name != "queue")
        server = [milliseconds(view.phases_ms["queue"]), milliseconds(compute), f"{view.mean_batch:.1f}"]
    percentiles = [milliseconds(run.at(share)) for share in PERCENTILES]
    ahead = [f"{run.load:g}", f"{run.throughput:.1f}", str(run.failed)]
    return [*ahead, *percentiles, milliseconds(run.max_ms), *server, f"{run.cpu.process:.0%}"]


def _names() -> list[str]:
    return [f"P{share:g}" for share in PERCENTILES]


def _latencies(run: RunResults) -> list[str]:
    values = [*(run.at(share) for share in PERCENTILES), run.max_ms, run.mean_ms]
    return [milliseconds(value) for value in values]


def _what(run: RunResults) -> str:
    loop = (
        f"closed loop of {run.load:g} connections"
        if run.mode == "closed"
        else f"open loop, {run.load:g} requests/s due"
    )
    return f"{loop}, {run.rows} row{'s' if run.rows != 1 else ''} per request, {run.seconds:g} s"


def _show_errors(console: Console, run: RunResults) -> None:
    for kind, count in run.errors.items():
        console.print(line(f"  {count} x {kind}: {run.examples.get(kind, '')}", "red"))


def _show_server(console: Console, view: ServerView | None) -> None:
    if view is None:
        console.print(line("server: no statistics for this time", "dim"))
        return
    phases = view.phases_ms
    compute = sum(value for name, value in phases.items() if name != "queue")
    parts = ", ".join(
        f"{name.removeprefix('compute_')} {milliseconds(phases[name])}" for name in phases if name != "queue"
    )
    console.print(
        line(
            f"server: queue {milliseconds(phases['queue'])} ms, compute {milliseconds(compute)} ms ({parts}), per request"
        )
    )
    common = sorted(view.batches.items(), key=lambda pair: -pair[1])[:_MOST_BATCHES]
    sizes = ", ".join(f"{count} of {size}" for size, count in sorted(common))
    more = ", ..." if len(view.batches) > _MOST_BATCHES else ""
    console.print(line(f"batches: {view.mean_batch:.1f} rows on average; {sizes}{more}"))


def _show_client(console: Console, run: RunResults) -> None:
    console.print(line(f"client: {run.cpu.process:.0%} of a core, {run.cpu.thread:.0%} in its busiest thread"))
    if run.mode == "open":
        late = [milliseconds(percentile(run.late_ms, share)) for share in (50, 99, 100)]
        console.print(line(f"sent behind schedule: p50 {late[0]} ms, p99 {late[1]} ms, max {late[2]} ms"))


def _show_lines(console: Console, name: str, lines: Sequence[str]) -> None:
    console.print(line(name, "bold"))
    for text in lines:
        console.print(Text(text), no_wrap=True, overflow="crop")


def _show_warnings(console: Console, warnings: Sequence[str]) -> None:
    if warnings:
        console.print()
    for warning in warnings:
        console.print(line(f"note: {warning}", "yellow"))


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The options of a language-model benchmark."""

    model: str
    url: str
    task: str
    scenarios: tuple[str, ...]
    concurrency: str
    duration: float
    max_requests: int
    timeout: float
    params: str
    dataset: str
    json_file: str
    report: str
    output: str
    about: tuple[str, ...]
    headers: tuple[str, ...]
    ca: str
    cert: str
    key: str


def run_chat(options: ChatOptions) -> None:
    """Run the measurements and print the results."""
    if options.task not in TASKS:
        raise InvalidArgument(f"--task {options.task[:40]!a}: write one of {', '.join(TASKS)}")
    if options.duration <= 0 or options.timeout <= 0:
        raise InvalidArgument("durations must be above 0")
    scenarios = [parse_scenario(text, options.task) for text in options.scenarios or DEFAULTS[options.task]]
    concurrencies = numbers("--concurrency", options.concurrency)
    if any(count != int(count) for count in concurrencies):
        raise InvalidArgument(f"--concurrency {options.concurrency}: give whole numbers")
    about, parameters = _about(options.about), _parameters(options.params)
    check_writable(options.json_file)
    if options.report and not Path(options.report).absolute().parent.is_dir():
        raise InvalidArgument(f"--report {options.report}: there is no such folder")
    if options.output:
        check_output(options.output)
    access = access_of(options.headers, options.ca, options.cert, options.key)
    texts = _texts(options.dataset)
    with bars() as progress:
        model, runs = uvloop.run(
            _measure_chat(
                options, scenarios, [int(count) for count in concurrencies], access, parameters, texts, progress
            )
        )
    _report_chat(options, model, about, runs)
    if not any(run.answers for run in runs):
        raise typer.Exit(FAILED)


async def _measure_chat(
    options: ChatOptions,
    scenarios: Sequence[Scenario],
    concurrencies: Sequence[int],
    access: Access,
    parameters: dict[str, Any],
    texts: Sequence[str],
    progress: Progress,
) -> tuple[str, list[ChatRun]]:
    test = ChatTest(
        options.url,
        options.model,
        task=options.task,
        parameters=parameters,
        texts=texts,
        access=access,
        progress=progress,
    )
    await test.prepare(options.timeout)
    limits = Limits(options.duration, options.max_requests, options.timeout)
    return test.bodies.model, [
        await test.run(scenario, count, limits) for scenario in scenarios for count in concurrencies
    ]


def _report_chat(options: ChatOptions, model: str, about: dict[str, str], runs: Sequence[ChatRun]) -> None:
    title = f"{model} at {Address.parse(options.url)}"
    document: dict[str, Any] = {"model": model, "url": options.url, "task": options.task, "headrace": __version__}
    document |= {"about": about, "runs": [run.document() for run in runs]}
    if options.json_file == "-":
        print_json(document)
    else:
        _show(title, runs)
    if options.json_file not in ("", "-"):
        write_json(options.json_file, document)
    if not (options.report or options.output):
        return
    page = report(title, {"Task": options.task, **about}, runs)
    if options.report:
        try:
            Path(options.report).write_text(page)
        except OSError as error:
            raise InvalidArgument(f"--report {options.report}: {error.strerror}") from None
        show_note(f"wrote {options.report}")
    if options.output:
        results = json.dumps(document, indent=2) + "\n"
        write_results(options.output, {"results.json": results.encode(), "report.html": page.encode()})
        show_note(f"saved results.json and report.html in {options.output}")


def _show(title: str, runs: Sequence[ChatRun]) -> None:
    console = open_console()
    console.print(heading(title))
    columns = ["SCENARIO", "CONCURRENCY", "REQUESTS/S", "TOKENS/S", "FIRST P50", "FIRST P99", "TOKEN P50", "TOKEN P99"]
    columns += ["ANSWER P50", "ANSWER P99", "ANSWERED", "FAILED"]
    console.print(table(columns, [_chat_row(run) for run in runs], right=columns[1:]))
    console.print(line("first token, token and complete response in milliseconds", "dim"))
    for run in runs:
        for kind, count in run.errors.items():
            console.print(line(f"  {run.scenario}: {count} x {kind}: {run.examples.get(kind, '')}", "red"))
    for warning in dict.fromkeys(text for run in runs for text in run.warnings()):
        console.print(line(f"note: {warning}", "yellow"))


def _chat_row(run: ChatRun) -> list[str]:
    times = [
        milliseconds(at(values, share))
        for values in (run.first_token_ms, run.token_ms, run.latency_ms)
        for share in (50.0, 99.0)
    ]
    rates = [f"{run.requests_per_second:.1f}", f"{run.answer_tokens_per_second:.1f}"]
    return [run.scenario, str(run.concurrency), *rates, *times, str(len(run.answers)), str(sum(run.errors.values()))]


def _about(texts: Sequence[str]) -> dict[str, str]:
    facts = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidArgument(f"--about {text[:64]!a}: write NAME=VALUE")
        facts[name] = value
    return facts


def _parameters(text: str) -> dict[str, Any]:
    try:
        parameters = json.loads(text) if text else {}
    except ValueError:
        parameters = None
    if not isinstance(parameters, dict):
        raise InvalidArgument(f"--params {text[:64]!a}: write a JSON object, such as '{{\"temperature\": 0}}'")
    return parameters


def _texts(location: str) -> list[str]:
    if not location:
        return []
    from headrace.models.storage.fetch import fetch_location

    with tempfile.TemporaryDirectory(prefix="headrace-dataset-") as folder:
        return read_dataset(fetch_location(location, Path(folder)))


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of `headrace bench`."""

    model: str
    url: str
    version: str
    protocol: str
    concurrency: str
    rate: str
    uniform: bool
    duration: float
    warm_up: float
    rows: int
    inputs: tuple[str, ...]
    shapes: tuple[str, ...]
    timeout: float
    json_file: str
    plot: str
    headers: tuple[str, ...]
    ca: str
    cert: str
    key: str


def run_bench(options: BenchOptions) -> None:
    """Run the measurements and print the results."""
    check_name(options.model)
    plans = _plans(options)
    if options.plot:
        check_plot_file(options.plot)
    check_writable(options.json_file)
    resolve_protocol(Address.parse(options.url), options.protocol)
    access = access_of(options.headers, options.ca, options.cert, options.key)
    with Client(options.url, verify=access.verify, cert=access.cert, headers=access.headers) as client:
        prepared = prepare(client, options.model, options.version, options.inputs, options.shapes, options.rows)
    for note in prepared.notes:
        show_note(note)
    with bars() as progress:
        runs = uvloop.run(_measure(options, plans, prepared, access, progress))
    _report(options, runs)
    if not any(run.finished for run in runs):
        raise typer.Exit(FAILED)


async def _measure(
    options: BenchOptions, plans: Sequence[Plan], prepared: Prepared, access: Access, progress: Progress
) -> list[RunResults]:
    async with LoadTest(
        options.url,
        options.model,
        prepared.inputs,
        version=options.version,
        protocol=options.protocol,
        rows=prepared.rows,
        batched=prepared.batched,
        access=access,
        progress=progress,
    ) as test:
        await test.check()
        return [await test.run(plan) for plan in plans]


def _report(options: BenchOptions, runs: Sequence[RunResults]) -> None:
    title = f"{options.model}{f' version {options.version}' if options.version else ''} at {options.url}"
    document: dict[str, Any] = {"model": options.model, "version": options.version, "url": options.url}
    document["runs"] = [run.document() for run in runs]
    if options.json_file == "-":
        print_json(document)
    elif len(runs) == 1:
        show_run(title, runs[0])
    else:
        show_sweep(title, runs)
    if options.plot:
        draw_runs(title, runs, options.plot)
        show_note(f"wrote {options.plot}")
    if options.json_file not in ("", "-"):
        write_json(options.json_file, document)


def _plans(options: BenchOptions) -> list[Plan]:
    common: dict[str, Any] = {
        "seconds": options.duration,
        "warm_up_seconds": options.warm_up,
        "timeout_seconds": options.timeout,
    }
    if options.rate:
        rates = numbers("--rate", options.rate)
        return [Plan(rate=rate, uniform=options.uniform, **common) for rate in rates]
    if options.uniform:
        raise InvalidArgument("--uniform is for an open loop: add --rate")
    counts = numbers("--concurrency", options.concurrency)
    if any(count != int(count) for count in counts):
        raise InvalidArgument(f"--concurrency {options.concurrency}: give whole numbers")
    return [Plan(concurrency=int(count), **common) for count in counts]


def numbers(option: str, text: str) -> list[float]:
    """Parse a comma-separated list of numbers above 0."""
    try:
        values = [float(value) for value in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < value < math.inf for value in values):
        raise InvalidArgument(f"{option} {text[:64]!a}: give a number above 0, or several as 1,4,16")
    return values


def access_of(headers: Sequence[str], ca: str, cert: str, key: str) -> Access:
    """Build headers and TLS settings from options."""
    fields: dict[str, str] = {}
    for text in headers:
        name, colon, value = text.partition(":")
        if not colon:
            raise InvalidArgument(f"--header {text[:64]!a}: write NAME:VALUE")
        fields[name.strip()] = value.strip()
    if key and not cert:
        raise InvalidArgument("--key needs --cert")
    return Access(fields, ca or True, (cert, key) if key else cert or None)


def check_writable(path: str) -> None:
    """Fail before a long measurement, not after it."""
    if path not in ("", "-") and not Path(path).absolute().parent.is_dir():
        raise InvalidArgument(f"--json {path}: there is no such folder")


def write_json(path: str, document: Mapping[str, Any]) -> None:
    """Write the results as JSON."""
    try:
        Path(path).write_text(json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise InvalidArgument(f"--json {path}: {error.strerror}") from None
    show_note(f"wrote {path}")


@contextmanager
def bars() -> Iterator[Progress]:
    """Yield the progress callback: a bar on a terminal, silent elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield silent
        return
    loading_bars = LoadingBars(console)
    try:
        yield loading_bars
    finally:
        loading_bars.close()
