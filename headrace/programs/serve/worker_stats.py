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
    "responses": ResponseStats,  # By place, which is a number, too.
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


def added_up(own: VersionStatistics, others: Iterable[Numbers]) -> VersionStatistics:
    """Add up the counts of one version in several workers."""
    total = VersionStatistics()
    total.log.recent = own.log.recent
    for numbers in (numbers_of(own), *others):
        _add(total, numbers)
    return total


def ended(numbers: Numbers) -> Numbers:
    """Return the counts of a version whose worker has died: nothing is in flight there."""
    return numbers | {"settled": numbers["received"]}


def together(first: Any, second: Any) -> Any:
    """Add up two results of `numbers_of`, or objects of them."""
    if first is None or second is None:
        return second if first is None else first
    if isinstance(first, dict):
        made = {name: together(first.get(name), second.get(name)) for name in first.keys() | second.keys()}
        if "last" in made:
            made["last"] = max(first["last"], second["last"])
        return made
    if isinstance(first, list):
        return [one + other for one, other in zip(first, second, strict=True)]
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

_QUESTION = "numbers"
_PATIENCE_SECONDS = 1.0
"""Patience with a worker that computes in its event loop; after that its file is used."""
_AT_ONCE = 64
"""Versions to read before requests get a turn."""

Extra = Callable[[], Numbers]


class WorkerStats:
    """One worker's numbers for the others, and theirs for it. In the event loop's thread."""

    def __init__(self, siblings: WorkerChannel, plane: DataPlane) -> None:
        self._siblings = siblings
        self._plane = plane
        self._extras: dict[str, Extra] = {}
        self._before: Numbers = {}
        """The counts of this worker's predecessors."""
        self._others: list[Numbers] = []
        self._of_versions: dict[str, list[Numbers]] = {}
        self._gathering = asyncio.Lock()
        self._telling = asyncio.Lock()
        self._begun = self._done = 0
        self.showing = False
        """Whether the numbers of all workers are being shown right now."""

    def show(self, tell: Callable[[], None]) -> None:
        """Call a function that reports numbers; meanwhile look-ups return those of all workers."""
        self.showing = True
        try:
            tell()
        finally:
            self.showing = False

    def tell_also(self, what: str, extra: Extra) -> None:
        """Share more numbers with the others: plain numbers, in objects of any depth."""
        self._extras[what] = extra

    def start(self) -> None:
        """Take over from a predecessor, and answer the others."""
        self._before = _ended(self._read(self._siblings.index))
        self._siblings.answer(_QUESTION, self._answer)

    def others(self, what: str) -> list[Numbers]:
        """Return what the others shared at the last gathering."""
        return [numbers[what] for numbers in (*self._others, self._before) if numbers.get(what)]

    def of_version(self, name: str, version: str) -> list[Numbers]:
        """Return the others' counts of a version at the last gathering."""
        return self._of_versions.get(f"{name}/{version}", [])

    async def gather(self) -> None:
        """Ask all other workers now. Simultaneous callers share one gathering that begins after they came.

        One that began earlier would not do: its numbers may be older than what another worker has reported meanwhile.
        """
        wanted = self._begun + 1
        async with self._gathering:
            if self._done < wanted:
                self._begun = number = self._begun + 1
                await self._gather()
                self._done = number

    async def _gather(self) -> None:
        told = self._siblings.ask_all(_QUESTION, seconds=_PATIENCE_SECONDS)
        answers, _ = await asyncio.gather(told, self._answer(None))
        self._others = [
            self._read(index) if isinstance(answer, BaseException) else answer for index, answer in answers.items()
        ]
        by_version: dict[str, list[Numbers]] = {}
        for numbers in (*self._others, self._before):
            for version, counted in numbers.get("versions", {}).items():
                by_version.setdefault(version, []).append(counted)
        self._of_versions = by_version

    async def _answer(self, _arguments: Any) -> Numbers:
        """Return this worker's numbers and those of its predecessors. Saved before they are reported, older ones first."""
        async with self._telling:
            versions: dict[str, Numbers] = {}
            for count, version in enumerate(self._plane.statistics(), 1):
                versions[f"{version.name}/{version.version_text}"] = numbers_of(version.statistics)
                if count % _AT_ONCE == 0:
                    await asyncio.sleep(0)
            own: Numbers = {"versions": versions} | {what: extra() for what, extra in self._extras.items()}
            all_told: Numbers = together(own, self._before) if self._before else own
            self._write(all_told)
            return all_told

    async def keep(self) -> None:
        """Save the last numbers: this worker ends."""
        await self._answer(None)

    def _write(self, numbers: Numbers) -> None:
        try:
            path = self._siblings.folder / f"worker-{self._siblings.index}.json"
            write_atomically(path, orjson.dumps(numbers), durable=False)
        except OSError as error:  # No disk space: after this worker's death counts would be smaller, nothing else.
            log.warning("cannot keep this worker's numbers: %s", error.strerror)

    def _read(self, index: int) -> Numbers:
        try:
            numbers: Numbers = orjson.loads((self._siblings.folder / f"worker-{index}.json").read_bytes())
        except (OSError, orjson.JSONDecodeError):  # It was never asked.
            return {}
        return numbers


def _ended(numbers: Numbers) -> Numbers:
    versions = {version: ended(counted) for version, counted in numbers.get("versions", {}).items()}
    return numbers | {"versions": versions} if numbers else {}
