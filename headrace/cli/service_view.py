# SPDX-License-Identifier: Apache-2.0
"""Output and prompts of `headrace service`: tables of services and checks, and questions on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from headrace.cli.checks import print_error
from headrace.cli.common_options import print_json
from headrace.cli.tables import heading, line, open_console, table

if TYPE_CHECKING:
    from rich.text import Text

    from headrace.platforms.catalogue import Field
    from headrace.platforms.launcher import Preflight, Service
    from headrace.platforms.registry import Entry

_STYLES = {"running": "green", "starting": "yellow", "ended": "red", "stale": "dim", "unknown": "magenta"}


def is_interactive() -> bool:
    """Return whether the user can be prompted."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def show_services(services: Sequence[Service], latest: str | None, as_json: bool) -> None:
    """Print the services as a table; the latest is marked."""
    if as_json:
        rows = [{**service.as_json(), "latest": service.entry.job_id == latest} for service in services]
        print_json(rows)
        return
    cells = [
        (
            f"{service.entry.job_id}{' *' if service.entry.job_id == latest else ''}",
            service.entry.network_arch,
            service.entry.platform,
            _state(service.state),
            service.entry.host_url or "-",
            service.entry.started_at[:19].replace("T", " "),
            service.reason,
        )
        for service in services
    ]
    open_console().print(table(("JOB", "ARCH", "PLATFORM", "STATE", "URL", "STARTED (UTC)", "REASON"), cells))


def show_service(service: Service, status: Mapping[str, Any] | None, as_json: bool) -> None:
    """Print everything known about one service."""
    if as_json:
        print_json({**service.as_json(), "service": status})
        return
    console = open_console()
    plain = [
        (key, value) for key, value in service.as_json().items() if isinstance(value, str | int) and key != "launcher"
    ]
    console.print(
        table(("FIELD", "VALUE"), [(key, _state(value) if key == "state" else value) for key, value in plain])
    )
    if status is None:
        console.print(line("the service does not answer"))
        return
    console.print(heading("reported by the service"))
    progress = status.get("progress")
    message = progress.get("message") if isinstance(progress, Mapping) else ""
    rows = [
        ("model", status.get("model_state", "")),
        ("kind", status.get("model_type", "")),
        ("progress", message),
        ("problem", status.get("initialization_error") or status.get("model_load_error")),
        ("last request", status.get("last_request_time")),
    ]
    console.print(table(("FIELD", "VALUE"), [(name, value) for name, value in rows if value]))


def show_preflight(preflight: Preflight, as_json: bool) -> None:
    """Print the checks of a platform, then its variables."""
    if as_json:
        checks = [{"name": check.name, "passed": check.passed, "message": check.message} for check in preflight.checks]
        document = {
            "platform": preflight.platform,
            "passed": preflight.passed,
            "checks": checks,
            "variables": dict(preflight.variables),
        }
        print_json(document)
        return
    console = open_console()
    cells = [(check.name, _passed(check.passed), check.message) for check in preflight.checks]
    console.print(table(("CHECK", "", "RESULT, OR WHAT TO DO"), cells))
    console.print(heading("variables"))
    console.print(table(("NAME", ""), preflight.variables))


def choose(question: str, candidates: Sequence[Entry], labels: Sequence[str]) -> Entry:
    """Prompt for one of the candidates, by number."""
    from headrace.core.telemetry.logs import one_line

    typer.echo(question, err=True)
    for number, entry in enumerate(candidates, 1):
        description = "  ".join(str(getattr(entry, name)) for name in labels)
        typer.echo(f"  {number}) {one_line(description)}", err=True)
    while True:
        text = typer.prompt("number", err=True).strip()
        if text.isascii() and text.isdigit() and 1 <= int(text) <= len(candidates):
            return candidates[int(text) - 1]
        typer.echo(f"write a number from 1 to {len(candidates)}", err=True)


def ask_fields(fields: Sequence[Field]) -> dict[str, Any]:
    """Prompt for the sampling parameters; an empty answer takes the default."""
    from headrace.core.errors import InvalidArgument
    from headrace.platforms.chat_requests import field_type, parse_value

    typer.echo("sampling parameters; press Enter for the default:", err=True)
    answers: dict[str, Any] = {}
    for field in fields:
        meaning = f", {field.meaning}" if field.meaning else ""
        while True:
            label = f"  {field.name} ({field_type(field)}{meaning}) [{default_of(field)}]"
            text = typer.prompt(label, default="", show_default=False, err=True)
            if not text.strip():
                break
            try:
                answers[field.name] = parse_value(field, text)
                break
            except InvalidArgument as error:
                print_error(error.message)
    return answers


def default_of(field: Field) -> str:
    """Return the default of a field as text."""
    return "the model's default" if field.default is None else str(field.default)


def _state(state: object) -> Text:
    return line(str(state), _STYLES.get(str(state), ""))


def _passed(passed: bool) -> Text:
    return line("ok", "green") if passed else line("missing", "red")
