# SPDX-License-Identifier: Apache-2.0
"""The batch program: run a batch job from its settings to its summary.

Called by `headrace batch` (`run_batch`) and by tests and runners (`run_job`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import Cancelled, FailedPrecondition, HeadraceError, InvalidArgument, NotFound
from headrace.core.telemetry.progress import Progress, Reporter, silent
from headrace.jobs.batch.ledger import Ledger, check_same, open_ledger
from headrace.jobs.batch.model import OpenModel, fetch_to_path, open_model
from headrace.jobs.batch.output import OutputTarget, deliver, parse_output
from headrace.jobs.batch.progress import BatchSummary, ProgressFile, State, progress_file_path, read_progress_file
from headrace.jobs.batch.runner import BatchRunner
from headrace.jobs.batch.settings import BatchSettings
from headrace.jobs.batch.sources import Source, open_source
from headrace.jobs.concurrency import run_in_thread
from headrace.models.storage.cache import CacheUse
from headrace.models.storage.locations import HubLocation, LocalLocation, ObjectLocation, parse_location

log = logging.getLogger("headrace.batch")

_CONTINUE_HINT = "run the same command again to continue"
_REPORT_SECONDS = 0.5
_SWITCH_SECONDS = 0.0001


class Interrupted(Cancelled):
    """A signal stopped the job before its first item, or a second signal stopped items in flight. It can continue."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number
        """The number of the signal."""


