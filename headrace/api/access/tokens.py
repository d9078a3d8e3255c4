# SPDX-License-Identifier: Apache-2.0
"""Bearer tokens (JSON Web Tokens with user, organisation and expiry) and the keys that sign them.

The authenticator issues and verifies tokens; `headrace users` rotates signing keys. These are in one file of the data
folder, created at the first start (HS256), or in a PEM file (RS256 or EdDSA, by the kind of key). Each key has an id,
and the key, never the token, decides the algorithm. Whether the user of a token still exists is checked by the
authenticator.

    signing-keys.json: {"keys": [{"kid": "...", "alg": "HS256", "secret": "...", "created": 0.0, "retired": null}]}
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import math
import os
import re
import secrets
import uuid
from collections.abc import Mapping
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
from headrace.core.files import FileLock, write_atomically

log = logging.getLogger("headrace.access")

Algorithm = Literal["HS256", "RS256", "EdDSA"]

SIGNING_KEYS_FILE = "signing-keys.json"
LIFETIME_SECONDS = 86400.0
MIN_REMAINING_SECONDS = 43200.0
"""A login returns the user's last token if it is valid for longer than this."""
SKEW_SECONDS = 60.0
"""Allowed difference between the clocks of two gateways."""
MAX_CHARACTERS = 4096

_ISSUER = "headrace"
_KID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SECRET_BYTES = 64
_MIN_SECRET_BYTES = 32
_MIN_RSA_BITS = 2048
_PUBLIC_KEY_TYPES: Mapping[str, type] = {"RS256": RSAPublicKey, "EdDSA": Ed25519PublicKey}
_MAX_FILE_BYTES = 1 << 20
_CACHED_TOKENS = 4096
_TICK = 1e-6
_MAX_TIME = 1e12
_UNVERIFIED: Any = dict.fromkeys(("verify_exp", "verify_iat", "verify_nbf", "verify_aud", "verify_iss"), False)
"""PyJWT does not check the claims: `verify` does, with our clock and after the signature."""
_INVALID = "Unauthorized: this is not a token of this server: log in again"


@dataclass(frozen=True, slots=True)
class SigningKey:
    """One signing key. Without `private` it can only verify."""

    kid: str
    algorithm: Algorithm
    public: Any = field(repr=False)
    """The key that verifies: for HS256 the secret."""
    private: Any = field(repr=False)
    created: float
    retired: float | None = None


@dataclass(frozen=True, slots=True)
class Claims:
    """The claims of a token whose signature and times are valid."""

    user_id: str
    organisation: str
    role: Role
    token_id: str
    kid: str
    issued: float
    expires: float


class RevocationStore(Protocol):
    """Stores revoked tokens until they would have expired."""

    async def revoke_token(self, jti: str, expires: float) -> None:
        """Store a revoked token; storing it again does nothing."""

    async def is_token_revoked(self, jti: str) -> bool:
        """Return whether the token was revoked."""


class SigningKeys:
    """The signing keys of one data folder; other processes may rotate them."""

    def __init__(self, path: Path, key_file: Path | None = None, clock: Clock | None = None) -> None:
        self._path = path
        self._key_file = key_file
        self._clock = clock or SystemClock()
        self._keys: dict[str, SigningKey]
        self._signing_key: SigningKey
        self._stamps: tuple[object, ...]
        with _file_lock(path):
            self._refresh()

    @property
    def current(self) -> SigningKey:
        """The key that signs new tokens."""
        self._reload_if_changed()
        return self._signing_key

    def find(self, kid: str) -> SigningKey | None:
        """Return a key by its id, also one that no longer signs."""
        self._reload_if_changed()
        return self._keys.get(kid)

    def rotate(self, *, keep_old: bool = True) -> str:
        """Create a new HS256 key and return its id. Tokens of old keys stay valid until they expire, if `keep_old`."""
        if self._key_file is not None:
            raise FailedPrecondition(f"tokens are signed with {self._key_file}: put another key into that file")
        with _file_lock(self._path):
            self._refresh(_new_secret(self._clock.wall()), keep_old=keep_old)
        return self._signing_key.kid

    def _refresh(self, signing: SigningKey | None = None, *, keep_old: bool = True) -> None:
        """Choose the key that signs, and write the file if the keys changed. The caller holds the lock."""
        now = self._clock.wall()
        stored = _read(self._path) if self._path.exists() else {}
        if signing is None:
            signing = self._find_signing_key(stored) or _new_secret(now)
        keys = {signing.kid: signing}
        for key in stored.values() if keep_old else ():
            if key.kid != signing.kid and now < (key.retired or now) + LIFETIME_SECONDS + SKEW_SECONDS:
                keys[key.kid] = replace(key, retired=key.retired or now)
        if {key.kid: key.retired for key in stored.values()} != {key.kid: key.retired for key in keys.values()}:
            self._write(keys)
        self._keys, self._signing_key, self._stamps = keys, signing, self._file_stamps()

    def _find_signing_key(self, keys: Mapping[str, SigningKey]) -> SigningKey | None:
        if self._key_file is not None:
            return _read_pem(self._key_file, self._clock.wall())
        live = [key for key in keys.values() if key.retired is None and key.algorithm == "HS256"]
        return max(live, key=lambda key: key.created, default=None)

    def _reload_if_changed(self) -> None:
        stamps = self._file_stamps()
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            keys = _read(self._path)
            signing = self._find_signing_key(keys)
            if signing is None:
                raise InvalidArgument(f"{self._path} has no key that signs")
            # The signing key stays valid even if another process removed it from the file.
            self._keys, self._signing_key = keys | {signing.kid: signing}, signing
        except HeadraceError as error:
            log.error("keeping the signing keys that were read before: %s", error.message)

    def _file_stamps(self) -> tuple[object, ...]:
        return tuple(_stamp(path) for path in (self._path, self._key_file) if path is not None)

    def _write(self, keys: Mapping[str, SigningKey]) -> None:
        text = json.dumps({"keys": [_entry(key) for key in keys.values()]}, indent=1)
        write_atomically(self._path, text.encode())


