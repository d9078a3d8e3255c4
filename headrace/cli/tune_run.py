# SPDX-License-Identifier: Apache-2.0
"""What `headrace tune` does: a server of its own or a running one, the search, and what is written in the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
import uvloop

from headrace.cli.bench_inputs import Prepared, prepare
from headrace.cli.bench_run import access_of, bars, check_writable, write_json
from headrace.cli.checks import FAILED
from headrace.cli.infer_view import show_note
from headrace.cli.results import print_json
from headrace.cli.tune_config import Change, change_of, write_change
from headrace.cli.tune_view import found_document, show_found, trial_line
from headrace.client import AsyncClient, Client
from headrace.core.errors import HeadraceError, InvalidArgument, Unimplemented, retold
from headrace.core.names import check_name
from headrace.core.telemetry.progress import Progress
from headrace.programs.loadtest.measured import Measured
from headrace.programs.loadtest.pictures import check_picture, draw_trials
from headrace.programs.loadtest.private_server import private_server
from headrace.programs.loadtest.running import Access, LoadTest, Plan
from headrace.programs.loadtest.search import Found, Search
from headrace.programs.loadtest.settings import Setting, setting_of, space_of, with_setting

_MOST_INSTANCES = 8
_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class TuneWish:
    """What was typed."""

    model: str
    target_ms: float
    repository: str
    url: str
    percentile: float
    duration: float
    warm_up: float
    max_batch: int | None
    max_instances: int | None
    max_concurrency: int
    rows: int
    inputs: tuple[str, ...]
    shapes: tuple[str, ...]
    write: bool
    json_file: str
    plot: str
    headers: tuple[str, ...]


def run_tune(wish: TuneWish) -> None:
    """Search, show, write."""
    check_name(wish.model)
    _check(wish)
    access = access_of(wish.headers, "", "", "")
    with bars() as progress:
        config, found = uvloop.run(_search(wish, access, progress))
    start = setting_of(config)
    auto = bool((config.get("dynamic_batching") or {}).get("max_queue_delay_auto"))
    change = Change(None, None, None)
    if found.winner is not None:
        change = change_of(start, found.winner.setting, was_auto=auto)
    if wish.json_file == "-":
        print_json(found_document(wish.model, start, found, change))
    else:
        show_found(wish.model, start, found, change, wish.percentile)
    if wish.json_file not in ("", "-"):
        write_json(wish.json_file, found_document(wish.model, start, found, change))
    if wish.plot:
        title = f"{wish.model}: trials for p{wish.percentile:g} within {wish.target_ms:g} ms"
        draw_trials(title, found.trials, wish.target_ms, wish.percentile, wish.plot)
        show_note(f"wrote {wish.plot}")
    if found.winner is None:
        raise typer.Exit(FAILED)
    if wish.write and change:
        _write(wish, change)


def _write(wish: TuneWish, change: Change) -> None:
    written = write_change(Path(wish.repository) / wish.model, change)
    if written.beside:
        show_note(
            f"the configuration could not be edited without losing something: wrote {written.path}; put it in place of "
            "the old one when you have looked at it"
        )
    else:
        show_note(f"wrote {written.path}")


def _check(wish: TuneWish) -> None:
    """Refuse before a long measurement what would fail after it."""
    if not wish.repository and not wish.url:
        raise InvalidArgument("give --repository DIR for a server of our own, or --url of a running one")
    if wish.write and not wish.repository:
        raise InvalidArgument("--write needs --repository: the folder with the model's folder")
    if wish.repository and not (Path(wish.repository) / wish.model).is_dir():
        raise InvalidArgument(f"there is no folder {Path(wish.repository) / wish.model}: is --repository right?")
    Plan(seconds=wish.duration, warm_up_seconds=wish.warm_up)
    if wish.plot:
        check_picture(wish.plot)
    check_writable(wish.json_file)


async def _search(wish: TuneWish, access: Access, progress: Progress) -> tuple[Mapping[str, Any], Found]:
    async with _server(wish) as url, _loaded(wish, url, access) as client:
        prepared = await asyncio.to_thread(_prepared, wish, url, access)
        config = prepared.config
        space = space_of(
            config,
            latency_ms=wish.target_ms,
            rows=wish.rows,
            max_batch=wish.max_batch,
            max_instances=wish.max_instances or max(_usual_instances(), setting_of(config).instances),
        )
        async with LoadTest(
            url,
            wish.model,
            prepared.inputs,
            rows=prepared.rows,
            batched=prepared.batched,
            access=access,
            progress=progress,
        ) as test:
            await test.check()

            async def apply(setting: Setting) -> None:
                await client.load(wish.model, config=with_setting(config, setting))

            async def measure(clients: int) -> Measured:
                return await test.run(
                    Plan(
                        concurrency=clients,
                        seconds=wish.duration,
                        warm_up_seconds=wish.warm_up,
                        timeout_seconds=_TIMEOUT_SECONDS,
                    )
                )

            search = Search(
                apply,
                measure,
                target_ms=wish.target_ms,
                share=wish.percentile,
                most_concurrency=wish.max_concurrency,
                tell=lambda trial: show_note(trial_line(trial, wish.percentile)),
            )
            return config, await search.run(setting_of(config), space)


def _usual_instances() -> int:
    return min(os.cpu_count() or 1, _MOST_INSTANCES)


@asynccontextmanager
async def _server(wish: TuneWish) -> AsyncIterator[str]:
    if wish.url:
        yield wish.url
        return
    async with private_server(Path(wish.repository)) as url:
        yield url


@asynccontextmanager
async def _loaded(wish: TuneWish, url: str, access: Access) -> AsyncIterator[AsyncClient]:
    """A client of a server that has the model. A running server gets its own configuration back in the end."""
    async with AsyncClient(url, headers=dict(access.headers)) as client:
        try:
            await client.load(wish.model)
        except Unimplemented as error:
            raise retold(error, f"{error.message}; tune a copy with --repository DIR instead of --url") from None
        try:
            yield client
        finally:
            if wish.url:
                # What brought us here is the error to tell, if there is one.
                with contextlib.suppress(HeadraceError):
                    await client.load(wish.model)


def _prepared(wish: TuneWish, url: str, access: Access) -> Prepared:
    with Client(url, headers=dict(access.headers)) as client:
        prepared = prepare(client, wish.model, "", wish.inputs, wish.shapes, wish.rows)
    for note in prepared.notes:
        show_note(note)
    if not prepared.config:
        raise InvalidArgument(
            f"the server does not tell the configuration of '{wish.model}': tune it with --repository"
        )
    return prepared
