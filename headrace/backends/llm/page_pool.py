# SPDX-License-Identifier: Apache-2.0
"""The page pool: allocates KV-cache pages to sequences and finds cached prefixes (vLLM's block pool).

Used by the scheduler. A page is free, evictable (unused, but its tokens are cached under a hash), or used by as many
sequences as its reference count says. Only a page with one user and no hash is written to: a full page is registered in
the prefix cache and is read-only from then on. The pool holds page numbers; the model runner owns the memory.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Protocol


class PoolEvents(Protocol):
    """Receives what leaves the prefix cache: `kv_events.KVEventPublisher`."""

    def removed(self, page_hash: bytes) -> None:
        """Take note that a page was evicted."""

    def cleared(self) -> None:
        """Take note that the prefix cache is empty."""


class PageSaver(Protocol):
    """Saves pages of the prefix cache before they are overwritten: `kv_offload.offload.KVOffload`."""

    def unused(self, page: int, page_hash: bytes) -> None:
        """Take note that a page has no user any more, and may be evicted."""

    def evicted(self, page: int, page_hash: bytes) -> None:
        """Take note that a page was evicted: it is overwritten when the next step is launched."""

    def cleared(self) -> None:
        """Take note that the prefix cache is empty, and the contents of its pages are not to be trusted."""


class PagePool:
    """Pages 0 to `pages` - 1 with reference counts and a prefix cache."""

    def __init__(self, pages: int, page_size: int, *, prefix_cache: bool) -> None:
        self.pages = pages
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self._free = list(range(pages - 1, -1, -1))
        self._ref_counts = [0] * pages
        self._hashes: dict[int, bytes] = {}
        self._by_hash: dict[bytes, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()
        """Least recently used first."""
        self.events: PoolEvents | None = None
        self.saver: PageSaver | None = None

    @property
    def free_pages(self) -> int:
        """Pages that can be allocated without evicting one."""
        return len(self._free)

    @property
    def available(self) -> int:
        """Pages that can be allocated now, free and evictable."""
        return len(self._free) + len(self._evictable)

    @property
    def used(self) -> int:
        """Pages that sequences use; a shared page counts once."""
        return self.pages - self.available

    @property
    def evictable(self) -> int:
        """Unused pages that are still in the prefix cache."""
        return len(self._evictable)

    def allocate(self) -> int:
        """Return a page to write to; one must be `available`. Evicts the least recently used page if none is free."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._evictable.popitem(last=False)
            page_hash = self._hashes.pop(page)
            del self._by_hash[page_hash]
            if self.events is not None:
                self.events.removed(page_hash)
            if self.saver is not None:
                self.saver.evicted(page, page_hash)
        self._ref_counts[page] = 1
        return page

    def share(self, page: int) -> None:
        """Add a reader to a cached page."""
        if not self._ref_counts[page]:
            del self._evictable[page]
        self._ref_counts[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Drop one reference to each page. Pass a sequence's last page first: it is the least likely to be reused."""
        for page in pages:
            self._ref_counts[page] -= 1
            if self._ref_counts[page] < 0:
                raise RuntimeError(f"page {page} was freed by a sequence that does not use it")
            if not self._ref_counts[page]:
                if page in self._hashes:
                    self._evictable[page] = None
                    if self.saver is not None:
                        self.saver.unused(page, self._hashes[page])
                else:
                    self._free.append(page)

    def ref_count(self, page: int) -> int:
        """Return how many sequences use a page."""
        return self._ref_counts[page]

    def is_evictable(self, page: int) -> bool:
        """Return whether a page is unused and still in the prefix cache."""
        return page in self._evictable

    def register(self, page: int, page_hash: bytes) -> bool:
        """Add a full page to the prefix cache; return whether it was new there. The first page with a hash keeps it."""
        if not self.prefix_cache or page_hash in self._by_hash or page in self._hashes:
            return False
        self._by_hash[page_hash] = page
        self._hashes[page] = page_hash
        return True

    def is_registered(self, page: int) -> bool:
        """Return whether a page is in the prefix cache, and therefore read-only."""
        return page in self._hashes

    def find(self, page_hash: bytes) -> int | None:
        """Return the page whose tokens, and all tokens before them, have this hash."""
        return self._by_hash.get(page_hash)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, because the contents of its pages are not to be trusted."""
        self._by_hash.clear()
        self._hashes.clear()
        self._free.extend(self._evictable)
        self._evictable.clear()
        if self.events is not None:
            self.events.cleared()
        if self.saver is not None:
            self.saver.cleared()


def extend_page_hashes(
    page_hashes: list[bytes], tokens: Sequence[int], page_size: int, cache_salt: bytes, pages: int
) -> Sequence[bytes]:
    """Extend `page_hashes` to the first `pages` full pages; each hash covers all tokens up to the end of its page.

    The hash is cryptographic: with a collision, one client could get the cached pages of another client's prompt.
    """
    while len(page_hashes) < pages:
        start = len(page_hashes) * page_size
        page_hash = blake2b(page_hashes[-1] if page_hashes else b"headrace" + cache_salt, digest_size=16)
        page_hash.update(array("q", tokens[start : start + page_size]).tobytes())
        page_hashes.append(page_hash.digest())
    return page_hashes
