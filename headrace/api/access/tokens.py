# SPDX-License-Identifier: Apache-2.0
"""Bearer tokens: JSON Web Tokens that say who, in which organisation, until when; and the keys that sign them.

Called by `logins`, and by `headrace users` to rotate what signs. Signing keys live in one file of the data folder, made at
first start (HS256), or in a PEM file (RS256 or EdDSA, by the kind of key). Each has an id, and which algorithm a token may
claim is decided by the key, never by the token. Whether a token's user still exists is not known here: `logins` asks.

    signing-keys.json: {"keys": [{"kid": "...", "alg": "HS256", "secret": "...", "created": 0.0, "retired": null}]}
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import secrets
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey

from headrace.api.access.roles import ROLES, Role
from headrace.api.access.users import User
from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument, Unauthenticated

log = logging.getLogger("headrace.access")

Algorithm = Literal["HS256", "RS256", "EdDSA"]

SIGNING_KEYS_FILE = "signing-keys.json"
LIFETIME_SECONDS = 86400.0
RENEWED_SECONDS = 43200.0
"""A login gets the token of the last one, unless that ends sooner than this."""
SKEW_SECONDS = 60.0
"""How far the clocks of two gateways may be apart."""
MOST_CHARACTERS = 4096

_ISSUER = "headrace"
_KID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SECRET_BYTES = 64
_LEAST_SECRET_BYTES = 32
_LEAST_RSA_BITS = 2048
_PUBLIC: Mapping[str, type] = {"RS256": RSAPublicKey, "EdDSA": Ed25519PublicKey}
_MOST_FILE_BYTES = 1 << 20
_REUSED = 4096
_TICK = 1e-6
_MOST_TIME = 1e12
_UNVERIFIED: Any = dict.fromkeys(("verify_exp", "verify_iat", "verify_nbf", "verify_aud", "verify_iss"), False)
"""Of the claims, which are checked here: by our clock, and after the signature."""
_FOREIGN = "Unauthorized: this is no token of this server: log in again"


@dataclass(frozen=True, slots=True)
class SigningKey:
    """One key. Who cannot sign with it (`private` is None) can verify."""

    kid: str
    algorithm: Algorithm
    public: Any = field(repr=False)
    """What verifies: for HS256 the secret."""
    private: Any = field(repr=False)
    created: float
    retired: float | None = None


@dataclass(frozen=True, slots=True)
class Claims:
    """What a token says, once its signature and times are found good."""

    user_id: str
    organisation: str
    role: Role
    token_id: str
    kid: str
    issued: float
    expires: float


class RevokedRows(Protocol):
    """Where revoked tokens are kept, until they would have expired."""

    async def revoke_token(self, jti: str, expires: float) -> None:
        """Keep one; again does nothing."""

    async def is_token_revoked(self, jti: str) -> bool:
        """Whether it was."""


class SigningKeys:
    """The keys of one data folder; other processes may rotate them."""

    def __init__(self, path: Path, key_file: Path | None = None, clock: Clock | None = None) -> None:
        self._path = path
        self._key_file = key_file
        self._clock = clock or SystemClock()
        self._keys: dict[str, SigningKey]
        self._signs: SigningKey
        self._seen: tuple[object, ...]
        with _locked(path):
            self._settle()

    @property
    def current(self) -> SigningKey:
        """What signs new tokens."""
        self._look_again()
        return self._signs

    def find(self, kid: str) -> SigningKey | None:
        """The key of a token, also one that no longer signs."""
        self._look_again()
        return self._keys.get(kid)

    def rotate(self, *, keep_old: bool = True) -> str:
        """A new HS256 key, whose id is returned. Tokens of the old ones stay good to their end, unless those are dropped."""
        if self._key_file is not None:
            raise FailedPrecondition(f"tokens are signed with {self._key_file}: put another key into that file")
        with _locked(self._path):
            self._settle(_new_secret(self._clock.wall()), keep_old=keep_old)
        return self._signs.kid

    def _settle(self, signs: SigningKey | None = None, *, keep_old: bool = True) -> None:
        """Have one key that signs, and write the file if that is new. Under the lock."""
        now = self._clock.wall()
        found = _read(self._path) if self._path.exists() else {}
        if signs is None:
            signs = self._signing(found) or _new_secret(now)
        keys = {signs.kid: signs}
        for key in found.values() if keep_old else ():
            if key.kid != signs.kid and now < (key.retired or now) + LIFETIME_SECONDS + SKEW_SECONDS:
                keys[key.kid] = replace(key, retired=key.retired or now)
        if {key.kid: key.retired for key in found.values()} != {key.kid: key.retired for key in keys.values()}:
            self._write(keys)
        self._keys, self._signs, self._seen = keys, signs, self._look()

    def _signing(self, keys: Mapping[str, SigningKey]) -> SigningKey | None:
        if self._key_file is not None:
            return _read_pem(self._key_file, self._clock.wall())
        live = [key for key in keys.values() if key.retired is None and key.algorithm == "HS256"]
        return max(live, key=lambda key: key.created, default=None)

    def _look_again(self) -> None:
        seen = self._look()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            keys = _read(self._path)
            signs = self._signing(keys)
            if signs is None:
                raise InvalidArgument(f"{self._path} has no key that signs")
            # Ours is good, whatever others made of the file.
            self._keys, self._signs = keys | {signs.kid: signs}, signs
        except HeadraceError as error:
            log.error("keeping the signing keys read before: %s", error.message)

    def _look(self) -> tuple[object, ...]:
        return tuple(_stamp(path) for path in (self._path, self._key_file) if path is not None)

    def _write(self, keys: Mapping[str, SigningKey]) -> None:
        text = json.dumps({"keys": [_entry(key) for key in keys.values()]}, indent=1)
        written = self._path.with_name(f"{self._path.name}.{secrets.token_hex(4)}")
        file = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(file, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(written, self._path)


class Tokens:
    """Issues and verifies."""

    def __init__(self, keys: SigningKeys, revoked: RevokedRows, clock: Clock | None = None) -> None:
        self._keys = keys
        self._revoked = revoked
        self._clock = clock or SystemClock()
        self._issued: dict[tuple[str, str], tuple[str, Claims]] = {}

    async def issue(self, user: User, organisation: str, role: Role) -> tuple[str, Claims]:
        """A token for a user in an organisation: the one they got last, while that is good for long enough."""
        now = self._clock.wall()
        known = self._issued.get((user.id, organisation))
        if known is not None and await self._is_as_good_as_new(known[1], user, role, now):
            return known
        issued = round(max(now, user.tokens_after + _TICK), 6)
        made = self._sign(user.id, organisation, role, issued)
        if len(self._issued) >= _REUSED:
            self._issued.clear()
        self._issued[user.id, organisation] = made
        return made

    def verify(self, token: str) -> Claims:
        """What a token says. Whether it was revoked is for `is_good` and the user's row to say."""
        if len(token) > MOST_CHARACTERS:
            raise Unauthenticated(_FOREIGN)
        try:
            kid = jwt.get_unverified_header(token).get("kid")
            key = self._keys.find(kid) if isinstance(kid, str) and _KID.fullmatch(kid) else None
            if key is None:
                raise Unauthenticated("Unauthorized: the token's signing key is not known here any more: log in again")
            said = jwt.decode(token, key.public, algorithms=[key.algorithm], options=_UNVERIFIED)
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
            raise Unauthenticated(_FOREIGN) from None
        claims = _claims(said, key.kid)
        now = self._clock.wall()
        if now >= claims.expires + SKEW_SECONDS:
            raise Unauthenticated("Unauthorized: the token has expired: log in again")
        if claims.issued > now + SKEW_SECONDS:
            raise Unauthenticated("Unauthorized: the token is from the future: check the clocks of the servers")
        # A key that leaked after it was retired signs nothing new, and no key signs for longer than we do.
        late = key.retired is not None and claims.issued > key.retired + SKEW_SECONDS
        if late or claims.expires - claims.issued > LIFETIME_SECONDS + 1:
            raise Unauthenticated(_FOREIGN)
        return claims

    async def revoke(self, token_id: str, expires: float | None = None) -> None:
        """Refuse one token from now on, by its `jti`."""
        if not 0 < len(token_id) <= 64:
            raise InvalidArgument("a token is revoked by its jti, which has 1 to 64 characters")
        until = self._clock.wall() + LIFETIME_SECONDS if expires is None else expires
        await self._revoked.revoke_token(token_id, until + SKEW_SECONDS)

    def is_in_time(self, claims: Claims) -> bool:
        """Whether a token that was verified has not expired, and its key is still in use."""
        return self._clock.wall() < claims.expires + SKEW_SECONDS and self._keys.find(claims.kid) is not None

    async def is_good(self, claims: Claims) -> bool:
        """The same, and nobody revoked it."""
        return self.is_in_time(claims) and not await self._revoked.is_token_revoked(claims.token_id)

    async def _is_as_good_as_new(self, claims: Claims, user: User, role: Role, now: float) -> bool:
        if claims.role != role or claims.issued <= user.tokens_after or claims.expires - now <= RENEWED_SECONDS:
            return False
        return claims.kid == self._keys.current.kid and await self.is_good(claims)

    def _sign(self, user_id: str, organisation: str, role: Role, issued: float) -> tuple[str, Claims]:
        key = self._keys.current
        expires = math.ceil(issued + LIFETIME_SECONDS)
        made = Claims(user_id, organisation, role, uuid.uuid4().hex, key.kid, issued, expires)
        said = {
            "iss": _ISSUER,
            "user_id": user_id,
            "org_name": organisation,
            "role": role,
            "jti": made.token_id,
            "iat": issued,
            "exp": expires,
        }
        return jwt.encode(said, key.private, key.algorithm, headers={"kid": key.kid}), made


