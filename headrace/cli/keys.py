# SPDX-License-Identifier: Apache-2.0
"""`headrace keys`: create, list, change and revoke the API keys in a server's key file."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.checks import FAILED, report_errors
from headrace.cli.common_options import Json, print_json, print_result

if TYPE_CHECKING:
    from headrace.api.access.api_keys import ApiKey
    from headrace.net.http.routes import Scope

keys = typer.Typer(name="keys", help="Create, list, change and revoke API keys.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Owner of the key; this name appears in logs.")]
File = Annotated[Path, typer.Option(metavar="FILE", help="Key file, YAML or JSON by its extension.")]

_ROUTER = "For a router that shares its backends fairly"
Share = Annotated[
    float | None,
    typer.Option(help="Share of the tokens, beside the shares of other keys (default: 1).", rich_help_panel=_ROUTER),
]
Priority = Annotated[
    int | None,
    typer.Option(help="Waiting requests of a higher priority are first (default: 0).", rich_help_panel=_ROUTER),
]
PromptTokens = Annotated[
    int | None,
    typer.Option(help="Maximum tokens of its prompts per minute; 0: unlimited (default).", rich_help_panel=_ROUTER),
]
OutputTokens = Annotated[
    int | None,
    typer.Option(help="Maximum tokens of its answers per minute; 0: unlimited (default).", rich_help_panel=_ROUTER),
]

_FILE = Path("keys.yaml")
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SPAN = re.compile(r"([0-9]{1,6})([smhdw])")


@keys.command()
def create(
    name: Name,
    scopes: Annotated[
        list[str] | None,
        typer.Option("--scope", metavar="SCOPE", help="Permission: infer (default), read or admin. Repeatable."),
    ] = None,
    expires: Annotated[
        str, typer.Option(metavar="WHEN", help="Expiry: a duration such as 30d or 12h, or a date such as 2027-01-31.")
    ] = "",
    share: Share = None,
    priority: Priority = None,
    prompt_tokens_per_minute: PromptTokens = None,
    output_tokens_per_minute: OutputTokens = None,
    file: File = _FILE,
    as_json: Json = False,
) -> None:
    """Create a key and print it. It cannot be shown again: the file only has its SHA-256.

    A running server accepts the key within about a second.

    Examples:

        headrace keys create alice --scope infer --scope read --expires 30d

        KEY=$(headrace keys create ci --scope admin --file /etc/headrace/keys.yaml)
    """
    from headrace.api.access.api_keys import create_key, format_time

    with report_errors(FAILED):
        now = time.time()
        expiry = _parse_expiry(expires, now) if expires else None
        tenant = _tenant(share, priority, prompt_tokens_per_minute, output_tokens_per_minute)
        key = create_key(file, name, _check_scopes(scopes or ["infer"]), created=now, expires=expiry, tenant=tenant)
    if as_json:
        print_json({"name": name, "key": key, "expires": None if expiry is None else format_time(expiry)})
        return
    typer.echo(key)
    until = "" if expiry is None else f", until {format_time(expiry)}"
    typer.echo(f"{name}: added to {file}{until}; the key is not shown again", err=True)


@keys.command("list")
def list_keys(file: File = _FILE, as_json: Json = False) -> None:
    """List the keys in a file: names, scopes and times.

    Example:

        headrace keys list --file keys.yaml
    """
    from headrace.api.access.api_keys import read_keys
    from headrace.cli.tables import open_console, table

    with report_errors(FAILED):
        api_keys = read_keys(file)
    rows = [_row(key, time.time()) for key in api_keys]
    if as_json:
        print_json(rows)
        return
    columns = ["NAME", "SCOPES", "CREATED", "EXPIRES", "STATE", "ROUTER"]
    cells = [
        [
            row["name"],
            " ".join(row["scopes"]),
            row["created"],
            row["expires"] or "never",
            row["state"],
            _tenant_text(row),
        ]
        for row in rows
    ]
    if not any(cell[-1] for cell in cells):
        columns, cells = columns[:-1], [cell[:-1] for cell in cells]
    open_console().print(table(columns, cells))


@keys.command("set")
def set_(
    name: Name,
    share: Share = None,
    priority: Priority = None,
    prompt_tokens_per_minute: PromptTokens = None,
    output_tokens_per_minute: OutputTokens = None,
    file: File = _FILE,
    as_json: Json = False,
) -> None:
    """Change what a router that shares its backends fairly grants a key. It takes effect within about a second.

    Example:

        headrace keys set alice --share 2 --output-tokens-per-minute 60000
    """
    from headrace.api.access.api_keys import set_tenant
    from headrace.core.errors import InvalidArgument

    with report_errors(FAILED):
        tenant = _tenant(share, priority, prompt_tokens_per_minute, output_tokens_per_minute)
        if not tenant:
            raise InvalidArgument("give what to change: --share, --priority or a limit of tokens per minute")
        set_tenant(file, name, tenant)
    changes = ", ".join(f"{field} {value:g}" for field, value in tenant.items())
    print_result({"name": name, **tenant}, f"{name}: {changes}", as_json)


@keys.command()
def revoke(name: Name, file: File = _FILE, as_json: Json = False) -> None:
    """Remove a key from the file. Servers reject it within about a second.

    Example:

        headrace keys revoke alice
    """
    from headrace.api.access.api_keys import revoke_key

    with report_errors(FAILED):
        revoke_key(file, name)
    print_result({"name": name, "revoked": True}, f"{name}: revoked", as_json)


def _row(key: ApiKey, now: float) -> dict[str, Any]:
    from headrace.api.access.api_keys import SCOPES, format_time, tenant_of

    return {
        "name": key.name,
        "scopes": [scope for scope in SCOPES if scope in key.scopes],
        "created": "" if key.created is None else format_time(key.created),
        "expires": None if key.expires is None else format_time(key.expires),
        "state": "expired" if key.expires is not None and key.expires <= now else "valid",
        **tenant_of(key),
    }


def _tenant(
    share: float | None, priority: int | None, prompt_tokens: int | None, output_tokens: int | None
) -> dict[str, float]:
    """Return the router's settings among the options."""
    settings = {
        "share": share,
        "priority": priority,
        "prompt_tokens_per_minute": prompt_tokens,
        "output_tokens_per_minute": output_tokens,
    }
    return {field: value for field, value in settings.items() if value is not None}


