# SPDX-License-Identifier: Apache-2.0
"""What came of a job. Made by `app`, shown by `headrace batch`, kept in the job's file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headrace.jobs.batch.job_file import State


@dataclass(frozen=True, slots=True)
class Failure:
    """An item that failed, for people who want to see some."""

    index: int
    id: str | int | None
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """Of one run, and of the job as it stands after it."""

    state: State
    reason: str
    output: str
    total: int
    """Items of the job."""
    succeeded: int
    failed: int
    left: int
    """Items without a result."""
    resumed: int
    """Items that earlier runs had done."""
    skipped_files: int
    seconds: float
    """Of computing, in this run."""
    load_seconds: float
    items_per_second: float
    failures: tuple[Failure, ...] = ()
    """The first few of this run."""

    def as_json(self) -> Mapping[str, Any]:
        """For a file or a script."""
        return asdict(self)
