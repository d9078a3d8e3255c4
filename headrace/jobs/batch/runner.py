# SPDX-License-Identifier: Apache-2.0
"""Run a batch job: read items ahead, keep many requests in flight, and write results as they finish.

    reading (a thread) -> groups -> requests in flight -> results -> writing (a thread)

The number of items between reading and writing is bounded, so memory does not grow with the input.
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
from headrace.jobs.batch.blocks import Block, BlockResult, Chunk, read_blocks, read_columns
from headrace.jobs.batch.inference import InferenceClient, TensorClient
from headrace.jobs.batch.ledger import Ledger, Result
from headrace.jobs.batch.progress import Failure
from headrace.jobs.batch.settings import BatchSettings
from headrace.jobs.batch.sources import Item, LinesSource, ParquetSource, Source

_MAX_CHUNK = 256
_WRITE_ITEMS = 512
_WRITE_SECONDS = 0.1
_MAX_FAILURES_SHOWN = 5
OnProgress = Callable[[int, int], None]
"""Called with the number of finished and of failed items."""


@dataclass(slots=True)
class _PreparedItem:
    """An item that is prepared, or invalid."""

    item: Item
    key: Any = None
    prepared: Any = None
    error: HeadraceError | None = None


class _Groups:
    """Collects items with equal keys into groups."""

    def __init__(self, size: int, max_items: int, *, in_order: bool) -> None:
        self._size = size
        self._max_items = max_items
        self._in_order = in_order
        self._groups: dict[Any, list[_PreparedItem]] = {}
        self._waiting = 0

    def add(self, prepared_item: _PreparedItem) -> list[list[_PreparedItem]] | None:
        """Add an item; return the groups to send now."""
        group = self._groups.get(prepared_item.key)
        before = None
        if group is None:
            before = self.take_all() if self._in_order else None
            group = self._groups[prepared_item.key] = []
        group.append(prepared_item)
        self._waiting += 1
        if len(group) >= self._size:
            return [*(before or ()), self._take(prepared_item.key)]
        if self._waiting > self._max_items:
            # Many shapes with few items each: send the oldest group as it is.
            return [*(before or ()), self._take(next(iter(self._groups)))]
        return before

    def take_all(self) -> list[list[_PreparedItem]]:
        """Return all groups."""
        return [self._take(key) for key in list(self._groups)]

    def _take(self, key: Any) -> list[_PreparedItem]:
        group = self._groups.pop(key)
        self._waiting -= len(group)
        return group


class BatchRunner:
    """One run of a batch job."""

    def __init__(
        self,
        settings: BatchSettings,
        source: Source,
        client: InferenceClient,
        ledger: Ledger,
        clock: Clock,
        on_progress: OnProgress,
    ) -> None:
        self._settings = settings
        self._source = source
        self._client = client
        self._ledger = ledger
        self._clock = clock
        self._on_progress = on_progress
        slots = settings.in_flight or client.in_flight
        self._slots = asyncio.Semaphore(slots)
        self._max_unwritten = max(2048, 4 * slots * client.max_batch)
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        in_blocks = isinstance(source, LinesSource | ParquetSource) and not settings.ordered
        self._plain = client.plain if isinstance(client, TensorClient) and in_blocks else None
        """The input for the fast path (`blocks`), if the order of results does not matter."""
        self._results: list[Result | BlockResult] = []
        self._computed = 0
        """Number of items in `_results`."""
        self._unwritten = 0
        """Items that were sent or rejected and are not in the ledger yet."""
        self._written = asyncio.Event()
        self._wake = asyncio.Event()
        """Set when the writer has work."""
        self._all_sent = False
        self._error: BaseException | None = None
        self._order: Iterator[int] | None = self._indices() if settings.ordered else None
        self._next = next(self._order, -1) if self._order is not None else -1
        self._held: dict[int, Result] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="headrace-batch-write")
        self.failures: list[Failure] = []
        """The first failures."""

    def stop(self) -> None:
        """Start no more items; call it from the loop's thread."""
        self._stopping.set()
        self._written.set()
        # `_start` may wait for a slot while no request in flight ends; from now on it takes none.
        self._slots.release()

    @property
    def stopped(self) -> bool:
        """Return whether `stop` was called."""
        return self._stopping.is_set()

    async def run(self) -> None:
        """Compute the missing items; return when all results are written, or those in flight at a stop.

        Raises errors that end the job: no disk space, too many failures.
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
            await _cancel(sending, *self._tasks)
            if not writing.done():
                # Sending failed: still write the finished results.
                self._end_writing()
                with contextlib.suppress(HeadraceError):
                    await writing
            self._writer.shutdown(wait=True)

    async def _send_all(self) -> None:
        groups = _Groups(self._client.max_batch, self._max_unwritten // 2, in_order=self._order is not None)
        chunks = self._chunks()
        reading = asyncio.create_task(asyncio.to_thread(next, chunks, None))
        while (chunk := await reading) is not None and not self._stopping.is_set():
            reading = asyncio.create_task(asyncio.to_thread(next, chunks, None))
            for block in chunk.blocks:
                self._unwritten += len(block.rows)
                await self._start(self._infer_block, block)
            for prepared_item in chunk.others:
                self._unwritten += 1
                if prepared_item.error is not None:
                    self._add_result(prepared_item.item, prepared_item.error)
                    continue
                full = groups.add(prepared_item)
                if full:
                    for group in full:
                        await self._send(group)
            await self._wait_for_room(groups)
        await asyncio.wait({reading})  # a thread cannot be cancelled
        for group in groups.take_all():
            await self._send(group)
        await self._wait_for_requests()
        if self._error is not None:
            raise self._error

    async def _wait_for_room(self, groups: _Groups) -> None:
        if self._unwritten <= self._max_unwritten:
            return
        if self._order is not None:
            # The next item in order may be in a group that is not full.
            for group in groups.take_all():
                await self._send(group)
        while self._unwritten > self._max_unwritten and not self._stopping.is_set():
            self._written.clear()
            await self._written.wait()

    async def _send(self, group: list[_PreparedItem]) -> None:
        await self._start(self._infer, group)

    async def _start(self, infer: Callable[[Any], Coroutine[Any, Any, None]], work: Any) -> None:
        if self._stopping.is_set():
            return
        await self._slots.acquire()
        if self._stopping.is_set():
            self._slots.release()
            return
        task = asyncio.create_task(infer(work))
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._error = task.exception()
            self.stop()

    async def _infer(self, group: list[_PreparedItem]) -> None:
        try:
            outcomes = await self._client.infer([prepared_item.prepared for prepared_item in group])
        finally:
            self._slots.release()
        for prepared_item, outcome in zip(group, outcomes, strict=True):
            self._add_result(prepared_item.item, outcome)

    async def _infer_block(self, block: Block) -> None:
        if not isinstance(self._client, TensorClient):
            raise TypeError("only a TensorClient runs blocks")
        try:
            outcome = await self._client.infer_block(block.rows)
        finally:
            self._slots.release()
        if isinstance(outcome, list):
            for index, item_id, item_outcome in zip(block.indices, block.ids, outcome, strict=True):
                self._add_result(Item(index, item_id, {}), item_outcome)
            return
        self._results.append(BlockResult(block.indices, block.ids, outcome))
        self._count_results(len(block.rows))

    async def _wait_for_requests(self) -> None:
        while self._tasks:
            if not self._stopping.is_set():
                stop = asyncio.create_task(self._stopping.wait())
                await asyncio.wait({stop, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
                await _cancel(stop)
                continue
            await asyncio.wait(self._tasks, timeout=self._settings.grace_seconds)
            await _cancel(*self._tasks)

    def _add_result(self, item: Item, outcome: Any) -> None:
        if isinstance(outcome, HeadraceError) and len(self.failures) < _MAX_FAILURES_SHOWN:
            self.failures.append(Failure(item.index, item.id, outcome.code.value, outcome.message))
        result = (item.index, item.id, outcome)
        if self._order is None:
            self._results.append(result)
            self._count_results(1)
            return
        self._held[item.index] = result
        while self._next in self._held:
            self._results.append(self._held.pop(self._next))
            self._next = next(self._order, -1)
            self._count_results(1)

    def _count_results(self, count: int) -> None:
        self._computed += count
        if self._computed >= _WRITE_ITEMS:
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
                self._on_progress(marks.finished, marks.failed)
                self._check_failures()
            elif last:
                return
            if self._clock.monotonic() >= due:
                await loop.run_in_executor(self._writer, self._ledger.checkpoint)
                due = self._clock.monotonic() + self._settings.checkpoint_seconds
            if not last and self._computed < _WRITE_ITEMS:
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), _WRITE_SECONDS)

    def _end_writing(self) -> None:
        self._all_sent = True
        self._wake.set()

    def _check_failures(self) -> None:
        limit = self._settings.max_failures
        failed = self._ledger.marks.failed
        if limit is not None and failed > limit:
            raise FailedPrecondition(
                f"{failed} items failed, but --max-failures is {limit}: check their errors in the results, then run the "
                "same command again with a larger number or with --retry-failed"
            )

    def _chunks(self) -> Iterator[Chunk[_PreparedItem]]:
        """Yield chunks of prepared items that are not done. Runs in a thread."""
        size = self._client.max_batch
        if self._plain is not None and isinstance(self._source, ParquetSource):
            limit, is_wanted = self._settings.limit, None if self._wants_all else self._wants
            parts = itertools.takewhile(lambda part: limit is None or part[0] < limit, self._source.parts(size))
            yield from read_columns(parts, self._plain, size, is_wanted, self._read)
            return
        if self._plain is not None:
            yield from read_blocks(self._entries(), self._plain, size, self._read)
            return
        # Few items per chunk if items are large.
        max_items = max(16, min(_MAX_CHUNK, 2 * size)) if size > 1 else 32
        chunk: list[_PreparedItem] = []
        for index, entry in self._entries():
            chunk.append(self._read(index, entry))
            if len(chunk) >= max_items:
                yield Chunk(others=chunk)
                chunk = []
        if chunk:
            yield Chunk(others=chunk)

    def _entries(self) -> Iterator[tuple[int, Any]]:
        if self._wants_all:
            yield from self._source.entries()
            return
        for index, entry in self._source.entries():
            if self._settings.limit is not None and index >= self._settings.limit:
                return
            if self._wants(index):
                yield index, entry

    @property
    def _wants_all(self) -> bool:
        return self._settings.limit is None and self._settings.shard.count == 1 and not self._ledger.resumed

    def _wants(self, index: int) -> bool:
        limit = self._settings.limit
        return (limit is None or index < limit) and self._settings.shard.has(index) and not self._ledger.is_done(index)

    def _indices(self) -> Iterator[int]:
        """Return the indices of the missing items, in order."""
        total = self._source.total if self._settings.limit is None else min(self._source.total, self._settings.limit)
        shard = self._settings.shard
        before = self._ledger.marks.snapshot()
        return (i for i in range(shard.number - 1, total, shard.count) if not before[shard.position(i)])

    def _read(self, index: int, entry: Any) -> _PreparedItem:
        item = None
        try:
            item = self._source.item(index, entry)
            return _PreparedItem(item, *self._client.prepare(item))
        except HeadraceError as error:
            return _PreparedItem(item or Item(index, self._source.id_of(entry), {}), error=error)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait for their end."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.gather(*tasks, return_exceptions=True)
