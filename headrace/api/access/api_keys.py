# SPDX-License-Identifier: Apache-2.0
"""API keys: the key of a request, and the keys file (YAML or JSON).

The guards of `programs.serve` look up the key of each request; `headrace keys` changes the file. The file has the
SHA-256 of each key, never a key. Keys are 256 random bits, so they need no salt, and the time of a lookup by digest
reveals nothing about existing keys. Servers reload the file while requests arrive. Never log keys.

    keys:
      - name: alice
        sha256: 1f0e...
        scopes: [infer, read]
        created: "2026-11-15T10:00:00Z"
        expires: "2026-12-15T10:00:00Z"
        share: 2
        output_tokens_per_minute: 60000
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import yaml

from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import AlreadyExists, HeadraceError, InvalidArgument, NotFound
from headrace.core.files import FileLock
from headrace.core.yaml_loader import load_yaml, yaml_error_line, yaml_error_reason
from headrace.net.http.routes import Scope

log = logging.getLogger("headrace.guard")

SCOPES: tuple[Scope, ...] = ("infer", "read", "admin")
_RELOAD_SECONDS = 1.0
_CACHED_KEYS = 1024

AUTHORIZATION = b"authorization"
API_KEY = b"x-api-key"


_TOKEN_LIMITS = ("prompt_tokens_per_minute", "output_tokens_per_minute")
_TENANT_DEFAULTS: dict[str, float] = {"share": 1.0, "priority": 0, **dict.fromkeys(_TOKEN_LIMITS, 0)}
_TENANT = frozenset(_TENANT_DEFAULTS)
_FIELDS = _TENANT | {"name", "sha256", "scopes", "created", "expires"}
_MAX_SHARE, _MAX_PRIORITY, _MAX_TOKENS = 1000.0, 100, 10**12
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_PREFIX = "hr_"
"""Lets people and secret scanners recognise a leaked key."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An entry of the keys file. Only its holder knows the key itself."""

    name: str
    sha256: bytes
    scopes: frozenset[Scope]
    created: float | None = None
    """Seconds since 1970, as `expires`."""
    expires: float | None = None
    share: float = 1.0
    """What a router with fairness between tenants goes by, as the fields below; servers ignore them."""
    priority: int = 0
    prompt_tokens_per_minute: int = 0
    """0: the router's default, as for the next."""
    output_tokens_per_minute: int = 0

    def allows(self, scope: Scope) -> bool:
        """Return whether the key grants a scope."""
        return scope in self.scopes or "admin" in self.scopes


def request_key(by_name: Mapping[bytes, bytes]) -> bytes | None:
    """Return the key of a request: `Authorization: Bearer KEY`, or `X-API-Key: KEY`."""
    value = by_name.get(AUTHORIZATION)
    if value is not None and _is_bearer(value):
        return value[7:].strip()
    return by_name.get(API_KEY)


def _is_bearer(authorization: bytes | None) -> bool:
    return authorization is not None and authorization[:7].lower() == b"bearer "


class KeyRing:
    """The keys of one file. `find` never raises, even if the file is gone or damaged."""

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        self._path = path
        self._clock = clock or SystemClock()
        self._by_authorization: dict[bytes | None, ApiKey] = {}
        """Entries by the value of `Authorization`."""
        self._by_api_key: dict[bytes | None, ApiKey] = {}
        """Entries by the value of `X-API-Key`: the same value in the other field is a different key."""
        self._last_stamp = self._stamp()
        self._keys = self._read()
        self._reload_at = self._clock.monotonic() + _RELOAD_SECONDS
        if not self._keys:
            log.warning("%s has no keys: all requests except health checks will be refused", path)

    def find(self, by_name: Mapping[bytes, bytes], now: float) -> ApiKey | None:
        """Return the entry of a request's key; None if the key is missing, unknown or expired. `now` is monotonic."""
        if now >= self._reload_at:
            self._reload_if_changed(now)
        authorization = by_name.get(AUTHORIZATION)
        use_api_key = authorization is None
        entry = self._by_api_key.get(by_name.get(API_KEY)) if use_api_key else self._by_authorization.get(authorization)
        if entry is None:
            entry = self._search(by_name)
        if entry is None or entry.expires is None or self._clock.wall() < entry.expires:
            return entry
        return None

    def _search(self, by_name: Mapping[bytes, bytes]) -> ApiKey | None:
        key = request_key(by_name)
        if key is None:
            return None
        entry = self._keys.get(hashlib.sha256(key).digest())
        authorization = by_name.get(AUTHORIZATION)
        if entry is None or (authorization is not None and not _is_bearer(authorization)):
            return entry
        # Saves the hash of later requests. A client without a valid key cannot fill this cache.
        cache, value = (self._by_api_key, key) if authorization is None else (self._by_authorization, authorization)
        if len(cache) >= _CACHED_KEYS:
            cache.clear()
        cache[value] = entry
        return entry

    def _reload_if_changed(self, now: float) -> None:
        self._reload_at = now + _RELOAD_SECONDS
        stamp = self._stamp()
        if stamp == self._last_stamp:
            return
        self._last_stamp = stamp
        try:
            self._keys = self._read()
            self._by_authorization.clear()
            self._by_api_key.clear()
        except HeadraceError as error:
            # The file is half-written or missing: the known keys stay valid.
            log.error("keeping the API keys that were read before: %s", error.message)
        else:
            log.info("read %d API key(s) from %s", len(self._keys), self._path)

    def _read(self) -> dict[bytes, ApiKey]:
        return {key.sha256: key for key in read_keys(self._path)}

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