def _claims(said: Mapping[str, Any], kid: str) -> Claims:
    """Signed by us, and yet looked at: another program may hold the same PEM key."""
    names, times = ("user_id", "org_name", "jti"), ("iat", "exp")
    good = all(isinstance(said.get(name), str) for name in names)
    good = good and all(type(said.get(name)) in (int, float) and 0 <= said[name] < _MOST_TIME for name in times)
    role = next((each for each in ROLES if each == said.get("role")), None)
    if not good or role is None or said.get("iss") != _ISSUER or "nbf" in said or "aud" in said:
        raise Unauthenticated(_FOREIGN)
    return Claims(said["user_id"], said["org_name"], role, said["jti"], kid, said["iat"], said["exp"])


def _new_secret(now: float) -> SigningKey:
    secret = secrets.token_bytes(_SECRET_BYTES)
    return SigningKey(secrets.token_hex(8), "HS256", secret, secret, now)


def _read(path: Path) -> dict[str, SigningKey]:
    """The keys of our own file, by id."""
    text = _read_secret(path, 0o077)
    try:
        return {key.kid: key for key in map(_key_of, json.loads(text)["keys"])}
    except (ValueError, TypeError, KeyError, AttributeError, UnsupportedAlgorithm, RecursionError):
        # Not the error's own text: it may quote a secret.
        raise InvalidArgument(
            f"{path} is damaged: restore it, or remove it to have a new one made, after which everybody logs in again"
        ) from None


