# SPDX-License-Identifier: Apache-2.0
"""The small parts of `/predict`, by themselves: labels, pace, deadlines, lanes."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from headrace.api.predict import ordered_responses
from headrace.api.predict.models import parse_labels
from headrace.api.predict.ordered_responses import OrderedResponses, ResponseSlot
from headrace.api.predict.predictor import Deadlines
from headrace.api.predict.websocket import FLOODING_SECONDS, MessageRate
from headrace.core.errors import DeadlineExceeded, HeadraceError
from support.virtual_time import run_virtual


def test_labels_in_both_directions() -> None:
    labels = parse_labels(" 1 = v1.0.0 ,2=v1.2.0,", "m")
    assert [labels.label(number) for number in ("1", "2", "3")] == ["v1.0.0", "v1.2.0", "3"]
    assert [labels.number(text) for text in ("v1.0.0", "v1.2.0", "3", "x")] == ["1", "2", "3", "x"]


@pytest.mark.parametrize("wrong", ["v1", "x=v1", "1=", "1=a b", "1=latest", "-1=v1", "2=one,3=one"])
def test_a_label_that_cannot_be_read_is_left_out_and_logged(wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        labels = parse_labels(f"{wrong},9=v9", "m")
    assert labels.label("9") == "v9"
    assert labels.label("1") == "1"
    assert len(caplog.records) == 1


def test_the_bucket_refills_to_its_burst_within_a_second() -> None:
    pace = MessageRate(10, 0.0)
    assert [pace.take(0.0) for _ in range(10)] == [0.0] * 10
    assert pace.take(0.0) == pytest.approx(0.1)
    assert pace.take(0.1001) == 0.0
    assert pace.take(0.1001) > 0
    assert [bool(pace.take(100.0)) for _ in range(11)] == [False] * 10 + [True]


def test_only_continued_requests_count_as_a_flood() -> None:
    steady, now = MessageRate(1, 0.0), 0.0
    while now < FLOODING_SECONDS - 0.3:
        steady.take(now)
        assert not steady.flooding
        now += 0.25
    for _ in range(4):
        steady.take(now)
        now += 0.25
    assert steady.flooding
    listens, now = MessageRate(1, 0.0), 0.0
    while now < FLOODING_SECONDS * 4:
        listens.take(now)
        listens.take(now)
        assert not listens.flooding
        now += 1.5
    assert all(MessageRate(0, 0.0).take(0.0) == 0.0 for _ in range(100))


class Waiter:
    def __init__(self) -> None:
        self.received: HeadraceError | None = None
        self.over = asyncio.Event()

    def cancel(self, reason: HeadraceError | None = None) -> None:
        self.received = reason
        self.over.set()


def test_deadlines_are_kept_in_order_and_forgotten() -> None:
    async def main() -> None:
        deadlines = Deadlines(10.0)
        first, forgotten, last = Waiter(), Waiter(), Waiter()
        for waiter in (first, forgotten, last):
            deadlines.add(waiter)
        deadlines.remove(forgotten)
        await asyncio.sleep(3.0)
        deadlines.add(last)  # its time begins anew
        anew = asyncio.get_running_loop().time()
        await asyncio.wait_for(first.over.wait(), 30)
        assert asyncio.get_running_loop().time() - anew == pytest.approx(7.0)
        await asyncio.wait_for(last.over.wait(), 30)
        assert asyncio.get_running_loop().time() - anew == pytest.approx(10.0)
        assert isinstance(first.received, DeadlineExceeded)
        assert isinstance(last.received, DeadlineExceeded)
        assert forgotten.received is None
        assert deadlines._timer is None

    run_virtual(main())


def test_without_a_deadline_there_is_no_timer() -> None:
    deadlines = Deadlines(0)
    deadlines.add(Waiter())  # outside of a loop: it would need one
    assert deadlines._waiting == {}


class Client:
    """What a lane talks to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch | None = None, most: int = 64) -> None:
        if monkeypatch is not None:
            monkeypatch.setattr(ordered_responses, "MOST_REQUESTS", most)
        self.slots: dict[Any, ResponseSlot] = {}
        self.sent: list[Any] = []
        self.events: list[str] = []
        self.writable = True
        self.at_once = False
        self.lane = OrderedResponses(
            self.begin, self.send, self.hold, self.release, lambda: self.events.append("overflow")
        )

    def begin(self, slot: ResponseSlot, question: Any) -> None:
        self.slots[question] = slot
        slot.cancel = lambda: self.events.append(f"cancel {question}")
        if self.at_once:
            slot.put(question)

    def send(self, message: Any) -> bool:
        self.sent.append(message)
        return self.writable

    def hold(self) -> None:
        self.events.append("hold")

    def release(self) -> None:
        self.events.append("release")


def test_a_lane_keeps_the_order() -> None:
    client = Client()
    for question in "abc":
        client.lane.submit(question, 1)
    client.slots["c"].put("C")
    client.slots["b"].put("B1", last=False)
    assert client.sent == []
    client.slots["a"].put("A")
    assert client.sent == ["A", "B1"]
    client.slots["b"].put("B2")
    assert client.sent == ["A", "B1", "B2", "C"]
    assert client.lane.empty
    client.slots["b"].put("too late")
    assert client.sent[-1] == "C"


def test_a_lane_pauses_and_resumes_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(monkeypatch, 2)
    for question in "abcd":
        client.lane.submit(question, 1)
    assert client.events == ["hold"]
    assert list(client.slots) == ["a", "b"]
    client.slots["a"].put("A")
    assert list(client.slots) == ["a", "b", "c"]
    client.slots["b"].put("B")
    assert list(client.slots) == ["a", "b", "c", "d"]
    assert client.events == ["hold"]
    client.slots["c"].put("C")
    assert client.events == ["hold", "release"]


def test_a_lane_stops_for_a_client_that_does_not_read() -> None:
    client = Client()
    client.at_once, client.writable = True, False
    for question in "abc":
        client.lane.submit(question, 1)
    assert client.sent == ["a"]
    assert client.events == ["hold"]
    client.writable = True
    client.lane.writable()
    assert client.sent == ["a", "b", "c"]
    assert client.events == ["hold", "release"]


def test_a_lane_that_closes_gives_up_its_questions() -> None:
    client = Client()
    client.lane.submit("a", 1)
    client.lane.close()
    assert client.events == ["cancel a"]
    client.slots["a"].put("A")
    client.lane.submit("b", 1)
    assert client.sent == []
    assert list(client.slots) == ["a"]


def test_a_lane_reports_when_too_much_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered_responses, "MOST_UNREAD_BYTES", 10)
    client = Client()
    client.lane.submit("a", 1)
    client.lane.submit("b", 1)
    client.slots["b"].put("B", 10, last=False)
    assert client.events == []
    client.slots["b"].put("B", 1, last=False)
    assert client.events == ["overflow"]
