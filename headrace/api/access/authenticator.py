# SPDX-License-Identifier: Apache-2.0
"""Authentication for the job API: exchange a key for a token, and a request's token or key for a `Principal`.

The gateway opens it (`open_access`). The job API calls `cached_principal` for each request, a dictionary lookup, and
`identify` on a miss. A result is cached for a second and then checked against the database again without computing the
key's hash, so a removed user loses access within a second. Failed attempts are rate-limited by address and by key.
Errors must not reveal whether the key or the user was wrong.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from headrace.api.access.audit import AUDIT_FILE, AuditLog, Outcome
from headrace.api.access.rate_limits import BucketTable, RateLimiter
from headrace.api.access.roles import Principal, check_organisation
from headrace.api.access.settings import RateLimit
from headrace.api.access.tokens import SIGNING_KEYS_FILE, Claims, RevocationStore, SigningKeys, Tokens
from headrace.api.access.users import (
    KEY_PREFIX,
    KeyHasher,
    User,
    UserKey,
    Users,
    UserStore,
    check_key_form,
    is_live,
    lookup_of,
)
from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import HeadraceError, InvalidArgument, ResourceExhausted, Unauthenticated

_ATTEMPTS = RateLimit(120, 60.0)
_FAILURES = RateLimit(20, 60.0)
_KEY_FAILURES = RateLimit(10, 60.0, by="key")
_CACHED_LOGINS = 4096
_BUCKET_SETS = 4096
_BASIC_USER = "$oauthtoken"
_MAX_BASIC_CHARACTERS = 1024
_MISSING = "Unauthorized: missing token"
_REVOKED = "Unauthorized: the token was revoked, or its user removed: log in again"


@dataclass(frozen=True, slots=True)
class LoginLimits:
    """How often a client may try a key: each attempt costs a hash."""

    attempts: RateLimit = _ATTEMPTS
    """From one address, successful or not."""
    failures: RateLimit = _FAILURES
    """From one address."""
    key_failures: RateLimit = _KEY_FAILURES
    """With keys of the same lookup prefix, from any address."""


@dataclass(frozen=True, slots=True)
class Login:
    """The answer to a login."""

    user_id: str
    token: str
    user_name: str
    user_email: str


@dataclass(frozen=True, slots=True)
class _DatabaseVersion:
    """A version of the database's users and revocations."""

    changes: int | None
    """The change counter; None if the store has none."""
    fresh_until: float
    """Monotonic time after which it is read again."""


@dataclass(frozen=True, slots=True)
class _CachedLogin:
    """An authenticated token or key."""

    principal: Principal
    proof: Claims | UserKey
    version: _DatabaseVersion
    """The database version that it was checked against."""


class AccessStore(UserStore, RevocationStore, Protocol):
    """The users and revocations of a database."""


@runtime_checkable
class ChangeCounter(Protocol):
    """A store that counts its changes, which saves reading each user again."""

    async def access_changes(self) -> int:
        """Return a number that changes with each change of a user and each revocation, by any process."""


