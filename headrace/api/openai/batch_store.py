# SPDX-License-Identifier: Apache-2.0
"""The batches of `/v1/batches` on disk: a record for each, and a folder with the work of those that are not finished.

Several processes share them: any may answer for a batch, and the one that holds the lock of its folder computes it. The
input is linked into the folder, so that a client may delete its file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.api.openai.errors import BadRequest
from headrace.api.openai.file_store import BATCH, FileNotKnown, FileStore
from headrace.api.openai.records import Record, RecordFolder, belongs_to, cannot_keep, locked
from headrace.core.clock import Clock
from headrace.core.errors import NotFound
from headrace.core.files import FileLock, remove_temporary_files
from headrace.core.limits import BatchLimits

log = logging.getLogger("headrace.api")

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
FINISHED = ("completed", "failed", "expired", "cancelled")

_RECORDS, _WORK = "records", "work"
_INPUT, _RESULTS, _RUN_LOCK = "input.jsonl", "results.jsonl", "run.lock"
_ABANDONED_SECONDS = 3600.0
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


class BatchNotKnown(NotFound):
    """No batch of the caller has this id."""

    param = "id"

    def __init__(self, id: str) -> None:
        super().__init__(f"No batch found with id '{id[:64]}'.")


class BatchStore:
    """The batches of all API keys. Its methods access the disk: call them in a thread."""

    def __init__(self, folder: Path, files: FileStore, limits: BatchLimits, clock: Clock) -> None:
        self._folder = folder
        self._files = files
        self._limits = limits
        self._clock = clock
        self._records = RecordFolder(folder / _RECORDS, "batch_")

    def create(
        self,
        owner: str,
        input_file_id: str,
        endpoint: str,
        metadata: Mapping[str, str] | None,
        output_seconds: float | None,
    ) -> Record:
        """Create a batch."""
        try:
            file = self._files.find(input_file_id, owner)
        except FileNotKnown as error:
            raise BadRequest("input_file_id", error.message, "file_not_found") from None
        if file["purpose"] != BATCH:
            raise BadRequest("input_file_id", f"has the purpose '{file['purpose']}': give a file for 'batch'")
        self._files.check_quota(owner)
        created = self._clock.wall()
        batch_id = self._records.new_id()
        record: Record = {
            "id": batch_id,
            "owner": owner,
            "created": created,
            "endpoint": endpoint,
            "input_file_id": input_file_id,
            "completion_window": "24h",
            "status": "validating",
            "expires_at": int(created + self._limits.batch_seconds),
            "metadata": metadata,
            "output_seconds": output_seconds,
            "output_id": self._files.new_id(),
            "error_id": self._files.new_id(),
            "counts": {"total": 0, "completed": 0, "failed": 0},
        }
        work = self.work_folder(batch_id)
        try:
            # The record comes last: from then on a worker may take the batch.
            work.mkdir(parents=True, mode=0o700)
            _link(self._files.content(input_file_id), work / _INPUT)
            locked(self._records, lambda: self._add(record))
        except OSError as error:
            self.remove_work(batch_id)
            log.error("cannot write %s: %s", work, error.strerror)
            raise cannot_keep() from None
        except BaseException:
            self.remove_work(batch_id)
            raise
        return record

    def find(self, id: str, caller: str) -> Record:
        """Return a batch of the caller; raise BatchNotKnown."""
        record = self._records.get(id)
        if record is None or not belongs_to(record, caller):
            raise BatchNotKnown(id)
        return record

    def batches_of(self, caller: str) -> list[Record]:
        """Return the batches of the caller, oldest first."""
        return [record for record in self._records.all() if belongs_to(record, caller)]

    def cancel(self, id: str, caller: str) -> Record:
        """Ask the worker of a batch to cancel it."""
        self.find(id, caller)

        def change(record: Record) -> None:
            status = record["status"]
            if status in ("validating", "in_progress"):
                self.set_status(record, "cancelling")
            elif status not in ("cancelling", "cancelled"):
                raise BadRequest("id", f"the batch is {status}: only one that is not finished can be cancelled")

        return self.change(id, change)

    # For the worker.

    def unfinished(self) -> list[str]:
        """Return the ids of all batches that are not finished, oldest first."""
        try:
            names = os.listdir(self._folder / _WORK)
        except FileNotFoundError:
            return []
        living: list[Record] = []
        for name in names:
            record = self._records.get(name)
            if record is not None and record["status"] not in FINISHED:
                living.append(record)
            elif record is not None or self._is_abandoned(name):
                self._remove_old_work(name)
        return [record["id"] for record in sorted(living, key=lambda record: (record["created"], record["id"]))]

    def get(self, id: str) -> Record | None:
        """Return a batch of any owner; None if there is none."""
        return self._records.get(id)

    def change(self, id: str, change: Callable[[Record], None], *, durable: bool = True) -> Record:
        """Change the record of a batch and return it; what `change` raises changes nothing."""

        def apply() -> Record:
            known = self._records.get(id, fresh=True)
            if known is None:
                raise BatchNotKnown(id)
            record = {**known, "counts": dict(known["counts"])}
            change(record)
            if record != known:
                self._records.put(record, durable=durable)
            return record

        changed: Record = locked(self._records, apply)
        return changed

    def set_status(self, record: Record, status: str) -> None:
        """Set a status and its time."""
        record["status"] = status
        record[f"{status}_at"] = int(self._clock.wall())

    def work_folder(self, id: str) -> Path:
        """Return the folder of a batch that is not finished."""
        return self._folder / _WORK / id

    def input_path(self, id: str) -> Path:
        """Return the path of the input of a batch that is not finished."""
        return self.work_folder(id) / _INPUT

    def results_path(self, id: str) -> Path:
        """Return the path of the ledger of a batch that is not finished."""
        return self.work_folder(id) / _RESULTS

    def run_lock(self, id: str) -> FileLock:
        """Return the lock of the process that computes a batch."""
        return FileLock(self.work_folder(id) / _RUN_LOCK)

    def remove_work(self, id: str) -> None:
        """Remove the folder of a batch that is finished. Only for the holder of its lock."""
        shutil.rmtree(self.work_folder(id), ignore_errors=True)

    def sweep(self) -> None:
        """Forget batches that finished long ago, and remove what killed processes left."""
        if not self._folder.is_dir():
            return
        locked(self._records, lambda: remove_temporary_files(self._folder / _RECORDS))
        before = self._clock.wall() - self._limits.record_seconds
        for record in self._records.all():
            finished = record.get(f"{record['status']}_at", 0)
            if record["status"] in FINISHED and finished < before:
                self._records.remove(record["id"])

    def _add(self, record: Record) -> None:
        everything, limits = self._records.all(), self._limits
        unfinished = [each for each in everything if each["status"] not in FINISHED]
        if sum(each["owner"] == record["owner"] for each in unfinished) >= limits.key_batches:
            raise BadRequest(
                "",
                f"{limits.key_batches} batches of this API key are not finished: wait for one, or cancel it",
                "quota_exceeded",
            )
        if len(everything) >= limits.total_batches:
            raise BadRequest("", "the server keeps no more batches: ask its operator", "quota_exceeded")
        self._records.put(record)

    def _is_abandoned(self, id: str) -> bool:
        """Return whether the process that was creating a batch was killed."""
        with contextlib.suppress(OSError):
            return time.time() - self.work_folder(id).stat().st_mtime > _ABANDONED_SECONDS
        return False

    def _remove_old_work(self, id: str) -> None:
        """Remove a folder that a killed process left, unless another process is about to do so."""
        lock = self.run_lock(id)
        try:
            if lock.try_acquire():
                self.remove_work(id)
        except OSError as error:
            log.warning("cannot remove %s: %s", self.work_folder(id), error.strerror)
        finally:
            lock.release()


def batch_json(record: Record) -> Record:
    """Return OpenAI's batch object."""
    document: dict[str, Any] = {
        "id": record["id"],
        "object": "batch",
        "endpoint": record["endpoint"],
        "model": record.get("model"),
        "errors": record.get("errors"),
        "input_file_id": record["input_file_id"],
        "completion_window": record["completion_window"],
        "status": record["status"],
        "output_file_id": record.get("output_file_id"),
        "error_file_id": record.get("error_file_id"),
        "created_at": int(record["created"]),
        "expires_at": record["expires_at"],
    }
    document |= {f"{time}_at": record.get(f"{time}_at") for time in _TIMES}
    document["request_counts"] = record["counts"]
    document["usage"] = record.get("usage")
    document["metadata"] = record["metadata"]
    return document


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
