# SPDX-License-Identifier: Apache-2.0
"""Requests that wait because every backend has as many as it may have: so many, for so long, the first first.

Owned by `limits`; the proxies put them in (`forwarding.Forwarder.nobody`, `h2.call`). Those waiting are `waking.held.Held`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.core.errors import HeadraceError, ResourceExhausted, Unavailable

if TYPE_CHECKING:
    from headrace.fleet.router.choosing.settings import QueueSettings
    from headrace.fleet.router.waking.held import Held

log = logging.getLogger("headrace.router")


class WaitingLine:
    """See the module. Used from the loop's thread only."""

    def __init__(self, settings: QueueSettings, has_room: Callable[[], bool]) -> None:
        self._settings = settings
        self._has_room = has_room
        self._waiting: deque[tuple[float, Held]] = deque()
        self._going = False
        self.refused = 0
        """Requests that could not wait, or not long enough."""
        self.length = 0
        """Requests that wait, some of which may have left."""

    def add(self, request: Held) -> None:
        """Have it wait, if it may."""
        settings = self._settings
        if self.length >= settings.requests:
            self._drop_gone()
        if self.length >= settings.requests:
            self._refuse(
                request,
                ResourceExhausted(
                    f"every backend is busy, and {settings.requests} requests wait already: try again later "
                    "(`queue.requests` of the router lets more wait)",
                    retry_after_seconds=1,
                ),
            )
            return
        self._waiting.append((asyncio.get_running_loop().time(), request))
        self.length += 1
        request.wait()

    def go_on(self) -> None:
        """There may be room: those who wait go on as long as there is."""
        if self._going:
            return
        self._going = True
        try:
            while self._waiting and self._has_room():
                _, request = self._waiting.popleft()
                self.length -= 1
                if request.gone():
                    continue
                try:
                    request.go()
                except Exception:
                    log.exception("a request that had waited failed")
                    self._refuse(request, Unavailable("the request could not be sent on; the router's log has more"))
        finally:
            self._going = False

    def sweep(self, now: float) -> None:
        """Tell those who have waited too long, and let go on who can: backends come and go."""
        longest = self._settings.wait_seconds
        while self._waiting and (now - self._waiting[0][0] >= longest or self._waiting[0][1].gone()):
            _, request = self._waiting.popleft()
            self.length -= 1
            if not request.gone():
                text = f"every backend was busy for {longest:g} seconds: try again later, or add backends"
                self._refuse(request, Unavailable(text, retry_after_seconds=1))
        self.go_on()

    def close(self) -> None:
        """Nobody waits any more."""
        while self._waiting:
            _, request = self._waiting.popleft()
            self.length -= 1
            self._refuse(request, Unavailable("the router is shutting down: try again", retry_after_seconds=1))

    def _drop_gone(self) -> None:
        self._waiting = deque(each for each in self._waiting if not each[1].gone())
        self.length = len(self._waiting)

    def _refuse(self, request: Held, error: HeadraceError) -> None:
        self.refused += 1
        try:
            request.refuse(error)
        except Exception:
            log.exception("a request that had waited could not be told")
