# SPDX-License-Identifier: Apache-2.0
"""Held requests without a router: order, batches, and that each is released or refused once."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import HeadraceError
from headrace.fleet.router.request_queue import HeldRequests
from headrace.fleet.router.settings import ActivationSettings
from support.virtual_time import run_virtual
from support.waiting import eventually_async


class Waiting:
    """Implements `request_queue.QueuedRequest`."""

    def __init__(self, number: int, log: list[Any], size: int = 0) -> None:
        self.queued_since = 0.0
        self.left = False
        self._number = number
        self._log = log
        self._size = size

    def is_gone(self) -> bool:
        return self.left

    def queued_bytes(self) -> int:
        return self._size

    def enter_queue(self) -> None:
        pass

    def traceparent(self) -> bytes:
        return b""

    def leave_queue(self, on_response: object = None) -> None:
        self._log.append(self._number)

    def refuse(self, error: HeadraceError) -> None:
        assert error.retry_after_seconds
        self._log.append(-self._number)


def held_queue(**bounds: Any) -> HeldRequests:
    return HeldRequests(ActivationSettings((), **bounds), lambda: "nobody came")


def test_all_are_released_in_order_without_cancelled_ones() -> None:
    async def run() -> list[Any]:
        log: list[Any] = []
        holding = held_queue()
        requests = [Waiting(number, log) for number in range(1, 201)]
        for request in requests:
            holding.add(request)
        requests[7].left = requests[150].left = True
        holding.release(lambda: True)
        assert 0 < len(log) < 100, "not all at once: they need connections"
        await eventually_async(lambda: not len(holding))
        assert holding.dropped == 2 and holding.refused == 0
        return log

    assert run_virtual(run()) == [number for number in range(1, 201) if number not in (8, 151)]


def test_who_falls_asleep_again_gets_no_more() -> None:
    async def run() -> None:
        log: list[Any] = []
        holding = held_queue()
        for number in range(1, 201):
            holding.add(Waiting(number, log))
        awake = [True, False]
        holding.release(lambda: awake.pop(0))
        await asyncio.sleep(0.05)
        first = len(log)
        assert first < 100 and len(holding) == 200 - first
        holding.release(lambda: True)
        await eventually_async(lambda: not len(holding))
        assert log == list(range(1, 201))
        holding.close()

    run_virtual(run())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=40),
    st.integers(0, 20),
    st.integers(0, 300),
    st.booleans(),
)
def test_each_is_completed_once_or_was_cancelled(
    requests: list[tuple[int, bool]], most: int, most_bytes: int, closes: bool
) -> None:
    async def run() -> None:
        log: list[Any] = []
        holding = held_queue(held_requests=most, held_bytes=most_bytes)
        created = []
        for number, (size, leaves) in enumerate(requests, 1):
            created.append(Waiting(number, log, size))
            holding.add(created[-1])
            assert len(holding) <= most and holding.bytes <= most_bytes
            created[-1].left = leaves
        if closes:
            holding.close()
        else:
            holding.release(lambda: True)
        assert len(holding) == 0 and holding.bytes == 0
        received = [abs(number) for number in log]
        assert len(received) == len(set(received))
        missing = {number for number in range(1, len(created) + 1) if number not in received}
        assert all(created[number - 1].left for number in missing)
        holding.close()

    run_virtual(run())


def test_requests_that_wait_too_long_get_an_error() -> None:
    async def run() -> list[Any]:
        log: list[Any] = []
        holding = held_queue(wait_seconds=600.0)
        for number in (1, 2):
            holding.add(Waiting(number, log))
        await asyncio.sleep(599)
        assert not log
        await asyncio.sleep(2)
        return log

    assert run_virtual(run()) == [-1, -2]
