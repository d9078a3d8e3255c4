# SPDX-License-Identifier: Apache-2.0
"""Progress of a batch job: which items are done, the progress file beside the results, and the summary.

The progress file says what the results belong to, up to where they are synced, and how the job ended. It is replaced
atomically.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.core.files import write_atomically

_TODO, _DONE, _FAILED = 0, 1, 2
_FINISHED_RUN = re.compile(rb"[\x01\x02]+")
_FAILED_RUN = re.compile(rb"\x02+")
Range = tuple[int, int]

State = Literal["running", "finished", "cancelled", "failed"]
_FORMAT = 1


class ItemMarks:
    """One byte per item: to do, done or failed; stored as ranges."""

    def __init__(self, count: int) -> None:
        self._marks = bytearray(count)
        self.finished = 0
        """Items with a result or an error."""
        self.failed = 0

    def __len__(self) -> int:
        return len(self._marks)

    def __contains__(self, position: int) -> bool:
        return self._marks[position] != _TODO

    def snapshot(self) -> bytes:
        """Return one byte per item: 0 if it is still to do."""
        return bytes(self._marks)

    def add(self, position: int, *, failed: bool) -> None:
        """Mark an item as done; raise if it already is."""
        if self._marks[position] != _TODO:
            raise InvalidArgument(f"the item at {position} is already done")
        self._marks[position] = _FAILED if failed else _DONE
        self.finished += 1
        self.failed += failed

    def add_run(self, first: int, count: int) -> None:
        """Mark consecutive items as done without errors; raise if one already is."""
        if self._marks.count(_TODO, first, first + count) != count:
            raise InvalidArgument(f"an item from {first} on is already done")
        self._marks[first : first + count] = bytes((_DONE,)) * count
        self.finished += count

    def as_ranges(self) -> dict[str, list[Range]]:
        """Return the first and last positions of runs of finished items, and of failed ones."""
        return {"finished": _runs(_FINISHED_RUN, self._marks), "failed": _runs(_FAILED_RUN, self._marks)}

    @classmethod
    def from_ranges(cls, count: int, ranges: Any) -> ItemMarks:
        """Restore from `as_ranges`. Raises InvalidArgument, ValueError, TypeError or KeyError for invalid ranges."""
        marks = cls(count)
        for first, last in _check_ranges(ranges["finished"], count):
            marks._marks[first : last + 1] = bytes([_DONE]) * (last + 1 - first)
        for first, last in _check_ranges(ranges["failed"], count):
            marks._marks[first : last + 1] = bytes([_FAILED]) * (last + 1 - first)
        marks.failed = marks._marks.count(_FAILED)
        marks.finished = count - marks._marks.count(_TODO)
        return marks


def _runs(pattern: re.Pattern[bytes], marks: bytearray) -> list[Range]:
    return [(match.start(), match.end() - 1) for match in pattern.finditer(marks)]


def _check_ranges(ranges: Iterable[Any], count: int) -> list[Range]:
    pairs = [(int(first), int(last)) for first, last in ranges]
    if not all(0 <= first <= last < count for first, last in pairs):
        raise InvalidArgument("a range of finished items exceeds the number of items")
    return pairs


@dataclass(frozen=True, slots=True)
class ProgressFile:
    """The content of a progress file."""

    job: Mapping[str, Any]
    """What the results belong to: fingerprints of model and input, parameters, order. Equal for all runs of a job."""
    total: int
    """Number of items."""
    state: State = "running"
    reason: str = ""
    """Why it failed or was cancelled."""
    finished: int = 0
    """Number of finished items, including failed ones."""
    failed: int = 0
    bytes: int = 0
    """Size of the results that the ranges cover; anything after it is read again."""
    ranges: Mapping[str, Any] = field(default_factory=lambda: {"finished": [], "failed": []})
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Summary of the last run."""


def progress_file_path(results: Path) -> Path:
    """Return the path of the progress file of some results."""
    return results.with_name(f"{results.name}.job.json")


def read_progress_file(path: Path) -> ProgressFile | None:
    """Read a progress file; None if there is none. FailedPrecondition if it is invalid."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        raise _invalid_file(path) from None
    if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
        raise _invalid_file(path)
    try:
        return ProgressFile(**content)
    except TypeError:
        raise _invalid_file(path) from None


def write_progress_file(path: Path, job: ProgressFile) -> None:
    """Replace a progress file and sync it to disk. Raises OSError."""
    write_atomically(path, json.dumps({"format": _FORMAT, **asdict(job)}).encode(), mode=None)


def _invalid_file(path: Path) -> FailedPrecondition:
    return FailedPrecondition(
        f"{path} is not the progress file of a batch job: remove it, or start over with --overwrite"
    )


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed item."""

    index: int
    id: str | int | None
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """The result of one run, and the state of the job after it."""

    state: State
    reason: str
    output: str
    total: int
    """Number of items."""
    succeeded: int
    failed: int
    left: int
    """Items without a result or an error."""
    resumed: int
    """Items that earlier runs finished."""
    skipped_files: int
    seconds: float
    """Time of inference in this run."""
    load_seconds: float
    items_per_second: float
    failures: tuple[Failure, ...] = ()
    """The first failures of this run."""

    def as_json(self) -> Mapping[str, Any]:
        """Return the summary as JSON."""
        return asdict(self)
