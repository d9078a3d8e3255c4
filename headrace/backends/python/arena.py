# SPDX-License-Identifier: Apache-2.0
"""Shared memory for tensors: one region per direction, written by one side and viewed by the other.

The writer (`Arena`) places blocks; the reader (`ArenaView`) gives arrays that are views of them, and a block is free
again when the last array on it is gone, whoever kept it. The region is an anonymous file (memfd), so the size of
/dev/shm does not matter and nothing is left behind by a killed process; it grows by itself.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from bisect import bisect_left
from collections import deque
from typing import Any

from headrace.backends.python.frames import Buffer

KEPT_BYTES = 32 << 20
"""What a region keeps when it is trimmed."""

_ALIGNMENT = 64
_FIRST_BYTES = 1 << 20


def make_region(name: str) -> int:
    """The descriptor of an empty region, or -1 where the system has none to give."""
    try:
        return os.memfd_create(name)
    except OSError:
        return -1


class Arena:
    """The writing side. Several threads may use it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._map: mmap.mmap | None = None
        self._view = memoryview(b"")
        self._sizes: dict[int, int] = {}
        # Free blocks by their offset; neighbours are always joined.
        self._free: list[tuple[int, int]] = []
        self.size = 0
        self.put_bytes = 0
        """What was placed so far, all together: unchanged means unused since."""

    @property
    def empty(self) -> bool:
        """Whether no block is in use."""
        return not self._sizes

    def put(self, buffer: Buffer) -> int:
        """Copy a buffer into a block of its own; where it lies."""
        need = max(1, (len(buffer) + _ALIGNMENT - 1) // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            offset = self._take(need)
            view = self._view
            self.put_bytes += need
        view[offset : offset + len(buffer)] = buffer
        return offset

    def release(self, offset: int) -> None:
        """The reader has no view of the block any more."""
        with self._lock:
            size = self._sizes.pop(offset, 0)
            if size:
                self._give(offset, size)

    def trim(self) -> None:
        """Give memory back to the system, if nothing is in use."""
        with self._lock:
            if self._map is not None and not self._sizes and self.size > KEPT_BYTES:
                # A hole, not a shorter file: the other side still has the whole mapped.
                self._map.madvise(mmap.MADV_REMOVE, KEPT_BYTES, self.size - KEPT_BYTES)

    def close(self) -> None:
        """Let go of the mapping; the descriptor belongs to the caller."""
        with self._lock:
            self._view = memoryview(b"")
            self._map = None
            self._sizes.clear()
            self._free.clear()

    def _take(self, need: int) -> int:
        for index, (offset, size) in enumerate(self._free):
            if size >= need:
                if size == need:
                    del self._free[index]
                else:
                    self._free[index] = (offset + need, size - need)
                self._sizes[offset] = need
                return offset
        self._grow(need)
        return self._take(need)

    def _grow(self, need: int) -> None:
        old = self.size
        size = max(_FIRST_BYTES, old * 2)
        while size - old < need:
            size *= 2
        os.ftruncate(self._fd, size)
        self._map = mmap.mmap(self._fd, size)
        self._view = memoryview(self._map)
        self.size = size
        self._give(old, size - old)

    def _give(self, offset: int, size: int) -> None:
        index = bisect_left(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == offset + size:
            size += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            index -= 1
            start, before = self._free.pop(index)
            offset, size = start, before + size
        self._free.insert(index, (offset, size))


class ArenaView:
    """The reading side."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._map: mmap.mmap | None = None
        self.mapped = 0
        self._blocks: dict[int, weakref.ref[Any]] = {}
        self._freed: deque[tuple[int, int]] = deque()

    def block(self, offset: int, size: int) -> Any:
        """Something numpy can view: writable memory that is given back when the last view of it is gone."""
        if offset + size > self.mapped or self._map is None:
            self.mapped = os.fstat(self._fd).st_size
            self._map = mmap.mmap(self._fd, self.mapped)
        block = (ctypes.c_ubyte * size).from_buffer(self._map, offset)
        freed, blocks = self._freed, self._blocks

        def gone(_: object) -> None:
            # Runs whenever and wherever the garbage is collected: nothing here may wait or send.
            blocks.pop(offset, None)
            freed.append((offset, size))

        # Later views of the same place are made only after this one was given back.
        blocks[offset] = weakref.ref(block, gone)
        return block

    def take_freed(self) -> list[int]:
        """The blocks that were given back since the last call."""
        freed = self._freed
        offsets: list[int] = []
        while freed:
            offsets.append(freed.popleft()[0])
        return offsets

    def freed_bytes(self) -> int:
        """How much waits to be given back."""
        return sum(size for _, size in list(self._freed))

    def close(self) -> None:
        """Let go of the mapping; views that are still held keep it alive."""
        self._map = None
        self.mapped = 0
