# SPDX-License-Identifier: Apache-2.0
"""Holds processes to limits where the kernel may not be asked to (`cgroups`): looks at them, and tells who is over.

Resident memory counts pages twice that processes share, so who seems to be over is looked at once more, by proportion.
RLIMIT_NPROC would count all processes of the user, not those of a container, and so does not do for a number of processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

from headrace.fleet.local.driving import Ended
from headrace.fleet.local.limits import Limits
from headrace.fleet.local.scaling.usage import Usage, Used
from headrace.fleet.local.sight import OOM_KILLED

_MEBIBYTE = 1 << 20
_MEMBERS_SECONDS = 1.0


class Watch:
    """All sessions that have limits. One look for all of them at a time, none while there are none."""

    def __init__(self, seconds: float = 0.25, proc: Path = Path("/proc")) -> None:
        self._seconds = seconds
        self._proc = proc
        self._usage = Usage(proc, _MEMBERS_SECONDS)
        self._watched: dict[int, tuple[Limits, asyncio.Future[Ended]]] = {}
        self._task: asyncio.Task[None] | None = None

    async def over(self, session: int, limits: Limits) -> Ended:
        """Wait until a session is over its limits. How it is to be ended."""
        found: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._watched[session] = (limits, found)
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())
        try:
            return await found
        finally:
            self._watched.pop(session, None)

    async def close(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        try:
            while self._watched:
                await asyncio.sleep(self._seconds)
                watched = dict(self._watched)
                over = await asyncio.to_thread(self._look, {session: each[0] for session, each in watched.items()})
                for session, how in over.items():
                    if not watched[session][1].done():
                        watched[session][1].set_result(how)
        finally:
            self._task = None

    def _look(self, limits: dict[int, Limits]) -> dict[int, Ended]:
        used = self._usage.read(time.monotonic(), limits)
        found = {session: self._judged(each, limits[session]) for session, each in used.items()}
        return {session: each for session, each in found.items() if each is not None}

    def _judged(self, used: Used, limits: Limits) -> Ended | None:
        if limits.tasks is not None and used.tasks > limits.tasks:
            said = f"it had {used.tasks} processes and threads, and may have {limits.tasks}: raise --max-processes"
            return Ended(-9, "Error", said)
        if limits.memory is None or used.memory <= limits.memory:
            return None
        memory = self._proportional(pid for pid, _ in used.ticks)
        if memory is None:
            memory = used.memory
        if memory <= limits.memory:
            return None
        return Ended(-9, OOM_KILLED, f"it used {_text(memory)} of memory, and its limit is {_text(limits.memory)}")

    def _proportional(self, pids: Iterable[int]) -> int | None:
        """Each page by how many have it; None where that is not told."""
        found = None
        for pid in pids:
            with contextlib.suppress(OSError, ValueError, IndexError):
                for line in (self._proc / str(pid) / "smaps_rollup").read_bytes().splitlines():
                    if line.startswith(b"Pss:"):
                        found = (found or 0) + int(line.split()[1]) * 1024
        return found


def _text(amount: int) -> str:
    return f"{amount / _MEBIBYTE:.0f} MiB"
