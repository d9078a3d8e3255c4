# SPDX-License-Identifier: Apache-2.0
"""Users of the job API and their keys: made, rotated, removed, and told by the key that was sent.

Called by `logins`, by `headrace users` and, for the first administrator, by `gateway`. Turns rows, which `jobs.store` keeps
behind `UserRows`, into users. A key is shown once and kept as its argon2id hash; its first characters are kept as they are,
so that one row is found and one hash computed whoever asks. Must not know requests, and must not let a key reach a log.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError, VerifyMismatchError

from headrace.api.access.roles import ANY_ORGANISATION, Role, check_organisation, check_role, role_in
from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import (
    AlreadyExists,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)

log = logging.getLogger("headrace.access")

KEY_PREFIX = "nvapi-"
FIRST_ADMIN = "admin"
DEFAULT_ROLE: Role = "operator"

_KEY_BYTES = 48  # 64 url-safe characters
_LOOKUP_CHARACTERS = 12
"""72 bits to find a row by; the other 52 characters are the secret."""
_KEY = re.compile(r"nvapi-[A-Za-z0-9_-]{64}")
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_EMAIL_CHARACTERS = 254
_NAMESPACE = uuid.UUID("7b6f8b1e-0f0c-5d0a-9a55-3c1f6a2f4d11")
_TRIES = 8
_MOST_GRACE_SECONDS = 366 * 86400
_MOST_OLD_KEYS = 4
_HASHES_AT_ONCE = 2
_HASHES_WAITING = 64

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Key:
    """A key as it is kept. The key itself is known to its holder only."""

    id: str
    lookup: str
    """The first characters after the prefix; no two keys have the same."""
    hash: str = field(repr=False)
    created: float
    """Seconds since 1970, as are the others."""
    expires: float | None = None


@dataclass(frozen=True, slots=True)
class User:
    """A user with everything that belongs to them: read and written whole."""

    id: str
    """A UUID made of the name."""
    name: str
    created: float
    roles: Mapping[str, Role]
    """By organisation; `*` for all of them."""
    keys: tuple[Key, ...] = ()
    email: str = ""
    tokens_after: float = 0.0
    """Tokens that were issued at this time or before are refused."""
    version: int = 0
    """Counted up by each `UserRows.update_user`."""

    def role_in(self, organisation: str) -> Role | None:
        """Their role there: the one they were given for it, else the one they have everywhere."""
        return role_in(self.roles, organisation)


class UserRows(Protocol):
    """Where users are kept. Each call is one transaction."""

    async def insert_user(self, user: User) -> None:
        """Keep a new user; `AlreadyExists` if the id, the name or a key's look-up is taken."""

    async def update_user(self, user: User) -> bool:
        """Replace a user, if the kept version is still `user.version`, and count it up; False if it is not."""

    async def delete_user(self, user_id: str) -> bool:
        """Remove a user with roles and keys; False if there is none."""

    async def find_user(self, *, id: str = "", name: str = "", lookup: str = "") -> User | None:
        """By the one that is given."""

    async def list_users(self, org: str = "") -> list[User]:
        """By name: all, or those with a role given for this organisation."""


