# SPDX-License-Identifier: Apache-2.0
"""Rows of users with roles and keys, and of revoked tokens: implements the storage interfaces of `api.access`."""

from __future__ import annotations

import time
from typing import Any, cast

from sqlalchemy import Connection, Select, delete, insert, select, text, update
from sqlalchemy.exc import IntegrityError

from headrace.api.access.roles import ANY_ORGANISATION, Role
from headrace.api.access.users import User, UserKey
from headrace.core.errors import AlreadyExists
from headrace.jobs.store.database import Database, counters, revoked_tokens, user_keys, user_roles, users

_INSERT_ORGANISATION = text("INSERT INTO organisations (name, created_on) VALUES (:name, :now) ON CONFLICT DO NOTHING")


class UserRows:
    """Users, their roles and keys, and revoked tokens."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def insert_user(self, user: User) -> None:
        """Insert a user; AlreadyExists if the name, id or a key's lookup is taken."""

        def work(connection: Connection) -> None:
            connection.execute(insert(users).values(**_values(user, user.version)))
            _insert_parts(connection, user)
            _count_change(connection)

        try:
            await self._database.write(work)
        except IntegrityError:
            raise AlreadyExists(f"a user named {user.name!a} already exists") from None

    async def update_user(self, user: User) -> bool:
        """Replace a user if it still has this version; return False if not."""

        def work(connection: Connection) -> bool:
            query = update(users).where(users.c.id == user.id, users.c.version == user.version)
            if connection.execute(query.values(**_values(user, user.version + 1))).rowcount != 1:
                return False
            _delete_parts(connection, user.id)
            _insert_parts(connection, user)
            _count_change(connection)
            return True

        return await self._database.write(work)

    async def delete_user(self, user_id: str) -> bool:
        """Delete a user with roles and keys; return False if it did not exist."""

        def work(connection: Connection) -> bool:
            _delete_parts(connection, user_id)
            _count_change(connection)
            return connection.execute(delete(users).where(users.c.id == user_id)).rowcount == 1

        return await self._database.write(work)

    async def find_user(self, *, id: str = "", name: str = "", lookup: str = "") -> User | None:
        """Find a user by one of the three; None if there is none."""
        if lookup:
            query = select(users).join(user_keys, user_keys.c.user_id == users.c.id).where(user_keys.c.lookup == lookup)
        elif id:
            query = select(users).where(users.c.id == id)
        else:
            query = select(users).where(users.c.name == name)
        matches = await self._database.read(lambda connection: _users(connection, query))
        return matches[0] if matches else None

    async def list_users(self, org: str = "") -> list[User]:
        """Return users by name: those with a role in `org`, or all."""
        query = select(users).order_by(users.c.name)
        if org:
            query = query.where(users.c.id.in_(select(user_roles.c.user_id).where(user_roles.c.org == org)))
        return await self._database.read(lambda connection: _users(connection, query))

    async def revoke_token(self, jti: str, expires: float) -> None:
        """Revoke a token until it would have expired."""

        def work(connection: Connection) -> None:
            now = time.time()
            connection.execute(delete(revoked_tokens).where(revoked_tokens.c.expires < now - 3600))
            connection.execute(delete(revoked_tokens).where(revoked_tokens.c.jti == jti))
            connection.execute(insert(revoked_tokens).values(jti=jti, expires=expires))
            _count_change(connection)

        await self._database.write(work)

    async def is_token_revoked(self, jti: str) -> bool:
        """Return whether a token is revoked."""
        query = select(revoked_tokens.c.jti).where(revoked_tokens.c.jti == jti)
        return await self._database.read(lambda connection: connection.execute(query).first() is not None)

    async def access_changes(self) -> int:
        """Return the number of changes to users and revoked tokens; an equal number means that caches are valid."""
        query = select(counters.c.value).where(counters.c.name == "access")
        return await self._database.read(lambda connection: connection.execute(query).scalar_one())


def _count_change(connection: Connection) -> None:
    connection.execute(update(counters).where(counters.c.name == "access").values(value=counters.c.value + 1))


def _values(user: User, version: int) -> dict[str, Any]:
    return {
        "id": user.id,
        "name": user.name,
        "email": user.email,
        "created": user.created,
        "tokens_after": user.tokens_after,
        "version": version,
    }


def _delete_parts(connection: Connection, user_id: str) -> None:
    for table in (user_roles, user_keys):
        connection.execute(delete(table).where(table.c.user_id == user_id))


def _insert_parts(connection: Connection, user: User) -> None:
    for org, role in user.roles.items():
        connection.execute(insert(user_roles).values(user_id=user.id, org=org, role=role))
        if org != ANY_ORGANISATION:
            connection.execute(_INSERT_ORGANISATION, {"name": org, "now": time.time()})
    for position, key in enumerate(user.keys):
        values = {"id": key.id, "lookup": key.lookup, "hash": key.hash, "created": key.created, "expires": key.expires}
        connection.execute(insert(user_keys).values(user_id=user.id, position=position, **values))


def _users(connection: Connection, query: Select[Any]) -> list[User]:
    rows = connection.execute(query).all()
    ids = [row.id for row in rows]
    roles: dict[str, dict[str, Role]] = {user_id: {} for user_id in ids}
    keys: dict[str, list[UserKey]] = {user_id: [] for user_id in ids}
    for row in connection.execute(select(user_roles).where(user_roles.c.user_id.in_(ids))):
        roles[row.user_id][row.org] = cast("Role", row.role)
    ordered = select(user_keys).where(user_keys.c.user_id.in_(ids)).order_by(user_keys.c.position)
    for row in connection.execute(ordered):
        keys[row.user_id].append(UserKey(row.id, row.lookup, row.hash, row.created, row.expires))
    return [
        User(
            id=row.id,
            name=row.name,
            created=row.created,
            roles=roles[row.id],
            keys=tuple(keys[row.id]),
            email=row.email,
            tokens_after=row.tokens_after,
            version=row.version,
        )
        for row in rows
    ]
