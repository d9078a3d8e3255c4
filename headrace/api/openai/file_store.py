# SPDX-License-Identifier: Apache-2.0
"""The files of `/v1/files` on disk: a record and a content for each, bounded in number, bytes and age.

Several processes share the folder, which is made when the first file arrives. A file belongs to the API key that sent it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from pathlib import Path
from typing import BinaryIO

from headrace.api.openai.errors import BadRequest
from headrace.api.openai.records import Record, RecordFolder, belongs_to, cannot_keep, locked
from headrace.core.clock import Clock
from headrace.core.errors import HeadraceError, NotFound
from headrace.core.files import remove_temporary_files
from headrace.core.limits import BatchLimits

log = logging.getLogger("headrace.api")

BATCH, BATCH_OUTPUT = "batch", "batch_output"
"""Purposes: the input of batches, and what batches make."""

_CONTENTS = "contents"
_NEW = ".new-"
_ABANDONED_SECONDS = 86_400.0
"""Age of the rest of an upload whose process was killed: no upload takes as long."""


class FileNotKnown(NotFound):
    """No file of the caller has this id."""

    param = "id"

    def __init__(self, id: str) -> None:
        super().__init__(f"No such File object: {id[:64]}")


class NewFile:
    """A file that is being written. `FileStore.keep` keeps it; `discard` does not."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.path = path
        self.size = 0
        self._stream = stream

    def write(self, content: bytes) -> None:
        """Append content."""
        try:
            self._stream.write(content)
        except OSError as error:
            raise _disk_error(self.path, error) from None
        self.size += len(content)

    def close(self) -> None:
        """Write everything to the disk."""
        try:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
        except OSError as error:
            raise _disk_error(self.path, error) from None

    def discard(self) -> None:
        """Remove it."""
        with contextlib.suppress(OSError):
            self._stream.close()
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)


class FileStore:
    """The files of all API keys. Its methods access the disk: call them in a thread."""

    def __init__(self, folder: Path, limits: BatchLimits, clock: Clock) -> None:
        self._folder = folder
        self._contents = folder / _CONTENTS
        self._limits = limits
        self._clock = clock
        self._records = RecordFolder(folder, "file-")

    def new_id(self) -> str:
        """Return an id for a file that is made later."""
        return self._records.new_id()

    def begin(self) -> NewFile:
        """Begin a file."""
        path = self._contents / f"{_NEW}{secrets.token_hex(16)}"
        try:
            for folder in (self._folder.parent, self._folder, self._contents):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _disk_error(path, error) from None
        return NewFile(path, os.fdopen(descriptor, "wb"))

    def keep(
        self,
        new: NewFile,
        owner: str,
        filename: str,
        purpose: str,
        *,
        keep_seconds: float | None = None,
        id: str = "",
    ) -> Record:
        """Keep a file. An `id` that is given replaces the file of that id, and no quota holds for it."""
        new.close()
        created = self._clock.wall()
        record: Record = {
            "id": id or self.new_id(),
            "owner": owner,
            "created": created,
            "bytes": new.size,
            "filename": filename,
            "purpose": purpose,
            "expires_at": int(created + (self._limits.file_seconds if keep_seconds is None else keep_seconds)),
        }

        def add() -> Record:
            if not id:
                self._check_quota(owner, new.size)
            try:
                new.path.replace(self._contents / record["id"])
            except OSError as error:
                raise _disk_error(new.path, error) from None
            # After the content: a killed process leaves no record without one.
            self._records.put(record)
            return record

        added: Record = locked(self._records, add)
        return added

    def find(self, id: str, caller: str) -> Record:
        """Return a file of the caller; raise FileNotKnown."""
        record = self._records.get(id)
        if record is None or not belongs_to(record, caller) or self._is_expired(record):
            raise FileNotKnown(id)
        return record

    def files_of(self, caller: str, purpose: str = "") -> list[Record]:
        """Return the files of the caller, oldest first."""
        return [
            record
            for record in self._records.all()
            if belongs_to(record, caller) and not self._is_expired(record) and purpose in ("", record["purpose"])
        ]

    def content(self, id: str) -> Path:
        """Return the path of a file's content."""
        return self._contents / id

    def remove(self, id: str, caller: str) -> None:
        """Remove a file of the caller."""
        self.find(id, caller)
        self._remove(id)

    def check_quota(self, owner: str) -> None:
        """Raise if the owner may have no more files."""
        self._check_quota(owner, 0)

    def sweep(self) -> None:
        """Remove expired files, and what killed processes left."""
        if not self._folder.is_dir():
            return
        locked(self._records, lambda: remove_temporary_files(self._folder))
        for record in self._records.all():
            if self._is_expired(record):
                self._remove(record["id"])
        with contextlib.suppress(OSError):
            for path in self._contents.iterdir():
                # By the system's clock, which made the time of the file.
                is_old = time.time() - path.stat().st_mtime > _ABANDONED_SECONDS
                if is_old and self._records.get(path.name) is None:
                    path.unlink(missing_ok=True)

    def _remove(self, id: str) -> None:
        # The record first: without one, no caller sees the file.
        self._records.remove(id)
        self._contents.joinpath(id).unlink(missing_ok=True)

    def _is_expired(self, record: Record) -> bool:
        return bool(self._clock.wall() >= record["expires_at"])

    def _check_quota(self, owner: str, size: int) -> None:
        limits = self._limits
        everything = [record for record in self._records.all() if not self._is_expired(record)]
        own = [record for record in everything if record["owner"] == owner]
        if len(own) >= limits.key_files or sum(record["bytes"] for record in own) + size > limits.key_bytes:
            raise BadRequest(
                "",
                f"there may be {limits.key_files} files of {limits.key_bytes} bytes in all for one API key: delete some",
                "quota_exceeded",
            )
        total = sum(record["bytes"] for record in everything) + size
        if len(everything) >= limits.total_files or total > limits.total_bytes:
            raise BadRequest(
                "", "the server has no room for more files: ask its operator, or delete some", "quota_exceeded"
            )


def check_keep_seconds(param: str, anchor: object, seconds: object) -> float:
    """Check the two members of `expires_after`, as OpenAI bounds them."""
    if anchor != "created_at":
        raise BadRequest(f"{param}.anchor", "must be 'created_at'")
    if type(seconds) is not int or not 3600 <= seconds <= 2_592_000:
        raise BadRequest(f"{param}.seconds", "must be an integer from 3600 to 2592000")
    return float(seconds)


def file_json(record: Record) -> Record:
    """Return OpenAI's file object."""
    return {
        "id": record["id"],
        "object": "file",
        "bytes": record["bytes"],
        "created_at": int(record["created"]),
        "expires_at": record["expires_at"],
        "filename": record["filename"],
        "purpose": record["purpose"],
        "status": "processed",
        "status_details": None,
    }


def _disk_error(path: Path, error: OSError) -> HeadraceError:
    log.error("cannot write %s: %s", path, error.strerror)
    return cannot_keep()
