# SPDX-License-Identifier: Apache-2.0
"""What became of requests, by revision: for who decides whether a new one gets more of them. Read by `status`.

Backends count for themselves; here they are added up when somebody asks, so that requests pay nothing for it. Of those that
have gone, the sums stay: a revision's errors are not forgotten with the pod that made them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.fleet.router.backend import Backend
    from headrace.fleet.router.backends import Backends

_MOST_GONE = 16
"""Revisions that are remembered without a backend."""


class _Sum:
    """Of one revision."""

    __slots__ = ("errors", "requests", "seconds", "times")

    def __init__(self) -> None:
        self.requests = self.errors = 0
        self.seconds = 0.0
        self.times: list[int] = []

    def add(self, backend: Backend) -> None:
        stats, took = backend.stats, backend.seconds
        self.add_counts(stats.done, stats.done - stats.ok, took.sum, took.counts)

    def add_counts(self, requests: int, errors: int, seconds: float, times: list[int]) -> None:
        self.requests += requests
        self.errors += errors
        self.seconds += seconds
        self.times = [a + b for a, b in zip(self.times, times, strict=True)] if self.times else list(times)


class Revisions:
    """See the module."""

    def __init__(self, backends: Backends) -> None:
        self._backends = backends
        self._gone: dict[str, _Sum] = {}

    def leave(self, backend: Backend) -> None:
        """A backend has gone, and has answered all it had."""
        revision = backend.address.revision
        if not revision:
            return
        kept = self._gone.pop(revision, None) or _Sum()
        kept.add(backend)
        # Put last, so that the one that nobody has been of for longest goes first.
        self._gone[revision] = kept
        while len(self._gone) > _MOST_GONE:
            del self._gone[next(iter(self._gone))]

    def as_json(self) -> dict[str, Any]:
        """`bounds` of the buckets, and `counts` by revision: requests, errors, the seconds they took, and their buckets."""
        backends = self._backends.all
        return {
            "bounds": list(backends[0].seconds.bounds) if backends else [],
            "counts": {
                name: {
                    "requests": each.requests,
                    "errors": each.errors,
                    "seconds": each.seconds,
                    "times": each.times,
                }
                for name, each in self._sums().items()
            },
        }

    def outcomes(self) -> dict[tuple[str, ...], float]:
        """For the metrics."""
        found: dict[tuple[str, ...], float] = {}
        for name, each in self._sums().items():
            found[(name, "ok")], found[(name, "error")] = each.requests - each.errors, each.errors
        return found

    def _sums(self) -> dict[str, _Sum]:
        found: dict[str, _Sum] = {}
        for name, each in self._gone.items():
            found[name] = made = _Sum()
            made.add_counts(each.requests, each.errors, each.seconds, each.times)
        for backend in (*self._backends.all, *self._backends.leaving):
            if backend.address.revision:
                found.setdefault(backend.address.revision, _Sum()).add(backend)
        return found