class Authenticator:
    """Authenticates logins and requests, in one event loop."""

    def __init__(
        self,
        users: Users,
        tokens: Tokens,
        audit: AuditLog,
        *,
        change_counter: ChangeCounter | None = None,
        limits: LoginLimits | None = None,
        cache_seconds: float = 1.0,
        clock: Clock | None = None,
    ) -> None:
        self._users = users
        self._tokens = tokens
        self._audit = audit
        self._change_counter = change_counter
        self._cache_seconds = cache_seconds
        self._clock = clock or SystemClock()
        limits = limits or LoginLimits()
        self._buckets = BucketTable(sets=_BUCKET_SETS)
        self._rates = RateLimiter((limits.attempts, limits.failures, limits.key_failures), self._buckets)
        self._cache: dict[str, _CachedLogin] = {}
        self._lookups: dict[str, asyncio.Task[Principal]] = {}
        self._last_version = _DatabaseVersion(None, -math.inf)
        self._version_lock = asyncio.Lock()

    def cached_principal(self, token: str, now: float) -> Principal | None:
        """Return the principal of a token or key that was authenticated within the last second. `now` is monotonic."""
        cached = self._cache.get(token)
        return cached.principal if cached is not None and now < cached.version.fresh_until else None

    async def identify(self, token: str, address: str) -> Principal:
        """Return the principal of a token or key. Concurrent requests with the same token share one lookup."""
        task = self._lookups.get(token)
        if task is None:
            task = self._lookups[token] = asyncio.create_task(self._identify(token, address))
            task.add_done_callback(self._lookup_done(token))
        return await asyncio.shield(task)  # other requests may wait for it

    async def login(self, ngc_key: object, ngc_org_name: object, address: str) -> Login:
        """Return a token for the user of a key in an organisation where the user has a role."""
        organisation = ngc_org_name if isinstance(ngc_org_name, str) else ""
        try:
            if not organisation:
                raise Unauthenticated("Unauthorized: ngc_org_name is missing: give the organisation of the token")
            check_organisation(organisation)
            if not isinstance(ngc_key, str) or not ngc_key.strip():
                raise Unauthenticated(
                    "Unauthorized: ngc_key is missing: give your personal key, which begins with 'nvapi-'"
                )
            version = await self._database_version()
            user, _ = await self._authenticate_key(ngc_key.strip(), address)
            role = user.role_in(organisation)
            if role is None:
                raise Unauthenticated(
                    f"Unauthorized: the key's user has no role in organisation {organisation[:64]!a}: check ngc_org_name, "
                    "or ask an admin for a role in it"
                )
        except HeadraceError as error:
            self._audit.record("login", _outcome(error), None, organisation, "", address, error.message)
            raise
        token, claims = await self._tokens.issue(user, organisation, role)
        principal = _principal(user, claims)
        self._cache_login(token, _CachedLogin(principal, claims, version))
        self._audit.record("login", "allowed", principal, organisation, claims.token_id, address)
        return Login(user.id, token, user.name, user.email)

    async def logout(self, token: str, address: str) -> None:
        """Revoke a token."""
        if token.startswith(KEY_PREFIX):
            raise InvalidArgument("this is a key, not a token: `headrace users rotate` replaces it")
        principal = await self.identify(token, address)
        await self._tokens.revoke(principal.token_id, principal.expires)
        self._cache.pop(token, None)
        organisation = next(iter(principal.roles), "")
        self._audit.record("logout", "allowed", principal, organisation, principal.token_id, address)

    def close(self) -> None:
        """Close the table of rate limits."""
        self._rates.close()

    async def _identify(self, token: str, address: str) -> Principal:
        cached = self._cache.pop(token, None)
        try:
            version = await self._database_version()  # first: a later change is found the next time
            if cached is not None:
                proof: Claims | UserKey = cached.proof
                if (
                    version.changes is not None
                    and version.changes == cached.version.changes
                    and self._is_current(proof)
                ):
                    self._cache_login(token, _CachedLogin(cached.principal, proof, version))
                    return cached.principal
                user = await self._users.find(cached.principal.user_id)
            elif token.startswith(KEY_PREFIX):
                user, proof = await self._authenticate_key(token, address)
            else:
                proof = self._tokens.verify(token)
                user = await self._users.find(proof.user_id)
            principal, proof = await self._revalidate(user, proof)
        except HeadraceError as error:
            previous = cached.principal if cached is not None else None
            self._audit.record("authenticate", _outcome(error), previous, "", "", address, error.message)
            raise
        self._cache_login(token, _CachedLogin(principal, proof, version))
        return principal

    async def _database_version(self) -> _DatabaseVersion:
        """Return the version of the database, at most a second old."""
        async with self._version_lock:
            now = self._clock.monotonic()
            if self._change_counter is None:
                return _DatabaseVersion(None, now + self._cache_seconds)
            if now >= self._last_version.fresh_until:
                self._last_version = _DatabaseVersion(
                    await self._change_counter.access_changes(), now + self._cache_seconds
                )
            return self._last_version

    def _is_current(self, proof: Claims | UserKey) -> bool:
        """Return whether a token or key has not expired."""
        return is_live(proof, self._clock.wall()) if isinstance(proof, UserKey) else self._tokens.is_current(proof)

    async def _revalidate(self, user: User | None, proof: Claims | UserKey) -> tuple[Principal, Claims | UserKey]:
        """Check a token or key against the user's record; return it as stored now: a key may have got an expiry."""
        if isinstance(proof, UserKey):
            stored = next((key for key in user.keys if key.id == proof.id), None) if user is not None else None
            if user is None or stored is None or stored.hash != proof.hash or not is_live(stored, self._clock.wall()):
                raise Unauthenticated(
                    "Unauthorized: this key was replaced or removed: use a newer one, or ask an admin"
                )
            return Principal(user.id, user.name, user.email, dict(user.roles), expires=stored.expires), stored
        if user is None or proof.issued <= user.tokens_after or not await self._tokens.is_valid(proof):
            raise Unauthenticated(_REVOKED)
        return _principal(user, proof), proof

    async def _authenticate_key(self, key: str, address: str) -> tuple[User, UserKey]:
        check_key_form(key)
        refund = self._charge(key, address)
        try:
            user_and_key = await self._users.by_key(key)
        except Unauthenticated:
            raise
        except HeadraceError:
            refund()  # not the caller's failure
            raise
        refund()
        return user_and_key

    def _charge(self, key: str, address: str) -> Callable[[], None]:
        """Count an attempt in advance; the returned function removes it from the failure counts."""
        source = address[:128].encode("utf-8", "replace")
        subjects = (b"0" + source, b"1" + source, b"2" + lookup_of(key).encode())
        rule, debt = self._rates.take(subjects, self._clock.monotonic())
        if debt < 0:
            wait = -debt / 1e9
            origin = "with this key" if rule.by == "key" else "from this address"
            raise ResourceExhausted(f"too many logins {origin}: wait {wait:.3g} s", retry_after_seconds=wait)

        def refund() -> None:
            for number in (1, 2):
                self._buckets.refund(subjects[number], self._rates.rules[number].interval)

        return refund

    def _cache_login(self, token: str, cached: _CachedLogin) -> None:
        # Only valid tokens and keys get here.
        if len(self._cache) >= _CACHED_LOGINS:
            del self._cache[next(iter(self._cache))]
        self._cache[token] = cached

    def _lookup_done(self, token: str) -> Callable[[asyncio.Task[Principal]], None]:
        def done(task: asyncio.Task[Principal]) -> None:
            self._lookups.pop(token, None)
            if not task.cancelled():
                task.exception()  # mark it as retrieved: perhaps no request waits any more

        return done


