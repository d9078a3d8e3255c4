# SPDX-License-Identifier: Apache-2.0
"""The audit log: one JSON line per login, change and denial, in a file that only grows.

The authenticator, the job API and `headrace users` write to it. Only the owner can read the file; it is rotated when it
is full, and several processes may write to it. Secrets are removed and everything but printable ASCII is escaped, so
that no client can forge a line. A failure to write never fails the request.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from headrace.api.access.rate_limits import BucketTable, RateLimiter
from headrace.api.access.roles import Principal
from headrace.api.access.settings import RateLimit
from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import InvalidArgument
from headrace.core.files import FileLock

log = logging.getLogger("headrace.access")

Outcome = Literal["allowed", "denied", "failed"]

AUDIT_FILE = "audit.jsonl"
_MAX_CHARACTERS = 256
_DENIALS = RateLimit(120, 60.0)
"""Maximum denials per address: a client that is refused a thousand times a second must not push out older lines."""
_SECRET = re.compile(
    r"nvapi-[\w-]*|hr_[\w-]{8,}|eyJ[\w-]{4,}(?:\.[\w-]*){0,2}|(?i:bearer|basic) +\S+|(?<=://)[^\s/@]*@"
    r"|(?i:password|passphrase|secret|token|signature|_key)[\"']?[=:] ?\S+"
)
_REDACTED = "[secret]"


_READ_BYTES = 4 << 20
"""Read from the end of each file: about twenty thousand lines."""


class AuditLog:
    """One log: the current file `path`, and the rotated files `path.1` (the newest) to `path.N`."""

    def __init__(self, path: Path, *, max_bytes: int = 64 << 20, files: int = 10, clock: Clock | None = None) -> None:
        if max_bytes < 1 or files < 1:
            raise InvalidArgument("the audit log needs at least 1 byte per file and at least 1 rotated file")
        self._path = path
        self._max_bytes = max_bytes
        self._files = files
        self._clock = clock or SystemClock()
        self._denials = RateLimiter([_DENIALS], BucketTable(sets=1024))
        self._skipped_denials = 0
        self._incomplete = False
        self._file = -1
        self._open()

    def record(
        self,
        operation: str,
        outcome: Outcome,
        principal: Principal | None,
        organisation: str,
        target: str,
        address: str,
        reason: str = "",
    ) -> None:
        """Write a line. `target`: the id of the object; `reason`: why the operation was refused or failed."""
        if (
            outcome == "denied"
            and self._denials.take([address[:64].encode("utf-8", "replace")], self._clock.monotonic())[1] < 0
        ):
            self._skipped_denials += 1
            return
        line: dict[str, str | int | None] = {
            "time": datetime.fromtimestamp(self._clock.wall(), UTC).isoformat(timespec="milliseconds")[:-6] + "Z",
            "user": None if principal is None else _redact(principal.user_name),
            "user_id": None if principal is None else _redact(principal.user_id),
            "organisation": _redact(organisation),
            "address": _redact(address),
            "operation": _redact(operation),
            "target": _redact(target),
            "outcome": outcome,
        }
        if reason:
            line["reason"] = _redact(reason)
        if principal is not None and principal.token_id:
            line["token_id"] = _redact(principal.token_id)
        if self._skipped_denials:
            line["denials_left_out"] = self._skipped_denials
        self._write(json.dumps(line).encode() + b"\n")

    def recent(self, organisation: str, limit: int) -> list[dict[str, Any]]:
        """Return the newest lines of an organisation, the newest first. Reads files: do not call it in the event loop."""
        lines: list[dict[str, Any]] = []
        for path in (self._path, self._numbered(1)):
            for line in _lines_backwards(path):
                if len(lines) >= limit:
                    return lines
                entry = _parse_line(line)
                if entry is not None and entry.get("organisation") == organisation:
                    lines.append(entry)
        return lines

    def close(self) -> None:
        """Close the file. Later records are lost; the server log says so."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, line: bytes) -> None:
        try:
            self._rotate_if_full(len(line))
            # One call, so that lines of several processes do not mix.
            data = b"\n" + line if self._incomplete else line
            self._incomplete = os.write(self._file, data) != len(data)
        except OSError as error:
            log.error("lost a line of the audit log %s: %s", self._path, error.strerror)
            return
        if self._incomplete:
            log.error("a line of the audit log %s is incomplete: is the disk full?", self._path)
        else:
            self._skipped_denials = 0

    def _rotate_if_full(self, size: int) -> None:
        """Make sure that the current file is open and has space for `size` bytes."""
        if self._is_current() and os.fstat(self._file).st_size + size <= self._max_bytes:
            return
        self._path.parent.stat()  # raises if the disk is unmounted: `FileLock` would create the folder on another disk
        with FileLock(self._path.with_name(f"{self._path.name}.lock")):
            if not self._is_current():
                self._open()  # another process has renamed it
            current = os.fstat(self._file).st_size
            if current and current + size > self._max_bytes:
                self._rotate()
                self._open()

    def _is_current(self) -> bool:
        if self._file < 0:
            return False
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _rotate(self) -> None:
        for number in range(self._files - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._numbered(number), self._numbered(number + 1))
        os.replace(self._path, self._numbered(1))

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")

    def _open(self) -> None:
        self.close()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self._path, flags, 0o600)
        os.fchmod(self._file, 0o600)


def _redact(text: str) -> str:
    """Remove secrets and cut the text."""
    # Cut twice: a secret at the cut must still be recognised, and a long text must be cheap.
    return _SECRET.sub(_REDACTED, text[: 4 * _MAX_CHARACTERS])[:_MAX_CHARACTERS]


def _lines_backwards(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _READ_BYTES))
            lines = file.read(_READ_BYTES).splitlines()
    except OSError:
        return
    yield from reversed(lines)


def _parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None
