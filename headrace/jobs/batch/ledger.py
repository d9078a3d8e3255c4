# SPDX-License-Identifier: Apache-2.0
"""The results of a job as they are written, and which items they are of: `Ledger`.

Called by `app`; by `running` in one thread at a time. An item has a line; where lines are only on the way to Parquet, a
block of items has one (`packing`). The lines are the truth: an item is done when its whole line is in the file. The file
beside them (`job_file`) saves reading all of them again when a job goes on, and says what they are of. A line that a kill
or a power cut tore is cut off, and its items are computed again.
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
from headrace.jobs.batch.blocks import BlockResult, lines_of
from headrace.jobs.batch.job_file import JobFile, State, job_path, read_job, write_job
from headrace.jobs.batch.marks import Marks
from headrace.jobs.batch.packing import can_pack, is_packed, pack, unpack
from headrace.jobs.batch.settings import Shard

log = logging.getLogger("headrace.batch")

_NEW_FILE = 0o644
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE

Result = tuple[int, str | int | None, Mapping[str, Any] | HeadraceError]
"""Index, id, and what came of the item."""


class Ledger:
    """One file of results. Made by `open_ledger`."""

    def __init__(
        self, path: Path, descriptor: int, job: JobFile, shard: Shard, marks: Marks, size: int, *, packed: bool = False
    ) -> None:
        self.path = path
        self.job = job
        self.marks = marks
        self.resumed = marks.finished
        """Items that an earlier run has done."""
        self._descriptor = descriptor
        self._shard = shard
        self._size = size
        self._packed = packed

    def is_done(self, index: int) -> bool:
        """Whether an item of this job needs nothing more."""
        return self._shard.place(index) in self.marks

    def write(self, results: Iterable[Result | BlockResult]) -> None:
        """Append. All of them or none; raises FailedPrecondition if there is no room."""
        texts: list[bytes] = []
        made: list[tuple[int, bool]] = []
        blocks: list[BlockResult] = []
        for result in results:
            block = result if isinstance(result, BlockResult) else self._as_block(result)
            if block is not None:
                try:
                    texts.append(pack(block) if self._packed and can_pack(block.arrays) else lines_of(block))
                    blocks.append(block)
                    continue
                except TypeError:
                    pass  # each for itself: the long way tells which
            for each in _apart(result) if isinstance(result, BlockResult) else (result,):
                index, line, failed = _line(each)
                texts.append(line)
                made.append((index, failed))
        lines = b"".join(texts)
        view = memoryview(lines)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError as error:
            self._take_back()
            raise _unwritable(self.path, error) from None
        self._size += len(lines)
        for index, failed in made:
            self.marks.add(self._shard.place(index), failed=failed)
        for block in blocks:
            self._mark(block.indices)

    def _as_block(self, result: Result) -> BlockResult | None:
        """An item by itself, if it is to be packed."""
        index, given, outcome = result
        if not self._packed or isinstance(outcome, HeadraceError) or outcome.keys() != {"outputs"}:
            return None
        values = outcome["outputs"]
        if not all(isinstance(each, np.ndarray) for each in values.values()):
            return None
        arrays = {name: each[np.newaxis] for name, each in values.items()}
        return BlockResult([index], [given], arrays) if can_pack(arrays) else None

    def _mark(self, indices: Sequence[int]) -> None:
        """Items of a block, which are in order; without gaps, nearly always."""
        place = self._shard.place
        first, last = place(indices[0]), place(indices[-1])
        if last - first + 1 == len(indices):
            self.marks.add_run(first, len(indices))
        else:
            for index in indices:
                self.marks.add(place(index), failed=False)

    def checkpoint(self, state: State = "running", reason: str = "", summary: Mapping[str, Any] | None = None) -> None:
        """See to it that what was written lasts, and say so beside it."""
        try:
            os.fsync(self._descriptor)
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
            write_job(job_path(self.path), self.job)
        except OSError as error:
            raise _unwritable(self.path, error) from None

    def close(self) -> None:
        """Let others at the file."""
        os.close(self._descriptor)

    def _take_back(self) -> None:
        """Half of a write is as good as none."""
        try:
            os.ftruncate(self._descriptor, self._size)
        except OSError as error:
            log.warning("%s ends in a torn line, which the next run cuts off: %s", self.path, error.strerror)


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
    """Begin results, or go on with those that are there. `packed`: numbers as such. Raises what is in the way."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(path)
        begun = _begin(path, descriptor, JobFile(job, total), overwrite=overwrite)
        if retry_failed and os.fstat(descriptor).st_size:
            # The marks first: they would not fit the lines that are left.
            begun = replace(begun, state="running", bytes=0, ranges=JobFile({}, 0).ranges)
            write_job(job_path(path), begun)
            descriptor = _without_failed(path, descriptor)
        marks, size = _read(path, descriptor, begun, shard)
    except OSError as error:
        raise _unwritable(path, error) from None
    return Ledger(path, descriptor, begun, shard, marks, size, packed=packed)


