# SPDX-License-Identifier: Apache-2.0
"""Jobs that are killed, stopped, or run out of room: the next run ends with every item exactly once."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from batch_tools import check_products, manifest, onnx_model, records, run_command, settings_of, start_batch

from headrace.core.errors import Cancelled
from headrace.jobs.batch import ledger as ledger_module
from headrace.jobs.batch.progress import progress_file_path
from headrace.programs.batch import StopSignal, run_job
from support.waiting import eventually

COUNT = 2500
SLOW = ("--batch-size", "1", "--in-flight", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return onnx_model(tmp_path_factory.mktemp("product"))


def until_longer(path: Path, size: int, process: Any) -> None:
    """Wait until so much is written, or the process has ended."""
    eventually(lambda: process.poll() is not None or (path.exists() and path.stat().st_size >= size))


@pytest.mark.parametrize(("ordered", "kills"), [pytest.param(False, 3, marks=pytest.mark.slow), (True, 1)])
def test_killed_at_random_points(tmp_path: Path, model: Path, ordered: bool, kills: int) -> None:
    given, output = manifest(tmp_path / "items.jsonl", COUNT), tmp_path / "results.jsonl"
    words = (model, given, output, *SLOW, *(["--ordered"] if ordered else []))
    chance = random.Random(8)  # noqa: S311
    size = 0
    for _ in range(kills):
        process = start_batch(*words)
        until_longer(output, size + chance.randrange(1, 40_000), process)
        process.kill()
        process.communicate(timeout=180)
        result = output.read_bytes() if output.exists() else b""
        assert len(result) >= size  # nothing that was written is lost
        size = len(result)
        # Killed in the middle of a write, which is rare, or of the file beside it.
        output.write_bytes(result[: len(result) - chance.randrange(0, 30)] if result else result)
        size = output.stat().st_size
    code, out, err = run_command(*words, "--json")
    assert code == 0, err
    summary = json.loads(out)
    assert 0 < summary["resumed"] < COUNT and summary["total"] == COUNT
    found_records = records(output)
    check_products(found_records, COUNT)
    assert not ordered or [record["index"] for record in found_records] == list(range(COUNT))


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_leaves_a_resumable_job(tmp_path: Path, model: Path, number: signal.Signals) -> None:
    given, output = manifest(tmp_path / "items.jsonl", COUNT), tmp_path / "results.jsonl"
    process = start_batch(model, given, output, *SLOW)
    until_longer(output, 2000, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=180)
    assert process.returncode == 128 + number, err
    assert b"left" in out
    assert f"error: stopped by {number.name}\n  try: run the same command again to resume".encode() in err
    document = json.loads(progress_file_path(output).read_bytes())
    done = len(records(output))
    assert document["state"] == "cancelled" and document["summary"]["succeeded"] == done and 0 < done < COUNT
    summary = asyncio.run(run_job(settings_of(model, given, output)))
    assert (summary.state, summary.resumed) == ("finished", done)
    check_products(records(output), COUNT)


def test_a_signal_before_the_first_item(tmp_path: Path) -> None:
    """The model's code waits for ever; nobody waits for it."""
    (tmp_path / "model").mkdir()
    here = tmp_path / "here"
    (tmp_path / "model" / "model.py").write_text(
        f"import pathlib, time\npathlib.Path({str(here)!r}).touch()\ntime.sleep(600)\ndef predict(x):\n    return x\n"
    )
    given, output = manifest(tmp_path / "items.jsonl", 3), tmp_path / "results.jsonl"
    process = start_batch(tmp_path / "model", given, output, "--grace-seconds", "0")
    until_longer(here, 0, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=180)
    assert process.returncode == 143, err
    assert b"stopped by SIGTERM before the first item" in err
    assert not output.exists()


def test_stopped_before_it_began(tmp_path: Path, model: Path) -> None:
    given, output = manifest(tmp_path / "items.jsonl", 10), tmp_path / "results.jsonl"

    async def stopped_at_once() -> None:
        stopping = StopSignal()
        stopping.stop("told to")
        await run_job(settings_of(model, given, output), stop_signal=stopping)

    with pytest.raises(Cancelled, match="told to before the first item: run the same command again"):
        asyncio.run(stopped_at_once())
    assert not output.exists()


def test_a_full_disk_ends_a_job_that_can_be_resumed(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Results are written some hundreds at a time: there is room for several such pieces, and not for all.
    given, output = manifest(tmp_path / "items.jsonl", 20_000), tmp_path / "results.jsonl"
    write, room = os.write, 600_000

    def limited(descriptor: int, data: Any) -> int:
        nonlocal room
        if room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(descriptor, data[:room])
        room -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(ledger_module.os, "write", limited)
        summary = asyncio.run(run_job(settings_of(model, given, output)))
    assert summary.state == "failed" and "no space left" in summary.reason
    assert 0 < summary.succeeded < 20_000 and summary.succeeded == len(records(output))
    again = asyncio.run(run_job(settings_of(model, given, output)))
    assert (again.state, again.resumed) == ("finished", summary.succeeded)
    check_products(records(output), 20_000)
