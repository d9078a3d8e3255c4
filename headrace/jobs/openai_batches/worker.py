# SPDX-License-Identifier: Apache-2.0
"""The batch worker of one server process: runs batches that no other process runs, a few at a time, oldest first."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from headrace.api.openai.batch_store import FINISHED, BatchStore
from headrace.api.openai.file_store import FileStore
from headrace.core.clock import Clock
from headrace.core.errors import HeadraceError
from headrace.core.files import FileLock
from headrace.core.limits import BatchLimits
from headrace.net.http.exchange import Handler

if TYPE_CHECKING:
    from headrace.jobs.openai_batches.batch_run import BatchRun

log = logging.getLogger("headrace.batch")

_POLL_SECONDS = 1.0
_SWEEP_SECONDS = 600.0
_RETRY_SECONDS = 60.0
"""Pause after an error that is not caused by the batch, such as a full disk."""


class BatchWorker:
    """The batches of one process. Used in the event loop's thread."""

    def __init__(
        self,
        batches: BatchStore,
        files: FileStore,
        limits: BatchLimits,
        clock: Clock,
        *,
        lines_at_once: int,
        poll_seconds: float = _POLL_SECONDS,
    ) -> None:
        """`lines_at_once` bounds the lines of all batches in the engine."""
        self._batches = batches
        self._files = files
        self._limits = limits
        self._clock = clock
        self._lines_at_once = lines_at_once
        self._poll_seconds = poll_seconds
        self._handlers: Mapping[str, Handler] = {}
        self._is_ready: Callable[[], bool] = lambda: True
        self._runs: dict[str, BatchRun] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._retry_at: dict[str, float] = {}
        self._wake = asyncio.Event()
        self._stopping = False
        self._last_error = ""
        self._main: asyncio.Task[None] | None = None

    def start(self, handlers: Mapping[str, Handler], is_ready: Callable[[], bool]) -> None:
        """Begin, when `is_ready` says that models are loaded. `handlers` answer the lines, by endpoint."""
        self._handlers = handlers
        self._is_ready = is_ready
        self._main = asyncio.get_running_loop().create_task(self._run())

    def wake(self) -> None:
        """Poll the batches now."""
        self._wake.set()
        for run in self._runs.values():
            run.wake()

    def stop(self) -> None:
        """Start no more lines; those in flight may finish."""
        self._stopping = True
        self._wake.set()
        for run in self._runs.values():
            run.stop()

    async def close(self) -> None:
        """Stop, and return when all results are written."""
        self.stop()
        main = [self._main] if self._main is not None else []
        await asyncio.gather(*main, *self._tasks.values(), return_exceptions=True)

    async def _run(self) -> None:
        slots = asyncio.Semaphore(self._lines_at_once)
        sweep_at = self._clock.monotonic()
        while not self._stopping:
            try:
                if self._clock.monotonic() >= sweep_at:
                    await asyncio.to_thread(self._sweep)
                    sweep_at = self._clock.monotonic() + _SWEEP_SECONDS
                if self._is_ready():
                    for batch_id in await asyncio.to_thread(self._batches.unfinished):
                        await self._start(batch_id, slots)
                    self._last_error = ""
            except (HeadraceError, OSError) as error:
                self._log_once(error)
            except Exception:
                log.exception("cannot poll the batches")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._poll_seconds)
            self._wake.clear()

    def _log_once(self, error: HeadraceError | OSError) -> None:
        """Log why polling failed, once per reason: a full disk fails every poll alike."""
        text = str(error)
        if text != self._last_error:
            self._last_error = text
            log.error("cannot poll the batches: %s", text)

    def _sweep(self) -> None:
        self._files.sweep()
        self._batches.sweep()

    async def _start(self, id: str, slots: asyncio.Semaphore) -> None:
        """Start a batch, unless another process runs it, or enough run here."""
        late = self._clock.monotonic() < self._retry_at.get(id, 0.0)
        if self._stopping or late or id in self._runs or len(self._runs) >= self._limits.running_batches:
            return
        run_class = await asyncio.to_thread(_run_class)
        lock = self._batches.run_lock(id)
        if not await asyncio.to_thread(lock.try_acquire) or self._stopping:
            lock.release()
            return
        self._runs[id] = run = run_class(
            id,
            self._batches,
            self._files,
            self._handlers,
            self._limits,
            self._clock,
            slots,
            self._lines_at_once,
            self._poll_seconds,
        )
        self._tasks[id] = task = asyncio.get_running_loop().create_task(self._run_one(id, run, lock))
        task.add_done_callback(partial(self._ended, id))

    async def _run_one(self, id: str, run: BatchRun, lock: FileLock) -> None:
        try:
            record = await asyncio.to_thread(self._batches.get, id)
            if record is None or record["status"] in FINISHED:  # by another process, meanwhile
                await asyncio.to_thread(self._batches.remove_work, id)
            else:
                await run.run(record)
        except (HeadraceError, OSError) as error:
            log.error("batch %s has to wait: %s", id, error)
            self._retry_at[id] = self._clock.monotonic() + _RETRY_SECONDS
        except Exception:
            log.exception("batch %s has to wait", id)
            self._retry_at[id] = self._clock.monotonic() + _RETRY_SECONDS
        else:
            self._retry_at.pop(id, None)
        finally:
            lock.release()

    def _ended(self, id: str, _task: asyncio.Task[None]) -> None:
        del self._runs[id], self._tasks[id]
        self._wake.set()


def _run_class() -> type[BatchRun]:
    # Imported with the first batch: a server without batches starts faster.
    from headrace.jobs.openai_batches.batch_run import BatchRun

    return BatchRun
