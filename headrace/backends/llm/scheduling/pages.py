# SPDX-License-Identifier: Apache-2.0
"""The pages of a KV cache: who has them, and which of those nobody has still hold something worth finding again.

Called by the scheduler. A page is free, or idle (nobody's, but full of tokens that a digest names), or used by as many
sequences as its count says. Only a page with one user and no digest is ever written to: what is full is registered and
from then on only read.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b


class PagePool:
    """Numbers from 0 to `pages`; the memory itself is the runner's."""

    def __init__(self, pages: int, page_size: int, *, prefix_cache: bool) -> None:
        self.pages = pages
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self._free = list(range(pages - 1, -1, -1))
        self._users = [0] * pages
        self._digests: dict[int, bytes] = {}
        self._by_digest: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Oldest first."""

    @property
    def available(self) -> int:
        """How many could be taken now."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """How many sequences have, each counted once."""
        return self.pages - self.available

    @property
    def idle(self) -> int:
        """How many are nobody's and may be found again."""
        return len(self._idle)

    def take(self) -> int:
        """A page to write to; there must be one `available`. The idle page that was used longest ago goes last."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            del self._by_digest[self._digests.pop(page)]
        self._users[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more reads it."""
        if not self._users[page]:
            del self._idle[page]
        self._users[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        """One user less for each. Of a sequence's pages the last should come first: they are found again least."""
        for page in pages:
            self._users[page] -= 1
            if self._users[page] < 0:
                raise RuntimeError(f"page {page} was given back by someone who did not have it")
            if not self._users[page]:
                if page in self._digests:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def users(self, page: int) -> int:
        """How many have it."""
        return self._users[page]

    def is_idle(self, page: int) -> bool:
        """Whether it is nobody's and may be found again."""
        return page in self._idle

    def register(self, page: int, digest: bytes) -> None:
        """The page is full: who has the same tokens may share it. The first page with a digest keeps it."""
        if self.prefix_cache and digest not in self._by_digest and page not in self._digests:
            self._by_digest[digest] = page
            self._digests[page] = digest

    def registered(self, page: int) -> bool:
        """Whether it may be shared, and must not be written to."""
        return page in self._digests

    def find(self, digest: bytes) -> int | None:
        """The page whose tokens, and all before them, are those of the digest."""
        return self._by_digest.get(digest)

    def forget(self) -> None:
        """No page is found again: their contents are not to be trusted."""
        self._by_digest.clear()
        self._digests.clear()
        self._free.extend(self._idle)
        self._idle.clear()


def extend_digests(
    digests: list[bytes], tokens: Sequence[int], page_size: int, salt: bytes, pages: int
) -> Sequence[bytes]:
    """Make the digests of the first `pages` full pages, each of all tokens up to its end.

    A cryptographic one: who could find two prompts with one digest could have another's prompt answered as his own.
    """
    while len(digests) < pages:
        start = len(digests) * page_size
        digest = blake2b(digests[-1] if digests else b"headrace" + salt, digest_size=16)
        digest.update(array("q", tokens[start : start + page_size]).tobytes())
        digests.append(digest.digest())
    return digests