class KeyHasher:
    """Argon2id, in threads of its own: a hash takes tens of milliseconds and 19 MiB, which bounds how many run at once.

    The costs are OWASP's least for argon2id. More buys nothing: a key is 312 random bits, not a person's password.
    """

    def __init__(self, time_cost: int = 2, memory_kib: int = 19456) -> None:
        self._argon2 = PasswordHasher(time_cost=time_cost, memory_cost=memory_kib, parallelism=1)
        self._threads = ThreadPoolExecutor(_HASHES_AT_ONCE, thread_name_prefix="argon2")
        self._waiting = 0
        self._nobody = ""
        """The hash of a key that was thrown away."""

    async def hash(self, key: str) -> str:
        """The hash to keep."""
        return await self._run(self._argon2.hash, key)

    async def matches(self, kept: str | None, key: str) -> bool:
        """Whether a kept hash is that of the key. The same work is done if there is none."""
        if not self._nobody:
            self._nobody = await self.hash(_new_key())
        return await self._run(self._matches, kept, key)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _matches(self, kept: str | None, key: str) -> bool:
        try:
            return self._argon2.verify(kept or self._nobody, key) and kept is not None
        except VerifyMismatchError:
            return False
        except (VerificationError, InvalidHashError):
            log.error("a key's hash in the database is damaged: rotate the keys of users who cannot log in")
            return False

    async def _run(self, deed: Callable[..., _T], *values: str | None) -> _T:
        if self._waiting >= _HASHES_WAITING:
            raise ResourceExhausted("too many logins at once: try again in a few seconds", retry_after_seconds=5.0)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, deed, *values)
        finally:
            self._waiting -= 1


