# SPDX-License-Identifier: Apache-2.0
"""Consistent hashing: the same key finds the same server, in every router, and few keys move when servers come and go.

Used by `chooser` for sessions and for `prefix_hash`. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.fleet.router.backend import Backend

_POINTS = 100
"""Places on the ring for a server of mean weight."""
_MOST_POINTS = 1000


class Ring:
    """Places of servers on a circle. A server that is down keeps its places: its keys come back when it does."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        mean = sum(each.weight for each in backends) / len(backends) if backends else 1.0
        points = sorted(
            (_hash(f"{each.name}#{turn}".encode()), place)
            for place, each in enumerate(backends)
            for turn in range(max(1, min(_MOST_POINTS, round(_POINTS * each.weight / mean))))
        )
        self._backends = tuple(backends)
        self._hashes = [each for each, _ in points]
        self._places = [place for _, place in points]

    def walk(self, key: bytes) -> Iterator[Backend]:
        """All servers, the key's own first, then those that stand in for it, in their order."""
        seen: set[int] = set()
        size = len(self._places)
        start = bisect_right(self._hashes, _hash(key))
        for step in range(size):
            place = self._places[(start + step) % size]
            if place not in seen:
                seen.add(place)
                yield self._backends[place]
                if len(seen) == len(self._backends):
                    return


def _hash(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=8).digest())