class Tokens:
    """Issues, verifies and revokes tokens."""

    def __init__(self, keys: SigningKeys, revoked: RevocationStore, clock: Clock | None = None) -> None:
        self._keys = keys
        self._revoked = revoked
        self._clock = clock or SystemClock()
        self._issued: dict[tuple[str, str], tuple[str, Claims]] = {}

    async def issue(self, user: User, organisation: str, role: Role) -> tuple[str, Claims]:
        """Return a token for a user in an organisation: the last one while it is valid for long enough, else a new one."""
        now = self._clock.wall()
        last = self._issued.get((user.id, organisation))
        if last is not None and await self._is_reusable(last[1], user, role, now):
            return last
        issued = round(max(now, user.tokens_after + _TICK), 6)
        signed = self._sign(user.id, organisation, role, issued)
        if len(self._issued) >= _CACHED_TOKENS:
            self._issued.clear()
        self._issued[user.id, organisation] = signed
        return signed

    def verify(self, token: str) -> Claims:
        """Verify a token and return its claims. `is_valid` and the user's record say whether it was revoked."""
        if len(token) > MAX_CHARACTERS:
            raise Unauthenticated(_INVALID)
        try:
            kid = jwt.get_unverified_header(token).get("kid")
            key = self._keys.find(kid) if isinstance(kid, str) and _KID.fullmatch(kid) else None
            if key is None:
                raise Unauthenticated("Unauthorized: the token's signing key is no longer in use: log in again")
            payload = jwt.decode(token, key.public, algorithms=[key.algorithm], options=_UNVERIFIED)
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
            raise Unauthenticated(_INVALID) from None
        claims = _claims(payload, key.kid)
        now = self._clock.wall()
        if now >= claims.expires + SKEW_SECONDS:
            raise Unauthenticated("Unauthorized: the token has expired: log in again")
        if claims.issued > now + SKEW_SECONDS:
            raise Unauthenticated("Unauthorized: the token was issued in the future: check the clocks of the servers")
        # A retired key that leaked must not sign new tokens, and no key signs for longer than the usual lifetime.
        signed_late = key.retired is not None and claims.issued > key.retired + SKEW_SECONDS
        if signed_late or claims.expires - claims.issued > LIFETIME_SECONDS + 1:
            raise Unauthenticated(_INVALID)
        return claims

    async def revoke(self, token_id: str, expires: float | None = None) -> None:
        """Revoke one token by its `jti`."""
        if not 0 < len(token_id) <= 64:
            raise InvalidArgument("the jti of a token has 1 to 64 characters")
        until = self._clock.wall() + LIFETIME_SECONDS if expires is None else expires
        await self._revoked.revoke_token(token_id, until + SKEW_SECONDS)

    def is_current(self, claims: Claims) -> bool:
        """Return whether a verified token has not expired and its key is still in use."""
        return self._clock.wall() < claims.expires + SKEW_SECONDS and self._keys.find(claims.kid) is not None

    async def is_valid(self, claims: Claims) -> bool:
        """Return whether a verified token has neither expired nor been revoked."""
        return self.is_current(claims) and not await self._revoked.is_token_revoked(claims.token_id)

    async def _is_reusable(self, claims: Claims, user: User, role: Role, now: float) -> bool:
        if claims.role != role or claims.issued <= user.tokens_after or claims.expires - now <= MIN_REMAINING_SECONDS:
            return False
        return claims.kid == self._keys.current.kid and await self.is_valid(claims)

    def _sign(self, user_id: str, organisation: str, role: Role, issued: float) -> tuple[str, Claims]:
        key = self._keys.current
        expires = math.ceil(issued + LIFETIME_SECONDS)
        claims = Claims(user_id, organisation, role, uuid.uuid4().hex, key.kid, issued, expires)
        payload = {
            "iss": _ISSUER,
            "user_id": user_id,
            "org_name": organisation,
            "role": role,
            "jti": claims.token_id,
            "iat": issued,
            "exp": expires,
        }
        return jwt.encode(payload, key.private, key.algorithm, headers={"kid": key.kid}), claims


