# SPDX-License-Identifier: Apache-2.0
"""The end of the audit log, for who may look at it: the newest lines of one organisation.

Called by `audit`. Files may be long and torn: only their ends are read, and what is no line of ours is left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_MOST_BYTES = 4 << 20
"""Of each file: some twenty thousand lines."""


def recent_lines(files: Iterable[Path], organisation: str, most: int) -> list[dict[str, Any]]:
    """The newest first, of files that are themselves in that order."""
    found: list[dict[str, Any]] = []
    for path in files:
        for line in _backwards(path):
            if len(found) >= most:
                return found
            told = _read(line)
            if told is not None and told.get("organisation") == organisation:
                found.append(told)
    return found


def _backwards(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _MOST_BYTES))
            lines = file.read(_MOST_BYTES).splitlines()
    except OSError:
        return
    yield from reversed(lines)


def _read(line: bytes) -> dict[str, Any] | None:
    try:
        told = json.loads(line)
    except ValueError:
        return None
    return told if isinstance(told, dict) else None