def parse_credential(authorization: str | None) -> str:
    """Return the token or key of an `Authorization` field: `Bearer TOKEN`, or `Basic` with `$oauthtoken` and `ORG,KEY`."""
    scheme, _, value = (authorization or "").strip().partition(" ")
    value = value.strip()
    if scheme.lower() == "bearer" and value:
        return value
    if scheme.lower() == "basic" and len(value) <= _MAX_BASIC_CHARACTERS:
        try:
            name, _, password = base64.b64decode(value, validate=True).decode().partition(":")
        except (binascii.Error, ValueError):
            raise Unauthenticated(_MISSING) from None
        key = password.rpartition(",")[2]
        if name == _BASIC_USER and key:
            return key
    raise Unauthenticated(_MISSING)


def _outcome(error: HeadraceError) -> Outcome:
    return "denied" if isinstance(error, Unauthenticated | ResourceExhausted | InvalidArgument) else "failed"


def _principal(user: User, claims: Claims) -> Principal:
    """Return the principal with the user's current role, which may differ from the one in the token."""
    role = user.role_in(claims.organisation)
    if role is None:
        raise Unauthenticated("Unauthorized: the token's user no longer has a role in its organisation: ask an admin")
    roles = {claims.organisation: role}
    return Principal(user.id, user.name, user.email, roles, claims.token_id, claims.expires)


@dataclass(frozen=True, slots=True)
class Access:
    """The access control of one gateway."""

    users: Users
    tokens: Tokens
    signing_keys: SigningKeys
    authenticator: Authenticator
    audit: AuditLog

    def close(self) -> None:
        """Close files and stop threads."""
        self.authenticator.close()
        self.users.close()
        self.audit.close()


def open_access(
    data_dir: Path,
    store: AccessStore,
    *,
    key_file: Path | None = None,
    hasher: KeyHasher | None = None,
    limits: LoginLimits | None = None,
    clock: Clock | None = None,
) -> Access:
    """Open access control over a data folder, for signing keys and the audit log, and a database."""
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    signing_keys = SigningKeys(data_dir / SIGNING_KEYS_FILE, key_file, clock)
    users = Users(store, hasher, clock)
    tokens = Tokens(signing_keys, store, clock)
    audit = AuditLog(data_dir / AUDIT_FILE, clock=clock)
    change_counter = store if isinstance(store, ChangeCounter) else None
    authenticator = Authenticator(users, tokens, audit, change_counter=change_counter, limits=limits, clock=clock)
    return Access(users, tokens, signing_keys, authenticator, audit)
