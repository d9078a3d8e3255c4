# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of both loops, on a clock that the test moves: what counts, from when, and what fell behind."""

from __future__ import annotations

import pytest
from load_fakes import FakeClock, FakeTarget

from headrace.programs.loadtest.loops import Arrivals, ClosedLoop, OpenLoop
from headrace.programs.loadtest.results import Recording


def open_loop(
    clock: FakeClock,
    target: FakeTarget,
    *,
    rate: float = 10.0,
    begins: float = 0.0,
    ends: float = 1.0,
    connections: int = 100,
) -> tuple[OpenLoop, Recording]:
    recording = Recording(begins, ends)
    arrivals = Arrivals(rate, uniform=True)
    return OpenLoop(target, arrivals, recording, start_time=0.0, max_connections=connections, now=clock), recording


def test_latency_counts_from_when_a_request_was_due() -> None:
    clock, target = FakeClock(), FakeTarget()
    loop, recording = open_loop(clock, target)
    clock.now = 0.25  # we were late: three are due
    loop.send_due()
    assert len(target.connections) == 3
    clock.now = 0.3
    for connection in target.connections:
        connection.answer()
    assert list(recording.latencies) == pytest.approx([0.3, 0.2, 0.1])
    assert list(recording.late) == pytest.approx([0.25, 0.15, 0.05])


def test_a_free_lane_is_used_again_before_a_new_one() -> None:
    clock, target = FakeClock(), FakeTarget()
    loop, _ = open_loop(clock, target)
    loop.send_due()
    target.connections[0].answer()
    clock.now = 0.1
    loop.send_due()
    assert [connection.sent for connection in target.connections] == [2]
    clock.now = 0.2  # the first has no answer yet
    loop.send_due()
    assert [connection.sent for connection in target.connections] == [2, 1]


def test_arrivals_do_not_wait_for_answers() -> None:
    clock, target = FakeClock(), FakeTarget()
    loop, recording = open_loop(clock, target)
    for tick in range(10):
        clock.now = tick / 10
        loop.send_due()
    assert len(target.connections) == loop.in_flight == 10
    assert list(recording.late) == pytest.approx([0.0] * 10)


def test_what_finds_no_lane_waits_and_its_waiting_counts() -> None:
    clock, target = FakeClock(), FakeTarget()
    loop, recording = open_loop(clock, target, connections=1)
    clock.now = 0.2
    loop.send_due()  # due at 0, 0.1 and 0.2
    assert recording.most_waiting == 2
    clock.now = 0.5
    target.connections[0].answer()
    clock.now = 0.6
    target.connections[0].answer()
    assert list(recording.latencies) == pytest.approx([0.5, 0.5])
    assert list(recording.late) == pytest.approx([0.2, 0.4, 0.4])


def test_what_never_found_a_lane_or_an_answer_is_an_error() -> None:
    clock, target = FakeClock(), FakeTarget()
    loop, recording = open_loop(clock, target, connections=1)
    clock.now = 0.2
    loop.send_due()
    clock.now = 5.0
    loop.close()
    assert recording.errors == {"never sent": 2, "timeout": 1}
    assert not recording.latencies


def test_nothing_is_due_after_the_end() -> None:
    clock, target = FakeClock(), FakeTarget()
    loop, _ = open_loop(clock, target, ends=0.55)
    clock.now = 9.0
    loop.send_due()
    assert len(target.connections) == 6  # at 0, 0.1, ... 0.5


def test_the_warm_up_does_not_count() -> None:
    clock, target = FakeClock(), FakeTarget()
    loop, recording = open_loop(clock, target, begins=0.5, ends=1.0)
    for tick in range(10):
        clock.now = tick / 10
        loop.send_due()
        target.connections[-1].answer()
    assert len(recording.latencies) == recording.finished == 5


def test_a_closed_loop_sends_the_next_request_after_the_answer() -> None:
    clock, target = FakeClock(), FakeTarget()
    recording = Recording(0.0, 1.0)
    loop = ClosedLoop(target, 2, recording, now=clock)
    loop.start()
    first, second = target.connections
    clock.now = 0.25
    first.answer()
    clock.now = 0.75
    first.answer()
    second.answer("HTTP 503", "busy")
    assert [connection.sent for connection in target.connections] == [3, 2]
    assert list(recording.latencies) == [0.25, 0.5]
    assert recording.errors == {"HTTP 503": 1}
    assert recording.examples == {"HTTP 503": "busy"}


def test_a_request_that_ends_after_the_window_keeps_its_latency() -> None:
    clock, target = FakeClock(), FakeTarget()
    recording = Recording(0.0, 1.0)
    loop = ClosedLoop(target, 1, recording, now=clock)
    loop.start()
    clock.now = 3.0
    target.connections[0].answer()
    assert list(recording.latencies) == [3.0]
    assert recording.finished == 0  # throughput is of the window
    assert loop.in_flight == 0
    assert target.connections[0].sent == 1
