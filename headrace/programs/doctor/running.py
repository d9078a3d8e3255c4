# SPDX-License-Identifier: Apache-2.0
"""Run checks side by side: one that raises or takes too long is told as such, and the others stand.

Called by the verb. A check that hangs (a dead network file system does that) is left behind in its thread, which does not
keep the process from ending.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping

from headrace.programs.doctor.finding import Finding, warning

Check = Callable[[], Iterable[Finding]]


def diagnose(checks: Mapping[str, Check], seconds: float) -> list[Finding]:
    """The findings of all checks, in the order of the checks; none waits for longer than `seconds` in all."""
    found: dict[str, list[Finding]] = {}
    threads = {}
    for name, check in checks.items():
        # Not a pool: the interpreter would wait for its threads at exit.
        threads[name] = threading.Thread(target=_run, args=(name, check, found), name=f"doctor {name}", daemon=True)
        threads[name].start()
    ends = time.monotonic() + seconds
    findings: list[Finding] = []
    for name, thread in threads.items():
        thread.join(max(0.0, ends - time.monotonic()))
        late = [warning(name, f"could not be looked at in {seconds:g} s: something it asks does not answer")]
        findings += found.get(name, late)
    return findings


def _run(name: str, check: Check, found: dict[str, list[Finding]]) -> None:
    try:
        found[name] = list(check())
    except Exception as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        found[name] = [warning(name, f"could not be looked at, the check itself failed: {told}")]
