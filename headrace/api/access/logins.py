# SPDX-License-Identifier: Apache-2.0
"""Who is asking: a login turns a key and an organisation into a token, a request's token or key into a `Principal`.

Called by `gateway`, which makes it all by `open_access`, and by `api/jobs` for each request: `recall` first, which is a look
into a table, and `identify` where that knows nothing. What was found is believed for a second, and then looked at again in
the database: a user who was removed anywhere is out that soon, and the key's hash is not computed again. Failed attempts
are counted by address and by key. Must not know transports, nor tell a caller which of key and user was wrong.
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

from headrace.api.access.audit import AUDIT_FILE, Audit, Outcome
from headrace.api.access.rates import Rates
from headrace.api.access.roles import Principal, check_organisation
from headrace.api.access.settings import RateLimit
from headrace.api.access.table import BucketTable
from headrace.api.access.tokens import SIGNING_KEYS_FILE, Claims, RevokedRows, SigningKeys, Tokens
from headrace.api.access.users import (
    KEY_PREFIX,
    Key,
    KeyHasher,
    User,
    UserRows,
    Users,
    check_key_form,
    is_live,
    lookup_of,
)
from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import HeadraceError, InvalidArgument, ResourceExhausted, Unauthenticated

_ATTEMPTS = RateLimit(120, 60.0)
_FAILURES = RateLimit(20, 60.0)
_KEY_FAILURES = RateLimit(10, 60.0, by="key")
_KNOWN = 4096
_BUCKET_SETS = 4096
_BASIC_USER = "$oauthtoken"
_MOST_BASIC_CHARACTERS = 1024
_MISSING = "Unauthorized: missing token"
_GONE = "Unauthorized: the token was revoked, or its user removed: log in again"


@dataclass(frozen=True, slots=True)
class LoginLimits:
    """How often a key may be tried, since each try costs a hash."""

    attempts: RateLimit = _ATTEMPTS
    """From one address, whatever comes of them."""
    failures: RateLimit = _FAILURES
    """From one address."""
    key_failures: RateLimit = _KEY_FAILURES
    """With keys of the same beginning, from anywhere."""


@dataclass(frozen=True, slots=True)
class Login:
    """What a login is answered."""

    user_id: str
    token: str
    user_name: str
    user_email: str


@dataclass(frozen=True, slots=True)
class _Seen:
    """A state of the database."""

    changes: int | None
    """How many there had been; None if nobody counts."""
    believed_until: float
    """By the monotonic clock: then it is looked at again."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A token or key that was found good, and by what it may cease to be."""

    principal: Principal
    proof: Claims | Key
    seen: _Seen
    """When that was."""


class AccessRows(UserRows, RevokedRows, Protocol):
    """All that access keeps in a database."""


@runtime_checkable
class CountedRows(Protocol):
    """Rows that know whether they changed, which saves looking at each user again."""

    async def access_changes(self) -> int:
        """Another number after each change of a user or a revocation, by whomever."""


