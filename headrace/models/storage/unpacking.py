# SPDX-License-Identifier: Apache-2.0
"""What holds for archives of every kind: how much may come out, and where it may go. Used by `archives` and `zips`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import InvalidArgument
from headrace.core.limits import MIB


@dataclass(frozen=True, slots=True)
class UnpackLimits:
    """How much may come out of one archive."""

    max_bytes: int = 1024 * 1024 * MIB
    max_files: int = 100_000

    def too_much(self, name: str) -> InvalidArgument:
        """What to say of an archive that holds more."""
        return InvalidArgument(f"{name} unpacks to more than {self.max_files} files or {self.max_bytes} bytes")


def inside(folder: Path, member: str, name: str) -> Path:
    """Where a member goes below the folder. Raises InvalidArgument if it would go elsewhere."""
    parts = [part for part in member.split("/") if part not in {"", "."}]
    if member.startswith("/") or ".." in parts or "\\" in member or "\0" in member:
        raise InvalidArgument(f"{name} holds a name that leads out of its folder; pack it with relative names")
    return folder.joinpath(*parts)
