# SPDX-License-Identifier: Apache-2.0
"""When requests of an open loop are due, whatever comes back. Pure: counts in seconds from the start.

Poisson by default: people and programs that know nothing of each other ask in bursts, and bursts are what makes queues.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from headrace.core.errors import InvalidArgument


class Arrivals:
    """Due times, one after the other."""

    def __init__(self, rate: float, *, uniform: bool = False, seed: int = 0) -> None:
        if rate <= 0:
            raise InvalidArgument(f"a rate of {rate:g} requests per second sends nothing: give one above 0")
        self._rate = rate
        self._uniform = uniform
        self._chance = random.Random(seed)  # noqa: S311 - spreads requests, hides nothing
        self._count = 0
        self.next = self._first()
        """When the next one is due."""

    def take_until(self, seconds: float) -> Iterator[float]:
        """Those that are due by now and have not been taken yet."""
        while self.next <= seconds:
            due = self.next
            self._count += 1
            # By multiplication where that is possible: sums of small steps drift.
            self.next = self._count / self._rate if self._uniform else due + self._gap()
            yield due

    def _first(self) -> float:
        return 0.0 if self._uniform else self._gap()

    def _gap(self) -> float:
        return self._chance.expovariate(self._rate)
