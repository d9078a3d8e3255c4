# SPDX-License-Identifier: Apache-2.0
"""Who did what, for later: every login, change and denial as one line of JSON in a file that only grows.

Called by `logins` for who they are, and by `api/jobs` and `headrace users` for what they do. The file is its owner's alone,
and is renamed when it is full; several processes may write to it. What looks like a secret is taken out, and all but
printable ASCII is escaped, so no caller can forge a line. Must not fail the request that it tells of.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from headrace.api.access.audit_reading import recent_lines
from headrace.api.access.rates import Rates
from headrace.api.access.roles import Principal
from headrace.api.access.settings import RateLimit
from headrace.api.access.table import BucketTable
from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import InvalidArgument

log = logging.getLogger("headrace.access")

Outcome = Literal["allowed", "denied", "failed"]

AUDIT_FILE = "audit.jsonl"
_MOST_CHARACTERS = 256
_DENIALS = RateLimit(120, 60.0)
"""For each address: who is refused a thousand times a second must not push the past out of the files."""
_SECRET = re.compile(
    r"nvapi-[\w-]*|hr_[\w-]{8,}|eyJ[\w-]{4,}(?:\.[\w-]*){0,2}|(?i:bearer|basic) +\S+|(?<=://)[^\s/@]*@"
    r"|(?i:password|passphrase|secret|token|signature|_key)[\"']?[=:] ?\S+"
)
_TAKEN_OUT = "[secret]"


class Audit:
    """One file: `path`, and `path.1` (the latest) to `path.N` before it."""

    def __init__(self, path: Path, *, most_bytes: int = 64 << 20, files: int = 10, clock: Clock | None = None) -> None:
        if most_bytes < 1 or files < 1:
            raise InvalidArgument(
                "the audit log needs room for a byte or more, in one file or more beside the current one"
            )
        self._path = path
        self._most_bytes = most_bytes
        self._files = files
        self._clock = clock or SystemClock()
        self._denials = Rates([_DENIALS], BucketTable(sets=1024))
        self._left_out = 0
        self._torn = False
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
        """Write a line. `target`: the id of what it is about; `reason`: why it was refused or failed."""
        if (
            outcome == "denied"
            and self._denials.take([address[:64].encode("utf-8", "replace")], self._clock.monotonic())[1] < 0
        ):
            self._left_out += 1
            return
        line: dict[str, str | int | None] = {
            "time": datetime.fromtimestamp(self._clock.wall(), UTC).isoformat(timespec="milliseconds")[:-6] + "Z",
            "user": None if principal is None else _told(principal.user_name),
            "user_id": None if principal is None else _told(principal.user_id),
            "organisation": _told(organisation),
            "address": _told(address),
            "operation": _told(operation),
            "target": _told(target),
            "outcome": outcome,
        }
        if reason:
            line["reason"] = _told(reason)
        if principal is not None and principal.token_id:
            line["token_id"] = _told(principal.token_id)
        if self._left_out:
            line["denials_left_out"] = self._left_out
        self._write(json.dumps(line).encode() + b"\n")

    def recent(self, organisation: str, most: int) -> list[dict[str, Any]]:
        """The newest lines of an organisation, the newest first. Reads files: not for the loop's thread."""
        return recent_lines((self._path, self._numbered(1)), organisation, most)

    def close(self) -> None:
        """Let go of the file. Later records are lost, and logged as such."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, line: bytes) -> None:
        try:
            self._settle(len(line))
            # In one call, so that lines of several processes do not mix.
            told = b"\n" + line if self._torn else line
            self._torn = os.write(self._file, told) != len(told)
        except OSError as error:
            log.error("a line of the audit log %s is lost: %s", self._path, error.strerror)
            return
        if self._torn:
            log.error("a line of the audit log %s is torn: is the disk full?", self._path)
        else:
            self._left_out = 0

    def _settle(self, size: int) -> None:
        """Have the current file open, with room."""
        if self._is_current() and os.fstat(self._file).st_size + size <= self._most_bytes:
            return
        with self._locked():
            if not self._is_current():
                self._open()  # another process has renamed it
            found = os.fstat(self._file).st_size
            if found and found + size > self._most_bytes:
                self._rename()
                self._open()

    def _is_current(self) -> bool:
        if self._file < 0:
            return False
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _rename(self) -> None:
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

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        file = os.open(self._path.with_name(f"{self._path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)


def _told(text: str) -> str:
    """What may be written: without secrets, and not too long."""
    # Cut twice: what is cut in the middle of a secret must still be recognised, and a long text cost nothing.
    return _SECRET.sub(_TAKEN_OUT, text[: 4 * _MOST_CHARACTERS])[:_MOST_CHARACTERS]
