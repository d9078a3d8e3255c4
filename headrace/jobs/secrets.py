# SPDX-License-Identifier: Apache-2.0
"""Encryption at rest for workspace credentials and environment variables, with a key in its own file.

A copied database reveals nothing without the key file. Gateways that share a database share the key file. Each ciphertext is
bound to its record, so rows cannot be swapped.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.core.errors import FailedPrecondition

_KEY_BYTES = 32
_NONCE_BYTES = 12
_VERSION_PREFIX = "1:"


class Vault:
    """Encrypts and decrypts JSON objects, and derives keys."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._key = key
        self._cipher = AESGCM(self._derive("encryption"))

    @classmethod
    def open(cls, path: Path) -> Vault:
        """Open the key file; create it if it does not exist. Blocks."""
        with contextlib.suppress(FileExistsError):
            _create_key_file(path)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            with os.fdopen(descriptor, "rb") as file:
                mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
                key = base64.b64decode(file.read(1024), validate=True)
        except (OSError, ValueError):
            raise FailedPrecondition(
                f"the key file {path} cannot be read; restore it, or the credentials are lost"
            ) from None
        if mode & 0o077:
            raise FailedPrecondition(f"the key file {path} is readable by other users: run chmod 600")
        if len(key) != _KEY_BYTES:
            raise FailedPrecondition(f"{path} is not a key file; restore it, or the credentials are lost")
        return cls(key)

    def encrypt(self, content: Mapping[str, Any], about: str) -> str:
        """Encrypt content for the record `about`; return "" for empty content."""
        if not content:
            return ""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        ciphertext = self._cipher.encrypt(nonce, json.dumps(content).encode(), about.encode())
        return _VERSION_PREFIX + base64.b64encode(nonce + ciphertext).decode()

    def decrypt(self, text: str, about: str) -> dict[str, Any]:
        """Decrypt what was encrypted for the same `about`."""
        from cryptography.exceptions import InvalidTag

        if not text:
            return {}
        try:
            raw = base64.b64decode(text.removeprefix(_VERSION_PREFIX), validate=True)
            content: dict[str, Any] = json.loads(
                self._cipher.decrypt(raw[:_NONCE_BYTES], raw[_NONCE_BYTES:], about.encode())
            )
        except (InvalidTag, ValueError):
            raise FailedPrecondition(
                "the stored credentials cannot be decrypted with this gateway's key file: give all gateways of the database "
                "the same file, or enter the credentials again"
            ) from None
        return content

    def fingerprint(self, content: Mapping[str, Any]) -> str:
        """Return a keyed hash: equal for equal contents."""
        text = json.dumps(content, sort_keys=True).encode()
        return hmac.new(self._derive("fingerprint"), text, hashlib.sha256).hexdigest()

    def callback_key(self, job_id: str) -> str:
        """Return the key with which a service authenticates its status updates."""
        return hmac.new(self._derive("callback"), job_id.encode(), hashlib.sha256).hexdigest()

    def _derive(self, use: str) -> bytes:
        return hmac.new(self._key, f"headrace jobs {use}".encode(), hashlib.sha256).digest()


def _create_key_file(path: Path) -> None:
    """Create a key file atomically: of two gateways that start together, one creates it."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(base64.b64encode(secrets.token_bytes(_KEY_BYTES)))
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
