# SPDX-License-Identifier: Apache-2.0
"""Progress: the first and the last event always, and not too many between."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.clock import ManualClock
from headrace.core.errors import NotFound
from headrace.core.telemetry.progress import ProgressEvent, Reporter, silent


class Watched:
    """A reporter with its clock and what came out of it."""

    def __init__(self, **settings):
        self.clock = ManualClock()
        self.events = []
        self.reporter = Reporter(self.events.append, self.clock, "load m", **settings)


def test_the_first_event_is_immediate():
    watched = Watched(total=10, unit="files")
    watched.reporter.advance(3)
    assert watched.events == [ProgressEvent("load m", 3, 10, "files", "", "running")]


def test_events_in_between_wait_for_their_time():
    watched = Watched(every_seconds=1.0)
    for _ in range(5):
        watched.reporter.advance()
        watched.clock.advance(0.5)
    assert [event.done for event in watched.events] == [1, 3, 5]


@given(st.lists(st.floats(0, 0.3)))
def test_there_are_never_more_events_than_time_for_them(waits):
    watched = Watched(every_seconds=0.1)
    for wait in waits:
        watched.clock.advance(wait)
        watched.reporter.advance()
    assert len(watched.events) <= 1 + watched.clock.monotonic() / 0.1 + 1e-6
    watched.reporter.finish()
    assert watched.events[-1] == ProgressEvent("load m", len(waits), None, "", "", "finished")


def test_a_silence_is_not_made_up_for():
    watched = Watched(every_seconds=1.0)
    watched.reporter.advance()
    watched.clock.advance(100)
    for _ in range(10):
        watched.reporter.advance()
    assert [event.done for event in watched.events] == [1, 2]


def test_a_new_phase_is_reported_immediately_and_a_repeated_one_is_not():
    watched = Watched()
    watched.reporter.update(message="download")
    watched.reporter.update(message="verify")
    watched.reporter.update(message="verify", done=5)
    watched.reporter.update(done=6, total=7)
    assert [event.message for event in watched.events] == ["download", "verify"]
    watched.clock.advance(1)
    watched.reporter.update(done=8)
    assert watched.events[-1] == ProgressEvent("load m", 8, 7, "", "verify", "running")


def test_nothing_follows_the_end():
    watched = Watched()
    watched.reporter.fail("disk full")
    watched.clock.advance(10)
    watched.reporter.advance()
    watched.reporter.update(message="again")
    watched.reporter.finish()
    watched.reporter.fail("again")
    assert watched.events == [ProgressEvent("load m", message="disk full", state="failed")]


def test_a_block_starts_and_finishes():
    watched = Watched(total=1)
    with watched.reporter as reporter:
        reporter.advance()
    assert [(event.done, event.state) for event in watched.events] == [(0, "running"), (1, "finished")]


@pytest.mark.parametrize(
    ("error", "words"), [(NotFound("no such model"), "no such model"), (OSError("/secret"), "OSError")]
)
def test_a_failing_block_reports_only_public_text(error, words):
    watched = Watched()
    with pytest.raises(type(error)), watched.reporter:
        raise error
    assert (watched.events[-1].state, watched.events[-1].message) == ("failed", words)


def test_a_block_that_ended_itself_is_not_ended_twice():
    watched = Watched()
    with watched.reporter as reporter:
        reporter.finish("cached")
    assert [event.message for event in watched.events] == ["", "cached"]


def test_the_final_message_defaults_to_the_phase():
    watched = Watched()
    watched.reporter.update(message="verify")
    watched.reporter.finish()
    assert watched.events[-1].message == "verify"


def test_silence_takes_events():
    with Reporter(silent, ManualClock(), "task") as reporter:
        reporter.advance()
