# SPDX-License-Identifier: Apache-2.0
"""`headrace users`: manage the users of a gateway in its data directory, while the gateway runs or not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from headrace.cli.checks import FAILED, report_errors
from headrace.cli.common_options import Json, print_json, print_result
from headrace.cli.gateway import DATA_DIR, DatabaseUrl, DataDir, with_gateway

if TYPE_CHECKING:
    from headrace.api.access.users import User, Users
    from headrace.programs.gateway import GatewayState

users = typer.Typer(name="users", help="Add, list and remove the users of a gateway.", no_args_is_help=True)

_T = TypeVar("_T")
Name = Annotated[str, typer.Argument(metavar="NAME", help="User name; it appears in the audit log.")]
Org = Annotated[str, typer.Option("--org", metavar="ORG", help="Organisation; '*' for all.")]
RoleName = Annotated[str, typer.Option("--role", metavar="ROLE", help="viewer, operator or admin.")]


@users.command()
def add(
    name: Name,
    org: Org,
    role: RoleName = "operator",
    email: Annotated[str, typer.Option("--email", metavar="ADDRESS", help="Email address, returned at login.")] = "",
    data_dir: DataDir = DATA_DIR,
    database_url: DatabaseUrl = "",
    as_json: Json = False,
) -> None:
    """Add a user and print their key. It cannot be shown again: only its hash is stored.

    A running gateway with the same data directory accepts the key at once.

    Examples:

        headrace users add alice --org acme --data-dir ./gateway

        KEY=$(headrace users add ci --org acme --role viewer)
    """
    user, key = _with_users(
        data_dir, database_url, "users.add", name, lambda users_: users_.add(name, org, role, email=email)
    )
    _show_key(user, key, as_json, f"{name}: {role} of {org}")


@users.command("list")
def list_users(
    org: Annotated[str, typer.Option("--org", metavar="ORG", help="List only this organisation.")] = "",
    data_dir: DataDir = DATA_DIR,
    database_url: DatabaseUrl = "",
    as_json: Json = False,
) -> None:
    """List the users: names, roles, creation times and numbers of keys.

    Example:

        headrace users list --org acme
    """
    from headrace.cli.tables import open_console, table

    listed = _with_users(data_dir, database_url, "", "", lambda users_: users_.list(org))
    rows = [_row(user) for user in listed]
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
    """Set a user's role in an organisation.

    Example:

        headrace users grant alice --org other --role viewer
    """
    user = _with_users(data_dir, database_url, "users.grant", name, lambda users_: users_.grant(name, org, role))
    print_result(_row(user), f"{name}: {role} of {org}", as_json)


@users.command()
def withdraw(
    name: Name, org: Org, data_dir: DataDir = DATA_DIR, database_url: DatabaseUrl = "", as_json: Json = False
) -> None:
    """Remove a user's role in an organisation. Their tokens for it are rejected within about a second.

    Example:

        headrace users withdraw alice --org other
    """
    user = _with_users(data_dir, database_url, "users.withdraw", name, lambda users_: users_.withdraw(name, org))
    print_result(_row(user), f"{name}: role in {org} removed", as_json)


@users.command("revoke-tokens")
def revoke_tokens(
    name: Name, data_dir: DataDir = DATA_DIR, database_url: DatabaseUrl = "", as_json: Json = False
) -> None:
    """Reject all current tokens of a user within about a second. Their key stays valid: they can log in again.

    Example:

        headrace users revoke-tokens alice
    """
    user = _with_users(data_dir, database_url, "users.revoke-tokens", name, lambda users_: users_.revoke_tokens(name))
    print_result(_row(user), f"{name}: all tokens revoked", as_json)


@users.command("rotate-signing-key")
def rotate_signing_key(
    drop_old: Annotated[
        bool, typer.Option("--drop-old", help="Reject all existing tokens, for example after the old key leaked.")
    ] = False,
    data_dir: DataDir = DATA_DIR,
    database_url: DatabaseUrl = "",
    as_json: Json = False,
) -> None:
    """Sign new tokens with a new key. Tokens signed with the old key stay valid until they expire, at most 24 hours.

    Running gateways with the same data directory use it at once. A gateway started with --token-key signs with that
    file: replace the key in it.

    Examples:

        headrace users rotate-signing-key --data-dir ./gateway

        headrace users rotate-signing-key --drop-old
    """
    from headrace.api.access.audit import AUDIT_FILE, AuditLog
    from headrace.api.access.tokens import SIGNING_KEYS_FILE, SigningKeys
    from headrace.core.errors import NotFound

    del database_url  # accepted as by the other commands; signing keys are only in the data directory
    folder = data_dir.expanduser()
    with report_errors(FAILED):
        if not (folder / SIGNING_KEYS_FILE).exists():
            raise NotFound(f"{folder} has no signing keys: set --data-dir to that of a gateway")
        key_id = SigningKeys(folder / SIGNING_KEYS_FILE).rotate(keep_old=not drop_old)
        audit = AuditLog(folder / AUDIT_FILE)
        try:
            audit.record("users.rotate-signing-key", "allowed", None, "", key_id, "command line")
        finally:
            audit.close()
    old = "removed: all users must log in again" if drop_old else "valid for the tokens that it has signed"
    print_result({"kid": key_id, "dropped_old": drop_old}, f"new signing key {key_id}; the old key is {old}", as_json)


@users.command()
def rotate(
    name: Name,
    grace: Annotated[
        float, typer.Option("--grace-seconds", min=0, metavar="SECONDS", help="How long the old key stays valid.")
    ] = 0.0,
    data_dir: DataDir = DATA_DIR,
    database_url: DatabaseUrl = "",
    as_json: Json = False,
) -> None:
    """Print a new key for a user; the old key and its tokens expire at once, or after the grace period.

    Example:

        headrace users rotate alice --grace-seconds 3600
    """
    user, key = _with_users(data_dir, database_url, "users.rotate", name, lambda users_: users_.rotate(name, grace))
    _show_key(user, key, as_json, f"{name}: new key")


@users.command()
def remove(name: Name, data_dir: DataDir = DATA_DIR, database_url: DatabaseUrl = "", as_json: Json = False) -> None:
    """Remove a user. Gateways reject their keys and tokens within about a second.

    Example:

        headrace users remove alice
    """
    user = _with_users(data_dir, database_url, "users.remove", name, lambda users_: users_.remove(name))
    print_result(_row(user), f"{name}: removed", as_json)


def _with_users(
    data_dir: Path, database_url: str, operation: str, target: str, work: Callable[[Users], Awaitable[_T]]
) -> _T:
    """Run a function with the users; record a change in the audit log."""

    async def run(gateway: GatewayState) -> _T:
        result = await work(gateway.access.users)
        if operation:
            gateway.access.audit.record(operation, "allowed", None, "", target, "command line")
        return result

    return with_gateway(data_dir, database_url, run)


def _row(user: User) -> dict[str, Any]:
    created = datetime.fromtimestamp(user.created, UTC).isoformat(timespec="seconds")
    return {"id": user.id, "name": user.name, "email": user.email, "roles": dict(user.roles), "created": created,
            "keys": len(user.keys)}  # fmt: skip


def _show_key(user: User, key: str, as_json: bool, text: str) -> None:
    if as_json:
        print_json({**_row(user), "key": key})
        return
    typer.echo(key)
    typer.echo(f"{text}; the key is not shown again", err=True)