def _claims(payload: Mapping[str, Any], kid: str) -> Claims:
    """Check the claims of a signed token: another program may use the same PEM key."""
    names, times = ("user_id", "org_name", "jti"), ("iat", "exp")
    valid = all(isinstance(payload.get(name), str) for name in names)
    valid = valid and all(type(payload.get(name)) in (int, float) and 0 <= payload[name] < _MAX_TIME for name in times)
    role = next((role for role in ROLES if role == payload.get("role")), None)
    if not valid or role is None or payload.get("iss") != _ISSUER or "nbf" in payload or "aud" in payload:
        raise Unauthenticated(_INVALID)
    return Claims(payload["user_id"], payload["org_name"], role, payload["jti"], kid, payload["iat"], payload["exp"])


def _new_secret(now: float) -> SigningKey:
    secret = secrets.token_bytes(_SECRET_BYTES)
    return SigningKey(secrets.token_hex(8), "HS256", secret, secret, now)


def _read(path: Path) -> dict[str, SigningKey]:
    """Read the keys file, by key id."""
    text = _read_secret(path, 0o077)
    try:
        return {key.kid: key for key in map(_parse_key, json.loads(text)["keys"])}
    except (ValueError, TypeError, KeyError, AttributeError, UnsupportedAlgorithm, RecursionError):
        # Not the error's own text: it may quote a secret.
        raise InvalidArgument(
            f"{path} is damaged: restore it, or remove it to create a new one, after which all users must log in again"
        ) from None


def _parse_key(entry: Mapping[str, Any]) -> SigningKey:
    kid, algorithm, created, retired = entry["kid"], entry["alg"], float(entry["created"]), entry["retired"]
    retired = None if retired is None else float(retired)
    if not _KID.fullmatch(kid):
        raise ValueError("kid")
    if algorithm == "HS256":
        secret = base64.b64decode(entry["secret"], validate=True)
        if len(secret) < _MIN_SECRET_BYTES:
            raise ValueError("secret")
        return SigningKey(kid, "HS256", secret, secret, created, retired)
    public = serialization.load_pem_public_key(entry["public"].encode())
    if not isinstance(public, _PUBLIC_KEY_TYPES[algorithm]):
        raise TypeError("public")
    return SigningKey(kid, algorithm, public, None, created, retired)


def _entry(key: SigningKey) -> dict[str, Any]:
    """Return a key as a file entry; for a PEM key only the public half."""
    entry: dict[str, Any] = {"kid": key.kid, "alg": key.algorithm, "created": key.created, "retired": key.retired}
    if key.algorithm == "HS256":
        return entry | {"secret": base64.b64encode(key.public).decode()}
    pem = key.public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return entry | {"public": pem.decode()}


def _read_pem(path: Path, now: float) -> SigningKey:
    try:
        private = serialization.load_pem_private_key(_read_secret(path, 0o007), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise InvalidArgument(f"{path} is not a PEM private key, or has a passphrase: give one without") from None
    algorithm: Algorithm = "EdDSA"
    if isinstance(private, RSAPrivateKey) and private.key_size >= _MIN_RSA_BITS:
        algorithm = "RS256"
    elif not isinstance(private, Ed25519PrivateKey):
        raise InvalidArgument(f"{path}: use an RSA key of at least {_MIN_RSA_BITS} bits, or an Ed25519 key")
    public = private.public_key()
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    kid = hashlib.sha256(public.public_bytes(serialization.Encoding.DER, form)).hexdigest()[:16]
    return SigningKey(kid, algorithm, public, private, now)


def _read_secret(path: Path, forbidden: int) -> bytes:
    try:
        with path.open("rb") as stream:
            if os.fstat(stream.fileno()).st_mode & forbidden:
                raise FailedPrecondition(f"others can read the signing key in {path}: run `chmod 600 {path}`")
            return stream.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise InvalidArgument(f"cannot read the signing key in {path}: {error.strerror}") from None


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _file_lock(path: Path) -> FileLock:
    """Return a lock on a separate file, because `path` is replaced by each write."""
    return FileLock(path.with_name(f"{path.name}.lock"))