def new_key() -> str:
    """Return a new key: 256 random bits."""
    return _PREFIX + secrets.token_urlsafe(32)


def create_key(
    path: Path,
    name: str,
    scopes: Sequence[Scope],
    *,
    created: float,
    expires: float | None = None,
    tenant: Mapping[str, float] | None = None,
) -> str:
    """Add a key to the file, creating it if needed, and return the key, which is not stored.

    tenant: `share`, `priority` and limits of tokens.
    """
    if not _NAME.fullmatch(name):
        raise InvalidArgument(f"{name!r} is not a valid name for a key: use up to 64 letters, digits and '_.@-'")
    if not scopes:
        raise InvalidArgument(f"a key needs a scope: {', '.join(SCOPES)}")
    key = new_key()

    def change(keys: list[ApiKey]) -> list[ApiKey]:
        if any(existing.name == name for existing in keys):
            raise AlreadyExists(f"{path} already has a key named '{name}': revoke it first, or choose another name")
        digest = hashlib.sha256(key.encode()).digest()
        added = ApiKey(name, digest, frozenset(scopes), created, expires)
        return [*keys, replace(added, **_tenant_fields(f"key '{name}'", tenant or {}))]

    _change(path, change, may_be_new=True)
    return key


def set_tenant(path: Path, name: str, tenant: Mapping[str, float]) -> None:
    """Change `share`, `priority` and limits of tokens of a key. Routers reload the file as servers do."""

    def change(keys: list[ApiKey]) -> list[ApiKey]:
        if all(key.name != name for key in keys):
            raise _no_such_key(path, name)
        fields = _tenant_fields(f"key '{name}'", tenant)
        return [replace(key, **fields) if key.name == name else key for key in keys]

    _change(path, change, may_be_new=False)


def revoke_key(path: Path, name: str) -> None:
    """Remove a key from the file. Running servers reload the file at their next request, at most once a second."""

    def change(keys: list[ApiKey]) -> list[ApiKey]:
        remaining = [key for key in keys if key.name != name]
        if len(remaining) == len(keys):
            raise _no_such_key(path, name)
        return remaining

    _change(path, change, may_be_new=False)


def _no_such_key(path: Path, name: str) -> NotFound:
    return NotFound(f"{path} has no key named '{name}': `headrace keys list` shows its keys")


def read_keys(path: Path) -> list[ApiKey]:
    """Read all keys of a file; an error names the entry that is wrong."""
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        raise NotFound(f"{path} does not exist: create it with `headrace keys create NAME --file {path}`") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidArgument(f"cannot read the API keys in {path}: {reason}") from None
    try:
        document = json.loads(text) if path.suffix == ".json" else load_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # The text of the error quotes the file.
        line = yaml_error_line(error)
        where = path if line is None else f"{path}, line {line}"
        raise InvalidArgument(f"{where}: {yaml_error_reason(error, 'not YAML or JSON')}") from None
    if document is None:
        return []
    if not isinstance(document, dict) or set(document) - {"keys"} or not isinstance(document.get("keys", []), list):
        raise InvalidArgument(f"{path}: expected one list named `keys` and nothing else")
    keys = [_parse_key(f"{path}: key {number}", entry) for number, entry in enumerate(document.get("keys", []), 1)]
    for field in ("name", "sha256"):
        if len({getattr(key, field) for key in keys}) != len(keys):
            raise InvalidArgument(f"{path}: two keys have the same {field}")
    return keys


