# SPDX-License-Identifier: Apache-2.0
"""Memory that backends keep of unloaded models, so that the next model of the same shape starts sooner.

A backend puts what it keeps here, with a function that frees it. The repository counts it against the memory limits of
models on demand, and frees the oldest when there is not enough. Safe from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """Something that is kept."""

    place: str
    """As memory limits name it: host, gpu0, ..."""
    size: int
    free: Callable[[], None]


class KeptMemory:
    """What is kept in one server."""

    def __init__(self) -> None:
        self._kept: dict[Kept, None] = {}
        """The oldest first."""
        self._lock = threading.Lock()
        self._closed = False

    @property
    def bytes(self) -> dict[str, int]:
        """What is kept now, by place."""
        total: dict[str, int] = {}
        with self._lock:
            for kept in self._kept:
                total[kept.place] = total.get(kept.place, 0) + kept.size
        return total

    def put(self, kept: Kept) -> bool:
        """Keep something. False if the server is closing: then the caller frees it."""
        with self._lock:
            if self._closed:
                return False
            self._kept[kept] = None
            return True

    def has(self, kept: Kept) -> bool:
        """Return whether something is still kept."""
        with self._lock:
            return kept in self._kept

    def take(self, kept: Kept) -> bool:
        """Take something out to use it. False if it was freed meanwhile."""
        with self._lock:
            return self._kept.pop(kept, self) is None

    def free(self, excess: Mapping[str, int]) -> None:
        """Free the oldest things until so many bytes of each place are free, or nothing is left there. May take long."""
        left = dict(excess)
        with self._lock:
            freeing = []
            for kept in tuple(self._kept):
                if left.get(kept.place, 0) > 0:
                    left[kept.place] -= kept.size
                    del self._kept[kept]
                    freeing.append(kept)
        for kept in freeing:
            kept.free()

    def close(self) -> None:
        """Free everything, and keep nothing more."""
        with self._lock:
            self._closed = True
            freeing, self._kept = tuple(self._kept), {}
        for kept in freeing:
            kept.free()
