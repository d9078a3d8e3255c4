# SPDX-License-Identifier: Apache-2.0
"""Which of several versions a request goes to: a point from 0 to 1, and where it falls among the shares.

A request with a key has the point that its key always has, in every process and after every restart; the model's name is
part of what is hashed, so that who sees the new version of one model does not see that of every other. A request without a
key has a point by chance. Shares lie side by side in the order of the versions' numbers: when weight moves from a version
to the next, those at the border between the two change versions and nobody else does.

`peek` and `take`: a request may first be tried on the short way, which may decline (`engine.express`). The chance it drew
is then kept for whoever comes next, itself most of the time. Were it drawn again, versions that decline often would get too
little.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Generic, TypeVar

Chance = Callable[[], float]
"""A number from 0 up to, and without, 1."""

Choice = TypeVar("Choice")


class Points:
    """Keys to points, for one model."""

    def __init__(self, salt: str) -> None:
        self._salted = blake2b(salt.encode() + b"\0", digest_size=8)

    def of(self, key: str) -> float:
        """From 0 up to, and without, 1; the same for the same key."""
        hashed = self._salted.copy()
        # What a client sends may be no text.
        hashed.update(key.encode(errors="surrogatepass"))
        return (int.from_bytes(hashed.digest(), "big") >> 11) * 2.0**-53


class Chooser(Generic[Choice]):
    """Chooses by shares, which are replaced as a whole."""

    def __init__(self, salt: str, chance: Chance) -> None:
        self._points = Points(salt)
        self._chance = chance
        self._drawn: float | None = None
        self._bounds: list[float] = []
        self._choices: list[Choice] = []

    def share_out(self, choices: Sequence[tuple[float, Choice]]) -> None:
        """From now on choose among these. A share of 0 is never chosen; what the shares lack to 1 is the last one's."""
        chosen = [(share, choice) for share, choice in choices if share > 0]
        self._bounds = list(accumulate(share for share, _ in chosen))[:-1]
        self._choices = [choice for _, choice in chosen]

    def peek(self, key: str) -> Choice:
        """The choice for a request; without a key, the same until it is taken."""
        if key:
            point = self._points.of(key)
        else:
            drawn = self._drawn
            point = drawn if drawn is not None else self._chance()
            self._drawn = point
        return self._choices[bisect_right(self._bounds, point)]

    def take(self, key: str) -> None:
        """The choice was followed."""
        if not key:
            self._drawn = None