class Authenticator:
    """For one event loop."""

    def __init__(
        self,
        users: Users,
        tokens: Tokens,
        audit: Audit,
        *,
        counted: CountedRows | None = None,
        limits: LoginLimits | None = None,
        believed_seconds: float = 1.0,
        clock: Clock | None = None,
    ) -> None:
        self._users = users
        self._tokens = tokens
        self._audit = audit
        self._counted = counted
        self._believed_seconds = believed_seconds
        self._clock = clock or SystemClock()
        limits = limits or LoginLimits()
        self._buckets = BucketTable(sets=_BUCKET_SETS)
        self._rates = Rates((limits.attempts, limits.failures, limits.key_failures), self._buckets)
        self._known: dict[str, _Known] = {}
        self._asked: dict[str, asyncio.Task[Principal]] = {}
        self._seen = _Seen(None, -math.inf)
        self._looking = asyncio.Lock()

    def recall(self, token: str, now: float) -> Principal | None:
        """Whose token or key this is, if that was found out within the last second. `now` is the monotonic clock's."""
        known = self._known.get(token)
        return known.principal if known is not None and now < known.seen.believed_until else None

    async def identify(self, token: str, address: str) -> Principal:
        """Whose token or key this is. Many requests that ask for the same at once cost one look."""
        asked = self._asked.get(token)
        if asked is None:
            asked = self._asked[token] = asyncio.create_task(self._identify(token, address))
            asked.add_done_callback(self._forgetting(token))
        return await asyncio.shield(asked)  # others may wait for it, too

    async def login(self, ngc_key: object, ngc_org_name: object, address: str) -> Login:
        """A token for the holder of a key, in an organisation they have a role in."""
        organisation = ngc_org_name if isinstance(ngc_org_name, str) else ""
        try:
            if not organisation:
                raise Unauthenticated("Unauthorized: ngc_org_name is missing: say for which organisation the token is")
            check_organisation(organisation)
            if not isinstance(ngc_key, str) or not ngc_key.strip():
                raise Unauthenticated(
                    "Unauthorized: ngc_key is missing: give your personal key, which begins with 'nvapi-'"
                )
            seen = await self._look()
            user, _ = await self._by_key(ngc_key.strip(), address)
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
        self._remember(token, _Known(principal, claims, seen))
        self._audit.record("login", "allowed", principal, organisation, claims.token_id, address)
        return Login(user.id, token, user.name, user.email)

    async def logout(self, token: str, address: str) -> None:
        """Revoke a token."""
        if token.startswith(KEY_PREFIX):
            raise InvalidArgument("this is a key, not a token: `headrace users rotate` replaces it")
        principal = await self.identify(token, address)
        await self._tokens.revoke(principal.token_id, principal.expires)
        self._known.pop(token, None)
        organisation = next(iter(principal.roles), "")
        self._audit.record("logout", "allowed", principal, organisation, principal.token_id, address)

    def forget(self) -> None:
        """Look again at everybody, at their next request."""
        self._known.clear()

    def close(self) -> None:
        """Let go of what is counted."""
        self._rates.close()

    async def _identify(self, token: str, address: str) -> Principal:
        known = self._known.pop(token, None)
        try:
            seen = await self._look()  # first: what changes meanwhile is seen the next time
            if known is not None:
                proof: Claims | Key = known.proof
                if seen.changes is not None and seen.changes == known.seen.changes and self._is_in_time(proof):
                    self._remember(token, _Known(known.principal, proof, seen))
                    return known.principal
                user = await self._users.find(known.principal.user_id)
            elif token.startswith(KEY_PREFIX):
                user, proof = await self._by_key(token, address)
            else:
                proof = self._tokens.verify(token)
                user = await self._users.find(proof.user_id)
            principal, proof = await self._still_good(user, proof)
        except HeadraceError as error:
            principal_then = known.principal if known is not None else None
            self._audit.record("authenticate", _outcome(error), principal_then, "", "", address, error.message)
            raise
        self._remember(token, _Known(principal, proof, seen))
        return principal

    async def _look(self) -> _Seen:
        """How the database stands, or stood within the last second."""
        async with self._looking:
            now = self._clock.monotonic()
            if self._counted is None:
                return _Seen(None, now + self._believed_seconds)
            if now >= self._seen.believed_until:
                self._seen = _Seen(await self._counted.access_changes(), now + self._believed_seconds)
            return self._seen

    def _is_in_time(self, proof: Claims | Key) -> bool:
        """What no database tells."""
        return is_live(proof, self._clock.wall()) if isinstance(proof, Key) else self._tokens.is_in_time(proof)

    async def _still_good(self, user: User | None, proof: Claims | Key) -> tuple[Principal, Claims | Key]:
        """With the proof as it is now: a key may have got an end."""
        if isinstance(proof, Key):
            kept = next((key for key in user.keys if key.id == proof.id), None) if user is not None else None
            if user is None or kept is None or kept.hash != proof.hash or not is_live(kept, self._clock.wall()):
                raise Unauthenticated(
                    "Unauthorized: this key was replaced or removed: use a newer one, or ask an admin"
                )
            return Principal(user.id, user.name, user.email, dict(user.roles), expires=kept.expires), kept
        if user is None or proof.issued <= user.tokens_after or not await self._tokens.is_good(proof):
            raise Unauthenticated(_GONE)
        return _principal(user, proof), proof

    async def _by_key(self, key: str, address: str) -> tuple[User, Key]:
        check_key_form(key)
        refund = self._charge(key, address)
        try:
            found = await self._users.by_key(key)
        except Unauthenticated:
            raise
        except HeadraceError:
            refund()  # not the caller's failure
            raise
        refund()
        return found

    def _charge(self, key: str, address: str) -> Callable[[], None]:
        """Count a try before it is made; what is returned takes it back from what counts failures."""
        where = address[:128].encode("utf-8", "replace")
        subjects = (b"0" + where, b"1" + where, b"2" + lookup_of(key).encode())
        rule, owes = self._rates.take(subjects, self._clock.monotonic())
        if owes < 0:
            wait = -owes / 1e9
            whose = "this key" if rule.by == "key" else "this address"
            raise ResourceExhausted(f"too many logins with {whose}: wait {wait:.3g} s", retry_after_seconds=wait)

        def refund() -> None:
            for number in (1, 2):
                self._buckets.refund(subjects[number], self._rates.rules[number].interval)

        return refund

    def _remember(self, token: str, known: _Known) -> None:
        # Who has neither token nor key can put nothing here.
        if len(self._known) >= _KNOWN:
            del self._known[next(iter(self._known))]
        self._known[token] = known

    def _forgetting(self, token: str) -> Callable[[asyncio.Task[Principal]], None]:
        def forget(task: asyncio.Task[Principal]) -> None:
            self._asked.pop(token, None)
            if not task.cancelled():
                task.exception()  # seen, also where everybody who asked has gone away

        return forget


