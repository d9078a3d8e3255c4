# SPDX-License-Identifier: Apache-2.0
"""What is written down of a job, and what is made of it after a kill, a power cut or a full disk."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import FailedPrecondition, InvalidArgument, Unavailable
from headrace.jobs.batch import ledger as ledger_module
from headrace.jobs.batch.ledger import Ledger, Result, open_ledger
from headrace.jobs.batch.progress import ItemMarks, progress_file_path, read_progress_file
from headrace.jobs.batch.settings import Shard

JOB = {"model": "m", "input": "i"}


def result(index: int) -> Result:
    outcome: Any = InvalidArgument("wrong") if index % 5 == 4 else {"n": index}
    return index, f"é{index}", outcome


def opened(path: Path, total: int = 20, **more: Any) -> Ledger:
    return open_ledger(path, JOB, total, more.pop("shard", Shard()), **more)


def indices(path: Path) -> list[int]:
    return [json.loads(line)["index"] for line in path.read_bytes().splitlines()]


def test_wherever_the_file_is_cut_each_item_is_there_once_in_the_end(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    first = opened(path)
    first.write([result(index) for index in (3, 0, 4)])
    first.checkpoint()
    certain = path.stat().st_size
    first.write([result(index) for index in (9, 1)])
    first.close()
    whole, beside = path.read_bytes(), progress_file_path(path).read_bytes()
    for cut in range(certain, len(whole) + 1):
        path.write_bytes(whole[:cut])
        progress_file_path(path).write_bytes(beside)
        again = opened(path)
        todo = [index for index in range(20) if not again.is_done(index)]
        assert {3, 0, 4}.isdisjoint(todo) and again.resumed == 20 - len(todo)
        again.write([result(index) for index in todo])
        again.checkpoint("finished")
        again.close()
        assert sorted(indices(path)) == list(range(20)), cut
        assert (again.marks.finished, again.marks.failed) == (20, 4)


@pytest.mark.parametrize(
    "tail", [b"\0" * 100, b"\0" * 99 + b"\n", b'{"index": 1}\n', b'{"index": 99}\n', b"[]\n", b'{"x": 0}\n']
)
def test_lines_that_cannot_be_are_cut_off(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "r.jsonl"
    first = opened(path)
    first.write([result(1)])
    first.close()
    with path.open("ab") as file:
        file.write(tail)
    again = opened(path)
    assert again.resumed == 1 and indices(path) == [1]
    again.close()


def test_without_marks_that_fit_all_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    first = opened(path)
    first.write([result(index) for index in range(6)])
    first.checkpoint()
    first.close()
    known = json.loads(progress_file_path(path).read_bytes())
    for said in ({"bytes": 10**6}, {"ranges": {"finished": [[0, 50]], "failed": []}}, {"ranges": {}}):
        # The marks of a longer file, of other items, and none: each with the lines that are really there.
        progress_file_path(path).write_text(json.dumps(known | said))
        again = opened(path)
        assert (again.resumed, again.marks.failed) == (6, 1)
        again.close()
    progress_file_path(path).write_text("{")
    with pytest.raises(FailedPrecondition, match="is not the progress file of a batch job"):
        opened(path)


def test_a_shard_keeps_its_own_items(tmp_path: Path) -> None:
    path, shard = tmp_path / "r.jsonl", Shard(2, 3)
    assert [shard.size(total) for total in (0, 1, 2, 4, 5, 20)] == [0, 0, 1, 1, 2, 7]
    first = opened(path, 7, shard=shard)
    first.write([result(index) for index in (1, 4, 10)])
    first.checkpoint()
    first.close()
    output = read_progress_file(progress_file_path(path))
    assert output is not None and output.ranges == {"finished": [[0, 1], [3, 3]], "failed": [[1, 1]]}
    again = opened(path, 7, shard=shard)
    assert [index for index in range(20) if shard.has(index) and not again.is_done(index)] == [7, 13, 16, 19]
    again.close()


def test_failed_items_are_removed_to_be_retried(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    first = opened(path)
    first.write([result(index) for index in range(20)])
    first.checkpoint("finished")
    first.close()
    again = opened(path, retry_failed=True)
    assert [index for index in range(20) if not again.is_done(index)] == [4, 9, 14, 19]
    again.write([(index, None, {"n": index}) for index in (4, 9, 14, 19)])
    with pytest.raises(Unavailable, match="another process writes"):
        opened(path)
    again.close()
    assert sorted(indices(path)) == list(range(20))
    assert not list(tmp_path.glob(".*"))


def test_results_that_json_cannot_carry_are_failures(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    first = opened(path)
    first.write([(0, "a", {"text": "\ud800"}), (1, "b", {"x": object()}), (2, "c", InvalidArgument("bad \ud800"))])
    first.write([(3, "d", {"x": float("nan")})])
    first.close()
    again = opened(path)
    assert (again.marks.finished, again.marks.failed) == (4, 3)
    again.close()
    outputs = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert outputs[0]["error"]["message"].startswith("the result cannot be written as JSON")
    assert outputs[3]["output"] == {"x": None}


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    first = opened(tmp_path / "r.jsonl")
    with pytest.raises(Unavailable, match="another process writes"):
        opened(tmp_path / "r.jsonl", overwrite=True)
    first.close()
    opened(tmp_path / "r.jsonl").close()


def test_marks_distinguish_one_from_two() -> None:
    marks = ItemMarks(3)
    marks.add(1, failed=False)
    with pytest.raises(InvalidArgument, match="already done"):
        marks.add(1, failed=True)
    assert (marks.finished, marks.failed, 1 in marks, 0 in marks) == (1, 0, True, False)


def test_a_disk_that_fills_up_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.jsonl"
    room = 200

    def write(descriptor: int, data: memoryview) -> int:
        """As the kernel does: what fits, and then the error."""
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = os.pwrite(descriptor, data[:room], 0)  # at the end: the file is open to append
        room -= written
        return written

    first = opened(path)
    monkeypatch.setattr(ledger_module.os, "write", write)
    first.write([result(0)])
    before = path.read_bytes()
    with pytest.raises(FailedPrecondition, match="no space left .*: free some space and run the same command again"):
        first.write([result(index) for index in range(1, 10)])
    assert path.read_bytes() == before and first.marks.finished == 1
    monkeypatch.undo()
    first.write([result(index) for index in range(1, 20)])
    first.close()
    assert indices(path) == list(range(20))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, check=False, capture_output=True).returncode:  # noqa: S603
        pytest.skip("only root can make a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)  # noqa: S603, S607


def test_a_real_disk_that_fills_up(small_disk: Path) -> None:
    path = small_disk / "r.jsonl"
    first = opened(path, 5000)
    done = 0
    with pytest.raises(FailedPrecondition, match="no space left"):
        while True:
            first.write([(index, None, {"text": "x" * 100}) for index in range(done, done + 10)])
            done += 10
    first.close()
    again = opened(path, 5000)
    assert (again.resumed, again.marks.finished) == (done, done)
    again.close()
    assert indices(path) == list(range(done)) and done > 100
