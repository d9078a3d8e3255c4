# SPDX-License-Identifier: Apache-2.0
"""The ledger: an append-only file of results, and the set of items that it covers.

Each item has one line; results that become Parquet have one line per block (`blocks.pack`). The lines are authoritative: an
item is done when its complete line is in the file. The progress file saves reading all lines again. A line that a kill or a
power cut truncated is removed, and its items are computed again.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from headrace.core.errors import FailedPrecondition, HeadraceError, Internal, InvalidArgument, Unavailable
from headrace.core.fault_points import fault_point
from headrace.core.files import remove_temporary_files
from headrace.jobs.batch.blocks import BlockResult, can_pack, is_packed, lines_of, pack, unpack
from headrace.jobs.batch.progress import (
    ItemMarks,
    ProgressFile,
    State,
    progress_file_path,
    read_progress_file,
    write_progress_file,
)
from headrace.jobs.batch.settings import Shard

log = logging.getLogger("headrace.batch")

_NEW_FILE = 0o644
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE


class FailedOutput(dict[str, Any]):
    """The output of an item that counts as failed: written as the item's `error`."""


Result = tuple[int, str | int | None, Mapping[str, Any] | HeadraceError]
"""Index, id, and the output or error of an item."""


class Ledger:
    """One file of results; created by `open_ledger`, used by one thread at a time."""

    def __init__(
        self,
        path: Path,
        descriptor: int,
        job: ProgressFile,
        shard: Shard,
        marks: ItemMarks,
        size: int,
        *,
        packed: bool = False,
    ) -> None:
        self.path = path
        self.job = job
        self.marks = marks
        self.resumed = marks.finished
        """Items that earlier runs finished."""
        self._descriptor = descriptor
        self._shard = shard
        self._size = size
        self._packed = packed

    def is_done(self, index: int) -> bool:
        """Return whether an item is done."""
        return self._shard.position(index) in self.marks

    def write(self, results: Iterable[Result | BlockResult]) -> None:
        """Append all results or none; FailedPrecondition if the disk is full."""
        texts: list[bytes] = []
        items: list[tuple[int, bool]] = []
        blocks: list[BlockResult] = []
        for result in results:
            block = result if isinstance(result, BlockResult) else self._as_block(result)
            if block is not None:
                try:
                    texts.append(pack(block) if self._packed and can_pack(block.arrays) else lines_of(block))
                    blocks.append(block)
                    continue
                except TypeError:
                    pass  # write them one by one, to find the item that fails
            for single in _split(result) if isinstance(result, BlockResult) else (result,):
                index, line, failed = _line(single)
                texts.append(line)
                items.append((index, failed))
        lines = b"".join(texts)
        view = memoryview(lines)
        try:
            fault_point("batch.ledger.append")
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError as error:
            self._undo_write()
            raise _write_error(self.path, error) from None
        fault_point("batch.ledger.appended")
        self._size += len(lines)
        for index, failed in items:
            self.marks.add(self._shard.position(index), failed=failed)
        for block in blocks:
            self._mark(block.indices)

    def _as_block(self, result: Result) -> BlockResult | None:
        """Return a single result as a block, if it can be packed."""
        index, item_id, outcome = result
        if not self._packed or isinstance(outcome, HeadraceError) or outcome.keys() != {"outputs"}:
            return None
        values = outcome["outputs"]
        if not all(isinstance(array, np.ndarray) for array in values.values()):
            return None
        arrays = {name: array[np.newaxis] for name, array in values.items()}
        return BlockResult([index], [item_id], arrays) if can_pack(arrays) else None

    def _mark(self, indices: Sequence[int]) -> None:
        """Mark the items of a block, which are in order and usually without gaps."""
        position = self._shard.position
        first, last = position(indices[0]), position(indices[-1])
        if last - first + 1 == len(indices):
            self.marks.add_run(first, len(indices))
        else:
            for index in indices:
                self.marks.add(position(index), failed=False)

    def checkpoint(self, state: State = "running", reason: str = "", summary: Mapping[str, Any] | None = None) -> None:
        """Sync the results to disk and write the progress file."""
        try:
            os.fsync(self._descriptor)
            fault_point("batch.ledger.checkpoint")
            self.job = replace(
                self.job,
                state=state,
                reason=reason,
                finished=self.marks.finished,
                failed=self.marks.failed,
                bytes=self._size,
                ranges=self.marks.as_ranges(),
                summary=self.job.summary if summary is None else summary,
            )
            write_progress_file(progress_file_path(self.path), self.job)
        except OSError as error:
            raise _write_error(self.path, error) from None

    def close(self) -> None:
        """Close the file and release its lock."""
        os.close(self._descriptor)

    def _undo_write(self) -> None:
        """Remove a partial write."""
        try:
            os.ftruncate(self._descriptor, self._size)
        except OSError as error:
            log.warning("%s ends in a truncated line, which the next run removes: %s", self.path, error.strerror)


