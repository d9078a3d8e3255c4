# SPDX-License-Identifier: Apache-2.0
"""What became of a batch whose process has ended, from its exit code and its log; and how far one is. Called by `batches`.

A gateway that took a batch up from a killed one is not told the exit code. The summary, which `headrace batch --json` writes
into the log as its last words, tells the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.platforms.contract import Observed

_ALL_DONE = (0, 3, None)
_NOT_BEGUN = 2
_FAILED = (1, None)
_SIGNALS = (130, 137, 143)
"""As the program itself tells of SIGINT and SIGTERM, and a shell of SIGKILL."""
_OURS = "headrace: "
_LINES = 8
_MOST_TEXT = 800
_MOST_FILE = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to make of it."""

    status: str
    """Done or Error; "" if it was cut short and can go on."""
    reason: str
    details: Mapping[str, Any] = field(default_factory=dict)


def judge(observed: Observed, log: str) -> Verdict:
    """Of a process that has ended."""
    code, said = observed.exit_code, summary_in(log)
    if said is not None and said["state"] == "finished" and code in _ALL_DONE:
        return Verdict("Done", told(said), {"summary": said, "progress": progress_of(said)})
    if said is not None and said["state"] == "failed" and code in _FAILED:
        return Verdict("Error", str(said.get("reason"))[:_MOST_TEXT], {"summary": said, "progress": progress_of(said)})
    if code is None or code < 0 or code in _SIGNALS:
        return Verdict("", observed.reason or "the process is gone")
    ours = [line for line in log.splitlines() if line.startswith(_OURS)]
    if code == _NOT_BEGUN and ours:
        return Verdict("Error", ours[-1].removeprefix(_OURS)[:_MOST_TEXT], {"exit_code": code})
    end = " | ".join(log.splitlines()[-_LINES:])[-_MOST_TEXT:]
    reason = observed.reason or f"the process has ended with code {code}"
    return Verdict("Error", f"{reason}. The log ends: {end}" if end else reason, {"exit_code": code})


def summary_in(log: str) -> dict[str, Any] | None:
    """The last summary in a log."""
    for line in reversed(log.splitlines()):
        if line.startswith('{"state"'):
            try:
                said = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(said, dict) and {"total", "succeeded", "failed", "output"} <= said.keys():
                return said
    return None


def told(summary: Mapping[str, Any]) -> str:
    """A summary in a sentence."""
    words = f"{summary['total']} items: {summary['succeeded']} done, {summary['failed']} failed"
    return f"{words}; results: {summary['output']}"[:_MOST_TEXT]


def progress_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """How far a batch came."""
    done = summary["succeeded"] + summary["failed"]
    return {"done": done, "failed": summary["failed"], "total": summary["total"]}


def read_progress(path: Path, *, states: tuple[str, ...] = ("running",)) -> dict[str, Any] | None:
    """How far a batch is, as its file beside the results has it: {done, failed, total}. None if it has none yet. Blocks."""
    try:
        if path.stat().st_size > _MOST_FILE:
            return None
        said = json.loads(path.read_bytes())
        # Another state is that of an earlier job with the same output.
        if said["state"] not in states:
            return None
        return {"done": int(said["finished"]), "failed": int(said["failed"]), "total": int(said["total"])}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
