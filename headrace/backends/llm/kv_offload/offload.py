# SPDX-License-Identifier: Apache-2.0
"""KV offload of one instance: saves pages before the page pool evicts them, and loads the pages of a prompt's prefix.

    poll           before a step is scheduled: end what was copied or read
    (the scheduler and the page pool call the methods for them)
    before_step    between scheduling and launching a step: save evicted pages, before the step overwrites them, and start
                   loads

A page becomes unused, then it is evicted. When few pages are free, unused pages are saved ahead, a few with each step. What
is evicted first is saved with the step that overwrites it, or dropped if too much waits to be copied already.

A load fills pages of the pool and adds them to the prefix cache, where the sequence that waits for them finds them as if
they had always been there. A request that is cancelled meanwhile changes nothing about it.

Only the engine's thread calls it.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol

from headrace.backends.llm.kv_offload.disk_pages import DiskPages
from headrace.backends.llm.kv_offload.host_pages import HostPages
from headrace.backends.llm.kv_offload.page_copier import CopyJob, PageCopier
from headrace.backends.llm.metrics import DISK, GPU, HOST, LevelCounts
from headrace.backends.llm.page_pool import PagePool
from headrace.backends.llm.scheduler import PageEvents
from headrace.backends.llm.scheduler import Sequence as TokenSequence

log = logging.getLogger("headrace.backends.llm")

_FREE_SHARE = 4
"""Unused pages are saved ahead while less than this part of the pool (one in so many pages) is free."""
_WAIT_SECONDS = 0.0005
"""Between two looks at a copy of the device."""


@dataclass(eq=False, slots=True)
class _Load:
    """Pages of one prompt on their way into the pool."""

    sequence: TokenSequence
    shared: list[int]
    """Pages before them, kept from being evicted."""
    pages: list[int]
    hashes: list[bytes]
    from_disk: list[bool]
    to_read: int
    """Pages that threads still read from disk."""
    job: CopyJob | None = None
    failed: set[bytes] = field(default_factory=set)


class OffloadEvents(PageEvents, Protocol):
    """Receives what enters and leaves the levels: `kv_events.KVEventPublisher`."""

    def host_stored(self, page_hashes: Sequence[bytes], page_size: int) -> None:
        """Take note of pages in host memory."""

    def host_removed(self, page_hash: bytes) -> None:
        """Take note of a page that is no longer in host memory."""


class KVOffload:
    """Implements `page_pool.PageSaver` and `scheduler.PageLoader`."""

    def __init__(
        self, pool: PagePool, host: HostPages, copier: PageCopier, disk: DiskPages | None, *, least_tokens: int
    ) -> None:
        """`least_tokens`: fewer tokens than these are computed, not loaded."""
        self._pool = pool
        self._host = host
        self._copier = copier
        self._disk = disk
        self._least_pages = max(1, -(-least_tokens // pool.page_size))
        self._unsaved: OrderedDict[int, bytes] = OrderedDict()
        """Pages of the prefix cache that were used, are not in the host level, and may be evicted. Oldest first."""
        self._evicted: list[tuple[int, bytes]] = []
        """Since the last step was launched."""
        self._saves: list[tuple[CopyJob, list[bytes]]] = []
        self._saving = 0
        """Pages of these."""
        self._loads: list[_Load] = []
        self._loading: set[bytes] = set()
        self._results: SimpleQueue[Callable[[], None]] = SimpleQueue()
        """What threads of the disk level have ended."""
        self._wake = threading.Event()
        self._events: OffloadEvents | None = None
        self.counts = {level: LevelCounts() for level in (GPU, HOST, DISK)}

    def report_to(self, events: OffloadEvents) -> None:
        """Report what enters and leaves the host level, and what is loaded."""
        self._events = events
        self._host.on_removed = events.host_removed

    @property
    def busy(self) -> bool:
        """Whether there is something to do without a request."""
        return bool(self._loads or self._saves or self._evicted or (self._unsaved and self._is_pressed()))

    @property
    def held_bytes(self) -> dict[str, int]:
        """Bytes of the pages that the host and the disk level hold."""
        return {HOST: self._host.held_bytes, DISK: self._disk.held_bytes if self._disk is not None else 0}

    # For the page pool

    def unused(self, page: int, page_hash: bytes) -> None:
        """Take note that a page of the prefix cache has no user any more."""
        if page_hash in self._host:
            self._host.touch(page_hash)
        else:
            self._unsaved[page] = page_hash
            self._unsaved.move_to_end(page)

    def evicted(self, page: int, page_hash: bytes) -> None:
        """Take note that a page was evicted: it is overwritten when the next step is launched."""
        self._unsaved.pop(page, None)
        if page_hash in self._host:
            self._host.touch(page_hash)
        else:
            self._evicted.append((page, page_hash))

    def cleared(self) -> None:
        """Take note that the contents of all pages of the pool are not to be trusted."""
        self._unsaved.clear()
        self._evicted.clear()

    # For the scheduler

    def is_loading(self, page_hash: bytes) -> bool:
        """Return whether a page is being loaded."""
        return page_hash in self._loading

    def load(self, sequence: TokenSequence, shared: list[int], hashes: Sequence[bytes]) -> bool:
        """Load the pages with the first of these hashes, which come behind the `shared` pages. False: it does not pay."""
        found = self._find(hashes)
        if not sequence.loaded:
            self.counts[HOST].lookups += 1
            self.counts[DISK].lookups += self._disk is not None
        if len(found) < self._least_pages:
            return False
        load = _Load(sequence, shared, [], list(hashes[: len(found)]), found, 0)
        for page in shared:
            self._pool.share(page)
        load.pages = [self._pool.allocate() for _ in found]
        for page_hash, on_disk in zip(load.hashes, found, strict=True):
            self._loading.add(page_hash)
            if not on_disk:
                self._host.pin(page_hash)
        self._loads.append(load)
        self._read_from_disk(load)
        return True

    def started(self, tokens: int) -> None:
        """Count a prompt of which so many tokens were in the prefix cache without a load."""
        counts = self.counts[GPU]
        counts.lookups += 1
        counts.hits += tokens > 0
        counts.tokens += tokens

    # For the engine core

    def poll(self) -> None:
        """End what was copied or read."""
        try:
            while True:
                self._results.get_nowait()()
        except Empty:
            pass
        while self._saves and self._saves[0][0].done:
            _, hashes = self._saves.pop(0)
            self._saving -= len(hashes)
            self.counts[HOST].written += len(hashes)
            if self._events is not None:
                self._events.host_stored(hashes, self._pool.page_size)
            for page_hash in hashes:
                self._host.completed(page_hash)
                self._write_to_disk(page_hash)
                self._host.unpin(page_hash)
        for load in [load for load in self._loads if load.job is not None and load.job.done]:
            self._finish(load)

    def before_step(self) -> None:
        """Save evicted pages and start loads. After a step was scheduled, before it is launched."""
        self._save()
        for load in [load for load in self._loads if load.job is None and not load.to_read]:
            self._start_copy(load)

    def wait(self) -> None:
        """Wait a moment if nothing else can be done than waiting for a copy or the disk."""
        if any(load.job is None and not load.to_read for load in self._loads):
            return
        if self._results.empty() and not any(load.job is not None and load.job.done for load in self._loads):
            self._wake.wait(_WAIT_SECONDS)
        self._wake.clear()

    def drain(self) -> None:
        """Finish all loads and saves. While no step is in flight."""
        while self._loads or self._saves or self._evicted:
            self.before_step()
            self.wait()
            self.poll()

    def release(self) -> int:
        """Free the memory of the host level; return its bytes. After `drain`."""
        self._finish_disk_writes()
        return self._host.release()

    def restore(self) -> None:
        """Take the memory of the host level again. If there is none, nothing is saved."""
        try:
            self._host.allocate()
        except (RuntimeError, MemoryError):
            log.exception("There is no memory for the host level of the KV cache (kv_host_bytes): it is off.")
            self._host.slots = 0
            self._host.allocate()

    def close(self) -> None:
        """Stop the threads and free the memory."""
        if self._disk is not None:
            self._disk.close()
        for load in self._loads:
            if load.job is not None:
                _wait_for(load.job)
        for job, _ in self._saves:
            _wait_for(job)
        self._loads.clear()
        self._saves.clear()
        self._host.release()

    # Saving

    def _is_pressed(self) -> bool:
        return self._pool.free_pages * _FREE_SHARE < self._pool.pages

    def _save(self) -> None:
        """Start a copy of evicted pages, and of pages that may be evicted soon."""
        batch, self._evicted = self._evicted, []
        room = self._copier.most_pages - self._saving
        if len(batch) > room:
            self.counts[HOST].dropped += len(batch) - max(0, room)
            batch = batch[len(batch) - room :] if room > 0 else []
        if not self._saves and self._unsaved and self._is_pressed():
            while self._unsaved and len(batch) < self._copier.batch_pages:
                page, page_hash = self._unsaved.popitem(last=False)
                if self._pool.find(page_hash) == page:
                    batch.append((page, page_hash))
        pages, slots, hashes = [], [], []
        for page, page_hash in batch:
            if page_hash in self._host:
                continue
            slot = self._host.reserve(page_hash)
            if slot is None:
                self.counts[HOST].dropped += 1
                continue
            pages.append(page)
            slots.append(slot)
            hashes.append(page_hash)
        if not pages:
            return
        try:
            job = self._copier.save(pages, self._host.block, slots)
        except Exception:
            # Whatever the error: these pages can be computed again.
            log.warning("KV pages could not be copied to host memory.", exc_info=True)
            self.counts[HOST].dropped += len(pages)
            for page_hash in hashes:
                self._host.unpin(page_hash)
            return
        self._saves.append((job, hashes))
        self._saving += len(hashes)

    def _write_to_disk(self, page_hash: bytes) -> None:
        if self._disk is None or self._disk.has(page_hash):
            return
        data = memoryview(self._host.block[self._host.pin(page_hash)].numpy())
        if not self._disk.write(page_hash, data, partial(self._report, self._written, page_hash)):
            self._host.unpin(page_hash)
            self.counts[DISK].dropped += 1

    def _written(self, page_hash: bytes, written: bool) -> None:
        self._host.unpin(page_hash)
        self.counts[DISK].written += written
        self.counts[DISK].dropped += not written

    def _finish_disk_writes(self) -> None:
        while self._host.pinned:
            self.wait()
            self.poll()

    # Loading

    def _find(self, hashes: Sequence[bytes]) -> list[bool]:
        """Return for each of the first pages that a level has whether it is only on disk."""
        found: list[bool] = []
        for page_hash in hashes:
            on_disk = not self._host.has(page_hash)
            if page_hash in self._loading or (on_disk and not self._is_on_disk(page_hash)):
                break
            found.append(on_disk)
        return found

    def _is_on_disk(self, page_hash: bytes) -> bool:
        # While the host level is about to have it, its slot is not free to be read into.
        return self._disk is not None and page_hash not in self._host and self._disk.has(page_hash)

    def _read_from_disk(self, load: _Load) -> None:
        """Start to read the pages of a load that are on disk, as far as there are slots for them."""
        for index, (page_hash, on_disk) in enumerate(zip(load.hashes, load.from_disk, strict=True)):
            if not on_disk or self._disk is None:
                continue
            slot = self._host.reserve(page_hash)
            if slot is None:
                self._cut(load, index)
                return
            load.to_read += 1
            target = memoryview(self._host.block[slot].numpy())
            self._disk.read(page_hash, target, partial(self._report, self._read, load, page_hash))

    def _report(self, function: Callable[..., None], *arguments: object) -> None:
        """Let the engine's thread call a function. From a thread of the disk level."""
        self._results.put(partial(function, *arguments))
        self._wake.set()

    def _read(self, load: _Load, page_hash: bytes, whole: bool) -> None:
        load.to_read -= 1
        if whole:
            self._host.completed(page_hash)
            if self._events is not None:
                self._events.host_stored([page_hash], self._pool.page_size)
        else:
            load.failed.add(page_hash)

    def _cut(self, load: _Load, count: int) -> None:
        """Keep only the first pages of a load."""
        self._pool.free(reversed(load.pages[count:]))
        for index in range(count, len(load.hashes)):
            page_hash = load.hashes[index]
            self._loading.discard(page_hash)
            if page_hash in self._host:
                self._host.unpin(page_hash)
        del load.pages[count:], load.hashes[count:], load.from_disk[count:]

    def _start_copy(self, load: _Load) -> None:
        """Copy the pages of a load to the device, up to the first that could not be read."""
        if load.failed:
            self._cut(load, next(index for index, page_hash in enumerate(load.hashes) if page_hash in load.failed))
        if not load.pages:
            load.job = CopyJob()
            return
        slots = [self._host.slot_of(page_hash) for page_hash in load.hashes]
        try:
            load.job = self._copier.load(load.pages, self._host.block, slots)
        except Exception:
            # Whatever the error, the prompt can be computed.
            log.warning("KV pages could not be copied from host memory.", exc_info=True)
            self._cut(load, 0)
            load.job = CopyJob()

    def _finish(self, load: _Load) -> None:
        """Add the pages of a load to the prefix cache."""
        self._loads.remove(load)
        size, sequence = self._pool.page_size, load.sequence
        for index, (page, page_hash) in enumerate(zip(load.pages, load.hashes, strict=True), len(load.shared)):
            self._loading.discard(page_hash)
            if self._pool.register(page, page_hash) and self._events is not None:
                self._events.stored(sequence, index, size)
        for page_hash in reversed(load.hashes):  # the beginning of a prompt is used longest
            self._host.unpin(page_hash)
        self._pool.free(reversed([*load.shared, *load.pages]))
        sequence.loaded += len(load.pages) * size
        if not load.pages:
            sequence.may_load = False  # it would find the same again
        for level, pages in ((HOST, load.from_disk.count(False)), (DISK, load.from_disk.count(True))):
            self.counts[level].hits += pages > 0
            self.counts[level].tokens += pages * size


def _wait_for(job: CopyJob) -> None:
    while not job.done:
        threading.Event().wait(_WAIT_SECONDS)
