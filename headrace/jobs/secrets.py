# SPDX-License-Identifier: Apache-2.0
"""Secrets at rest: workspaces' credentials and jobs' variables are encrypted with a key that lies in a file of its own.

Used by `service` and `services`. A database that is copied without the key file tells nothing. Gateways that share a
database share the file. Each text is bound to what it is of, so that rows cannot be exchanged.
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
_MARK = "1:"


class Vault:
    """Encrypts and decrypts JSON objects."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._key = key
        self._cipher = AESGCM(self._derived("encryption"))

    @classmethod
    def open(cls, path: Path) -> Vault:
        """With the key of a file, which is made if there is none. Blocks."""
        with contextlib.suppress(FileExistsError):
            _make(path)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            with os.fdopen(descriptor, "rb") as file:
                rights = stat.S_IMODE(os.fstat(descriptor).st_mode)
                key = base64.b64decode(file.read(1024), validate=True)
        except (OSError, ValueError):
            raise FailedPrecondition(
                f"the key file {path} cannot be read; restore it, or the credentials are lost"
            ) from None
        if rights & 0o077:
            raise FailedPrecondition(f"the key file {path} can be read by others: chmod 600 it")
        if len(key) != _KEY_BYTES:
            raise FailedPrecondition(f"{path} is no key file; restore it, or the credentials are lost")
        return cls(key)

    def encrypt(self, content: Mapping[str, Any], about: str) -> str:
        """A text for the database; "" for nothing."""
        if not content:
            return ""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed = self._cipher.encrypt(nonce, json.dumps(content).encode(), about.encode())
        return _MARK + base64.b64encode(nonce + sealed).decode()

    def decrypt(self, text: str, about: str) -> dict[str, Any]:
        """What was encrypted for the same `about`."""
        from cryptography.exceptions import InvalidTag

        if not text:
            return {}
        try:
            raw = base64.b64decode(text.removeprefix(_MARK), validate=True)
            found: dict[str, Any] = json.loads(
                self._cipher.decrypt(raw[:_NONCE_BYTES], raw[_NONCE_BYTES:], about.encode())
            )
        except (InvalidTag, ValueError):
            raise FailedPrecondition(
                "the kept credentials cannot be read with this gateway's key file: give every gateway of the database the "
                "same one, or enter the credentials again"
            ) from None
        return found

    def fingerprint(self, content: Mapping[str, Any]) -> str:
        """Equal for equal contents, and telling nothing of them."""
        text = json.dumps(content, sort_keys=True).encode()
        return hmac.new(self._derived("fingerprint"), text, hashlib.sha256).hexdigest()

    def callback_key(self, job_id: str) -> str:
        """By which a service proves who it is when it calls back."""
        return hmac.new(self._derived("callback"), job_id.encode(), hashlib.sha256).hexdigest()

    def _derived(self, use: str) -> bytes:
        return hmac.new(self._key, f"headrace jobs {use}".encode(), hashlib.sha256).digest()


def _make(path: Path) -> None:
    """Whole or not at all: of two gateways that start together, one makes it."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(base64.b64encode(secrets.token_bytes(_KEY_BYTES)))
            file.flush()
            os.fsync(file.fileno())
        os.link(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