class StopSignal:
    """Stops a job, from the loop's thread."""

    def __init__(self) -> None:
        self.reason = ""
        self._listeners: list[Callable[[], None]] = []

    @property
    def requested(self) -> bool:
        """Return whether `stop` was called."""
        return bool(self.reason)

    def stop(self, reason: str = "cancelled") -> None:
        """Start no more items; items in flight may finish. The job can continue later."""
        self.reason = self.reason or reason
        for listener in self._listeners:
            listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call the listener at a stop, or now if it has happened."""
        self._listeners.append(listener)
        if self.requested:
            listener()


def run_batch(settings: BatchSettings, progress: Progress = silent) -> tuple[BatchSummary, int]:
    """Run a job in its own loop; SIGTERM and SIGINT stop it. Return the summary and the signal, 0 for none.

    Raises errors before the first item; `Interrupted` for a signal before it, or for a second signal.
    """
    before = sys.getswitchinterval()
    # After a batch, the model's thread waits this long for the threads that read and write.
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        return uvloop.run(_with_signals(settings, progress))
    finally:
        sys.setswitchinterval(before)


async def _with_signals(settings: BatchSettings, progress: Progress) -> tuple[BatchSummary, int]:
    loop = asyncio.get_running_loop()
    stop_signal = StopSignal()
    job = asyncio.create_task(run_job(settings, progress, stop_signal))
    received = 0

    def stop(number: int) -> None:
        nonlocal received
        if received:
            job.cancel()  # a second signal does not wait for items in flight
        received = received or number
        stop_signal.stop(f"stopped by {signal.Signals(number).name}")

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    try:
        return await job, received
    except (asyncio.CancelledError, Cancelled) as error:
        if not received:
            raise
        message = error.message if isinstance(error, Cancelled) else f"{stop_signal.reason}: {_CONTINUE_HINT}"
        raise Interrupted(message, received) from None
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)  # uvloop would keep them after its end


async def run_job(
    settings: BatchSettings,
    progress: Progress = silent,
    stop_signal: StopSignal | None = None,
    clock: Clock | None = None,
) -> BatchSummary:
    """Compute the missing items. Raises errors before the first item; later errors are in the summary."""
    with CacheUse() as use:
        return await _run_job(settings, progress, stop_signal or StopSignal(), clock or SystemClock(), use)


async def _run_job(
    settings: BatchSettings, progress: Progress, stop_signal: StopSignal, clock: Clock, use: CacheUse
) -> BatchSummary:
    started = clock.monotonic()
    target = parse_output(settings)
    input_path, base, is_copy = await _unless_stopped(_fetch_input(settings, progress, stop_signal, use), stop_signal)
    folders = () if base and "://" in base else (Path(base),)
    opening = open_model(settings, folders, progress, lambda: stop_signal.requested, use)
    model = await _unless_stopped(opening.__aenter__(), stop_signal)
    try:
        source = await run_in_thread(
            partial(open_source, input_path, model.shape, base, is_copy=is_copy), "headrace-batch-input"
        )
        job = _Job(settings, target, source, model, clock, clock.monotonic() - started)
        return await job.run(progress, stop_signal)
    finally:
        await opening.__aexit__(None, None, None)


@dataclass(frozen=True, slots=True)
class _Job:
    """Everything that a run needs."""

    settings: BatchSettings
    target: OutputTarget
    source: Source
    model: OpenModel
    clock: Clock
    load_seconds: float

    async def run(self, progress: Progress, stop_signal: StopSignal) -> BatchSummary:
        """Run the job; return its summary."""
        settings = self.settings
        identity, total = self._identity()
        delivered = self._delivered_summary(identity, total)
        if delivered is not None:
            return delivered
        ledger = await run_in_thread(
            partial(
                open_ledger,
                self.target.results,
                identity,
                total,
                settings.shard,
                overwrite=settings.overwrite,
                retry_failed=settings.retry_failed,
                packed=self.target.parquet and self.model.outputs is not None,
            ),
            "headrace-batch-ledger",
        )
        try:
            return await self._run(ledger, progress, stop_signal)
        finally:
            ledger.close()

    async def _run(self, ledger: Ledger, progress: Progress, stop_signal: StopSignal) -> BatchSummary:
        total = ledger.job.total
        reporter = Reporter(progress, self.clock, f"batch {self.target}", total=total, unit="items")
        progress_report = _ProgressReport(reporter, self.clock, ledger.resumed)
        runner = BatchRunner(self.settings, self.source, self.model.client, ledger, self.clock, progress_report)
        stop_signal.listen(runner.stop)
        if ledger.job.state != "running":
            ledger.checkpoint()  # show that it continues
        started = self.clock.monotonic()
        state: State = "finished"
        reason = ""
        with reporter:
            progress_report.report(ledger.marks.finished, ledger.marks.failed)
            try:
                await runner.run()
                progress_report.report(ledger.marks.finished, ledger.marks.failed)
                if ledger.marks.finished < total:
                    state, reason = "cancelled", stop_signal.reason or "cancelled"
                elif self.target.needs_delivery:
                    reporter.update(message=f"writing {self.target}")
                    await run_in_thread(
                        partial(deliver, self.target, self.settings, self.model.outputs), "headrace-batch-deliver"
                    )
            except HeadraceError as error:
                state, reason = "failed", error.message
            except OSError as error:
                log.error("The batch job failed.", exc_info=error)
                state, reason = "failed", f"the input cannot be read: {error.strerror}; {_CONTINUE_HINT}"
            seconds = self.clock.monotonic() - started
            summary = self._summary(ledger, runner, state, reason, seconds)
            self._write_end(ledger, summary)
            if state == "failed":
                reporter.fail(reason)
        return summary

    def _write_end(self, ledger: Ledger, summary: BatchSummary) -> None:
        try:
            ledger.checkpoint(summary.state, summary.reason, summary.as_json())
        except HeadraceError as error:
            # The results are written, which is enough to continue.
            log.warning("Could not write the end of the job: %s", error.message)
            return
        if summary.state == "finished" and self.target.needs_delivery:
            ledger.path.unlink(missing_ok=True)

    def _summary(self, ledger: Ledger, runner: BatchRunner, state: State, reason: str, seconds: float) -> BatchSummary:
        marks = ledger.marks
        done_now = marks.finished - ledger.resumed
        return BatchSummary(
            state=state,
            reason=reason,
            output=str(self.target),
            total=len(marks),
            succeeded=marks.finished - marks.failed,
            failed=marks.failed,
            left=len(marks) - marks.finished,
            resumed=ledger.resumed,
            skipped_files=self.source.skipped,
            seconds=round(seconds, 3),
            load_seconds=round(self.load_seconds, 3),
            items_per_second=round(done_now / seconds, 3) if seconds > 0 else 0.0,
            failures=tuple(runner.failures),
        )

    def _identity(self) -> tuple[Mapping[str, Any], int]:
        """Return what the results belong to, and the number of items."""
        settings = self.settings
        settings_used = {
            "parameters": settings.parameters,
            "specs": settings.specs,
            "network_arch": settings.network_arch,
            "task": settings.task,
        }
        try:
            text = json.dumps(settings_used, sort_keys=True)
        except (TypeError, ValueError):
            raise InvalidArgument("the parameters are not JSON") from None
        total = self.source.total if settings.limit is None else min(self.source.total, settings.limit)
        return {
            "model": self.model.fingerprint,
            "input": self.source.fingerprint,
            "parameters": hashlib.sha256(text.encode()).hexdigest(),
            "limit": settings.limit,
            "shard": str(settings.shard),
            "ordered": settings.ordered,
        }, settings.shard.size(total)

    def _delivered_summary(self, identity: Mapping[str, Any], total: int) -> BatchSummary | None:
        """Return the summary of a job that is finished and delivered; None otherwise."""
        if not self.target.needs_delivery or self.settings.overwrite:
            return None
        progress = read_progress_file(progress_file_path(self.target.results))
        if progress is None or progress.state != "finished":
            return None
        check_same(self.target.results, progress, ProgressFile(identity, total))
        if self.settings.retry_failed:
            raise FailedPrecondition(f"{self.target} is finished and written: start over with --overwrite")
        self.target.results.unlink(missing_ok=True)  # left by a process that was killed after it wrote its end
        summary = dict(progress.summary)
        summary.update(resumed=total, seconds=0.0, items_per_second=0.0, failures=())
        return BatchSummary(**summary)


class _ProgressReport:
    """Reports progress at intervals, with the rate and the remaining time."""

    def __init__(self, reporter: Reporter, clock: Clock, resumed: int) -> None:
        self._reporter = reporter
        self._clock = clock
        self._resumed = resumed
        self._started = clock.monotonic()
        self._due = self._started

    def __call__(self, finished: int, failed: int) -> None:
        """Report progress, unless the last report is recent."""
        if self._clock.monotonic() >= self._due:
            self.report(finished, failed)

    def report(self, finished: int, failed: int) -> None:
        """Report progress now."""
        now = self._clock.monotonic()
        self._due = now + _REPORT_SECONDS
        rate = (finished - self._resumed) / max(now - self._started, 1e-9)
        parts = [f"{finished} of {self._reporter.total:g} items"]
        if failed:
            parts.append(f"{failed} failed")
        if finished > self._resumed:
            seconds_left = ((self._reporter.total or 0) - finished) / rate
            parts += [f"{rate:.1f} items/s", f"{seconds_left:.0f} s left"]
        self._reporter.update(done=finished, message=", ".join(parts))


async def _fetch_input(
    settings: BatchSettings, progress: Progress, stop_signal: StopSignal, use: CacheUse
) -> tuple[Path, str, bool]:
    """Return the input as a local path, the base of its relative paths, and whether it is a download."""
    location = parse_location(settings.input)
    if isinstance(location, HubLocation):
        raise InvalidArgument("the input is a model on the Hugging Face Hub: use a folder or a manifest")
    if isinstance(location, LocalLocation):
        path = location.path.absolute()
        if not path.exists():
            raise NotFound(f"the input {settings.input} does not exist: use a folder, a .jsonl or a .parquet file")
        return path, str(path if path.is_dir() else path.parent), False
    path = await run_in_thread(
        lambda: fetch_to_path(settings, location, progress, lambda: stop_signal.requested, use),
        "headrace-batch-download",
    )
    if path.is_dir():
        return path, str(path), True
    parent = (
        str(location).rpartition("/")[0] if isinstance(location, ObjectLocation) else settings.input.rpartition("/")[0]
    )
    return path, parent, True


async def _unless_stopped(work: Any, stop_signal: StopSignal) -> Any:
    """Await something; cancel it at a stop."""
    task = asyncio.ensure_future(work)
    stop_signal.listen(task.cancel)
    try:
        return await task
    except (asyncio.CancelledError, Cancelled):
        if not stop_signal.requested:
            raise
        raise Cancelled(f"{stop_signal.reason} before the first item: {_CONTINUE_HINT}") from None
