# SPDX-License-Identifier: Apache-2.0
"""A job from its settings to its summary. Called by `headrace batch` (`run_batch`) and by runners of jobs (`run_job`)."""

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
from headrace.jobs.batch.delivering import Target, deliver, target_of
from headrace.jobs.batch.job_file import JobFile, State, job_path, read_job
from headrace.jobs.batch.ledger import Ledger, check_same, open_ledger
from headrace.jobs.batch.opening import OpenModel, bring_to, open_model
from headrace.jobs.batch.running import Runner
from headrace.jobs.batch.settings import BatchSettings
from headrace.jobs.batch.sources import Source, open_source
from headrace.jobs.batch.summary import BatchSummary
from headrace.jobs.microservice.threads import in_thread
from headrace.models.storage.cache import CacheUse
from headrace.models.storage.locations import HubPlace, LocalPlace, ObjectPlace, parse_location

log = logging.getLogger("headrace.batch")

_GO_ON = "run the same again to go on"
_TOLD_SECONDS = 0.5
_SWITCH_SECONDS = 0.0001


class Interrupted(Cancelled):
    """A signal ended the job before it had begun, or before what was under way was done. It can go on."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number
        """Of the signal."""


class Stopping:
    """How a job is told to stop, from the loop's thread."""

    def __init__(self) -> None:
        self.reason = ""
        self._listeners: list[Callable[[], None]] = []

    @property
    def asked(self) -> bool:
        """Whether it was."""
        return bool(self.reason)

    def stop(self, reason: str = "cancelled") -> None:
        """Begin no more; what is under way may finish. The job can go on later."""
        self.reason = self.reason or reason
        for listener in self._listeners:
            listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call this when it is asked, or now if it was."""
        self._listeners.append(listener)
        if self.asked:
            listener()


def run_batch(settings: BatchSettings, progress: Progress = silent) -> tuple[BatchSummary, int]:
    """Run a job in a loop of its own; SIGTERM and SIGINT stop it. Gives the signal too, 0 for none.

    Raises what kept it from beginning; `Interrupted` if that was a signal, or a second one.
    """
    before = sys.getswitchinterval()
    # A model's thread that has computed a batch waits so long for those that read and write, while nothing computes.
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        return uvloop.run(_with_signals(settings, progress))
    finally:
        sys.setswitchinterval(before)


async def _with_signals(settings: BatchSettings, progress: Progress) -> tuple[BatchSummary, int]:
    loop = asyncio.get_running_loop()
    stopping = Stopping()
    job = asyncio.create_task(run_job(settings, progress, stopping))
    got = 0

    def stop(number: int) -> None:
        nonlocal got
        if got:
            job.cancel()  # the second one does not wait for what is under way
        got = got or number
        stopping.stop(f"stopped by {signal.Signals(number).name}")

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    try:
        return await job, got
    except (asyncio.CancelledError, Cancelled) as error:
        if not got:
            raise
        words = error.message if isinstance(error, Cancelled) else f"{stopping.reason}: {_GO_ON}"
        raise Interrupted(words, got) from None


async def run_job(
    settings: BatchSettings,
    progress: Progress = silent,
    stopping: Stopping | None = None,
    clock: Clock | None = None,
) -> BatchSummary:
    """Compute what is not done yet. Raises what kept it from beginning; what came after is in the summary."""
    with CacheUse() as use:
        return await _run_job(settings, progress, stopping or Stopping(), clock or SystemClock(), use)


async def _run_job(
    settings: BatchSettings, progress: Progress, stopping: Stopping, clock: Clock, use: CacheUse
) -> BatchSummary:
    began = clock.monotonic()
    target = target_of(settings)
    input_path, base, brought = await _unless_stopped(_bring_input(settings, progress, stopping, use), stopping)
    folders = () if base and "://" in base else (Path(base),)
    opening = open_model(settings, folders, progress, lambda: stopping.asked, use)
    model = await _unless_stopped(opening.__aenter__(), stopping)
    try:
        source = await in_thread(
            partial(open_source, input_path, model.shape, base, brought=brought), "headrace-batch-input"
        )
        job = _Job(settings, target, source, model, clock, clock.monotonic() - began)
        return await job.run(progress, stopping)
    finally:
        await opening.__aexit__(None, None, None)


@dataclass(frozen=True, slots=True)
class _Job:
    """All that a run needs."""

    settings: BatchSettings
    target: Target
    source: Source
    model: OpenModel
    clock: Clock
    load_seconds: float

    async def run(self, progress: Progress, stopping: Stopping) -> BatchSummary:
        """From the ledger to the summary."""
        settings = self.settings
        described, total = self._described()
        known = self._delivered(described, total)
        if known is not None:
            return known
        ledger = await in_thread(
            partial(
                open_ledger,
                self.target.results,
                described,
                total,
                settings.shard,
                overwrite=settings.overwrite,
                retry_failed=settings.retry_failed,
                packed=self.target.parquet and self.model.outputs is not None,
            ),
            "headrace-batch-ledger",
        )
        try:
            return await self._run(ledger, progress, stopping)
        finally:
            ledger.close()

    async def _run(self, ledger: Ledger, progress: Progress, stopping: Stopping) -> BatchSummary:
        total = ledger.job.total
        reporter = Reporter(progress, self.clock, f"batch {self.target}", total=total, unit="items")
        told = _Told(reporter, self.clock, ledger.resumed)
        runner = Runner(self.settings, self.source, self.model.asker, ledger, self.clock, told)
        stopping.listen(runner.stop)
        if ledger.job.state != "running":
            ledger.checkpoint()  # whoever looks is to see that it goes on
        began = self.clock.monotonic()
        state: State = "finished"
        reason = ""
        with reporter:
            told.say(ledger.marks.finished, ledger.marks.failed)
            try:
                await runner.run()
                told.say(ledger.marks.finished, ledger.marks.failed)
                if ledger.marks.finished < total:
                    state, reason = "cancelled", stopping.reason or "cancelled"
                elif self.target.delivers:
                    reporter.update(message=f"writing {self.target}")
                    await in_thread(
                        partial(deliver, self.target, self.settings, self.model.outputs), "headrace-batch-deliver"
                    )
            except HeadraceError as error:
                state, reason = "failed", error.message
            except OSError as error:
                log.error("the job failed", exc_info=error)
                state, reason = "failed", f"the input cannot be read: {error.strerror}; {_GO_ON}"
            seconds = self.clock.monotonic() - began
            summary = self._summary(ledger, runner, state, reason, seconds)
            self._write_down(ledger, summary)
            if state == "failed":
                reporter.fail(reason)
        return summary

    def _write_down(self, ledger: Ledger, summary: BatchSummary) -> None:
        try:
            ledger.checkpoint(summary.state, summary.reason, summary.as_json())
        except HeadraceError as error:
            # The lines are there, which is what counts when it goes on.
            log.warning("the end of the job is not written down: %s", error.message)
            return
        if summary.state == "finished" and self.target.delivers:
            ledger.path.unlink(missing_ok=True)

    def _summary(self, ledger: Ledger, runner: Runner, state: State, reason: str, seconds: float) -> BatchSummary:
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

    def _described(self) -> tuple[Mapping[str, Any], int]:
        """What the results are of, for comparing; and how many items they are to be."""
        settings = self.settings
        chosen = {
            "parameters": settings.parameters,
            "specs": settings.specs,
            "network_arch": settings.network_arch,
            "task": settings.task,
        }
        try:
            text = json.dumps(chosen, sort_keys=True)
        except (TypeError, ValueError):
            raise InvalidArgument("the parameters are no JSON") from None
        total = self.source.total if settings.limit is None else min(self.source.total, settings.limit)
        return {
            "model": self.model.fingerprint,
            "input": self.source.fingerprint,
            "parameters": hashlib.sha256(text.encode()).hexdigest(),
            "limit": settings.limit,
            "shard": str(settings.shard),
            "ordered": settings.ordered,
        }, settings.shard.size(total)

    def _delivered(self, described: Mapping[str, Any], total: int) -> BatchSummary | None:
        """The summary of a job whose results have left; None if there is something to do."""
        if not self.target.delivers or self.settings.overwrite:
            return None
        known = read_job(job_path(self.target.results))
        if known is None or known.state != "finished":
            return None
        check_same(self.target.results, known, JobFile(described, total))
        if self.settings.retry_failed:
            raise FailedPrecondition(f"{self.target} is finished and written: start over with --overwrite")
        said = dict(known.summary)
        said.update(resumed=total, seconds=0.0, items_per_second=0.0, failures=())
        return BatchSummary(**said)


class _Told:
    """Progress for people: not too often, with a rate and what is left."""

    def __init__(self, reporter: Reporter, clock: Clock, resumed: int) -> None:
        self._reporter = reporter
        self._clock = clock
        self._resumed = resumed
        self._began = clock.monotonic()
        self._due = self._began

    def __call__(self, finished: int, failed: int) -> None:
        """So many items are done."""
        if self._clock.monotonic() >= self._due:
            self.say(finished, failed)

    def say(self, finished: int, failed: int) -> None:
        """The same, now."""
        now = self._clock.monotonic()
        self._due = now + _TOLD_SECONDS
        rate = (finished - self._resumed) / max(now - self._began, 1e-9)
        words = [f"{finished} of {self._reporter.total:g} items"]
        if failed:
            words.append(f"{failed} failed")
        if finished > self._resumed:
            left = ((self._reporter.total or 0) - finished) / rate
            words += [f"{rate:.1f} items/s", f"{left:.0f} s left"]
        self._reporter.update(done=finished, message=", ".join(words))


async def _bring_input(
    settings: BatchSettings, progress: Progress, stopping: Stopping, use: CacheUse
) -> tuple[Path, str, bool]:
    """The input as a local path; where the paths in it begin; whether it is a copy."""
    place = parse_location(settings.input)
    if isinstance(place, HubPlace):
        raise InvalidArgument("the input is a model of the Hugging Face Hub: name a folder or a manifest")
    if isinstance(place, LocalPlace):
        path = place.path.absolute()
        if not path.exists():
            raise NotFound(f"the input {settings.input} does not exist: give a folder, a .jsonl or a .parquet file")
        return path, str(path if path.is_dir() else path.parent), False
    path = await in_thread(
        lambda: bring_to(settings, place, progress, lambda: stopping.asked, use), "headrace-batch-download"
    )
    if path.is_dir():
        return path, str(path), True
    above = str(place).rpartition("/")[0] if isinstance(place, ObjectPlace) else settings.input.rpartition("/")[0]
    return path, above, True


async def _unless_stopped(work: Any, stopping: Stopping) -> Any:
    """Wait for something that can be given up."""
    task = asyncio.ensure_future(work)
    stopping.listen(task.cancel)
    try:
        return await task
    except (asyncio.CancelledError, Cancelled):
        if not stopping.asked:
            raise
        raise Cancelled(f"{stopping.reason} before the first item: {_GO_ON}") from None
