# SPDX-License-Identifier: Apache-2.0
"""Which items are done: a byte for each, written down as ranges. Kept by `ledger`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from headrace.core.errors import InvalidArgument

_TODO, _DONE, _FAILED = 0, 1, 2
_FINISHED_RUN = re.compile(rb"[\x01\x02]+")
_FAILED_RUN = re.compile(rb"\x02+")
Range = tuple[int, int]


class Marks:
    """Of so many items, by their places."""

    def __init__(self, count: int) -> None:
        self._marks = bytearray(count)
        self.finished = 0
        """With a result or an error."""
        self.failed = 0

    def __len__(self) -> int:
        return len(self._marks)

    def __contains__(self, place: int) -> bool:
        return self._marks[place] != _TODO

    def snapshot(self) -> bytes:
        """A byte for each item: 0 if it is still to be done."""
        return bytes(self._marks)

    def add(self, place: int, *, failed: bool) -> None:
        """An item is done. Once."""
        if self._marks[place] != _TODO:
            raise InvalidArgument(f"the item at {place} is done twice")
        self._marks[place] = _FAILED if failed else _DONE
        self.finished += 1
        self.failed += failed

    def add_run(self, first: int, count: int) -> None:
        """Items that follow each other are done, and none has failed. Once."""
        if self._marks.count(_TODO, first, first + count) != count:
            raise InvalidArgument(f"an item from {first} on is done twice")
        self._marks[first : first + count] = bytes((_DONE,)) * count
        self.finished += count

    def as_ranges(self) -> dict[str, list[Range]]:
        """For a file: first and last places of runs of items that are done, and of those that failed."""
        return {"finished": _runs(_FINISHED_RUN, self._marks), "failed": _runs(_FAILED_RUN, self._marks)}

    @classmethod
    def from_ranges(cls, count: int, said: Any) -> Marks:
        """From what `as_ranges` gave. Raises InvalidArgument, ValueError, TypeError or KeyError for anything else."""
        made = cls(count)
        for first, last in _checked(said["finished"], count):
            made._marks[first : last + 1] = bytes([_DONE]) * (last + 1 - first)
        for first, last in _checked(said["failed"], count):
            made._marks[first : last + 1] = bytes([_FAILED]) * (last + 1 - first)
        made.failed = made._marks.count(_FAILED)
        made.finished = count - made._marks.count(_TODO)
        return made


def _runs(pattern: re.Pattern[bytes], marks: bytearray) -> list[Range]:
    return [(found.start(), found.end() - 1) for found in pattern.finditer(marks)]


def _checked(ranges: Iterable[Any], count: int) -> list[Range]:
    read = [(int(first), int(last)) for first, last in ranges]
    if not all(0 <= first <= last < count for first, last in read):
        raise InvalidArgument("a range of items that are done leads beyond the items")
    return read