class Users:
    """All users. Changes are safe beside those of other gateways and of the command line."""

    def __init__(self, rows: UserRows, hasher: KeyHasher | None = None, clock: Clock | None = None) -> None:
        self._rows = rows
        self._hasher = hasher or KeyHasher()
        self._clock = clock or SystemClock()

    async def add(self, name: str, organisation: str, role: str = DEFAULT_ROLE, *, email: str = "") -> tuple[User, str]:
        """A new user and their key, which is kept nowhere. `organisation` may be `*`."""
        if not _NAME.fullmatch(name):
            raise InvalidArgument(f"{name[:64]!a} is no name for a user: up to 64 letters, digits and '_.@-'")
        if len(email) > _EMAIL_CHARACTERS or not email.isprintable():
            raise InvalidArgument(f"an email address is at most {_EMAIL_CHARACTERS} characters that can be printed")
        roles = {_organisation(organisation): check_role(role)}
        taken = await self._rows.find_user(name=name)
        if taken is not None:
            raise AlreadyExists(_taken(name))
        kept, key = await self._made()
        now = self._clock.wall()
        # Whoever had this name before had this id, too: their tokens are not the new user's.
        user = User(user_id(name), name, now, roles, (kept,), email, tokens_after=now)
        try:
            await self._rows.insert_user(user)
        except AlreadyExists:
            raise AlreadyExists(_taken(name)) from None
        return user, key

    async def ensure_admin(self) -> str | None:
        """The key of an administrator of everything, made if there is no user at all; None if there is."""
        if await self._rows.list_users():
            return None
        try:
            return (await self.add(FIRST_ADMIN, ANY_ORGANISATION, "admin"))[1]
        except AlreadyExists:
            return None  # another gateway on the same database was quicker, and printed it

    async def list(self, organisation: str = "") -> list[User]:
        """All users, or those of an organisation, by name."""
        return await self._rows.list_users(organisation)

    async def get(self, name: str) -> User:
        """By name."""
        user = await self._rows.find_user(name=name) if _NAME.fullmatch(name) else None
        if user is None:
            raise NotFound(f"there is no user {name[:64]!a}: `headrace users list` shows those there are")
        return user

    async def find(self, user_id: str) -> User | None:
        """By id."""
        return await self._rows.find_user(id=user_id)

    async def grant(self, name: str, organisation: str, role: str) -> User:
        """Give a user a role in an organisation, in place of the one they had there."""
        given = {_organisation(organisation): check_role(role)}
        return await self._change(name, lambda user: replace(user, roles={**user.roles, **given}))

    async def withdraw(self, name: str, organisation: str) -> User:
        """Take a user's role in an organisation away."""

        def without(user: User) -> User:
            if organisation not in user.roles:
                raise NotFound(f"the user {name} has no role of their own in organisation {organisation[:255]!a}")
            return replace(user, roles={org: role for org, role in user.roles.items() if org != organisation})

        return await self._change(name, without)

    async def rotate(self, name: str, grace_seconds: float = 0.0) -> tuple[User, str]:
        """A new key. The old ones go at once, and the tokens with them; or both stay good for `grace_seconds`."""
        if not 0 <= grace_seconds <= _MOST_GRACE_SECONDS:
            raise InvalidArgument("an old key may stay good for 0 seconds to 366 days")
        await self.get(name)
        kept, key = await self._made()

        def rotated(user: User) -> User:
            now = self._clock.wall()
            if not grace_seconds:
                return replace(user, keys=(kept,), tokens_after=now)
            until = now + grace_seconds
            live = (old for old in user.keys if old.expires is None or old.expires > now)
            old = tuple(replace(old, expires=min(until, old.expires or until)) for old in live)
            return replace(user, keys=(*old[-_MOST_OLD_KEYS:], kept))

        return await self._change(name, rotated), key

    async def remove(self, name: str) -> User:
        """Remove a user: keys and tokens are refused from then on. Returns who it was."""
        user = await self.get(name)
        if not await self._rows.delete_user(user.id):
            raise NotFound(f"the user {name} was removed by somebody else meanwhile")
        return user

    async def revoke_tokens(self, name: str) -> User:
        """Refuse every token that the user has now. Keys stay."""
        return await self._change(name, lambda user: replace(user, tokens_after=self._clock.wall()))

    async def by_key(self, key: str) -> tuple[User, Key]:
        """Whose key this is. Takes the same time for a key that nobody has."""
        check_key_form(key)
        user = await self._rows.find_user(lookup=lookup_of(key))
        kept = next((each for each in user.keys if each.lookup == lookup_of(key)), None) if user is not None else None
        matches = await self._hasher.matches(kept.hash if kept is not None else None, key)
        if not matches or user is None or kept is None:
            raise Unauthenticated("Unauthorized: this key is not known here: check it, or ask an admin for a new one")
        if not is_live(kept, self._clock.wall()):
            raise Unauthenticated("Unauthorized: this key was replaced by a newer one: use that, or ask an admin")
        return user, kept

    def close(self) -> None:
        """Let go of the threads."""
        self._hasher.close()

    async def _made(self) -> tuple[Key, str]:
        key = _new_key()
        return Key(uuid.uuid4().hex, lookup_of(key), await self._hasher.hash(key), self._clock.wall()), key

    async def _change(self, name: str, change: Callable[[User], User]) -> User:
        for _ in range(_TRIES):
            changed = change(await self.get(name))
            if await self._rows.update_user(changed):
                return replace(changed, version=changed.version + 1)
        raise Unavailable(f"the user {name} is being changed by others: try again", retry_after_seconds=1.0)


def check_key_form(key: str) -> None:
    """Refuse what cannot be a key, with the reason; nothing secret is needed to tell."""
    if not key.startswith(KEY_PREFIX):
        raise Unauthenticated(
            "Unauthorized: legacy NGC API keys are not accepted: use a personal key, which begins with 'nvapi-'; "
            "`headrace users add` or `headrace users rotate` prints one"
        )
    if not _KEY.fullmatch(key):
        raise Unauthenticated("Unauthorized: the key is incomplete: 'nvapi-' is followed by 64 characters")


def lookup_of(key: str) -> str:
    """By what a key is found."""
    return key[len(KEY_PREFIX) : len(KEY_PREFIX) + _LOOKUP_CHARACTERS]


def is_live(key: Key, now: float) -> bool:
    """Whether a key has not been replaced for good."""
    return key.expires is None or now < key.expires


def user_id(name: str) -> str:
    """The id of who has this name."""
    return str(uuid.uuid5(_NAMESPACE, name))


def _new_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def _organisation(text: str) -> str:
    return text if text == ANY_ORGANISATION else check_organisation(text)


def _taken(name: str) -> str:
    return f"there is a user {name} already: choose another name, or give that one a role in this organisation"
