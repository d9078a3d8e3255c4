# SPDX-License-Identifier: Apache-2.0
"""What `headrace bench --protocol openai` does: asks in scenarios, has the numbers shown, written and kept."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
import uvloop

from headrace.cli.bench_run import access_of, bars, check_writable, numbers, write_json
from headrace.cli.checks import FAILED
from headrace.cli.infer_view import show_note
from headrace.cli.results import print_json
from headrace.cli.tables import heading, line, open_console, table
from headrace.client.addresses import Address
from headrace.core.errors import InvalidArgument
from headrace.core.telemetry.progress import Progress
from headrace.fleet.benchmarks.scenarios import DEFAULTS, TASKS, Scenario, parse_scenario
from headrace.programs.loadtest.chat.keeping import check_place, keep
from headrace.programs.loadtest.chat.measured import ChatRun, at
from headrace.programs.loadtest.chat.prompts import read_dataset
from headrace.programs.loadtest.chat.report import report
from headrace.programs.loadtest.chat.running import ChatTest, Limits
from headrace.programs.loadtest.plots import milliseconds
from headrace.programs.loadtest.running import Access
from headrace.version import __version__


@dataclass(frozen=True, slots=True)
class ChatWish:
    """What was typed."""

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


def run_chat(wish: ChatWish) -> None:
    """Measure, and show."""
    if wish.task not in TASKS:
        raise InvalidArgument(f"--task {wish.task[:40]!a}: it is {', '.join(TASKS)}")
    if wish.duration <= 0 or wish.timeout <= 0:
        raise InvalidArgument("durations must be above 0")
    scenarios = [parse_scenario(each, wish.task) for each in wish.scenarios or DEFAULTS[wish.task]]
    at_once = numbers("--concurrency", wish.concurrency)
    if any(each != int(each) for each in at_once):
        raise InvalidArgument(f"--concurrency {wish.concurrency}: give whole numbers")
    about, parameters = _about(wish.about), _parameters(wish.params)
    check_writable(wish.json_file)
    if wish.report and not Path(wish.report).absolute().parent.is_dir():
        raise InvalidArgument(f"--report {wish.report}: there is no such folder")
    if wish.output:
        check_place(wish.output)
    access = access_of(wish.headers, wish.ca, wish.cert, wish.key)
    texts = _texts(wish.dataset)
    with bars() as progress:
        model, runs = uvloop.run(
            _measure(wish, scenarios, [int(each) for each in at_once], access, parameters, texts, progress)
        )
    _tell(wish, model, about, runs)
    if not any(run.answers for run in runs):
        raise typer.Exit(FAILED)


async def _measure(
    wish: ChatWish,
    scenarios: Sequence[Scenario],
    at_once: Sequence[int],
    access: Access,
    parameters: dict[str, Any],
    texts: Sequence[str],
    progress: Progress,
) -> tuple[str, list[ChatRun]]:
    test = ChatTest(
        wish.url, wish.model, task=wish.task, parameters=parameters, texts=texts, access=access, progress=progress
    )
    await test.prepare(wish.timeout)
    limits = Limits(wish.duration, wish.max_requests, wish.timeout)
    return test.bodies.model, [await test.run(each, count, limits) for each in scenarios for count in at_once]


def _tell(wish: ChatWish, model: str, about: dict[str, str], runs: Sequence[ChatRun]) -> None:
    title = f"{model} at {Address.parse(wish.url)}"
    document: dict[str, Any] = {"model": model, "url": wish.url, "task": wish.task, "headrace": __version__}
    document |= {"about": about, "runs": [run.document() for run in runs]}
    if wish.json_file == "-":
        print_json(document)
    else:
        _show(title, runs)
    if wish.json_file not in ("", "-"):
        write_json(wish.json_file, document)
    if not (wish.report or wish.output):
        return
    page = report(title, {"Task": wish.task, **about}, runs)
    if wish.report:
        try:
            Path(wish.report).write_text(page)
        except OSError as error:
            raise InvalidArgument(f"--report {wish.report}: {error.strerror}") from None
        show_note(f"wrote {wish.report}")
    if wish.output:
        results = json.dumps(document, indent=2) + "\n"
        keep(wish.output, {"results.json": results.encode(), "report.html": page.encode()})
        show_note(f"kept results.json and report.html in {wish.output}")


def _show(title: str, runs: Sequence[ChatRun]) -> None:
    console = open_console()
    console.print(heading(title))
    columns = ["SCENARIO", "AT A TIME", "REQUESTS/S", "TOKENS/S", "FIRST P50", "FIRST P99", "TOKEN P50", "TOKEN P99"]
    columns += ["ANSWER P50", "ANSWER P99", "ANSWERED", "FAILED"]
    console.print(table(columns, [_row(run) for run in runs], right=columns[1:]))
    console.print(line("first token, token and whole answer in milliseconds", "dim"))
    for run in runs:
        for kind, count in run.errors.items():
            console.print(line(f"  {run.scenario}: {count} x {kind}: {run.examples.get(kind, '')}", "red"))
    for each in dict.fromkeys(text for run in runs for text in run.warnings()):
        console.print(line(f"note: {each}", "yellow"))


def _row(run: ChatRun) -> list[str]:
    times = [
        milliseconds(at(values, share))
        for values in (run.first_token_ms, run.token_ms, run.whole_ms)
        for share in (50.0, 99.0)
    ]
    rates = [f"{run.requests_per_second:.1f}", f"{run.answer_tokens_per_second:.1f}"]
    return [run.scenario, str(run.concurrency), *rates, *times, str(len(run.answers)), str(sum(run.errors.values()))]


def _about(said: Sequence[str]) -> dict[str, str]:
    found = {}
    for each in said:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise InvalidArgument(f"--about {each[:64]!a}: write NAME=VALUE")
        found[name] = value
    return found


def _parameters(said: str) -> dict[str, Any]:
    try:
        found = json.loads(said) if said else {}
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidArgument(f"--params {said[:64]!a}: write a JSON object, such as '{{\"temperature\": 0}}'")
    return found


def _texts(place: str) -> list[str]:
    if not place:
        return []
    from headrace.models.storage.bringing import bring

    with tempfile.TemporaryDirectory(prefix="headrace-dataset-") as folder:
        return read_dataset(bring(place, Path(folder)))
