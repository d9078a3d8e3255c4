# SPDX-License-Identifier: Apache-2.0
"""The file beside the results that says what they are of, how far they go for certain, and how the job ended.

Written by `ledger`, read by it and by whoever asks how a job stands. It is whole or the one before: never half.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from headrace.core.errors import FailedPrecondition

State = Literal["running", "finished", "cancelled", "failed"]
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class JobFile:
    """What it says."""

    job: Mapping[str, Any]
    """What the results are of: the state of model and input, parameters, order. The same for every run of a job."""
    total: int
    """Items of this job."""
    state: State = "running"
    reason: str = ""
    """Why it failed or was cancelled."""
    finished: int = 0
    """Items that are done when this was written, those that failed among them."""
    failed: int = 0
    bytes: int = 0
    """How much of the results the ranges below tell of. What comes after is read again."""
    ranges: Mapping[str, Any] = field(default_factory=lambda: {"finished": [], "failed": []})
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Of the last run."""


def job_path(results: Path) -> Path:
    """Where the file of some results lies."""
    return results.with_name(f"{results.name}.job.json")


def read_job(path: Path) -> JobFile | None:
    """The file; None if there is none. Raises FailedPrecondition if it cannot be one of ours."""
    try:
        said = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        raise _not_ours(path) from None
    if not isinstance(said, dict) or said.pop("format", None) != _FORMAT:
        raise _not_ours(path)
    try:
        return JobFile(**said)
    except TypeError:
        raise _not_ours(path) from None


def write_job(path: Path, job: JobFile) -> None:
    """Replace the file; it lasts a power cut. Raises OSError."""
    fresh = path.with_name(f".{path.name}.new")
    with fresh.open("w") as file:
        json.dump({"format": _FORMAT, **asdict(job)}, file)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Let a new or renamed file last."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _not_ours(path: Path) -> FailedPrecondition:
    return FailedPrecondition(f"{path} is not the file of a job: remove it, or start over with --overwrite")
