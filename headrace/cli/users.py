# SPDX-License-Identifier: Apache-2.0
"""`headrace users`: who may use a gateway. Works on its data directory, whether the gateway runs or not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from headrace.cli.checks import FAILED, told
from headrace.cli.gateway import DATA_DIR, DatabaseUrl, DataDir
from headrace.cli.results import Json, print_json, print_result

if TYPE_CHECKING:
    from headrace.api.access.users import User, Users

users = typer.Typer(name="users", help="Add, list and remove the users of a gateway.", no_args_is_help=True)

_T = TypeVar("_T")
Name = Annotated[str, typer.Argument(metavar="NAME", help="Who it is; this name is in the audit log.")]
Org = Annotated[str, typer.Option("--org", metavar="ORG", help="The organisation; '*' for all.")]
RoleName = Annotated[str, typer.Option("--role", metavar="ROLE", help="viewer, operator or admin.")]


@users.command()
def add(
    name: Name,
    org: Org,
    role: RoleName = "operator",
    email: Annotated[str, typer.Option("--email", metavar="ADDRESS", help="Told at login.")] = "",
    data_dir: DataDir = DATA_DIR,
    database_url: DatabaseUrl = "",
    as_json: Json = False,
) -> None:
    """Add a user and print their key. It is shown this once: only its hash is kept.

    A gateway that runs on the same data directory knows the key at once.

    Examples:

        headrace users add alice --org acme --data-dir ./gateway

        KEY=$(headrace users add ci --org acme --role viewer)
    """
    user, key = _with_users(
        data_dir, database_url, "users.add", name, lambda every: every.add(name, org, role, email=email)
    )
    _show_key(user, key, as_json, f"{name}: {role} of {org}")


@users.command("list")
def list_users(
    org: Annotated[str, typer.Option("--org", metavar="ORG", help="Only those of this organisation.")] = "",
    data_dir: DataDir = DATA_DIR,
    database_url: DatabaseUrl = "",
    as_json: Json = False,
) -> None:
    """List the users: names, roles and keys' ages.

    Example:

        headrace users list --org acme
    """
    from headrace.cli.tables import open_console, table

    found = _with_users(data_dir, database_url, "", "", lambda every: every.list(org))
    rows = [_row(user) for user in found]
    if as_json:
        print_json(rows)
        return
    cells = [
        (row["name"], " ".join(f"{org}:{role}" for org, role in row["roles"].items()), row["created"], row["keys"])
        for row in rows
    ]
    open_console().print(table(("NAME", "ROLES", "CREATED", "KEYS"), cells, right=("KEYS",)))


@users.command()
def grant(
    name: Name,
    org: Org,
    role: RoleName = "operator",
    data_dir: DataDir = DATA_DIR,
    database_url: DatabaseUrl = "",
    as_json: Json = False,
) -> None:
    """Give a user a role in an organisation, in place of the one they had there.

    Example:

        headrace users grant alice --org other --role viewer
    """
    user = _with_users(data_dir, database_url, "users.grant", name, lambda every: every.grant(name, org, role))
    print_result(_row(user), f"{name}: {role} of {org}", as_json)


@users.command()
def withdraw(
    name: Name, org: Org, data_dir: DataDir = DATA_DIR, database_url: DatabaseUrl = "", as_json: Json = False
) -> None:
    """Take a user's role in an organisation away. Their tokens for it are refused within a second or so.

    Example:

        headrace users withdraw alice --org other
    """
    user = _with_users(data_dir, database_url, "users.withdraw", name, lambda every: every.withdraw(name, org))
    print_result(_row(user), f"{name}: no role in {org} any more", as_json)


@users.command("revoke-tokens")
def revoke_tokens(
    name: Name, data_dir: DataDir = DATA_DIR, database_url: DatabaseUrl = "", as_json: Json = False
) -> None:
    """Refuse every token that a user has now, within a second or so. Their key stays good: they log in again.

    Example:

        headrace users revoke-tokens alice
    """
    user = _with_users(data_dir, database_url, "users.revoke-tokens", name, lambda every: every.revoke_tokens(name))
    print_result(_row(user), f"{name}: all tokens are revoked", as_json)


@users.command("rotate-signing-key")
def rotate_signing_key(
    drop_old: Annotated[
        bool, typer.Option("--drop-old", help="Refuse all tokens there are: for when the old key may have leaked.")
    ] = False,
    data_dir: DataDir = DATA_DIR,
    database_url: DatabaseUrl = "",
    as_json: Json = False,
) -> None:
    """Sign new tokens with a new key. Tokens of the old one stay good to their end, 24 hours at most.

    Gateways that run on the same data directory take it up at once. One that was started with --token-key signs with that
    file: put another key into it.

    Examples:

        headrace users rotate-signing-key --data-dir ./gateway

        headrace users rotate-signing-key --drop-old
    """
    from headrace.api.access.audit import AUDIT_FILE, Audit
    from headrace.api.access.tokens import SIGNING_KEYS_FILE, SigningKeys
    from headrace.core.errors import NotFound

    del database_url  # as all verbs take it; but signing keys are in the data directory alone
    folder = data_dir.expanduser()
    with told(FAILED):
        if not (folder / SIGNING_KEYS_FILE).exists():
            raise NotFound(f"{folder} has no signing keys: name the --data-dir of a gateway")
        key_id = SigningKeys(folder / SIGNING_KEYS_FILE).rotate(keep_old=not drop_old)
        audit = Audit(folder / AUDIT_FILE)
        try:
            audit.record("users.rotate-signing-key", "allowed", None, "", key_id, "command line")
        finally:
            audit.close()
    old = "dropped: everybody logs in again" if drop_old else "good for the tokens that it has signed"
    print_result({"kid": key_id, "dropped_old": drop_old}, f"{key_id} signs; the old key is {old}", as_json)


@users.command()
def rotate(
    name: Name,
    grace: Annotated[
        float, typer.Option("--grace-seconds", min=0, metavar="SECONDS", help="How long the old key stays good.")
    ] = 0.0,
    data_dir: DataDir = DATA_DIR,
    database_url: DatabaseUrl = "",
    as_json: Json = False,
) -> None:
    """Print a new key for a user; the old one, and tokens made with it, end at once or after the grace.

    Example:

        headrace users rotate alice --grace-seconds 3600
    """
    user, key = _with_users(data_dir, database_url, "users.rotate", name, lambda every: every.rotate(name, grace))
    _show_key(user, key, as_json, f"{name}: a new key")


@users.command()
def remove(name: Name, data_dir: DataDir = DATA_DIR, database_url: DatabaseUrl = "", as_json: Json = False) -> None:
    """Remove a user. Gateways refuse their keys and tokens within a second or so.

    Example:

        headrace users remove alice
    """
    user = _with_users(data_dir, database_url, "users.remove", name, lambda every: every.remove(name))
    print_result(_row(user), f"{name}: removed", as_json)


def _with_users(
    data_dir: Path, database_url: str, operation: str, target: str, work: Callable[[Users], Awaitable[_T]]
) -> _T:
    """Do something with the users; a change is written into the audit log."""
    import asyncio

    from headrace.jobs.settings import JobSettings
    from headrace.programs.gateway.opening import opened

    settings = JobSettings(data_dir.expanduser(), database_url=database_url)

    async def run() -> _T:
        async with opened(settings) as found:
            made = await work(found.access.users)
            if operation:
                found.access.audit.record(operation, "allowed", None, "", target, "command line")
            return made

    with told(FAILED):
        return asyncio.run(run())


def _row(user: User) -> dict[str, Any]:
    created = datetime.fromtimestamp(user.created, UTC).isoformat(timespec="seconds")
    return {"id": user.id, "name": user.name, "email": user.email, "roles": dict(user.roles), "created": created,
            "keys": len(user.keys)}  # fmt: skip


def _show_key(user: User, key: str, as_json: bool, said: str) -> None:
    if as_json:
        print_json({**_row(user), "key": key})
        return
    typer.echo(key)
    typer.echo(f"{said}; the key is not shown again", err=True)
