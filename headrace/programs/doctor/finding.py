# SPDX-License-Identifier: Apache-2.0
"""One result of a check, and how checks run side by side."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

State = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    """What was checked: `port 8000`, `GPU driver`."""
    state: State
    """`problem`: something will not work. `warning`: it may be slow, or fail later. `ok` may have a fix, too."""
    message: str
    fix: str = ""
    """A command that fixes it; "" if there is none."""
    group: str = ""
    """The heading under which it is shown; `diagnose` sets it."""


def ok(name: str, message: str, fix: str = "") -> Finding:
    """Return a finding without a problem."""
    return Finding(name, "ok", message, fix)


def warning(name: str, message: str, fix: str = "") -> Finding:
    """Return a warning."""
    return Finding(name, "warning", message, fix)


def problem(name: str, message: str, fix: str = "") -> Finding:
    """Return a problem."""
    return Finding(name, "problem", message, fix)


def size(count: float) -> str:
    """Format bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


Check = Callable[[], Iterable[Finding]]


def diagnose(
    checks: Mapping[str, Check], seconds: float, heading_of: Callable[[str], str] = lambda name: name
) -> list[Finding]:
    """Return the findings of all checks, in their order, within `seconds` in all. `heading_of` a check is its group."""
    results: dict[str, list[Finding]] = {}
    threads = {}
    for name, check in checks.items():
        # Not a pool: the interpreter would wait for its threads at exit.
        threads[name] = threading.Thread(target=_run, args=(name, check, results), name=f"doctor {name}", daemon=True)
        threads[name].start()
    ends = time.monotonic() + seconds
    findings: list[Finding] = []
    for name, thread in threads.items():
        thread.join(max(0.0, ends - time.monotonic()))
        late = [warning(name, f"could not be checked in {seconds:g} s: a program or server does not answer")]
        findings += [replace(finding, group=heading_of(name)) for finding in results.get(name, late)]
    return findings


def _run(name: str, check: Check, results: dict[str, list[Finding]]) -> None:
    try:
        results[name] = list(check())
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        results[name] = [warning(name, f"could not be checked, because the check itself failed: {text}")]
