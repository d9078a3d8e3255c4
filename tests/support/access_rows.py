# SPDX-License-Identifier: Apache-2.0
"""The rows of `headrace.access` in memory, with the rules of a database, and a hasher that is quick."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from headrace.api.access.users import KeyHasher, User
from headrace.core.errors import AlreadyExists


class MemoryRows:
    """`UserStore` and `RevocationStore`."""

    def __init__(self) -> None:
        self.users: dict[str, User] = {}
        self.revoked: dict[str, float] = {}
        self.reads = 0
        self.lost_updates = 0
        """So many of the next updates find that somebody else was first."""

    async def insert_user(self, user: User) -> None:
        taken = {key.lookup for user in self.users.values() for key in user.keys}
        names = {user.name for user in self.users.values()}
        if user.id in self.users or user.name in names or taken & {key.lookup for key in user.keys}:
            raise AlreadyExists("taken")
        self.users[user.id] = user

    async def update_user(self, user: User) -> bool:
        if self.lost_updates:
            self.lost_updates -= 1
            return False
        kept = self.users.get(user.id)
        if kept is None or kept.version != user.version:
            return False
        self.users[user.id] = replace(user, version=user.version + 1)
        return True

    async def delete_user(self, user_id: str) -> bool:
        return self.users.pop(user_id, None) is not None

    async def find_user(self, *, id: str = "", name: str = "", lookup: str = "") -> User | None:
        self.reads += 1
        for user in self.users.values():
            if user.id == id or user.name == name or lookup in {key.lookup for key in user.keys}:
                return user
        return None

    async def list_users(self, org: str = "") -> list[User]:
        results = [user for user in self.users.values() if not org or org in user.roles]
        return sorted(results, key=lambda user: user.name)

    async def revoke_token(self, jti: str, expires: float) -> None:
        self.revoked[jti] = expires

    async def is_token_revoked(self, jti: str) -> bool:
        return jti in self.revoked


class CountedMemoryRows(MemoryRows):
    """`ChangeCounter`, too."""

    def __init__(self) -> None:
        super().__init__()
        self.changes = 0
        self.looks = 0

    async def access_changes(self) -> int:
        self.looks += 1
        return self.changes

    async def insert_user(self, user: User) -> None:
        self.changes += 1
        await super().insert_user(user)

    async def update_user(self, user: User) -> bool:
        self.changes += 1
        return await super().update_user(user)

    async def delete_user(self, user_id: str) -> bool:
        self.changes += 1
        return await super().delete_user(user_id)

    async def revoke_token(self, jti: str, expires: float) -> None:
        self.changes += 1
        await super().revoke_token(jti, expires)


class CountingHasher(KeyHasher):
    """Argon2id at its cheapest, which counts."""

    def __init__(self) -> None:
        super().__init__(time_cost=1, memory_kib=8)
        self.matched = 0

    async def matches(self, kept: str | None, key: str) -> bool:
        self.matched += 1
        return await super().matches(kept, key)


def async_test(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that awaits."""

    @functools.wraps(test)
    def run(*values: Any, **named: Any) -> None:
        asyncio.run(test(*values, **named))

    return run