def open_ledger(
    path: Path,
    job: Mapping[str, Any],
    total: int,
    shard: Shard,
    *,
    overwrite: bool = False,
    retry_failed: bool = False,
    packed: bool = False,
) -> Ledger:
    """Create the results or continue existing ones. `packed`: store blocks as binary numbers."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _open_locked(path)
        progress = _read_or_create_progress(path, descriptor, ProgressFile(job, total), overwrite=overwrite)
        if retry_failed and os.fstat(descriptor).st_size:
            # Reset the progress file first: it would not match the remaining lines.
            progress = replace(progress, state="running", bytes=0, ranges=ProgressFile({}, 0).ranges)
            write_progress_file(progress_file_path(path), progress)
            descriptor = _remove_failed(path, descriptor)
        marks, size = _read(path, descriptor, progress, shard)
    except OSError as error:
        raise _write_error(path, error) from None
    return Ledger(path, descriptor, progress, shard, marks, size, packed=packed)


def _read_or_create_progress(path: Path, descriptor: int, job: ProgressFile, *, overwrite: bool) -> ProgressFile:
    """Return the progress of existing results, or of new ones. Closes the descriptor on an error."""
    progress_path = progress_file_path(path)
    try:
        remove_temporary_files(path.parent, progress_path.name)
        if overwrite:
            progress_path.unlink(missing_ok=True)
            os.ftruncate(descriptor, 0)
        progress = read_progress_file(progress_path)
        if progress is not None:
            check_same(path, progress, job)
            return progress
        if os.fstat(descriptor).st_size:
            raise FailedPrecondition(
                f"{path} exists and belongs to no batch job: use another output, or start over with --overwrite"
            )
        # Before the first line, so that no line is without its progress file.
        write_progress_file(progress_path, job)
    except BaseException:
        os.close(descriptor)
        raise
    return job


def check_same(path: Path, existing: ProgressFile, job: ProgressFile) -> None:
    """Raise if existing results belong to another job, and name the differences."""
    differences = [name for name in job.job if existing.job.get(name) != job.job[name]]
    if not differences and existing.total != job.total:
        differences = ["input"]
    if differences:
        names = ", ".join(differences)
        raise FailedPrecondition(
            f"the results in {path} belong to another job (different: {names}): use the same settings as before, "
            "use another output, or start over with --overwrite"
        )


def _read(path: Path, descriptor: int, progress: ProgressFile, shard: Shard) -> tuple[ItemMarks, int]:
    """Return the finished items and the size of their lines; remove a truncated end."""
    file_size = os.fstat(descriptor).st_size
    marks, size = ItemMarks(progress.total), 0
    if progress.bytes <= file_size:
        try:
            marks, size = ItemMarks.from_ranges(progress.total, progress.ranges), progress.bytes
        except (InvalidArgument, ValueError, TypeError, KeyError):
            log.warning("%s has invalid ranges; reading all results.", progress_file_path(path))
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(size)
        for line in file:
            try:
                _mark_line(line, marks, shard)
            except (ValueError, KeyError, TypeError, IndexError, InvalidArgument):
                log.warning("%s is truncated after byte %d; computing those items again.", path, size)
                break
            size += len(line)
    if size != file_size:
        os.ftruncate(descriptor, size)
    return marks, size


def _mark_line(line: bytes, marks: ItemMarks, shard: Shard) -> None:
    if not line.endswith(b"\n"):
        raise ValueError("a line without an end")
    record = orjson.loads(line)
    indices = unpack(record).indices if is_packed(record) else [record["index"]]
    for index in indices:
        if not shard.has(index):
            raise ValueError("a line of another job")
        marks.add(shard.position(index), failed="error" in record)


def _remove_failed(path: Path, descriptor: int) -> int:
    """Remove the lines of failed items; return the descriptor of the new file."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    new_descriptor = _open_locked(temporary)
    try:
        with open(descriptor, "rb", closefd=False) as file, open(new_descriptor, "wb", closefd=False) as new_file:
            file.seek(0)
            for line in file:
                try:
                    failed = "error" in orjson.loads(line)
                except ValueError:
                    break  # truncated
                if not failed:
                    new_file.write(line)
        os.fsync(new_descriptor)
        temporary.replace(path)
    except BaseException:
        os.close(new_descriptor)
        temporary.unlink(missing_ok=True)
        raise
    os.close(descriptor)
    return new_descriptor


def _split(block: BlockResult) -> Iterator[Result]:
    for number, (index, item_id) in enumerate(zip(block.indices, block.ids, strict=True)):
        yield index, item_id, {"outputs": {name: array[number] for name, array in block.arrays.items()}}


def _line(result: Result) -> tuple[int, bytes, bool]:
    """Return the index of an item, its line, and whether it failed."""
    index, item_id, outcome = result
    if not isinstance(outcome, HeadraceError):
        failed = isinstance(outcome, FailedOutput)
        try:
            line = {"index": index, "id": item_id, "error" if failed else "output": outcome}
            return index, orjson.dumps(line, option=_OPTIONS), failed
        except TypeError as error:  # the model returned a lone surrogate, or a key that is not a string
            log.warning("The result of item %d cannot be written as JSON: %s", index, error)
            outcome = Internal("the result cannot be written as JSON; the job's log has the details")
    error_json = {"code": outcome.code.value, "message": outcome.message.encode(errors="replace").decode()}
    return index, orjson.dumps({"index": index, "id": item_id, "error": error_json}, option=_OPTIONS), True


def _open_locked(path: Path) -> int:
    """Open or create the file and lock it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, _NEW_FILE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise Unavailable(f"another process writes to {path}: wait for it, or use another output") from None
        except FileNotFoundError:
            pass
        os.close(descriptor)  # the file was replaced meanwhile


def _write_error(path: Path, error: OSError) -> FailedPrecondition:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FailedPrecondition(
            f"no space left for {path}: free some space and run the same command again to continue"
        )
    return FailedPrecondition(f"{path} cannot be written: {error.strerror}; use another output")
