# SPDX-License-Identifier: Apache-2.0
"""The host level of the KV cache: pages in host memory, found by their hashes, the least recently used replaced first.

All pages are slots of one block, which is page-locked for a GPU. A page that is being copied is pinned: its slot is not
reused meanwhile. Only the engine's thread calls it; other threads read and write slots that are pinned for them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.backends.cuda_memory import huge_pages, register, unregister


@dataclass(slots=True)
class _Entry:
    slot: int
    pins: int
    ready: bool
    """Whether its contents are complete."""


class HostPages:
    """At most `max_bytes` of pages of `page_bytes` each."""

    def __init__(self, max_bytes: int, page_bytes: int, *, pinned: bool) -> None:
        """Allocate the memory. Raises RuntimeError or MemoryError if that fails."""
        self.page_bytes = page_bytes
        self.slots = max_bytes // page_bytes
        self._pinned = pinned
        self._block: torch.Tensor | None = None
        self._entries: dict[bytes, _Entry] = {}
        self._unpinned: OrderedDict[bytes, None] = OrderedDict()
        """Least recently used first."""
        self._free: list[int] = []
        self.on_removed: Callable[[bytes], None] | None = None
        """Called with each page that makes room for another."""
        self.allocate()

    def allocate(self) -> None:
        """Take the memory, unless it is there."""
        if self._block is None:
            if self._pinned and self.slots:
                block = huge_pages(self.slots * self.page_bytes)
                register(block)
            else:
                block = torch.empty(self.slots * self.page_bytes, dtype=torch.uint8)
            self._block = block.view(self.slots, self.page_bytes)
            self._free = list(range(self.slots - 1, -1, -1))

    def release(self) -> int:
        """Forget all pages and free the memory; return its bytes. No page may be pinned."""
        if self._block is None:
            return 0
        freed = self.slots * self.page_bytes
        if self._pinned and self.slots:
            unregister(self._block)
        self._block, self._free = None, []
        self._entries.clear()
        self._unpinned.clear()
        return freed

    @property
    def block(self) -> torch.Tensor:
        """The memory, `[slots, bytes of a page]`."""
        if self._block is None:
            raise RuntimeError("the host level has no memory while the model sleeps")
        return self._block

    @property
    def held_bytes(self) -> int:
        """Bytes of the pages that it holds."""
        return len(self._entries) * self.page_bytes

    def __contains__(self, page_hash: bytes) -> bool:
        """Whether it has a page, or is about to."""
        return page_hash in self._entries

    def has(self, page_hash: bytes) -> bool:
        """Return whether it has a page whose contents are complete."""
        entry = self._entries.get(page_hash)
        return entry is not None and entry.ready

    @property
    def pinned(self) -> int:
        """Pages that are being copied, read or written."""
        return len(self._entries) - len(self._unpinned)

    def slot_of(self, page_hash: bytes) -> int:
        """Return the slot of a page that is here."""
        return self._entries[page_hash].slot

    def touch(self, page_hash: bytes) -> None:
        """Make a page the most recently used."""
        if page_hash in self._unpinned:
            self._unpinned.move_to_end(page_hash)

    def reserve(self, page_hash: bytes) -> int | None:
        """Return a slot for a page that is not here, pinned; None if all slots are pinned."""
        if self._free:
            slot = self._free.pop()
        elif self._unpinned:
            oldest, _ = self._unpinned.popitem(last=False)
            slot = self._entries.pop(oldest).slot
            if self.on_removed is not None:
                self.on_removed(oldest)
        else:
            return None
        self._entries[page_hash] = _Entry(slot, 1, False)
        return slot

    def completed(self, page_hash: bytes) -> None:
        """Take note that the contents of a reserved page are complete. It stays pinned."""
        self._entries[page_hash].ready = True

    def pin(self, page_hash: bytes) -> int:
        """Keep a page until `unpin`; return its slot."""
        entry = self._entries[page_hash]
        entry.pins += 1
        self._unpinned.pop(page_hash, None)
        return entry.slot

    def unpin(self, page_hash: bytes) -> None:
        """Drop one pin. A page that never was completed is forgotten."""
        entry = self._entries[page_hash]
        entry.pins -= 1
        if entry.pins:
            return
        if entry.ready:
            self._unpinned[page_hash] = None
        else:
            del self._entries[page_hash]
            self._free.append(entry.slot)
