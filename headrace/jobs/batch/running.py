# SPDX-License-Identifier: Apache-2.0
"""All of a job at once: items are read ahead, many are under way, results are written as they come. Called by `app`.

    reading (a thread) -> groups -> requests under way -> results -> writing (a thread)

The loop's thread only hands things on. What is read and not yet written is bounded, so that memory does not grow with the
input, whichever of the four is the slowest.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from headrace.core.clock import Clock
from headrace.core.errors import FailedPrecondition, HeadraceError
from headrace.jobs.batch.asking import Asker, RowsAsker
from headrace.jobs.batch.blocks import Block, BlockResult, Chunk, read_blocks
from headrace.jobs.batch.columns import read_columns
from headrace.jobs.batch.ledger import Ledger, Result
from headrace.jobs.batch.parquet import ParquetSource
from headrace.jobs.batch.settings import BatchSettings
from headrace.jobs.batch.shaping import Item
from headrace.jobs.batch.sources import LinesSource, Source
from headrace.jobs.batch.summary import Failure

_READ_AT_ONCE = 256
_WRITE_AT_ONCE = 512
_WRITE_SECONDS = 0.1
_SHOWN_FAILURES = 5
Told = Callable[[int, int], None]
"""How many items are done, and how many of them failed."""


@dataclass(slots=True)
class _Ready:
    """An item on its way: prepared, or already known to be wrong."""

    item: Item
    key: Any = None
    prepared: Any = None
    error: HeadraceError | None = None


class _Groups:
    """Items that go together, until there are enough of them."""

    def __init__(self, size: int, most: int, *, in_order: bool) -> None:
        self._size = size
        self._most = most
        self._in_order = in_order
        self._groups: dict[Any, list[_Ready]] = {}
        self._waiting = 0

    def add(self, ready: _Ready) -> list[list[_Ready]] | None:
        """Take one in; gives groups that are to be sent now."""
        group = self._groups.get(ready.key)
        before = None
        if group is None:
            before = self.take_all() if self._in_order else None
            group = self._groups[ready.key] = []
        group.append(ready)
        self._waiting += 1
        if len(group) >= self._size:
            return [*(before or ()), self._take(ready.key)]
        if self._waiting > self._most:
            # Many shapes, none of them often: the one that waits longest goes as it is.
            return [*(before or ()), self._take(next(iter(self._groups)))]
        return before

    def take_all(self) -> list[list[_Ready]]:
        """Whatever is there."""
        return [self._take(key) for key in list(self._groups)]

    def _take(self, key: Any) -> list[_Ready]:
        group = self._groups.pop(key)
        self._waiting -= len(group)
        return group


class Runner:
    """One run of a job."""

    def __init__(
        self, settings: BatchSettings, source: Source, asker: Asker, ledger: Ledger, clock: Clock, told: Told
    ) -> None:
        self._settings = settings
        self._source = source
        self._asker = asker
        self._ledger = ledger
        self._clock = clock
        self._told = told
        slots = settings.in_flight or asker.in_flight
        self._slots = asyncio.Semaphore(slots)
        self._most_unwritten = max(2048, 4 * slots * asker.group)
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        in_blocks = isinstance(source, LinesSource | ParquetSource) and not settings.ordered
        self._plain = asker.plain if isinstance(asker, RowsAsker) and in_blocks else None
        """For the short way of usual items (`blocks`, `columns`), where the order of results does not matter."""
        self._results: list[Result | BlockResult] = []
        self._computed = 0
        """Items that these are of."""
        self._unwritten = 0
        """Items that were sent, or found wrong, and are not in the ledger yet."""
        self._written = asyncio.Event()
        self._wake = asyncio.Event()
        """There is something for the writer."""
        self._all_sent = False
        self._crash: BaseException | None = None
        self._order: Iterator[int] | None = self._indices() if settings.ordered else None
        self._next = next(self._order, -1) if self._order is not None else -1
        self._held: dict[int, Result] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="headrace-batch-write")
        self.failures: list[Failure] = []
        """The first few."""

    def stop(self) -> None:
        """Begin no more items. From the loop's thread."""
        self._stopping.set()
        self._written.set()

    @property
    def stopped(self) -> bool:
        """Whether that was asked."""
        return self._stopping.is_set()

    async def run(self) -> None:
        """Compute what is not done; returns when all is written, or as much as there was when it was stopped.

        Raises what ended the job: no room for results, too many failures.
        """
        sending = asyncio.create_task(self._send_all())
        writing = asyncio.create_task(self._write_all())
        try:
            await asyncio.wait({sending, writing}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                await sending
                self._end_writing()
            await writing
        finally:
            await _ended(sending, *self._tasks)
            if not writing.done():
                # Sending failed: what was computed is written all the same.
                self._end_writing()
                with contextlib.suppress(HeadraceError):
                    await writing
            self._writer.shutdown(wait=True)

    async def _send_all(self) -> None:
        groups = _Groups(self._asker.group, self._most_unwritten // 2, in_order=self._order is not None)
        chunks = self._chunks()
        reading = asyncio.create_task(asyncio.to_thread(next, chunks, None))
        while (chunk := await reading) is not None and not self._stopping.is_set():
            reading = asyncio.create_task(asyncio.to_thread(next, chunks, None))
            for block in chunk.blocks:
                self._unwritten += len(block.rows)
                await self._begin(self._ask_block, block)
            for ready in chunk.others:
                self._unwritten += 1
                if ready.error is not None:
                    self._answered(ready.item, ready.error)
                    continue
                full = groups.add(ready)
                if full:
                    for group in full:
                        await self._send(group)
            await self._wait_for_room(groups)
        await asyncio.wait({reading})  # a thread is not cancelled
        for group in groups.take_all():
            await self._send(group)
        await self._wait_for_those_under_way()
        if self._crash is not None:
            raise self._crash

    async def _wait_for_room(self, groups: _Groups) -> None:
        if self._unwritten <= self._most_unwritten:
            return
        if self._order is not None:
            # The one that all others wait for may be in a group that is not full.
            for group in groups.take_all():
                await self._send(group)
        while self._unwritten > self._most_unwritten and not self._stopping.is_set():
            self._written.clear()
            await self._written.wait()

    async def _send(self, group: list[_Ready]) -> None:
        await self._begin(self._ask, group)

    async def _begin(self, ask: Callable[[Any], Coroutine[Any, Any, None]], what: Any) -> None:
        if self._stopping.is_set():
            return
        await self._slots.acquire()
        if self._stopping.is_set():
            self._slots.release()
            return
        task = asyncio.create_task(ask(what))
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._crash = task.exception()
            self.stop()

    async def _ask(self, group: list[_Ready]) -> None:
        try:
            outcomes = await self._asker.ask([ready.prepared for ready in group])
        finally:
            self._slots.release()
        for ready, outcome in zip(group, outcomes, strict=True):
            self._answered(ready.item, outcome)

    async def _ask_block(self, block: Block) -> None:
        if not isinstance(self._asker, RowsAsker):
            raise TypeError("blocks are of rows")
        try:
            outcome = await self._asker.ask_block(block.rows)
        finally:
            self._slots.release()
        if isinstance(outcome, list):
            for index, given, each in zip(block.indices, block.ids, outcome, strict=True):
                self._answered(Item(index, given, {}), each)
            return
        self._results.append(BlockResult(block.indices, block.ids, outcome))
        self._came(len(block.rows))

    async def _wait_for_those_under_way(self) -> None:
        while self._tasks:
            if not self._stopping.is_set():
                stop = asyncio.create_task(self._stopping.wait())
                await asyncio.wait({stop, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
                await _ended(stop)
                continue
            await asyncio.wait(self._tasks, timeout=self._settings.grace_seconds)
            await _ended(*self._tasks)

    def _answered(self, item: Item, outcome: Any) -> None:
        if isinstance(outcome, HeadraceError) and len(self.failures) < _SHOWN_FAILURES:
            self.failures.append(Failure(item.index, item.id, outcome.code.value, outcome.message))
        result = (item.index, item.id, outcome)
        if self._order is None:
            self._results.append(result)
            self._came(1)
            return
        self._held[item.index] = result
        while self._next in self._held:
            self._results.append(self._held.pop(self._next))
            self._next = next(self._order, -1)
            self._came(1)

    def _came(self, count: int) -> None:
        self._computed += count
        if self._computed >= _WRITE_AT_ONCE:
            self._wake.set()

    async def _write_all(self) -> None:
        loop = asyncio.get_running_loop()
        due = self._clock.monotonic() + self._settings.checkpoint_seconds
        while True:
            last = self._all_sent
            results, self._results = self._results, []
            count, self._computed = self._computed, 0
            if results:
                await loop.run_in_executor(self._writer, self._ledger.write, results)
                self._unwritten -= count
                self._written.set()
                marks = self._ledger.marks
                self._told(marks.finished, marks.failed)
                self._check_failures()
            elif last:
                return
            if self._clock.monotonic() >= due:
                await loop.run_in_executor(self._writer, self._ledger.checkpoint)
                due = self._clock.monotonic() + self._settings.checkpoint_seconds
            if not last and self._computed < _WRITE_AT_ONCE:
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), _WRITE_SECONDS)

    def _end_writing(self) -> None:
        self._all_sent = True
        self._wake.set()

    def _check_failures(self) -> None:
        most = self._settings.max_failures
        failed = self._ledger.marks.failed
        if most is not None and failed > most:
            raise FailedPrecondition(
                f"{failed} items have failed, and --max-failures allows {most}: look at their errors in the results, then "
                "run the same again with a larger number, or with --retry-failed"
            )

    def _chunks(self) -> Iterator[Chunk[_Ready]]:
        """Items that are not done, read and prepared, some at a time. In a thread."""
        size = self._asker.group
        if self._plain is not None and isinstance(self._source, ParquetSource):
            limit, wanted = self._settings.limit, None if self._all_wanted else self._wants
            parts = itertools.takewhile(lambda part: limit is None or part[0] < limit, self._source.parts(size))
            yield from read_columns(parts, self._plain, size, wanted, self._read)
            return
        if self._plain is not None:
            yield from read_blocks(self._entries(), self._plain, size, self._read)
            return
        # Little where an item is much: it is the batch that counts.
        most = max(16, min(_READ_AT_ONCE, 2 * size)) if size > 1 else 32
        chunk: list[_Ready] = []
        for index, entry in self._entries():
            chunk.append(self._read(index, entry))
            if len(chunk) >= most:
                yield Chunk(others=chunk)
                chunk = []
        if chunk:
            yield Chunk(others=chunk)

    def _entries(self) -> Iterator[tuple[int, Any]]:
        if self._all_wanted:
            yield from self._source.entries()
            return
        for index, entry in self._source.entries():
            if self._settings.limit is not None and index >= self._settings.limit:
                return
            if self._wants(index):
                yield index, entry

    @property
    def _all_wanted(self) -> bool:
        return self._settings.limit is None and self._settings.shard.count == 1 and not self._ledger.resumed

    def _wants(self, index: int) -> bool:
        limit = self._settings.limit
        return (limit is None or index < limit) and self._settings.shard.has(index) and not self._ledger.is_done(index)

    def _indices(self) -> Iterator[int]:
        """Of the items that are to be written, in order."""
        total = self._source.total if self._settings.limit is None else min(self._source.total, self._settings.limit)
        shard = self._settings.shard
        before = self._ledger.marks.snapshot()
        return (i for i in range(shard.number - 1, total, shard.count) if not before[shard.place(i)])

    def _read(self, index: int, entry: Any) -> _Ready:
        item = None
        try:
            item = self._source.item(index, entry)
            return _Ready(item, *self._asker.prepare(item))
        except HeadraceError as error:
            return _Ready(item or Item(index, self._source.id_of(entry), {}), error=error)


async def _ended(*tasks: asyncio.Task[Any]) -> None:
    """Cancel what is not done, and wait until it is."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.gather(*tasks, return_exceptions=True)