def _key_of(entry: Mapping[str, Any]) -> SigningKey:
    kid, algorithm, created, retired = entry["kid"], entry["alg"], float(entry["created"]), entry["retired"]
    retired = None if retired is None else float(retired)
    if not _KID.fullmatch(kid):
        raise ValueError("kid")
    if algorithm == "HS256":
        secret = base64.b64decode(entry["secret"], validate=True)
        if len(secret) < _LEAST_SECRET_BYTES:
            raise ValueError("secret")
        return SigningKey(kid, "HS256", secret, secret, created, retired)
    public = serialization.load_pem_public_key(entry["public"].encode())
    if not isinstance(public, _PUBLIC[algorithm]):
        raise TypeError("public")
    return SigningKey(kid, algorithm, public, None, created, retired)


def _entry(key: SigningKey) -> dict[str, Any]:
    """Of a PEM file's key the public half only: the other stays where it is."""
    entry: dict[str, Any] = {"kid": key.kid, "alg": key.algorithm, "created": key.created, "retired": key.retired}
    if key.algorithm == "HS256":
        return entry | {"secret": base64.b64encode(key.public).decode()}
    pem = key.public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return entry | {"public": pem.decode()}


def _read_pem(path: Path, now: float) -> SigningKey:
    try:
        private = serialization.load_pem_private_key(_read_secret(path, 0o007), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise InvalidArgument(f"{path} is no PEM private key, or has a passphrase: give one without") from None
    algorithm: Algorithm = "EdDSA"
    if isinstance(private, RSAPrivateKey) and private.key_size >= _LEAST_RSA_BITS:
        algorithm = "RS256"
    elif not isinstance(private, Ed25519PrivateKey):
        raise InvalidArgument(f"{path}: tokens are signed with RSA of {_LEAST_RSA_BITS} bits or more, or with Ed25519")
    public = private.public_key()
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    kid = hashlib.sha256(public.public_bytes(serialization.Encoding.DER, form)).hexdigest()[:16]
    return SigningKey(kid, algorithm, public, private, now)


def _read_secret(path: Path, forbidden: int) -> bytes:
    try:
        with path.open("rb") as stream:
            if os.fstat(stream.fileno()).st_mode & forbidden:
                raise FailedPrecondition(f"others can read the signing key in {path}: run `chmod 600 {path}`")
            return stream.read(_MOST_FILE_BYTES)
    except OSError as error:
        raise InvalidArgument(f"cannot read the signing key in {path}: {error.strerror}") from None


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Apart from the file itself, which is replaced."""
    file = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
