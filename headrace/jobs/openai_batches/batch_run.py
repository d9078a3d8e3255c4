# SPDX-License-Identifier: Apache-2.0
"""Run one batch, from its record to its result files. Only the process that holds the batch's lock does so.

    validating -> in_progress -> finalizing -> completed
    validating -> failed; in_progress -> failed, expired; validating, in_progress -> cancelling -> cancelled

Each status is stored before the work of the next one begins, and all work is idempotent: if a process is killed, another one
continues its batch from the stored status and the lines in the ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from headrace.api.openai.batch_store import BatchStore
from headrace.api.openai.file_store import FileStore
from headrace.api.openai.records import Record
from headrace.core.clock import Clock
from headrace.core.limits import BatchLimits
from headrace.jobs.batch.ledger import Ledger, open_ledger
from headrace.jobs.batch.runner import BatchRunner
from headrace.jobs.batch.settings import BatchSettings, Shard
from headrace.jobs.openai_batches.input_lines import InputLines, check_input
from headrace.jobs.openai_batches.line_client import LineClient
from headrace.jobs.openai_batches.result_files import UnfinishedLines, write_result_files
from headrace.net.http.exchange import Handler

log = logging.getLogger("headrace.batch")

_GRACE_SECONDS = 5.0
"""Grace period of lines in flight when the server stops: longer ones are computed again after the restart."""
_EXPIRED = UnfinishedLines("batch_expired", "the completion window of the batch ended before this request was computed")
_CANCELLED = UnfinishedLines("batch_cancelled", "the batch was cancelled before this request was computed")
_TOO_LARGE = UnfinishedLines("output_too_large", "the results of the batch were larger than the server allows")
_ENDS = {"expired": _EXPIRED, "cancelled": _CANCELLED, "failed": _TOO_LARGE}
"""Final statuses of a batch that ends early."""


class BatchRun:
    """The run of one batch in one process."""

    def __init__(
        self,
        id: str,
        batches: BatchStore,
        files: FileStore,
        handlers: Mapping[str, Handler],
        limits: BatchLimits,
        clock: Clock,
        slots: asyncio.Semaphore,
        in_flight: int,
        poll_seconds: float,
    ) -> None:
        self._id = id
        self._batches = batches
        self._files = files
        self._handlers = handlers
        self._limits = limits
        self._clock = clock
        self._slots = slots
        self._in_flight = in_flight
        self._poll_seconds = poll_seconds
        self._wake = asyncio.Event()
        self._stopping = False
        self._end = ""
        """The final status of a batch that ends early."""

    def wake(self) -> None:
        """Schedule another read of the record: it may have changed."""
        self._wake.set()

    def stop(self) -> None:
        """Start no more lines; a later run continues."""
        self._stopping = True
        self._wake.set()

    async def run(self, record: Record) -> None:
        """Do the remaining work of the batch."""
        if record["status"] == "validating":
            record = await self._validate(record)
        if record["status"] == "cancelling":
            await self._finish(record, "cancelled")
        elif record["status"] == "finalizing":
            await self._finish(record, "completed")
        elif record["status"] == "in_progress":
            await self._compute(record)

    async def _validate(self, record: Record) -> Record:
        path = self._batches.input_path(self._id)
        checked = await asyncio.to_thread(check_input, path, record["endpoint"], self._limits)

        def change(current: Record) -> None:
            if current["status"] != "validating":
                return  # it was cancelled meanwhile
            if checked.errors:
                current["errors"] = {"object": "list", "data": checked.errors}
                self._batches.set_status(current, "failed")
                return
            current["counts"]["total"] = checked.total
            current["model"] = checked.models.pop() if len(checked.models) == 1 else None
            self._batches.set_status(current, "in_progress")

        changed = await asyncio.to_thread(self._batches.change, self._id, change)
        if changed["status"] == "failed":
            await asyncio.to_thread(self._batches.remove_work, self._id)
        return changed

    async def _compute(self, record: Record) -> None:
        ledger = await asyncio.to_thread(self._open_ledger, record)
        client = LineClient(
            record["endpoint"], self._handlers[record["endpoint"]], record["owner"], self._slots, self._in_flight
        )
        settings = BatchSettings(model="", input="", output="", grace_seconds=_GRACE_SECONDS)
        runner = BatchRunner(settings, self._input(record), client, ledger, self._clock, lambda _done, _failed: None)
        watching = asyncio.create_task(self._watch(record, ledger, runner, client))
        try:
            await runner.run()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await asyncio.to_thread(self._close_ledger, ledger)
        await asyncio.to_thread(self._batches.change, self._id, lambda current: _count(current, ledger))
        if self._end:
            await self._finish(record, self._end)
        elif ledger.marks.finished == record["counts"]["total"] and not self._stopping:
            record = await asyncio.to_thread(self._batches.change, self._id, self._finalize)
            await self._finish(record, "cancelled" if record["status"] == "cancelling" else "completed")

    async def _watch(self, record: Record, ledger: Ledger, runner: BatchRunner, client: LineClient) -> None:
        """Store the progress, and stop the runner when the batch has to end."""
        while not runner.stopped:
            record = await asyncio.to_thread(self._write_progress, ledger)
            if record["status"] == "cancelling":
                self._end = "cancelled"
            elif self._clock.wall() >= record["expires_at"]:
                self._end = "expired"
            elif self._batches.results_path(self._id).stat().st_size > self._limits.output_bytes:
                self._end = "failed"
            if self._end or self._stopping:
                runner.stop()
                if self._end:
                    client.cancel()
                else:
                    client.stop()
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._poll_seconds)
            self._wake.clear()

    async def _finish(self, record: Record, status: str) -> None:
        """Write the result files and the final status."""
        unfinished_error, total = _ENDS.get(status), record["counts"]["total"]
        if not total:  # it was cancelled before it was validated
            await asyncio.to_thread(self._write_end, status, {})
            return
        # Opening the ledger removes a line that a killed process truncated.
        ledger = await asyncio.to_thread(self._open_ledger, record)
        await asyncio.to_thread(ledger.close)
        path = self._batches.results_path(self._id)
        results = await asyncio.to_thread(
            write_result_files, self._files, record, path, self._input(record), unfinished_error
        )
        members: dict[str, Any] = {
            "output_file_id": results.output_id,
            "error_file_id": results.error_id,
            "usage": results.usage.to_json(),
        }
        if status == "failed" and unfinished_error is not None:
            error = {"code": unfinished_error.code, "message": unfinished_error.message, "param": None, "line": None}
            members["errors"] = {"object": "list", "data": [error]}
        await asyncio.to_thread(self._write_end, status, members, ledger)

    # In a thread.

    def _open_ledger(self, record: Record) -> Ledger:
        path, total = self._batches.results_path(self._id), record["counts"]["total"]
        return open_ledger(path, {"batch": self._id}, total, Shard())

    def _close_ledger(self, ledger: Ledger) -> None:
        try:
            ledger.checkpoint()
        finally:
            ledger.close()

    def _write_progress(self, ledger: Ledger) -> Record:
        return self._batches.change(self._id, lambda current: _count(current, ledger), durable=False)

    def _finalize(self, current: Record) -> None:
        if current["status"] == "in_progress":
            self._batches.set_status(current, "finalizing")

    def _write_end(self, status: str, members: Mapping[str, Any], ledger: Ledger | None = None) -> None:
        def change(current: Record) -> None:
            current.update(members)
            if ledger is not None:
                _count(current, ledger)
            self._batches.set_status(current, status)

        changed = self._batches.change(self._id, change)
        self._batches.remove_work(self._id)
        log.info("batch %s is %s: %s", self._id, status, changed["counts"])

    def _input(self, record: Record) -> InputLines:
        return InputLines(self._batches.input_path(self._id), record["counts"]["total"], self._limits)


def _count(record: Record, ledger: Ledger) -> None:
    marks = ledger.marks
    record["counts"]["completed"] = marks.finished - marks.failed
    record["counts"]["failed"] = marks.failed
