# SPDX-License-Identifier: Apache-2.0
"""When a worker hangs and when it works: the judge with made-up processes and time, real processes in /proc."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from headrace.programs.serve.supervisor import Heartbeats, ProcessActivity, Watchdog, read_activity
from support.virtual_time import run_virtual
from support.waiting import eventually


class FakeProcess:
    """What /proc would tell of a worker."""

    def __init__(self) -> None:
        self.activity = ProcessActivity("S", 100, 0)

    def computes(self) -> None:
        self.activity = self.activity._replace(state="R", ticks=self.activity.ticks + 100)

    def reads(self) -> None:
        self.activity = self.activity._replace(faults=self.activity.faults + 1)


class Watched:
    """Worker 1 of two, looked at by a watchdog of 30 seconds."""

    def __init__(self, *, serves: bool = True) -> None:
        self.process = FakeProcess()
        self.beats = Heartbeats(2)
        self.watchdog = Watchdog(self.beats, 30.0, read_activity=lambda pid: self.process.activity)
        self.watchdog.begin(1)
        if serves:
            self.beats.serve(1)

    def seconds(self, count: int, *, beating: bool = False, working: bool = False, reading: bool = False) -> str:
        """So many looks, a second apart; what the last of them said, or the first that said something."""
        for _ in range(count):
            if beating:
                self.beats.beat(1)
            if working:
                self.process.computes()
            if reading:
                self.process.reads()
            if reported := self.watchdog.check(1, 4711, 1.0):
                return reported
        return ""


def test_who_beats_lives_whatever_else() -> None:
    watched = Watched()
    assert watched.seconds(1000, beating=True) == ""
    assert watched.seconds(25) == ""
    watched.beats.beat(1)  # one beat is enough, and counts from there
    assert watched.seconds(25) == ""


def test_silent_and_at_rest_hangs() -> None:
    watched = Watched()
    watched.seconds(5, beating=True)
    assert watched.seconds(30) == ""
    assert "done nothing for 30 s" in watched.seconds(1)


def test_a_stopped_worker_is_reported_as_stopped() -> None:
    watched = Watched()
    watched.process.activity = ProcessActivity("T", 7, 7)
    assert "has been stopped for 30 s" in watched.seconds(40)


@pytest.mark.parametrize("work", ["working", "reading"])
def test_silent_and_at_work_has_ten_times_as_long(work: str) -> None:
    watched = Watched()
    watched.seconds(5, beating=True)
    assert watched.seconds(299, **{work: True}) == ""
    assert "for 300 s in which it computed" in watched.seconds(3, **{work: True})


def test_who_waits_for_a_disk_is_at_work() -> None:
    watched = Watched()
    watched.process.activity = ProcessActivity("D", 7, 7)
    assert watched.seconds(100) == ""


def test_who_starts_may_compute_for_as_long_as_it_takes() -> None:
    starting = Watched(serves=False)
    assert starting.seconds(10_000, working=True) == ""
    assert "done nothing" in starting.seconds(31)  # but not do nothing


def test_little_work_is_none_and_little_rest_is_none() -> None:
    """Threads that wait for Python's lock wake up now and then; who computes has to wait where the machine is crowded."""
    watched, crowded = Watched(), Watched()
    for _ in range(28):
        assert watched.seconds(2) == watched.seconds(1, working=True) == ""
        assert crowded.seconds(1) == crowded.seconds(2, working=True) == ""
    assert "done nothing" in watched.seconds(10)
    assert crowded.seconds(10) == ""


def test_time_in_which_the_supervisor_was_paused_does_not_count() -> None:
    watched = Watched()
    watched.seconds(2)
    for _ in range(10):  # the machine slept ten nights
        assert watched.watchdog.check(1, 4711, 36_000.0) == ""
    assert watched.seconds(8) == ""


def test_a_successor_starts_fresh() -> None:
    watched = Watched()
    assert watched.seconds(40) != ""
    watched.watchdog.begin(1)
    assert not watched.beats.serves(1)
    assert watched.seconds(30) == ""
    assert watched.seconds(1) != ""


def test_heartbeats_reach_the_parent_and_are_separate_for_each_worker() -> None:
    beats = Heartbeats(3)
    code = os.fork()
    if code == 0:
        for _ in range(5):
            beats.beat(1)
        beats.serve(1)
        os._exit(0)
    os.waitpid(code, 0)
    assert [beats.beats(number) for number in range(3)] == [0, 5, 0]
    assert [beats.serves(number) for number in range(3)] == [False, True, False]


def test_a_loop_beats_as_long_as_it_turns() -> None:
    beats = Heartbeats(1)

    async def turn() -> None:
        beats.keep_beating(0)
        await asyncio.sleep(60.5)

    run_virtual(turn())
    assert beats.beats(0) == 61


def test_states_of_real_processes_in_proc() -> None:
    spins = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before = read_activity(spins.pid)
        eventually(lambda: read_activity(spins.pid).worked_since(before))
        spins.send_signal(signal.SIGSTOP)
        eventually(lambda: read_activity(spins.pid).state == "T")
        before = read_activity(spins.pid)
        time.sleep(0.05)  # five ticks, if it were to run
        assert not read_activity(spins.pid).worked_since(before)
    finally:
        spins.kill()
        spins.wait(30)
    nobody = read_activity(2**22 + 1)
    assert nobody.worked_since(nobody)
