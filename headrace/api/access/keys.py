# SPDX-License-Identifier: Apache-2.0
"""API keys while a server runs: who is asking, told by the key that was sent.

Asked by the guards of `apps` for each request. A key is looked up by its SHA-256: keys are 256 random bits, so there is
nothing to guess and no salt to add, and a look-up by digest tells an attacker's clock nothing about the keys that exist.
The file is looked at again while requests come; what reads it is `keys_file`. Must not let a key reach a log.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.api.access.settings import Scope
from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import HeadraceError

log = logging.getLogger("headrace.guard")

SCOPES: tuple[Scope, ...] = ("infer", "read", "admin")
_LOOK_SECONDS = 1.0
_RECENT = 1024

AUTHORIZATION = b"authorization"
API_KEY = b"x-api-key"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as the file has it. The key itself is known to its holder only."""

    name: str
    sha256: bytes
    scopes: frozenset[Scope]
    created: float | None = None
    """Seconds since 1970, as is the other."""
    expires: float | None = None

    def allows(self, scope: Scope) -> bool:
        """Whether its holder may do what needs this scope."""
        return scope in self.scopes or "admin" in self.scopes


def sent_key(by_name: Mapping[bytes, bytes]) -> bytes | None:
    """The key that a request carries: `Authorization: Bearer KEY`, or `X-API-Key: KEY`."""
    value = by_name.get(AUTHORIZATION)
    if value is not None and _is_bearer(value):
        return value[7:].strip()
    return by_name.get(API_KEY)


def _is_bearer(authorization: bytes | None) -> bool:
    return authorization is not None and authorization[:7].lower() == b"bearer "


class KeyRing:
    """The keys of one file. `find` never raises, whatever has become of the file."""

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        self._path = path
        self._clock = clock or SystemClock()
        self._recent: dict[bytes | None, ApiKey] = {}
        """By what `Authorization` said."""
        self._recent_plain: dict[bytes | None, ApiKey] = {}
        """By what `X-API-Key` said. Apart: what is a key in the one is none in the other."""
        self._seen = self._look()
        self._keys = self._read()
        self._look_at = self._clock.monotonic() + _LOOK_SECONDS
        if not self._keys:
            log.warning("%s has no keys: every request but those for health will be refused", path)

    def find(self, by_name: Mapping[bytes, bytes], now: float) -> ApiKey | None:
        """The entry of the key in a request's fields; None without one, or if it is unknown or has expired.

        `now` is the monotonic clock's.
        """
        if now >= self._look_at:
            self._look_again(now)
        authorization = by_name.get(AUTHORIZATION)
        plain = authorization is None
        found = self._recent_plain.get(by_name.get(API_KEY)) if plain else self._recent.get(authorization)
        if found is None:
            found = self._search(by_name)
        if found is None or found.expires is None or self._clock.wall() < found.expires:
            return found
        return None

    def _search(self, by_name: Mapping[bytes, bytes]) -> ApiKey | None:
        key = sent_key(by_name)
        if key is None:
            return None
        found = self._keys.get(hashlib.sha256(key).digest())
        authorization = by_name.get(AUTHORIZATION)
        if found is None or (authorization is not None and not _is_bearer(authorization)):
            return found
        # Saves the hash from now on. Who has no key can put nothing here, nor find out what is.
        recent, value = (self._recent_plain, key) if authorization is None else (self._recent, authorization)
        if len(recent) >= _RECENT:
            recent.clear()
        recent[value] = found
        return found

    def _look_again(self, now: float) -> None:
        self._look_at = now + _LOOK_SECONDS
        seen = self._look()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._keys = self._read()
            self._recent.clear()
            self._recent_plain.clear()
        except HeadraceError as error:
            # Half-written by an editor, or gone: nobody is locked out by a slip, and nobody let in.
            log.error("keeping the API keys read before: %s", error.message)
        else:
            log.info("read %d API key(s) from %s", len(self._keys), self._path)

    def _read(self) -> dict[bytes, ApiKey]:
        from headrace.api.access.keys_file import read_keys

        return {key.sha256: key for key in read_keys(self._path)}

    def _look(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
