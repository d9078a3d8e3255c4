# SPDX-License-Identifier: Apache-2.0
"""What was found: one file for each kind of accident, not for each input that leads to it.

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
    """Those of one target, in a folder of its own."""

    folder: Path
    kinds: dict[str, Path] = field(default_factory=dict)
    """What it is -> the input."""

    def add(self, data: bytes, error: BaseException) -> bool:
        """Keep an input that broke something; whether it is the first of its kind."""
        kind = kind_of(error)
        if kind in self.kinds:
            return False
        name = hashlib.sha256(kind.encode()).hexdigest()[:12]
        path = self.folder / f"{type(error).__name__}-{name}"
        write_whole(path, data)
        write_whole(path.with_suffix(".txt"), "".join(traceback.format_exception(error)).encode())
        self.kinds[kind] = path
        return True


def kind_of(error: BaseException) -> str:
    """The class of an accident and the places of ours that it came through, innermost first."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    frames = [
        frame for frame in traceback.extract_tb(root.__traceback__) if any(part in frame.filename for part in _OURS)
    ]
    places = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames[-3:]]
    return f"{type(root).__name__} at {' < '.join(reversed(places)) or 'an unknown place'}"


def write_whole(path: Path, data: bytes) -> None:
    """The file is there with all of it, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".")
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    Path(name).replace(path)
