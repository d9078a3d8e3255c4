# SPDX-License-Identifier: Apache-2.0
"""Sleep of a loaded version: the model gives its memory back, requests wait, and the first of them wakes it.

While a version sleeps, a `SleepGate` stands in for its scheduler, so that a request to a model that is awake pays nothing.
All that needs no computation (metadata, statistics, the response cache) is answered as before. Runs in the event loop's
thread; the model itself sleeps and wakes in a loader thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from time import monotonic, monotonic_ns
from typing import Literal, NamedTuple, Protocol

from headrace.backends.contract import SleepLevel
from headrace.core.errors import HeadraceError, Internal, Unavailable, with_message
from headrace.engine.scheduling.pending_request import ANSWERED, PendingRequest
from headrace.engine.statistics import VersionStatistics

log = logging.getLogger("headrace.engine")

_LOOK_SECONDS = 0.01
"""How often it is looked whether the requests in flight have ended: counting them costs requests nothing this way."""
_PAUSE_SECONDS = 1.0
"""After a wake-up that failed, requests get its error for so long before it is tried again."""

SleepState = Literal["awake", "falling asleep", "asleep", "waking"]


class Sleeper(NamedTuple):
    """What makes a loaded model sleep and wake: `contract.SleepableModel` in a loader thread."""

    sleep: Callable[[SleepLevel], Awaitable[Mapping[str, int]]]
    wake: Callable[[], Awaitable[None]]


class GatedScheduler(Protocol):
    """The scheduler behind a gate."""

    @property
    def active_sequences(self) -> int:
        """Number of open sequences of requests."""

    def add(self, pending: PendingRequest) -> None:
        """Queue a request; raise if it is not accepted."""

    def close(self, reason: HeadraceError) -> None:
        """Cancel all waiting requests and compute nothing more."""


@dataclass(slots=True)
class SleepReport:
    """What is shown of the sleep of a version."""

    state: SleepState = "awake"
    level: int = 0
    """0 while it is awake."""
    freed: Mapping[str, int] | None = None
    """Bytes that it has given back, by place."""
    seconds: float | None = None
    """How long the last change took: falling asleep or waking."""
    wakes: int = 0

    @property
    def reason(self) -> str:
        """The state in words, for the repository index; "" while it is awake."""
        if self.state == "asleep":
            return f"asleep at level {self.level}: the next request wakes it"
        return "" if self.state == "awake" else self.state


class SleepGate:
    """Whether a version sleeps, and the requests that wait for it. In place of its scheduler while it is not awake."""

    def __init__(
        self,
        name: str,
        scheduler: GatedScheduler,
        statistics: VersionStatistics,
        sleeper: Sleeper,
        wait_seconds: float,
        switch: Callable[[bool], None],
    ) -> None:
        """`name`: of the version, for messages. `wait_seconds`: how long requests wait. `switch`: put the gate in or out."""
        self.report = SleepReport()
        self._name = name
        self._scheduler = scheduler
        self._statistics = statistics
        self._sleeper = sleeper
        self._wait_seconds = wait_seconds
        self._switch = switch
        self._requests: dict[PendingRequest, asyncio.TimerHandle] = {}
        self._changing = asyncio.Lock()
        """Held while it falls asleep or wakes."""
        self._waking: asyncio.Task[None] | None = None
        self._closed: HeadraceError | None = None
        self._problem: HeadraceError | None = None
        self._retry_at = 0.0

    # In place of the scheduler.

    @property
    def waiting(self) -> int:
        """Number of requests that wait for the version to wake."""
        return sum(pending.state != ANSWERED for pending in self._requests)

    @property
    def active_sequences(self) -> int:
        """Number of open sequences of requests."""
        return self._scheduler.active_sequences

    def add(self, pending: PendingRequest) -> None:
        """Keep a request until the version is awake, and wake it."""
        if self._closed is not None:
            raise with_message(self._closed, self._closed.message)
        seconds_left = self._retry_at - monotonic()
        if self._problem is not None and seconds_left > 0:
            raise with_message(self._problem, self._problem.message)
        loop = asyncio.get_running_loop()
        self._requests[pending] = loop.call_later(self._wait_seconds, self._time_out, pending)
        self._wake_for_requests()

    def close(self, reason: HeadraceError) -> None:
        """Cancel all requests, and compute nothing more."""
        self._closed = reason
        for pending in self._take_requests():
            pending.cancel(reason)
        self._scheduler.close(reason)

    # Sleeping and waking.

    async def sleep(self, level: SleepLevel) -> None:
        """Let requests in flight finish, then put the version to sleep; return when its memory is free.

        A version that sleeps as deep already stays as it is.
        """
        async with self._changing:
            self._check_open()
            if self.report.level >= level:
                return
            was_awake = not self.report.level
            self.report.state = "falling asleep"
            self._switch(True)
            began = monotonic()
            try:
                if was_awake:
                    await self._drained()
                self._check_open()
                freed = await self._sleeper.sleep(level)
            except BaseException:
                self._open_gate() if was_awake else self._asleep(self.report.level)
                raise
            if not was_awake:
                before = self.report.freed or {}
                freed = {place: freed.get(place, 0) + before.get(place, 0) for place in {*freed, *before}}
            self.report.freed = freed
            self.report.seconds = monotonic() - began
            self._asleep(level)
            log.info("model %s sleeps at level %d after %.3g s", self._name, level, self.report.seconds)

    async def wake(self) -> None:
        """Wake the version; return when it serves. Raise if that fails: it sleeps on then."""
        async with self._changing:
            self._check_open()
            if not self.report.level:
                return
            self.report.state = "waking"
            began = monotonic()
            try:
                await self._sleeper.wake()
            except BaseException as error:
                self.report.state = "asleep"
                if isinstance(error, Exception):
                    self._failed(error)
                raise
            self.report.seconds = monotonic() - began
            self.report.wakes += 1
            self._problem = None
            log.info("model %s is awake after %.3g s", self._name, self.report.seconds)
            self._open_gate()

    def _asleep(self, level: int) -> None:
        self.report.state, self.report.level = "asleep", level
        if self.waiting:
            self._wake_for_requests()

    def _check_open(self) -> None:
        if self._closed is not None:
            raise with_message(self._closed, self._closed.message)

    async def _drained(self) -> None:
        """Return when no request is in flight but those that wait here. Raise if that takes too long."""
        end = monotonic() + self._wait_seconds
        while (running := self._statistics.in_flight - self.waiting) > 0:
            if monotonic() > end:
                raise Unavailable(
                    f"model {self._name} has {running} requests in flight after {self._wait_seconds:g} s and stays awake: "
                    "try again when they are done",
                    retry_after_seconds=_PAUSE_SECONDS,
                )
            await asyncio.sleep(_LOOK_SECONDS)

    def _wake_for_requests(self) -> None:
        if self.report.state == "asleep" and self._waking is None and self._closed is None:
            self._waking = asyncio.get_running_loop().create_task(self._wake_quietly())

    async def _wake_quietly(self) -> None:
        """Wake for the requests that wait; they get the error if that fails."""
        try:
            await self.wake()
        except HeadraceError as error:
            log.warning("model %s could not wake: %s", self._name, error.message)
        except Exception:
            log.exception("model %s could not wake", self._name)
        finally:
            self._waking = None

    def _open_gate(self) -> None:
        """Serve again, and pass on the requests that wait, in their order."""
        self.report.state, self.report.level, self.report.freed = "awake", 0, None
        self._switch(False)
        for pending in self._take_requests():
            try:
                self._scheduler.add(pending)
            except HeadraceError as error:
                self._finish(pending, error)

    def _failed(self, error: Exception) -> None:
        """Answer all requests that wait with the error of a wake-up."""
        text = "it could not wake; the server's log has the details"
        reason = error if isinstance(error, HeadraceError) else Internal(f"model {self._name}: {text}")
        self._problem, self._retry_at = reason, monotonic() + _PAUSE_SECONDS
        for pending in self._take_requests():
            self._finish(pending, with_message(reason, reason.message))

    def _take_requests(self) -> list[PendingRequest]:
        """Return the requests that still wait, and forget all."""
        requests, self._requests = self._requests, {}
        for timer in requests.values():
            timer.cancel()
        return [pending for pending in requests if pending.state != ANSWERED]

    def _time_out(self, pending: PendingRequest) -> None:
        self._requests.pop(pending, None)
        if pending.state != ANSWERED:
            seconds = (monotonic_ns() - pending.arrived_ns) / 1e9
            error = Unavailable(
                f"model {self._name} is {self.report.state} and does not serve after {seconds:.0f} s: send it again",
                retry_after_seconds=_PAUSE_SECONDS,
            )
            self._finish(pending, error)

    def _finish(self, pending: PendingRequest, error: HeadraceError) -> None:
        try:
            pending.finish(error)
        except Exception:  # an error in one caller's callback must not affect the others
            log.exception("Could not notify the caller of a request to a sleeping model.")
