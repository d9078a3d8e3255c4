# SPDX-License-Identifier: Apache-2.0
"""Aggregate statistics from all worker processes, so that any worker can answer for the server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

import orjson

from headrace.core.files import write_atomically
from headrace.engine.dataplane import DataPlane
from headrace.engine.statistics import BatchStats, RequestStats, ResponseStats, VersionStatistics
from headrace.programs.serve.worker_channel import WorkerChannel

Numbers = dict[str, Any]

_BY_SIZE: dict[str, type[RequestStats | BatchStats | ResponseStats]] = {
    "by_rows": RequestStats,
    "batches": BatchStats,
    "responses": ResponseStats,  # By the index of the response.
}


def numbers_of(statistics: VersionStatistics) -> Numbers:
    """Return a version's counts as JSON."""
    numbers: Numbers = {
        "received": statistics.received,
        "settled": statistics.settled,
        "last": statistics._last_ns,
        "failures": dict(statistics.failures),
        "reasons": {reason: count for reason, count in statistics.log.reasons.items() if count},
    }
    for name, kind in _BY_SIZE.items():
        sizes: dict[int, Any] = getattr(statistics, name)
        numbers[name] = {str(size): [getattr(stats, slot) for slot in kind.__slots__] for size, stats in sizes.items()}
    return numbers


def sum_statistics(own: VersionStatistics, others: Iterable[Numbers]) -> VersionStatistics:
    """Sum the counts of one version over several workers."""
    total = VersionStatistics()
    total.log.recent = own.log.recent
    for numbers in (numbers_of(own), *others):
        _add(total, numbers)
    return total


def without_in_flight(numbers: Numbers) -> Numbers:
    """Return the counts of a version whose worker has died: none of its requests are in flight."""
    return numbers | {"settled": numbers["received"]}


def merge_counts(first: Any, second: Any) -> Any:
    """Add up two results of `numbers_of`, or JSON objects that contain such results."""
    if first is None or second is None:
        return second if first is None else first
    if isinstance(first, dict):
        merged = {name: merge_counts(first.get(name), second.get(name)) for name in first.keys() | second.keys()}
        if "last" in merged:
            merged["last"] = max(first["last"], second["last"])
        return merged
    if isinstance(first, list):
        return [left + right for left, right in zip(first, second, strict=True)]
    return first + second


def _add(total: VersionStatistics, numbers: Numbers) -> None:
    total.received += numbers["received"]
    total.settled += numbers["settled"]
    # The monotonic clock is the same in every process.
    total._last_ns = max(total._last_ns, numbers["last"])
    total.failures.update(numbers["failures"])
    for reason, count in numbers["reasons"].items():
        total.log.reasons[reason] = total.log.reasons.get(reason, 0) + count
    for name, kind in _BY_SIZE.items():
        sizes: dict[int, Any] = getattr(total, name)
        for size, values in numbers[name].items():
            stats = sizes.setdefault(int(size), kind())
            for slot, value in zip(kind.__slots__, values, strict=True):
                setattr(stats, slot, getattr(stats, slot) + value)


log = logging.getLogger("headrace.apps")

_REQUEST = "numbers"
_TIMEOUT_SECONDS = 1.0
"""Timeout for the numbers of a worker whose event loop is busy; after it, its file is read."""
_VERSIONS_PER_TURN = 64
"""Number of versions to read before yielding to the event loop."""

NumberSource = Callable[[], Numbers]


class WorkerStats:
    """Sends this worker's numbers to the others, and gathers theirs. Used in the event loop's thread."""

    def __init__(self, channel: WorkerChannel, plane: DataPlane) -> None:
        self._channel = channel
        self._plane = plane
        self._sources: dict[str, NumberSource] = {}
        self._before: Numbers = {}
        """The counts of this worker's predecessors."""
        self._others: list[Numbers] = []
        self._of_versions: dict[str, list[Numbers]] = {}
        self._gather_lock = asyncio.Lock()
        self._answer_lock = asyncio.Lock()
        self._started = self._finished = 0
        self.showing = False
        """Whether look-ups return the numbers of all workers."""

    def show(self, answer: Callable[[], None]) -> None:
        """Call a function that reports numbers; meanwhile look-ups return those of all workers."""
        self.showing = True
        try:
            answer()
        finally:
            self.showing = False

    def add_source(self, name: str, source: NumberSource) -> None:
        """Share more numbers with the other workers: JSON objects of any depth whose values are numbers."""
        self._sources[name] = source

    def start(self) -> None:
        """Take over the counts of a predecessor, and answer the other workers."""
        self._before = _all_without_in_flight(self._read(self._channel.index))
        self._channel.register_handler(_REQUEST, self._answer)

    def others(self, name: str) -> list[Numbers]:
        """Return what the other workers shared at the last gathering."""
        return [numbers[name] for numbers in (*self._others, self._before) if numbers.get(name)]

    def of_version(self, name: str, version: str) -> list[Numbers]:
        """Return the other workers' counts of a version at the last gathering."""
        return self._of_versions.get(f"{name}/{version}", [])

    async def gather(self) -> None:
        """Request the numbers of all other workers. Simultaneous callers share one gathering that starts after their call.

        The numbers of one that started earlier may be older than those another worker has reported meanwhile.
        """
        generation = self._started + 1
        async with self._gather_lock:
            if self._finished < generation:
                self._started = number = self._started + 1
                await self._gather()
                self._finished = number

    async def _gather(self) -> None:
        requests = self._channel.request_all(_REQUEST, seconds=_TIMEOUT_SECONDS)
        answers, _ = await asyncio.gather(requests, self._answer(None))
        self._others = [
            self._read(index) if isinstance(answer, BaseException) else answer for index, answer in answers.items()
        ]
        by_version: dict[str, list[Numbers]] = {}
        for numbers in (*self._others, self._before):
            for version, counts in numbers.get("versions", {}).items():
                by_version.setdefault(version, []).append(counts)
        self._of_versions = by_version

    async def _answer(self, _arguments: Any) -> Numbers:
        """Return the numbers of this worker and its predecessors. They are saved before they are reported, in order."""
        async with self._answer_lock:
            versions: dict[str, Numbers] = {}
            for count, version in enumerate(self._plane.statistics(), 1):
                versions[f"{version.name}/{version.version_text}"] = numbers_of(version.statistics)
                if count % _VERSIONS_PER_TURN == 0:
                    await asyncio.sleep(0)
            numbers: Numbers = {"versions": versions} | {name: source() for name, source in self._sources.items()}
            total: Numbers = merge_counts(numbers, self._before) if self._before else numbers
            self._write(total)
            return total

    async def save(self) -> None:
        """Save the last numbers before this worker ends."""
        await self._answer(None)

    def _write(self, numbers: Numbers) -> None:
        try:
            path = self._channel.folder / f"worker-{self._channel.index}.json"
            write_atomically(path, orjson.dumps(numbers), durable=False)
        except OSError as error:  # A full disk: if this worker dies, its counts are lost.
            log.warning("Could not save this worker's numbers: %s", error.strerror)

    def _read(self, index: int) -> Numbers:
        try:
            numbers: Numbers = orjson.loads((self._channel.folder / f"worker-{index}.json").read_bytes())
        except (OSError, orjson.JSONDecodeError):  # The worker never saved its numbers.
            return {}
        return numbers


def _all_without_in_flight(numbers: Numbers) -> Numbers:
    versions = {version: without_in_flight(counts) for version, counts in numbers.get("versions", {}).items()}
    return numbers | {"versions": versions} if numbers else {}
