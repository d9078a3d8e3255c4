# SPDX-License-Identifier: Apache-2.0
"""Run `headrace tune`: start or use a server, search, print the trials, write the configuration."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import stat
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
import uvloop
from rich.text import Text

from headrace.cli.bench_inputs import Prepared, prepare
from headrace.cli.bench_run import access_of, bars, check_writable, write_json
from headrace.cli.checks import FAILED
from headrace.cli.client import explain_control_mode
from headrace.cli.common_options import print_json
from headrace.cli.infer_run import show_note
from headrace.cli.tables import heading, line, open_console, table
from headrace.client import AsyncClient, Client
from headrace.core.errors import HeadraceError, InvalidArgument, Unimplemented, with_message
from headrace.core.files import write_atomically
from headrace.core.names import check_name
from headrace.core.telemetry.progress import Progress
from headrace.models.config.drafts import Draft, read_draft
from headrace.models.config.messages import to_text
from headrace.models.config.problems import ConfigError
from headrace.models.config.syntax import Block, Entry, Items, Scalar, parse_text
from headrace.programs.loadtest.plots import bar, check_plot_file, draw_trials, milliseconds
from headrace.programs.loadtest.private_server import private_server
from headrace.programs.loadtest.results import BUSY_SHARE, RunResults
from headrace.programs.loadtest.runner import Access, LoadTest, Plan
from headrace.programs.loadtest.search import Search, SearchResult, Trial
from headrace.programs.loadtest.tuning import Setting, setting_of, space_of, with_setting

BESIDE = "config.tuned.pbtxt"
_OPENING = re.compile(r"(?:\s|#[^\n]*(?:\n|$)|:|\[)*[{<]")
_BATCH, _BATCHING, _DELAY, _GROUPS = (
    "max_batch_size",
    "dynamic_batching",
    "max_queue_delay_microseconds",
    "instance_group",
)


@dataclass(frozen=True, slots=True)
class Change:
    """Settings to write; None leaves a value unchanged."""

    max_batch_size: int | None
    delay_microseconds: int | None
    instances: int | None

    def __bool__(self) -> bool:
        """Return whether there is anything to write."""
        return (self.max_batch_size, self.delay_microseconds, self.instances) != (None, None, None)

    def text(self) -> str:
        """Return the change in the syntax of `config.pbtxt`."""
        lines = []
        if self.max_batch_size is not None:
            lines.append(f"{_BATCH}: {self.max_batch_size}")
        if self.delay_microseconds is not None:
            lines.append(f"{_BATCHING} {{ {_DELAY}: {self.delay_microseconds} }}")
        if self.instances is not None:
            lines.append(f"{_GROUPS} [ {{ count: {self.instances} }} ]")
        return "".join(f"{line}\n" for line in lines)


def change_of(before: Setting, after: Setting, *, was_auto: bool = False) -> Change:
    """Return the difference of two settings. A delay of `auto` is always replaced by a number."""
    delay = after.delay_microseconds
    return Change(
        after.max_batch_size if after.max_batch_size != before.max_batch_size else None,
        delay if delay != before.delay_microseconds or was_auto else None,
        after.instances if after.instances != before.instances else None,
    )


@dataclass(frozen=True, slots=True)
class Written:
    """The file that was written."""

    path: Path
    beside: bool
    """Whether the configuration could not be edited safely: then this is a complete copy for the user to review."""


def write_change(folder: Path, change: Change) -> Written:
    """Write a change into the configuration of a model folder."""
    if not folder.is_dir():
        raise InvalidArgument(f"{folder} is not a model folder: set --repository to the folder that contains it")
    draft = read_draft(folder)
    expected = _expected_config(draft, change)
    path = draft.path or folder / "config.pbtxt"
    try:
        text = path.read_bytes().decode("utf-8-sig") if draft.path is not None else ""
        edit = _EDITORS.get(path.name)
        edited = edit(text, change) if edit is not None else None
        if edited is not None and _parses_as(folder, path.name, edited, expected):
            _replace(path, edited)
            return Written(path, beside=False)
        _replace(folder / BESIDE, to_text(expected))
    except OSError as error:
        raise InvalidArgument(f"{error.filename or folder}: {error.strerror}; nothing was changed") from None
    return Written(folder / BESIDE, beside=True)


def _expected_config(draft: Draft, change: Change) -> Any:
    message = type(draft.message)()
    message.CopyFrom(draft.message)
    if change.max_batch_size is not None:
        message.max_batch_size = change.max_batch_size
        sizes = [size for size in message.dynamic_batching.preferred_batch_size if size <= change.max_batch_size]
        if list(message.dynamic_batching.preferred_batch_size) != sizes:
            message.dynamic_batching.preferred_batch_size[:] = sizes
    if change.delay_microseconds is not None:
        message.dynamic_batching.SetInParent()
        message.dynamic_batching.max_queue_delay_microseconds = change.delay_microseconds
        message.dynamic_batching.ClearField("max_queue_delay_auto")
    if change.instances is not None:
        group = message.instance_group[0] if message.instance_group else message.instance_group.add()
        group.count = change.instances
    return message


def _parses_as(folder: Path, name: str, text: str, expected: Any) -> bool:
    """Return whether a text parses to the expected configuration."""
    with tempfile.TemporaryDirectory() as folder_path:
        trial = Path(folder_path) / folder.name
        trial.mkdir()
        (trial / name).write_bytes(text.encode())
        try:
            return bool(read_draft(trial).message == expected)
        except ConfigError:
            return False


def _edited_text(text: str, change: Change) -> str:
    """Edit protobuf text: replace values in place, append what is missing."""
    tree = parse_text(text)
    edits: list[tuple[int, int, str]] = []
    missing = Change(None, None, None)
    if change.max_batch_size is not None:
        entry = _find(tree, _BATCH)
        if entry is not None and isinstance(entry.value, Scalar):
            edits.append((entry.value.start, entry.value.end, str(change.max_batch_size)))
        else:
            missing = Change(change.max_batch_size, missing.delay_microseconds, missing.instances)
    for name, field, value in (
        (_BATCHING, _DELAY, change.delay_microseconds),
        (_GROUPS, "count", change.instances),
    ):
        if value is None:
            continue
        entry = _find(tree, name)
        if entry is not None and (edit := _inner_edit(text, entry, field, value)) is not None:
            edits.append(edit)
        elif name == _BATCHING:
            missing = Change(missing.max_batch_size, value, missing.instances)
        else:
            missing = Change(missing.max_batch_size, missing.delay_microseconds, value)
    for start, end, replacement in sorted(edits, reverse=True):
        text = text[:start] + replacement + text[end:]
    if missing and text and not text.endswith("\n"):
        text += "\n"
    return text + missing.text()


def _inner_edit(text: str, entry: Entry, field: str, value: int) -> tuple[int, int, str] | None:
    """Return the edit that sets a number in a block, or in the only block of a list."""
    block = entry.value
    if isinstance(block, Items):
        block = block.items[0] if len(block.items) == 1 else Items(block.line)
    if not isinstance(block, Block):
        return None
    inner = _find(block, field)
    if inner is not None:
        return (inner.value.start, inner.value.end, str(value)) if isinstance(inner.value, Scalar) else None
    opening = _OPENING.match(text, entry.end)
    return None if opening is None else (opening.end(), opening.end(), f" {field}: {value} ")


def _find(block: Block, name: str) -> Entry | None:
    return next((entry for entry in block.entries if entry.name == name), None)


def _edited_json(text: str, change: Change) -> str:
    document = json.loads(text)
    if change.max_batch_size is not None:
        document[_BATCH] = change.max_batch_size
    if change.delay_microseconds is not None:
        document.setdefault(_BATCHING, {})[_DELAY] = change.delay_microseconds
    if change.instances is not None:
        groups = document.setdefault(_GROUPS, [{}])
        groups[0]["count"] = change.instances
    indented = re.search(r"\n([ \t]+)\"", text)
    return json.dumps(document, indent=indented[1] if indented else 2, ensure_ascii=False) + "\n"


_EDITORS: Mapping[str, Callable[[str, Change], str]] = {"config.pbtxt": _edited_text, "config.json": _edited_json}
"""Not YAML: no parser here keeps its comments."""


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically, with the permissions it had."""
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o644
    write_atomically(path, text.encode(), mode=mode)


