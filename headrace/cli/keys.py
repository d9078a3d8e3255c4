# SPDX-License-Identifier: Apache-2.0
"""`headrace keys`: make, list and revoke the API keys of a file that servers read."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.checks import FAILED, told
from headrace.cli.results import Json, print_json, print_result

if TYPE_CHECKING:
    from headrace.api.access.keys import ApiKey
    from headrace.api.access.settings import Scope

keys = typer.Typer(name="keys", help="Make, list and revoke API keys.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is; this name is in logs.")]
File = Annotated[Path, typer.Option(metavar="FILE", help="The file of keys, YAML or JSON, by its name's end.")]

_FILE = Path("keys.yaml")
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SPAN = re.compile(r"([0-9]{1,6})([smhdw])")


@keys.command()
def create(
    name: Name,
    scopes: Annotated[
        list[str] | None,
        typer.Option(
            "--scope", metavar="SCOPE", help="What it is for: infer, read or admin. Repeatable; infer unless told."
        ),
    ] = None,
    expires: Annotated[
        str, typer.Option(metavar="WHEN", help="After a time such as 30d or 12h, or on a date such as 2027-01-31.")
    ] = "",
    file: File = _FILE,
    as_json: Json = False,
) -> None:
    """Make a key and print it. It is shown this once: the file has its SHA-256 only.

    A server that runs with this file knows the key within a second or so.

    Examples:

        headrace keys create alice --scope infer --scope read --expires 30d

        KEY=$(headrace keys create ci --scope admin --file /etc/headrace/keys.yaml)
    """
    from headrace.api.access.keys_file import create_key, time_text

    with told(FAILED):
        now = time.time()
        ends = _when(expires, now) if expires else None
        key = create_key(file, name, _checked(scopes or ["infer"]), created=now, expires=ends)
    if as_json:
        print_json({"name": name, "key": key, "expires": None if ends is None else time_text(ends)})
        return
    typer.echo(key)
    until = "" if ends is None else f", until {time_text(ends)}"
    typer.echo(f"{name}: added to {file}{until}; the key is not shown again", err=True)


@keys.command("list")
def list_keys(file: File = _FILE, as_json: Json = False) -> None:
    """List the keys of a file: names, scopes and times.

    Example:

        headrace keys list --file keys.yaml
    """
    from headrace.api.access.keys_file import read_keys
    from headrace.cli.tables import open_console, table

    with told(FAILED):
        found = read_keys(file)
    rows = [_row(key, time.time()) for key in found]
    if as_json:
        print_json(rows)
        return
    columns = ["NAME", "SCOPES", "CREATED", "EXPIRES", "STATE"]
    cells = [
        [row["name"], " ".join(row["scopes"]), row["created"], row["expires"] or "never", row["state"]] for row in rows
    ]
    open_console().print(table(columns, cells))


@keys.command()
def revoke(name: Name, file: File = _FILE, as_json: Json = False) -> None:
    """Take a key out of the file. Servers refuse it within a second or so.

    Example:

        headrace keys revoke alice
    """
    from headrace.api.access.keys_file import revoke_key

    with told(FAILED):
        revoke_key(file, name)
    print_result({"name": name, "revoked": True}, f"{name}: revoked", as_json)


def _row(key: ApiKey, now: float) -> dict[str, Any]:
    from headrace.api.access.keys import SCOPES
    from headrace.api.access.keys_file import time_text

    return {
        "name": key.name,
        "scopes": [scope for scope in SCOPES if scope in key.scopes],
        "created": "" if key.created is None else time_text(key.created),
        "expires": None if key.expires is None else time_text(key.expires),
        "state": "expired" if key.expires is not None and key.expires <= now else "valid",
    }


def _checked(scopes: list[str]) -> list[Scope]:
    from headrace.api.access.keys import SCOPES
    from headrace.core.errors import InvalidArgument

    known = [scope for scope in SCOPES if scope in scopes]
    for scope in scopes:
        if scope not in SCOPES:
            raise InvalidArgument(f"--scope {scope}: there are {', '.join(SCOPES)}")
    return known


def _when(text: str, now: float) -> float:
    from headrace.core.errors import InvalidArgument

    span = _SPAN.fullmatch(text)
    try:
        if span is not None:
            when = now + int(span[1]) * _UNIT_SECONDS[span[2]]
        else:
            date = datetime.fromisoformat(text)
            when = (date if date.tzinfo is not None else date.replace(tzinfo=UTC)).timestamp()
    except ValueError:
        raise InvalidArgument(
            f"--expires {text}: give a time such as 30d, 12h or 45m, or a date such as 2027-01-31"
        ) from None
    if when <= now:
        raise InvalidArgument(f"--expires {text}: that is over already")
    return when
