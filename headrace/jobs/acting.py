# SPDX-License-Identifier: Apache-2.0
"""One at a time acts on a job: in this process by a lock, among gateways by a lease in the database. Used by `services`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headrace.core.clock import Clock
from headrace.core.errors import Unavailable
from headrace.jobs.store.leases import LeaseRows

_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 0.5


class Busy(Unavailable):
    """Somebody else acts on the job."""


class Acting:
    """The turns of one gateway."""

    def __init__(self, leases: LeaseRows, owner: str, clock: Clock, lease_seconds: float) -> None:
        self.owner = owner
        self._leases = leases
        self._clock = clock
        self._seconds = lease_seconds
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}
        """With how many have it or wait for it."""

    @asynccontextmanager
    async def alone(self, job_id: str, wait_seconds: float = 0.0) -> AsyncIterator[None]:
        """Have a job to oneself. Raises Busy if others have it for longer than that."""
        busy = Busy(f"job {job_id} is being changed by another request; try again in a moment", retry_after_seconds=1.0)
        async with self._locked(job_id, wait_seconds, busy):
            await self._take(job_id, wait_seconds, busy)
            try:
                yield
            finally:
                await self._leases.give_back(job_id, self.owner)

    @asynccontextmanager
    async def _locked(self, job_id: str, wait_seconds: float, busy: Busy) -> AsyncIterator[None]:
        lock, users = self._locks.get(job_id) or (asyncio.Lock(), 0)
        if users and not wait_seconds:
            raise busy
        self._locks[job_id] = lock, users + 1
        try:
            try:
                await asyncio.wait_for(lock.acquire(), wait_seconds or None)
            except TimeoutError:
                raise busy from None
            try:
                yield
            finally:
                lock.release()
        finally:
            users = self._locks.pop(job_id)[1] - 1
            if users:
                self._locks[job_id] = lock, users

    async def _take(self, job_id: str, wait_seconds: float, busy: Busy) -> None:
        loop = asyncio.get_running_loop()
        limit = loop.time() + wait_seconds
        pause = _FIRST_PAUSE_SECONDS
        while not await self._leases.take(job_id, self.owner, self._clock.wall(), self._seconds):
            if loop.time() >= limit:
                raise busy
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
