# SPDX-License-Identifier: Apache-2.0
"""How `headrace service` shows services and checks to people, and what it asks them on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from headrace.cli.results import print_json
from headrace.cli.tables import heading, line, open_console, table

if TYPE_CHECKING:
    from rich.text import Text

    from headrace.platforms.catalogue import Field
    from headrace.platforms.launcher import Preflight, Service
    from headrace.platforms.registry import Entry

_STYLES = {"running": "green", "starting": "yellow", "ended": "red", "stale": "dim", "unknown": "magenta"}


def is_interactive() -> bool:
    """Whether somebody can be asked."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def show_services(found: Sequence[Service], latest: str | None, as_json: bool) -> None:
    """A table, the latest marked."""
    if as_json:
        rows = [{**each.as_json(), "latest": each.entry.job_id == latest} for each in found]
        print_json(rows)
        return
    cells = [
        (
            f"{each.entry.job_id}{' *' if each.entry.job_id == latest else ''}",
            each.entry.network_arch,
            each.entry.platform,
            _state(each.state),
            each.entry.host_url or "-",
            each.entry.started_at[:19].replace("T", " "),
            each.reason,
        )
        for each in found
    ]
    open_console().print(table(("JOB", "ARCH", "PLATFORM", "STATE", "URL", "STARTED (UTC)", "REASON"), cells))


def show_service(found: Service, told: Mapping[str, Any] | None, as_json: bool) -> None:
    """All that is known of one."""
    if as_json:
        print_json({**found.as_json(), "service": told})
        return
    console = open_console()
    plain = [
        (key, value) for key, value in found.as_json().items() if isinstance(value, str | int) and key != "launcher"
    ]
    console.print(
        table(("FIELD", "VALUE"), [(key, _state(value) if key == "state" else value) for key, value in plain])
    )
    if told is None:
        console.print(line("the service itself does not answer"))
        return
    console.print(heading("what it says"))
    progress = told.get("progress")
    words = progress.get("message") if isinstance(progress, Mapping) else ""
    rows = [
        ("model", told.get("model_state", "")),
        ("kind", told.get("model_type", "")),
        ("progress", words),
        ("problem", told.get("initialization_error") or told.get("model_load_error")),
        ("last request", told.get("last_request_time")),
    ]
    console.print(table(("FIELD", "VALUE"), [(name, value) for name, value in rows if value]))


def show_preflight(found: Preflight, as_json: bool) -> None:
    """Checks, then variables."""
    if as_json:
        checks = [{"name": each.name, "passed": each.passed, "message": each.message} for each in found.checks]
        told = {
            "platform": found.platform,
            "passed": found.passed,
            "checks": checks,
            "variables": dict(found.variables),
        }
        print_json(told)
        return
    console = open_console()
    cells = [(each.name, _passed(each.passed), each.message) for each in found.checks]
    console.print(table(("CHECK", "", "FOUND, OR WHAT TO DO"), cells))
    console.print(heading("variables"))
    console.print(table(("NAME", ""), found.variables))


def choose(question: str, candidates: Sequence[Entry], shown: Sequence[str]) -> Entry:
    """Ask which one, by its number."""
    from headrace.core.telemetry.logs import one_line

    typer.echo(question, err=True)
    for number, entry in enumerate(candidates, 1):
        told = "  ".join(str(getattr(entry, name)) for name in shown)
        typer.echo(f"  {number}) {one_line(told)}", err=True)
    while True:
        text = typer.prompt("number", err=True).strip()
        if text.isascii() and text.isdigit() and 1 <= int(text) <= len(candidates):
            return candidates[int(text) - 1]
        typer.echo(f"write a number from 1 to {len(candidates)}", err=True)


def ask_fields(fields: Sequence[Field]) -> dict[str, Any]:
    """The sampling parameters, each with its type and default; nothing typed takes the default."""
    from headrace.core.errors import InvalidArgument
    from headrace.platforms.chat_bodies import kind_of, read_value

    typer.echo("sampling parameters; Enter takes the default:", err=True)
    answers: dict[str, Any] = {}
    for field in fields:
        meaning = f", {field.meaning}" if field.meaning else ""
        while True:
            label = f"  {field.name} ({kind_of(field)}{meaning}) [{default_of(field)}]"
            text = typer.prompt(label, default="", show_default=False, err=True)
            if not text.strip():
                break
            try:
                answers[field.name] = read_value(field, text)
                break
            except InvalidArgument as error:
                typer.secho(f"  {error.message}", fg="red", err=True)
    return answers


def default_of(field: Field) -> str:
    """In words."""
    return "as the model has it" if field.default is None else str(field.default)


def _state(state: object) -> Text:
    return line(str(state), _STYLES.get(str(state), ""))


def _passed(passed: bool) -> Text:
    return line("ok", "green") if passed else line("missing", "red")
