# SPDX-License-Identifier: Apache-2.0
"""Findings: one file for each kind of failure, not for each input that leads to it.

Used by both ways to fuzz. Two accidents are the same if they are of one class and come from the same lines of ours.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path

_OURS = ("/headrace/", "/fuzz/")


@dataclass(slots=True)
class Findings:
    """The findings of one target, in a folder of its own."""

    folder: Path
    kinds: dict[str, Path] = field(default_factory=dict)
    """Inputs by kind of failure."""

    def add(self, data: bytes, error: BaseException) -> bool:
        """Keep a failing input; return whether it is the first of its kind."""
        kind = failure_kind(error)
        if kind in self.kinds:
            return False
        name = hashlib.sha256(kind.encode()).hexdigest()[:12]
        path = self.folder / f"{type(error).__name__}-{name}"
        write_atomically(path, data)
        write_atomically(path.with_suffix(".txt"), "".join(traceback.format_exception(error)).encode())
        self.kinds[kind] = path
        return True


def failure_kind(error: BaseException) -> str:
    """Return the class of a failure and its frames in our code, innermost first."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    frames = [
        frame for frame in traceback.extract_tb(root.__traceback__) if any(part in frame.filename for part in _OURS)
    ]
    places = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames[-3:]]
    return f"{type(root).__name__} at {' < '.join(reversed(places)) or 'an unknown place'}"


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".")
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    Path(name).replace(path)
