# SPDX-License-Identifier: Apache-2.0
"""Which of several servers gets the next request. Asked by `backends.Backends.pick` for every request.

A policy is given those that may be chosen, at least two, and knows of them what `Candidate` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Protocol

from headrace.core.errors import InvalidArgument
from headrace.fleet.router.settings import ALIASES, POLICIES

if TYPE_CHECKING:
    from headrace.fleet.router.backend import Backend


class Policy(Protocol):
    """A way to choose."""

    def pick(self, live: Sequence[Backend]) -> Backend:
        """One of `live`, which is not empty."""


class RoundRobin:
    """Each in its turn, whatever its weight. One in a slow start is passed over most of the time."""

    def __init__(self, random: Random) -> None:
        self._next = 0
        self._random = random.random

    def pick(self, live: Sequence[Backend]) -> Backend:
        """See `Policy.pick`."""
        size = len(live)
        for _ in range(size):
            self._next = place = (self._next + 1) % size
            backend = live[place]
            if backend.ramp >= 1.0 or self._random() < backend.ramp:
                return backend
        return live[self._next]


class LeastOutstanding:
    """The one with the fewest unanswered requests for its weight; among equals each in its turn."""

    def __init__(self, random: Random) -> None:
        self._start = 0

    def pick(self, live: Sequence[Backend]) -> Backend:
        """See `Policy.pick`."""
        size = len(live)
        # The turn moves by one each time: else the first of equals would get all that comes to an idle router.
        self._start = start = (self._start + 1) % size
        best = live[start]
        least = (best.outstanding + 1) / best.share
        for place in range(start + 1, start + size):
            backend = live[place - size if place >= size else place]
            load = (backend.outstanding + 1) / backend.share
            if load < least:
                best, least = backend, load
        return best


class PowerOfTwo:
    """Two by chance, and of these the one with fewer unanswered requests for its weight.

    Nearly as even as looking at all, and several routers that do so do not all run to the same server.
    """

    def __init__(self, random: Random) -> None:
        self._random = random.random

    def pick(self, live: Sequence[Backend]) -> Backend:
        """See `Policy.pick`."""
        size = len(live)
        random = self._random
        first = int(random() * size)
        second = int(random() * (size - 1))
        if second >= first:
            second += 1
        one, other = live[first], live[second % size]
        if (one.outstanding + 1) * other.share <= (other.outstanding + 1) * one.share:
            return one
        return other


class SmoothWeighted:
    """Each by its weight, well mixed: with 2 and 1 it goes a b a, not a a b (the algorithm that nginx made known)."""

    def __init__(self, random: Random) -> None:
        self._credit: dict[Backend, float] = {}

    def pick(self, live: Sequence[Backend]) -> Backend:
        """See `Policy.pick`."""
        credit = self._credit
        total = 0.0
        best = live[0]
        most = float("-inf")
        for backend in live:
            share = backend.share
            total += share
            credit[backend] = have = credit.get(backend, 0.0) + share
            if have > most:
                best, most = backend, have
        credit[best] = most - total
        return best

    def forget(self, backend: Backend) -> None:
        """The server has gone for good."""
        self._credit.pop(backend, None)

    def __copy__(self) -> SmoothWeighted:
        # For who wants to know the next choice without making it.
        made = SmoothWeighted(Random())  # noqa: S311 - unused
        made._credit = dict(self._credit)
        return made


class ByChance:
    """Any, by its weight."""

    def __init__(self, random: Random) -> None:
        self._random = random.random

    def pick(self, live: Sequence[Backend]) -> Backend:
        """See `Policy.pick`."""
        left = self._random() * sum(backend.share for backend in live)
        for backend in live:
            left -= backend.share
            if left < 0:
                return backend
        return live[-1]


_MAKERS: dict[str, Callable[[Random], Policy]] = dict(
    zip(
        POLICIES,
        # The last two look at requests (`choosing`), and where there is nothing to look at, at the load.
        (PowerOfTwo, RoundRobin, LeastOutstanding, SmoothWeighted, ByChance, LeastOutstanding, LeastOutstanding),
        strict=True,
    )
)


def make_policy(name: str, random: Random | None = None) -> Policy:
    """The policy of this name, one of `settings.POLICIES` or of its `ALIASES`."""
    try:
        maker = _MAKERS[ALIASES.get(name, name)]
    except KeyError:
        raise InvalidArgument(f"there is no policy {name!r}; choose one of {', '.join(POLICIES)}") from None
    return maker(random or Random())  # noqa: S311 - spreads requests, hides nothing
