# SPDX-License-Identifier: Apache-2.0
"""At most so many requests for each backend; more wait until one is free. Made by `proxy` for `max_outstanding`.

`Backends` with a bound: whoever ends a request, of either proxy, makes room for one that waits.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from headrace.fleet.router.backend import Backend, Outcome
from headrace.fleet.router.backends import Backends
from headrace.fleet.router.choosing.queueing import WaitingLine

if TYPE_CHECKING:
    from headrace.fleet.router.settings import RouterSettings


class LimitedBackends(Backends):
    """See the module."""

    def __init__(self, settings: RouterSettings) -> None:
        super().__init__(settings)
        self.most = settings.max_outstanding
        self.line = WaitingLine(settings.queue, self._has_room)

    @property
    def queued(self) -> int:
        """See `Backends.queued`."""
        return self.line.length

    def pick(self, exclude: Collection[Backend] = ()) -> Backend | None:
        """See `Backends.pick`."""
        full = [backend for backend in self.live if backend.outstanding >= self.most]
        return super().pick((*exclude, *full) if full else exclude)

    def give(self) -> Backend | None:
        """See `Backends.give`."""
        backend = self.pick()
        if backend is not None:
            self.begin(backend)
        return backend

    def end(self, backend: Backend, outcome: int, now: float) -> None:
        """See `Backends.end`."""
        super().end(backend, outcome, now)
        if outcome != Outcome.OK and self.line.length:
            self.line.go_on()

    def ended_well(self, backend: Backend) -> None:
        """See `Backends.ended_well`."""
        super().ended_well(backend)
        if self.line.length:
            self.line.go_on()

    def _has_room(self) -> bool:
        return any(backend.outstanding < self.most for backend in self.live)
