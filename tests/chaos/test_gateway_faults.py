# SPDX-License-Identifier: Apache-2.0
"""The gateway while its database is locked, its disk is full or it is killed: what it said it has, it has."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from chaos_records import Writers
from gateway_process import Gateway, gateway

from support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Gateway]:
    with gateway(tmp_path) as made:
        yield made


def test_killed_repeatedly_it_keeps_what_it_acknowledged(running: Gateway) -> None:
    with Writers(running) as writers:
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
            writers.wait_for(6)
            running.end(number)
            running.start()
        count = len(writers.made)
        eventually(
            lambda: len(writers.made) > count + 5, message=lambda: (writers.error_answers[:3], running.log[-900:])
        )
    writers.check_kept()
    assert all(status == 503 for status, _ in writers.error_answers), writers.error_answers[:3]


def test_stopped_for_a_moment_it_answers_everything(running: Gateway) -> None:
    with Writers(running) as writers:
        for _ in range(3):
            writers.wait_for(6)
            pid = running.process.pid  # type: ignore[union-attr]
            os.kill(pid, signal.SIGSTOP)
            eventually(lambda pid=pid: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
            os.kill(pid, signal.SIGCONT)
    assert (writers.error_answers, writers.cut) == ([], 0)
    writers.check_kept()


def test_while_the_database_is_locked_reads_continue_and_writes_wait(running: Gateway) -> None:
    database = running.data_dir / "headrace.sqlite3"
    with contextlib.closing(sqlite3.connect(database, isolation_level=None, timeout=60)) as other:
        with Writers(running) as writers:
            eventually(lambda: len(writers.made) > 5, message=lambda: writers.error_answers[:3])
            for _ in range(3):
                other.execute("BEGIN IMMEDIATE")
                writers.check_kept()
                other.execute("ROLLBACK")
                count = len(writers.made)
                eventually(
                    lambda count=count: len(writers.made) > count + 5, message=lambda: writers.error_answers[-3:]
                )
    # Who waited for more than half a minute was told to come again.
    assert all(status == 503 and b"database" in body for status, body in writers.error_answers), writers.error_answers[
        :3
    ]
    assert writers.cut == 0
    writers.check_kept()


def test_a_full_disk_is_reported_and_nothing_is_half_written(running: Gateway) -> None:
    """No file may grow beyond what it has: what a full disk says, for this process alone."""
    process = running.process
    assert process is not None
    with Writers(running) as writers:
        eventually(lambda: len(writers.made) > 5, message=lambda: writers.error_answers[:3])
        largest = max(path.stat().st_size for path in running.data_dir.rglob("*") if path.is_file())
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (largest, resource.RLIM_INFINITY))
        eventually(lambda: len(writers.error_answers) >= 4, message=lambda: len(writers.made))
        writers.check_kept()
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        count = len(writers.made)
        eventually(lambda: len(writers.made) > count + 5, message=lambda: writers.error_answers[-3:])
    assert all(status >= 500 for status, _ in writers.error_answers), writers.error_answers[:3]
    assert process.poll() is None
    writers.check_kept()
