# SPDX-License-Identifier: Apache-2.0
"""One thing that was looked at, and how it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """See the module."""

    name: str
    """What was looked at: `port 8000`, `GPU driver`."""
    state: State
    """`problem`: something will not work. `warning`: it may be slow, or fail later. `ok` may have a fix too: how to get
    what is not there and need not be."""
    message: str
    fix: str = ""
    """A line that can be typed; "" where there is nothing to mend, or no line that would."""


def ok(name: str, message: str, fix: str = "") -> Finding:
    """All is well."""
    return Finding(name, "ok", message, fix)


def warning(name: str, message: str, fix: str = "") -> Finding:
    """It works, but."""
    return Finding(name, "warning", message, fix)


def problem(name: str, message: str, fix: str = "") -> Finding:
    """It does not work."""
    return Finding(name, "problem", message, fix)


def size(count: float) -> str:
    """Bytes as people write them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
