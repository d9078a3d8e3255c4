# SPDX-License-Identifier: Apache-2.0
"""Users of the job API and their keys: create, rotate, remove, and find the user of a key.

Used by the authenticator, `headrace users` and, for the first administrator, the gateway. `jobs.store` stores users
behind `UserStore`. A key is shown once and stored as its argon2id hash; its first characters are stored in plain text,
so that every lookup reads one row and computes one hash. Never log keys.
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
"""72 bits to find a row; the other 52 characters are the secret."""
_KEY = re.compile(r"nvapi-[A-Za-z0-9_-]{64}")
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_EMAIL_CHARACTERS = 254
_NAMESPACE = uuid.UUID("7b6f8b1e-0f0c-5d0a-9a55-3c1f6a2f4d11")
_UPDATE_ATTEMPTS = 8
_MAX_GRACE_SECONDS = 366 * 86400
_MAX_OLD_KEYS = 4
_HASH_THREADS = 2
_MAX_WAITING_HASHES = 64

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class UserKey:
    """A stored key. Only its holder knows the key itself."""

    id: str
    lookup: str
    """The first characters after the prefix; unique."""
    hash: str = field(repr=False)
    created: float
    """Seconds since 1970, as all times here."""
    expires: float | None = None


@dataclass(frozen=True, slots=True)
class User:
    """A user with roles and keys, read and written as one record."""

    id: str
    """A UUID derived from the name."""
    name: str
    created: float
    roles: Mapping[str, Role]
    """By organisation; `*` for all organisations."""
    keys: tuple[UserKey, ...] = ()
    email: str = ""
    tokens_after: float = 0.0
    """Tokens issued at this time or earlier are refused."""
    version: int = 0
    """Incremented by each `UserStore.update_user`."""

    def role_in(self, organisation: str) -> Role | None:
        """Return the role in an organisation."""
        return role_in(self.roles, organisation)


class UserStore(Protocol):
    """Stores users. Each call is one transaction."""

    async def insert_user(self, user: User) -> None:
        """Insert a new user; raise `AlreadyExists` if the id, the name or a key's lookup is taken."""

    async def update_user(self, user: User) -> bool:
        """Replace a user and increment the version if the stored one is still `user.version`; else return False."""

    async def delete_user(self, user_id: str) -> bool:
        """Remove a user with roles and keys; return False if there is none."""

    async def find_user(self, *, id: str = "", name: str = "", lookup: str = "") -> User | None:
        """Return the user with the given id, name or key lookup."""

    async def list_users(self, org: str = "") -> list[User]:
        """Return all users, or those with a role in an organisation, sorted by name."""


class KeyHasher:
    """Hashes keys with argon2id in threads of its own: a hash takes tens of milliseconds and 19 MiB.

    The costs are OWASP's minimum for argon2id. A key is 312 random bits, not a password, so higher costs gain nothing.
    """

    def __init__(self, time_cost: int = 2, memory_kib: int = 19456) -> None:
        self._argon2 = PasswordHasher(time_cost=time_cost, memory_cost=memory_kib, parallelism=1)
        self._threads = ThreadPoolExecutor(_HASH_THREADS, thread_name_prefix="argon2")
        self._waiting = 0
        self._dummy_hash = ""
        """The hash of a discarded key, verified when there is no stored hash."""

    async def hash(self, key: str) -> str:
        """Return the hash to store."""
        return await self._run(self._argon2.hash, key)

    async def matches(self, stored: str | None, key: str) -> bool:
        """Return whether a stored hash is that of the key. Does the same work if there is none."""
        if not self._dummy_hash:
            self._dummy_hash = await self.hash(_new_key())
        return await self._run(self._matches, stored, key)

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _matches(self, stored: str | None, key: str) -> bool:
        try:
            return self._argon2.verify(stored or self._dummy_hash, key) and stored is not None
        except VerifyMismatchError:
            return False
        except (VerificationError, InvalidHashError):
            log.error("the hash of a key in the database is damaged: rotate the keys of users who cannot log in")
            return False

    async def _run(self, function: Callable[..., _T], *values: str | None) -> _T:
        if self._waiting >= _MAX_WAITING_HASHES:
            raise ResourceExhausted("too many logins at once: try again in a few seconds", retry_after_seconds=5.0)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function, *values)
        finally:
            self._waiting -= 1