_WIDTH = 40


def trial_line(trial: Trial, share: float) -> str:
    """Return one trial as a line."""
    if trial.results is None:
        return f"{trial.setting}: rejected: {trial.reason}"
    numbers = f"{trial.throughput:.1f} requests/s, p{share:g} {milliseconds(trial.latency_ms)} ms"
    return f"{trial.setting}; {trial.concurrency} client(s): {numbers}{'' if trial.ok else f' ({trial.reason})'}"


def show_result(model: str, start: Setting, result: SearchResult, change: Change, share: float) -> None:
    """Print all trials, a bar chart of the best per setting, and the winner."""
    console = open_console()
    console.print(heading(f"Trials of {model}"))
    columns = ["BATCH", "DELAY US", "INSTANCES", "CLIENTS", "REQUESTS/S", f"P{share:g} MS", "MEAN BATCH", ""]
    console.print(table(columns, [_row(trial, result) for trial in result.trials], right=columns[:-1]))
    console.print()
    for text in _bars(result.trials):
        console.print(Text(text), no_wrap=True, overflow="crop")
    console.print()
    winner = result.winner
    for note in result.notes:
        console.print(line(note, "yellow" if winner is None else ""))
    if winner is None:
        return
    result_text = f"p{share:g} {milliseconds(winner.latency_ms)} ms with {winner.concurrency} client(s)"
    console.print(line(f"best: {winner.setting}: {result.throughput:.1f} requests/s, {result_text}", "bold green"))
    if result.start is None:
        console.print(line(f"the current setting ({start}) does not meet the target"))
    elif winner.setting != start:
        gain = result.throughput / result.start.throughput - 1
        console.print(
            line(f"the current setting ({start}) reaches {result.start.throughput:.1f} requests/s: {gain:+.0%}")
        )
    if winner.results is not None and winner.results.cpu.thread > BUSY_SHARE:
        console.print(line("note: the load generator was saturated: the model may be able to do more", "yellow"))
    if not change:
        console.print(line("the current setting is the best: nothing to change"))
        return
    if change.max_batch_size is not None and change.max_batch_size < start.max_batch_size:
        console.print(line(f"note: requests with more than {change.max_batch_size} rows would be rejected", "yellow"))
    console.print(line("for the model's config.pbtxt:"))
    for text in change.text().splitlines():
        console.print(Text(f"  {text}"))