def _begin(path: Path, descriptor: int, job: JobFile, *, overwrite: bool) -> JobFile:
    """What is known of the results that are there; a new file if there are none. Closes the descriptor if it raises."""
    beside = job_path(path)
    try:
        if overwrite:
            beside.unlink(missing_ok=True)
            os.ftruncate(descriptor, 0)
        known = read_job(beside)
        if known is not None:
            check_same(path, known, job)
            return known
        if os.fstat(descriptor).st_size:
            raise FailedPrecondition(
                f"{path} exists and is not of a job that can go on: name another output, or start over with --overwrite"
            )
        # Before the first line, so that there never are lines of which nobody knows what they are.
        write_job(beside, job)
    except BaseException:
        os.close(descriptor)
        raise
    return job


def check_same(path: Path, known: JobFile, job: JobFile) -> None:
    """Raise what differs between the job that results are of and another one."""
    other = [name for name in job.job if known.job.get(name) != job.job[name]]
    if not other and known.total != job.total:
        other = ["input"]
    if other:
        words = ", ".join(other)
        raise FailedPrecondition(
            f"the results in {path} are of another job (what differs: {words}): go on with what it was begun with, name "
            "another output, or start over with --overwrite"
        )


def _read(path: Path, descriptor: int, known: JobFile, shard: Shard) -> tuple[Marks, int]:
    """What is done, and how many bytes tell of it; what is torn is cut off."""
    there = os.fstat(descriptor).st_size
    marks, size = Marks(known.total), 0
    if known.bytes <= there:
        try:
            marks, size = Marks.from_ranges(known.total, known.ranges), known.bytes
        except (InvalidArgument, ValueError, TypeError, KeyError):
            log.warning("%s does not tell what is done: all results are read", job_path(path))
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(size)
        for line in file:
            try:
                _take(line, marks, shard)
            except (ValueError, KeyError, TypeError, IndexError, InvalidArgument):
                log.warning("%s: what follows byte %d is torn and computed again", path, size)
                break
            size += len(line)
    if size != there:
        os.ftruncate(descriptor, size)
    return marks, size


def _take(line: bytes, marks: Marks, shard: Shard) -> None:
    if not line.endswith(b"\n"):
        raise ValueError("a line without an end")
    record = orjson.loads(line)
    indices = unpack(record).indices if is_packed(record) else [record["index"]]
    for index in indices:
        if not shard.has(index):
            raise ValueError("a line of another job")
        marks.add(shard.place(index), failed="error" in record)


def _without_failed(path: Path, descriptor: int) -> int:
    """Take the lines of failed items out; gives the file that has taken the place of this one."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    made = _locked(fresh)
    try:
        with open(descriptor, "rb", closefd=False) as file, open(made, "wb", closefd=False) as kept:
            file.seek(0)
            for line in file:
                try:
                    failed = "error" in orjson.loads(line)
                except ValueError:
                    break  # torn, and with it all that follows
                if not failed:
                    kept.write(line)
        os.fsync(made)
        fresh.replace(path)
    except BaseException:
        os.close(made)
        fresh.unlink(missing_ok=True)
        raise
    os.close(descriptor)
    return made


def _apart(block: BlockResult) -> Iterator[Result]:
    for number, (index, given) in enumerate(zip(block.indices, block.ids, strict=True)):
        yield index, given, {"outputs": {name: array[number] for name, array in block.arrays.items()}}


def _line(result: Result) -> tuple[int, bytes, bool]:
    """The item's index, its line, and whether it failed."""
    index, given, outcome = result
    if not isinstance(outcome, HeadraceError):
        try:
            return index, orjson.dumps({"index": index, "id": given, "output": outcome}, option=_OPTIONS), False
        except TypeError as error:  # of a model's own making: half of a surrogate pair, a key that is no text
            log.warning("item %d has a result that JSON cannot carry: %s", index, error)
            outcome = Internal("the result cannot be written as JSON; the job's log has the details")
    error_told = {"code": outcome.code.value, "message": outcome.message.encode(errors="replace").decode()}
    return index, orjson.dumps({"index": index, "id": given, "error": error_told}, option=_OPTIONS), True


def _locked(path: Path) -> int:
    """The file, made if need be, for us alone."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, _NEW_FILE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise Unavailable(f"another process writes to {path}: wait for it, or name another output") from None
        except FileNotFoundError:
            pass
        os.close(descriptor)  # another one took its place meanwhile


def _unwritable(path: Path, error: OSError) -> FailedPrecondition:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FailedPrecondition(
            f"there is no room left for {path}: make room and run the same again, which goes on where this ended"
        )
    return FailedPrecondition(f"{path} cannot be written: {error.strerror}; name another output")
