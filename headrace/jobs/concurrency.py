# SPDX-License-Identifier: Apache-2.0
"""Job locks, background tasks and daemon threads of the gateway.

`JobLocks` lets one task of one gateway at a time act on a job: a lock in this process, and a lease in the database.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.core.clock import Clock
from headrace.core.errors import Unavailable
from headrace.platforms.processes import is_dead

if TYPE_CHECKING:
    from headrace.jobs.records import Job
    from headrace.jobs.store.jobs import LeaseRows

_FIRST_DELAY_SECONDS = 0.02
_MAX_DELAY_SECONDS = 0.5

Result = TypeVar("Result")


class Busy(Unavailable):
    """Another task or gateway holds the job."""


class JobLocks:
    """The job locks of one gateway."""

    def __init__(self, leases: LeaseRows, owner: str, clock: Clock, lease_seconds: float) -> None:
        self.owner = owner
        self._leases = leases
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}
        """Each lock with the number of tasks that hold it or wait for it."""

    def is_orphan(self, job: Job) -> bool:
        """Return whether another gateway launched a job and is gone."""
        gateway = str(job.details.get("gateway", ""))
        return gateway != self.owner and is_dead(gateway)

    @asynccontextmanager
    async def hold(self, job_id: str, wait_seconds: float = 0.0) -> AsyncIterator[None]:
        """Hold a job; raise Busy if others hold it for longer than `wait_seconds`."""
        busy = Busy(f"job {job_id} is being changed by another request; try again in a moment", retry_after_seconds=1.0)
        async with self._local_lock(job_id, wait_seconds, busy):
            await self._acquire_lease(job_id, wait_seconds, busy)
            try:
                yield
            finally:
                await self._leases.release(job_id, self.owner)

    @asynccontextmanager
    async def _local_lock(self, job_id: str, wait_seconds: float, busy: Busy) -> AsyncIterator[None]:
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

    async def _acquire_lease(self, job_id: str, wait_seconds: float, busy: Busy) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_seconds
        delay = _FIRST_DELAY_SECONDS
        while not await self._leases.acquire(job_id, self.owner, self._clock.wall(), self._lease_seconds):
            if loop.time() >= deadline:
                raise busy
            await asyncio.sleep(delay)
            delay = min(2 * delay, _MAX_DELAY_SECONDS)


class BackgroundTasks:
    """Tasks that run to their end, also when their caller is cancelled."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run_shielded(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Wait for `work`; cancelling the caller does not cancel it."""
        return await asyncio.shield(self.spawn(work))

    def spawn(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Start `work` in the background."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def close(self) -> None:
        """Wait until all tasks have ended."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # mark it as retrieved: a caller that waits gets it anyway


async def run_in_thread(work: Callable[[], Result], name: str) -> Result:
    """Run blocking work in a daemon thread, which does not keep the process alive.

    Cancelling the wait does not stop the work: let it check a flag.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            set_outcome(value)

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            call_in_loop(loop, settle, future.set_exception, error)
        else:
            call_in_loop(loop, settle, future.set_result, result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await future


def call_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    """Call a function in the loop's thread; do nothing once the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        return
