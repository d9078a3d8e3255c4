# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for somebody to wake: how many, how many bytes, how long. Owned by `activator`.

Each is told in the end: it goes on, or gets 503 with the time after which another try may be worth it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from headrace.core.errors import Unavailable

if TYPE_CHECKING:
    from headrace.fleet.router.waking.held import Held
    from headrace.fleet.router.waking.settings import ActivationSettings

log = logging.getLogger("headrace.router")

SWEEP_SECONDS = 0.05
_AT_ONCE, _BATCH_SECONDS = 64, 0.01
"""Each needs a connection. Many servers let a hundred wait to be accepted; who is not among them is late by a second."""


class Holding:
    """See the module. Used from the loop's thread only."""

    def __init__(
        self,
        settings: ActivationSettings,
        why: Callable[[], str],
        refused: Callable[[Held, str], None] = lambda _request, _why: None,
    ) -> None:
        """refused: called with each that is told that nobody will answer."""
        self._settings = settings
        self._refused = refused
        self._why = why
        """Why nobody has woken yet, for those who are told so."""
        self._held: list[Held] = []
        self._bytes = 0
        self._last = inf
        self._timer: asyncio.TimerHandle | None = None
        self._releasing: asyncio.TimerHandle | None = None
        self.retry_after_seconds = 10.0
        """What those are told who cannot wait."""
        self.dropped = 0
        """Requests that left, or were told that nobody will answer."""
        self.refused = 0
        """Those among them that were told."""

    def __len__(self) -> int:
        return len(self._held)

    @property
    def bytes(self) -> int:
        """Bytes that are kept, as of a moment ago."""
        return self._bytes

    @property
    def oldest(self) -> float | None:
        """Since when somebody waits."""
        return self._held[0].since if self._held else None

    def add(self, request: Held) -> None:
        """Have it wait, if it may."""
        settings = self._settings
        now = asyncio.get_running_loop().time()
        if len(self._held) >= settings.held_requests:
            self._look()
        if len(self._held) >= settings.held_requests:
            self._refuse(
                request,
                f"the service is waking, and {settings.held_requests} requests wait for it already: "
                "try again later (`activation.held_requests` of the router lets more wait)",
            )
            return
        if self._bytes + request.size() > settings.held_bytes:
            self._refuse(request, self._too_many_bytes())
            return
        request.since = request.since or now
        self._bytes += request.size()
        self._held.append(request)
        request.wait()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)

    def release(self, awake: Callable[[], bool], answered: Callable[[Held], None] | None = None) -> None:
        """Somebody is awake: all go on, in the order in which they came, as long as that is so.

        `answered`: called with each as its answer begins.
        """
        if self._releasing is not None:
            self._releasing.cancel()
            self._releasing = None
        if not awake():
            return
        batch, self._held = self._held[:_AT_ONCE], self._held[_AT_ONCE:]
        self._bytes = sum(request.size() for request in self._held)
        if self._held:
            self._releasing = asyncio.get_running_loop().call_later(_BATCH_SECONDS, self.release, awake, answered)
        for request in batch:
            if request.gone():
                self.dropped += 1
                continue
            try:
                request.go(answered)
            except Exception:
                log.exception("a request that had waited failed")
                self._refuse(request, "the request could not be sent on; the router's log has more")

    def renew(self, settings: ActivationSettings) -> None:
        """Other bounds, for who waits already, too."""
        self._settings = settings

    def end_by(self, time: float) -> None:
        """The router stops: nobody waits any longer than that."""
        self._last = time

    def close(self) -> None:
        """Nobody waits any more."""
        for timer in (self._timer, self._releasing):
            if timer is not None:
                timer.cancel()
        self._timer = self._releasing = None
        held, self._held, self._bytes = self._held, [], 0
        for request in held:
            self._refuse(request, _STOPPING)

    def _sweep(self) -> None:
        self._timer = None
        self._look()
        if self._held:
            self._timer = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)

    def _look(self) -> None:
        """Forget who has left, and tell those who have waited too long, or whose bodies have become too much."""
        now = asyncio.get_running_loop().time()
        longest = self._settings.wait_seconds
        kept: list[Held] = []
        told: list[tuple[Held, str]] = []
        size = 0
        for request in self._held:
            if request.gone():
                self.dropped += 1
            elif now >= self._last:
                told.append((request, _STOPPING))
            elif now - request.since >= longest:
                told.append((request, f"the service did not wake within {longest:g} seconds: {self._why()}"))
            elif size + request.size() > self._settings.held_bytes:
                told.append((request, self._too_many_bytes()))
            else:
                size += request.size()
                kept.append(request)
        self._held, self._bytes = kept, size
        for request, text in told:
            self._refuse(request, text)

    def _refuse(self, request: Held, text: str) -> None:
        self.dropped += 1
        self.refused += 1
        self._refused(request, text)
        try:
            request.refuse(Unavailable(text, retry_after_seconds=self.retry_after_seconds))
        except Exception:
            log.exception("a request that had waited could not be told")

    def _too_many_bytes(self) -> str:
        return (
            "the service is waking, and the requests that wait for it have as many bytes as may be kept: "
            "try again later (`activation.held_bytes` of the router lets more wait)"
        )


_STOPPING = "the router is shutting down, and the service has not woken yet: try again"
