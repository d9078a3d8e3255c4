# SPDX-License-Identifier: Apache-2.0
"""Which bytes of a download lie on disk already, so that the next try goes on where this one was cut: `Journal`.

Used by `objects`. A file of lines beside the folder of a download: what is being downloaded, then one line for every range
that was written. Bytes are in the file before their line is, so a process may be killed at any point. After a crash of the
machine itself that order is not kept; so a journal of an earlier boot is not believed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

Range = tuple[int, int]
"""From the first byte to the one after the last."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Journal:
    """One download, by as many threads as like. `close` it in the end."""

    def __init__(self, path: Path, state: str) -> None:
        self.path = path
        self._head = json.dumps({"state": state, "boot": boot()})
        self._lock = threading.Lock()
        self._had = self._read()
        self._file: IO[str] = path.open("a" if self._had is not None else "w", encoding="utf-8")
        if self._had is None:
            self._write(self._head)
        else:
            self._write("")  # ends a line that was cut off

    @property
    def continues(self) -> bool:
        """Whether there was one of this very download."""
        return self._had is not None

    def had(self, name: str) -> list[Range]:
        """What had been written of a file before: in order, none overlapping."""
        return _joined((self._had or {}).get(name, ()))

    def wrote(self, name: str, start: int, end: int) -> None:
        """These bytes of a file are in their place."""
        self._write(json.dumps([name, start, end]))

    def close(self) -> None:
        """It stays, for the next try."""
        self._file.close()

    def _write(self, line: str) -> None:
        with self._lock:
            self._file.write(line + "\n")
            self._file.flush()

    def _read(self) -> dict[str, list[Range]] | None:
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):
            return None
        if not lines or lines[0] != self._head:
            return None
        found: dict[str, list[Range]] = {}
        for line in lines[1:]:
            try:
                name, start, end = json.loads(line)
                found.setdefault(str(name), []).append((int(start), int(end)))
            except (ValueError, TypeError):
                continue  # cut off while it was written
        return found


def missing(had: Iterable[Range], size: int, most: int) -> Iterator[Range]:
    """What of a file is not there yet, in ranges of at most so many bytes."""
    at = 0
    for start, end in (*had, (size, size)):
        while at < start:
            upto = min(start, at + most)
            yield at, upto
            at = upto
        at = max(at, end)


def _joined(ranges: Iterable[Range]) -> list[Range]:
    found: list[Range] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif end > start >= 0:
            found.append((start, end))
    return found


def boot() -> str:
    """Which run of the machine this is; "" if it does not say."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