class Users:
    """Manages users. Safe while other gateways and the command line change the same users."""

    def __init__(self, store: UserStore, hasher: KeyHasher | None = None, clock: Clock | None = None) -> None:
        self._store = store
        self._hasher = hasher or KeyHasher()
        self._clock = clock or SystemClock()

    async def add(self, name: str, organisation: str, role: str = DEFAULT_ROLE, *, email: str = "") -> tuple[User, str]:
        """Create a user; return it with its key, which is not stored. `organisation` may be `*`."""
        if not _NAME.fullmatch(name):
            raise InvalidArgument(f"{name[:64]!a} is not a valid user name: use up to 64 letters, digits and '_.@-'")
        if len(email) > _EMAIL_CHARACTERS or not email.isprintable():
            raise InvalidArgument(f"an email address has at most {_EMAIL_CHARACTERS} printable characters")
        roles = {_organisation(organisation): check_role(role)}
        existing = await self._store.find_user(name=name)
        if existing is not None:
            raise AlreadyExists(_taken_message(name))
        stored, key = await self._create_key()
        now = self._clock.wall()
        # An earlier user of this name had the same id: their tokens must not become valid again.
        user = User(user_id(name), name, now, roles, (stored,), email, tokens_after=now)
        try:
            await self._store.insert_user(user)
        except AlreadyExists:
            raise AlreadyExists(_taken_message(name)) from None
        return user, key

    async def ensure_admin(self) -> str | None:
        """Create an administrator of all organisations if there is no user; return the key, or None if there are users."""
        if await self._store.list_users():
            return None
        try:
            return (await self.add(FIRST_ADMIN, ANY_ORGANISATION, "admin"))[1]
        except AlreadyExists:
            return None  # another gateway on the same database was faster and printed the key

    async def list(self, organisation: str = "") -> list[User]:
        """Return all users, or those of an organisation, sorted by name."""
        return await self._store.list_users(organisation)

    async def get(self, name: str) -> User:
        """Return a user by name; raise `NotFound`."""
        user = await self._store.find_user(name=name) if _NAME.fullmatch(name) else None
        if user is None:
            raise NotFound(f"there is no user {name[:64]!a}: `headrace users list` shows the users")
        return user

    async def find(self, user_id: str) -> User | None:
        """Return a user by id."""
        return await self._store.find_user(id=user_id)

    async def grant(self, name: str, organisation: str, role: str) -> User:
        """Give a user a role in an organisation, replacing an earlier one."""
        granted = {_organisation(organisation): check_role(role)}
        return await self._change(name, lambda user: replace(user, roles={**user.roles, **granted}))

    async def withdraw(self, name: str, organisation: str) -> User:
        """Remove a user's role in an organisation."""

        def remove_role(user: User) -> User:
            if organisation not in user.roles:
                raise NotFound(f"the user {name} has no role of their own in organisation {organisation[:255]!a}")
            return replace(user, roles={org: role for org, role in user.roles.items() if org != organisation})

        return await self._change(name, remove_role)

    async def rotate(self, name: str, grace_seconds: float = 0.0) -> tuple[User, str]:
        """Create a new key. Old keys and tokens become invalid at once, or stay valid for `grace_seconds`."""
        if not 0 <= grace_seconds <= _MAX_GRACE_SECONDS:
            raise InvalidArgument("an old key can stay valid for 0 seconds to 366 days")
        await self.get(name)
        stored, key = await self._create_key()

        def rotate_keys(user: User) -> User:
            now = self._clock.wall()
            if not grace_seconds:
                return replace(user, keys=(stored,), tokens_after=now)
            until = now + grace_seconds
            live = (old for old in user.keys if old.expires is None or old.expires > now)
            old = tuple(replace(old, expires=min(until, old.expires or until)) for old in live)
            return replace(user, keys=(*old[-_MAX_OLD_KEYS:], stored))

        return await self._change(name, rotate_keys), key

    async def remove(self, name: str) -> User:
        """Remove a user and return it. Its keys and tokens are refused from now on."""
        user = await self.get(name)
        if not await self._store.delete_user(user.id):
            raise NotFound(f"the user {name} has already been removed")
        return user

    async def revoke_tokens(self, name: str) -> User:
        """Revoke all current tokens of a user. Keys stay valid."""
        return await self._change(name, lambda user: replace(user, tokens_after=self._clock.wall()))

    async def by_key(self, key: str) -> tuple[User, UserKey]:
        """Return the user of a key. Takes the same time for an unknown key."""
        check_key_form(key)
        user = await self._store.find_user(lookup=lookup_of(key))
        keys = user.keys if user is not None else ()
        stored = next((candidate for candidate in keys if candidate.lookup == lookup_of(key)), None)
        matches = await self._hasher.matches(stored.hash if stored is not None else None, key)
        if not matches or user is None or stored is None:
            raise Unauthenticated("Unauthorized: unknown key: check it, or ask an admin for a new one")
        if not is_live(stored, self._clock.wall()):
            raise Unauthenticated("Unauthorized: this key was replaced by a newer one: use that, or ask an admin")
        return user, stored

    def close(self) -> None:
        """Stop the threads."""
        self._hasher.close()

    async def _create_key(self) -> tuple[UserKey, str]:
        key = _new_key()
        return UserKey(uuid.uuid4().hex, lookup_of(key), await self._hasher.hash(key), self._clock.wall()), key

    async def _change(self, name: str, change: Callable[[User], User]) -> User:
        for _ in range(_UPDATE_ATTEMPTS):
            changed = change(await self.get(name))
            if await self._store.update_user(changed):
                return replace(changed, version=changed.version + 1)
        raise Unavailable(f"other processes are changing the user {name}: try again", retry_after_seconds=1.0)


def check_key_form(key: str) -> None:
    """Raise, with the reason, for a string that cannot be a key."""
    if not key.startswith(KEY_PREFIX):
        raise Unauthenticated(
            "Unauthorized: legacy NGC API keys are not accepted: use a personal key, which begins with 'nvapi-'; "
            "`headrace users add` or `headrace users rotate` prints one"
        )
    if not _KEY.fullmatch(key):
        raise Unauthenticated("Unauthorized: the key is incomplete: 'nvapi-' is followed by 64 characters")


def lookup_of(key: str) -> str:
    """Return the part of a key by which it is found."""
    return key[len(KEY_PREFIX) : len(KEY_PREFIX) + _LOOKUP_CHARACTERS]


def is_live(key: UserKey, now: float) -> bool:
    """Return whether a key has not expired."""
    return key.expires is None or now < key.expires


def user_id(name: str) -> str:
    """Return the id of the user with this name."""
    return str(uuid.uuid5(_NAMESPACE, name))


def _new_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def _organisation(text: str) -> str:
    return text if text == ANY_ORGANISATION else check_organisation(text)


def _taken_message(name: str) -> str:
    return f"the user {name} already exists: choose another name, or give that user a role in this organisation"