def _parse_key(place: str, entry: Any) -> ApiKey:
    if not isinstance(entry, dict):
        raise InvalidArgument(f"{place}: expected {', '.join(sorted(_FIELDS))}")
    # A misspelt `expires` must not create a key that never expires.
    unknown = sorted(str(field) for field in set(entry) - _FIELDS)
    if unknown:
        raise InvalidArgument(
            f"{place}: unknown field '{unknown[0][:64]}': the fields are {', '.join(sorted(_FIELDS))}"
        )
    name, digest, scopes = entry.get("name"), entry.get("sha256"), entry.get("scopes")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidArgument(f"{place}: `name` must be up to 64 letters, digits and '_.@-'")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest.lower()):
        raise InvalidArgument(f"{place} ({name}): `sha256` must be the key's SHA-256, 64 hexadecimal digits")
    if not isinstance(scopes, list) or not scopes or not all(scope in SCOPES for scope in scopes):
        raise InvalidArgument(f"{place} ({name}): `scopes` must be a list of {', '.join(SCOPES)}")
    created, expires = (
        _parse_time(f"{place} ({name}): `{field}`", entry.get(field)) for field in ("created", "expires")
    )
    key = ApiKey(name, bytes.fromhex(digest), frozenset(cast("list[Scope]", scopes)), created, expires)
    return replace(key, **_tenant_fields(f"{place} ({name})", {field: entry[field] for field in _TENANT & set(entry)}))


def _tenant_fields(place: str, tenant: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked fields of a tenant. Raises InvalidArgument."""
    for field, value in tenant.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        whole = number and isinstance(value, int)
        if field == "share" and not (number and 0 < value <= _MAX_SHARE):
            raise InvalidArgument(f"{place}: `share` is a number over 0, up to {_MAX_SHARE:g}, not {value!r:.64}")
        if field == "priority" and not (whole and -_MAX_PRIORITY <= value <= _MAX_PRIORITY):
            raise InvalidArgument(
                f"{place}: `priority` is a whole number from {-_MAX_PRIORITY} to {_MAX_PRIORITY}, not {value!r:.64}"
            )
        if field in _TOKEN_LIMITS and not (whole and 0 <= value <= _MAX_TOKENS):
            raise InvalidArgument(f"{place}: `{field}` is a whole number from 0 (unlimited), not {value!r:.64}")
    return dict(tenant)


def _parse_time(place: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = datetime.fromisoformat(value)
    if not isinstance(value, datetime):
        raise InvalidArgument(f'{place} must be a time such as "2026-12-15T10:00:00Z"')
    return (value if value.tzinfo is not None else value.replace(tzinfo=UTC)).timestamp()


def _change(path: Path, change: Callable[[list[ApiKey]], list[ApiKey]], *, may_be_new: bool) -> None:
    # Follow a link: replace the file, not the link.
    path = path.resolve()
    # Without the lock, one of two concurrent changes would be lost.
    lock = FileLock(path.parent)
    try:
        path.parent.stat()
        lock.acquire()
    except OSError as error:
        raise InvalidArgument(f"cannot write {path}: {error.strerror}") from None
    try:
        keys = [] if may_be_new and not path.exists() else read_keys(path)
        _write(path, _document(change(keys)))
    finally:
        lock.release()


def _document(keys: list[ApiKey]) -> dict[str, Any]:
    entries = []
    for key in keys:
        entry: dict[str, Any] = {"name": key.name, "sha256": key.sha256.hex()}
        entry["scopes"] = [scope for scope in SCOPES if scope in key.scopes]
        for field, time in (("created", key.created), ("expires", key.expires)):
            if time is not None:
                entry[field] = format_time(time)
        entry.update({field: value for field, value in tenant_of(key).items() if value != _TENANT_DEFAULTS[field]})
        entries.append(entry)
    return {"keys": entries}


def tenant_of(key: ApiKey) -> dict[str, Any]:
    """Return what a key sets for a router with fairness between tenants."""
    return {field: getattr(key, field) for field in _TENANT_DEFAULTS}


def format_time(time: float) -> str:
    """Format seconds since 1970 as the file and the command line show them."""
    return datetime.fromtimestamp(int(time), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _write(path: Path, document: dict[str, Any]) -> None:
    text = json.dumps(document, indent=2) if path.suffix == ".json" else yaml.safe_dump(document, sort_keys=False)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        target = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(target, "w", encoding="utf-8") as stream:
                if path.exists() and os.geteuid() == 0:
                    # The server that reads the file may run as another user.
                    owner = path.stat()
                    os.fchown(stream.fileno(), owner.st_uid, owner.st_gid)
                stream.write(text.rstrip() + "\n")
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InvalidArgument(f"cannot write {path}: {error.strerror}; it is unchanged") from None