def result_document(model: str, start: Setting, result: SearchResult, change: Change) -> dict[str, Any]:
    """Return the document that `--json` prints."""
    return {
        "model": model,
        "start": _setting(start),
        "best": None
        if result.winner is None
        else _trial(result.winner) | {"mean_requests_per_second": result.throughput},
        "change": change.text(),
        "notes": list(result.notes),
        "trials": [_trial(trial) for trial in result.trials],
    }


def _row(trial: Trial, result: SearchResult) -> list[object]:
    setting = trial.setting
    delay = "-" if setting.delay_microseconds is None else setting.delay_microseconds
    won = result.winner is not None and result.winner.setting == setting
    remark = Text(trial.reason, "red") if trial.reason else Text("*" if won else "", "green")
    numbers: list[object] = ["-", "-", "-", "-"]
    if trial.results is not None:
        view = trial.results.server
        batch = f"{view.mean_batch:.1f}" if view is not None else "-"
        numbers = [trial.concurrency, f"{trial.throughput:.1f}", milliseconds(trial.latency_ms), batch]
    return [setting.max_batch_size, delay, setting.instances, *numbers, remark]


def _bars(trials: Sequence[Trial]) -> list[str]:
    """Return a bar chart of the highest throughput per setting within the target."""
    best: dict[Setting, float] = {}
    for trial in trials:
        if trial.ok:
            best[trial.setting] = max(best.get(trial.setting, 0.0), trial.throughput)
    highest = max(best.values(), default=0.0) or 1.0
    names = [str(setting) for setting in best]
    width = max(map(len, names), default=0)
    return [
        f"{name:<{width}}  {value:>10.1f}  {bar(value / highest, _WIDTH)}"
        for name, value in zip(names, best.values(), strict=True)
    ]


def _setting(setting: Setting) -> dict[str, int | None]:
    return {
        "max_batch_size": setting.max_batch_size,
        "max_queue_delay_microseconds": setting.delay_microseconds,
        "instances": setting.instances,
    }


def _trial(trial: Trial) -> dict[str, Any]:
    measured = trial.results.document() if trial.results is not None else None
    return _setting(trial.setting) | {
        "concurrency": trial.concurrency,
        "ok": trial.ok,
        "why": trial.reason,
        "measured": measured,
    }


_MOST_INSTANCES = 8
_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """The options of `headrace tune`."""

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


