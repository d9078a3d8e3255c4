# SPDX-License-Identifier: Apache-2.0
"""What `headrace bench` does: makes the request, runs the loops, has the numbers shown and written."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
import uvloop

from headrace.cli.bench_inputs import Prepared, prepare
from headrace.cli.bench_view import show_run, show_sweep
from headrace.cli.checks import FAILED
from headrace.cli.infer_view import show_note
from headrace.cli.progress import LoadingBars
from headrace.cli.results import print_json
from headrace.client import Client
from headrace.client.addresses import Address
from headrace.core.errors import InvalidArgument
from headrace.core.names import check_name
from headrace.core.telemetry.progress import Progress, silent
from headrace.programs.loadtest.measured import Measured
from headrace.programs.loadtest.pictures import check_picture, draw_runs
from headrace.programs.loadtest.running import Access, LoadTest, Plan
from headrace.programs.loadtest.targets import protocol_of


@dataclass(frozen=True, slots=True)
class BenchWish:
    """What was typed."""

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


def run_bench(wish: BenchWish) -> None:
    """Measure, and show."""
    check_name(wish.model)
    plans = _plans(wish)
    if wish.plot:
        check_picture(wish.plot)
    check_writable(wish.json_file)
    protocol_of(Address.parse(wish.url), wish.protocol)
    access = access_of(wish.headers, wish.ca, wish.cert, wish.key)
    with Client(wish.url, verify=access.verify, cert=access.cert, headers=access.headers) as client:
        prepared = prepare(client, wish.model, wish.version, wish.inputs, wish.shapes, wish.rows)
    for note in prepared.notes:
        show_note(note)
    with bars() as progress:
        runs = uvloop.run(_measure(wish, plans, prepared, access, progress))
    _tell(wish, runs)
    if not any(run.finished for run in runs):
        raise typer.Exit(FAILED)


async def _measure(
    wish: BenchWish, plans: Sequence[Plan], prepared: Prepared, access: Access, progress: Progress
) -> list[Measured]:
    async with LoadTest(
        wish.url,
        wish.model,
        prepared.inputs,
        version=wish.version,
        protocol=wish.protocol,
        rows=prepared.rows,
        batched=prepared.batched,
        access=access,
        progress=progress,
    ) as test:
        await test.check()
        return [await test.run(plan) for plan in plans]


def _tell(wish: BenchWish, runs: Sequence[Measured]) -> None:
    title = f"{wish.model}{f' version {wish.version}' if wish.version else ''} at {wish.url}"
    document: dict[str, Any] = {"model": wish.model, "version": wish.version, "url": wish.url}
    document["runs"] = [run.document() for run in runs]
    if wish.json_file == "-":
        print_json(document)
    elif len(runs) == 1:
        show_run(title, runs[0])
    else:
        show_sweep(title, runs)
    if wish.plot:
        draw_runs(title, runs, wish.plot)
        show_note(f"wrote {wish.plot}")
    if wish.json_file not in ("", "-"):
        write_json(wish.json_file, document)


def _plans(wish: BenchWish) -> list[Plan]:
    common: dict[str, Any] = {
        "seconds": wish.duration,
        "warm_up_seconds": wish.warm_up,
        "timeout_seconds": wish.timeout,
    }
    if wish.rate:
        rates = numbers("--rate", wish.rate)
        return [Plan(rate=rate, uniform=wish.uniform, **common) for rate in rates]
    if wish.uniform:
        raise InvalidArgument("--uniform is for an open loop: give --rate with it")
    counts = numbers("--concurrency", wish.concurrency)
    if any(count != int(count) for count in counts):
        raise InvalidArgument(f"--concurrency {wish.concurrency}: give whole numbers")
    return [Plan(concurrency=int(count), **common) for count in counts]


def numbers(option: str, text: str) -> list[float]:
    """Numbers above 0, with commas between them."""
    try:
        found = [float(each) for each in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < each < math.inf for each in found):
        raise InvalidArgument(f"{option} {text[:64]!a}: give a number above 0, or several as 1,4,16")
    return found


def access_of(headers: Sequence[str], ca: str, cert: str, key: str) -> Access:
    """Header fields and TLS from options."""
    fields: dict[str, str] = {}
    for text in headers:
        name, colon, value = text.partition(":")
        if not colon:
            raise InvalidArgument(f"--header {text[:64]!a}: write NAME:VALUE")
        fields[name.strip()] = value.strip()
    if key and not cert:
        raise InvalidArgument("--key needs --cert with it")
    return Access(fields, ca or True, (cert, key) if key else cert or None)


def check_writable(path: str) -> None:
    """Refuse before a long measurement what would fail after it."""
    if path not in ("", "-") and not Path(path).absolute().parent.is_dir():
        raise InvalidArgument(f"--json {path}: there is no such folder")


def write_json(path: str, document: Mapping[str, Any]) -> None:
    """Write the numbers."""
    try:
        Path(path).write_text(json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise InvalidArgument(f"--json {path}: {error.strerror}") from None
    show_note(f"wrote {path}")


@contextmanager
def bars() -> Iterator[Progress]:
    """Where progress goes: a bar on a terminal, nowhere else."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield silent
        return
    shown = LoadingBars(console)
    try:
        yield shown
    finally:
        shown.close()