def credential(authorization: str | None) -> str:
    """The token or key of an `Authorization` field: `Bearer TOKEN`, or `Basic` with `$oauthtoken` and `ORG,KEY`."""
    scheme, _, value = (authorization or "").strip().partition(" ")
    value = value.strip()
    if scheme.lower() == "bearer" and value:
        return value
    if scheme.lower() == "basic" and len(value) <= _MOST_BASIC_CHARACTERS:
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
    """By the role that the user has now, which may not be the one they had when the token was made."""
    role = user.role_in(claims.organisation)
    if role is None:
        raise Unauthenticated("Unauthorized: the token's user has no role in its organisation any more: ask an admin")
    roles = {claims.organisation: role}
    return Principal(user.id, user.name, user.email, roles, claims.token_id, claims.expires)


@dataclass(frozen=True, slots=True)
class Access:
    """All of it, for one gateway."""

    users: Users
    tokens: Tokens
    signing_keys: SigningKeys
    authenticator: Authenticator
    audit: Audit

    def close(self) -> None:
        """Let go of files and threads."""
        self.authenticator.close()
        self.users.close()
        self.audit.close()


def open_access(
    data_dir: Path,
    rows: AccessRows,
    *,
    key_file: Path | None = None,
    hasher: KeyHasher | None = None,
    limits: LoginLimits | None = None,
    clock: Clock | None = None,
) -> Access:
    """What a data folder and a database make: the folder gets its signing keys and the audit log."""
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    signing_keys = SigningKeys(data_dir / SIGNING_KEYS_FILE, key_file, clock)
    users = Users(rows, hasher, clock)
    tokens = Tokens(signing_keys, rows, clock)
    audit = Audit(data_dir / AUDIT_FILE, clock=clock)
    counted = rows if isinstance(rows, CountedRows) else None
    authenticator = Authenticator(users, tokens, audit, counted=counted, limits=limits, clock=clock)
    return Access(users, tokens, signing_keys, authenticator, audit)