def run_tune(options: TuneOptions) -> None:
    """Search, print the result, and write the configuration."""
    check_name(options.model)
    _check(options)
    access = access_of(options.headers, "", "", "")
    with bars() as progress:
        config, result = uvloop.run(_search(options, access, progress))
    start = setting_of(config)
    auto = bool((config.get("dynamic_batching") or {}).get("max_queue_delay_auto"))
    change = Change(None, None, None)
    if result.winner is not None:
        change = change_of(start, result.winner.setting, was_auto=auto)
    if options.json_file == "-":
        print_json(result_document(options.model, start, result, change))
    else:
        show_result(options.model, start, result, change, options.percentile)
    if options.json_file not in ("", "-"):
        write_json(options.json_file, result_document(options.model, start, result, change))
    if options.plot:
        title = f"{options.model}: trials for p{options.percentile:g} within {options.target_ms:g} ms"
        draw_trials(title, result.trials, options.target_ms, options.percentile, options.plot)
        show_note(f"wrote {options.plot}")
    if result.winner is None:
        raise typer.Exit(FAILED)
    if options.write and change:
        _write(options, change)


def _write(options: TuneOptions, change: Change) -> None:
    written = write_change(Path(options.repository) / options.model, change)
    if written.beside:
        show_note(
            f"the configuration could not be edited without losing something: wrote {written.path}; review it and replace "
            "the old one with it"
        )
    else:
        show_note(f"wrote {written.path}")


def _check(options: TuneOptions) -> None:
    """Fail before a long measurement, not after it."""
    if not options.repository and not options.url:
        raise InvalidArgument("no server: give --repository DIR to start one, or --url of a running one")
    if options.write and not options.repository:
        raise InvalidArgument("--write needs --repository: the folder that contains the model's folder")
    if options.repository and not (Path(options.repository) / options.model).is_dir():
        raise InvalidArgument(f"there is no folder {Path(options.repository) / options.model}: check --repository")
    Plan(seconds=options.duration, warm_up_seconds=options.warm_up)
    if options.plot:
        check_plot_file(options.plot)
    check_writable(options.json_file)


async def _search(options: TuneOptions, access: Access, progress: Progress) -> tuple[Mapping[str, Any], SearchResult]:
    async with _server(options) as url, _loaded(options, url, access) as client:
        prepared = await asyncio.to_thread(_prepared, options, url, access)
        config = prepared.config
        space = space_of(
            config,
            latency_ms=options.target_ms,
            rows=options.rows,
            max_batch=options.max_batch,
            max_instances=options.max_instances or max(_usual_instances(), setting_of(config).instances),
        )
        async with LoadTest(
            url,
            options.model,
            prepared.inputs,
            rows=prepared.rows,
            batched=prepared.batched,
            access=access,
            progress=progress,
        ) as test:
            await test.check()

            async def apply(setting: Setting) -> None:
                await client.load(options.model, config=with_setting(config, setting))

            async def measure(clients: int) -> RunResults:
                return await test.run(
                    Plan(
                        concurrency=clients,
                        seconds=options.duration,
                        warm_up_seconds=options.warm_up,
                        timeout_seconds=_TIMEOUT_SECONDS,
                    )
                )

            search = Search(
                apply,
                measure,
                target_ms=options.target_ms,
                share=options.percentile,
                max_concurrency=options.max_concurrency,
                on_trial=lambda trial: show_note(trial_line(trial, options.percentile)),
            )
            return config, await search.run(setting_of(config), space)


def _usual_instances() -> int:
    return min(os.cpu_count() or 1, _MOST_INSTANCES)


@asynccontextmanager
async def _server(options: TuneOptions) -> AsyncIterator[str]:
    if options.url:
        yield options.url
        return
    async with private_server(Path(options.repository)) as url:
        yield url


@asynccontextmanager
async def _loaded(options: TuneOptions, url: str, access: Access) -> AsyncIterator[AsyncClient]:
    """Yield a client of a server with the model loaded. A running server gets its own configuration back at the end."""
    async with AsyncClient(url, headers=dict(access.headers)) as client:
        try:
            await client.load(options.model)
        except HeadraceError as error:
            explained = explain_control_mode(error)
            if explained is error and not isinstance(error, Unimplemented):
                raise
            raise with_message(
                explained, f"{explained.message}; or tune a copy with --repository DIR instead of --url"
            ) from None
        try:
            yield client
        finally:
            if options.url:
                # Do not hide the original error.
                with contextlib.suppress(HeadraceError):
                    await client.load(options.model)


def _prepared(options: TuneOptions, url: str, access: Access) -> Prepared:
    with Client(url, headers=dict(access.headers)) as client:
        prepared = prepare(client, options.model, "", options.inputs, options.shapes, options.rows)
    for note in prepared.notes:
        show_note(note)
    if not prepared.config:
        raise InvalidArgument(f"the server does not return the configuration of '{options.model}': use --repository")
    return prepared