def _tenant_text(row: dict[str, Any]) -> str:
    """Return the router's settings of a key, as text."""
    texts = [f"share {row['share']:g}"] if row["share"] != 1 else []
    if row["priority"]:
        texts.append(f"priority {row['priority']}")
    limits = {kind: row[f"{kind}_tokens_per_minute"] for kind in ("prompt", "output")}
    texts += [f"{limit} {kind} tokens/min" for kind, limit in limits.items() if limit]
    return ", ".join(texts)


def _check_scopes(scopes: list[str]) -> list[Scope]:
    from headrace.api.access.api_keys import SCOPES
    from headrace.core.errors import InvalidArgument

    known = [scope for scope in SCOPES if scope in scopes]
    for scope in scopes:
        if scope not in SCOPES:
            raise InvalidArgument(f"--scope {scope}: write one of {', '.join(SCOPES)}")
    return known


def _parse_expiry(text: str, now: float) -> float:
    from headrace.core.errors import InvalidArgument

    duration = _SPAN.fullmatch(text)
    try:
        if duration is not None:
            expiry = now + int(duration[1]) * _UNIT_SECONDS[duration[2]]
        else:
            date = datetime.fromisoformat(text)
            expiry = (date if date.tzinfo is not None else date.replace(tzinfo=UTC)).timestamp()
    except ValueError:
        raise InvalidArgument(
            f"--expires {text}: give a time such as 30d, 12h or 45m, or a date such as 2027-01-31"
        ) from None
    if expiry <= now:
        raise InvalidArgument(f"--expires {text}: that time is in the past")
    return expiry
