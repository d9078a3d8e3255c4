# SPDX-License-Identifier: Apache-2.0
"""Where requests wait: whose turn it is, who may wait at all, for how long, and what is left of those who gave up."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import Cancelled, InvalidArgument, Unavailable
from headrace.core.requests import InferRequest
from headrace.engine.scheduling.pending_request import RUNNING, PendingRequest
from headrace.engine.scheduling.queues import FifoQueue, PolicyQueue
from headrace.models.config.types import DynamicBatching, InstanceGroup, QueuePolicy
from support.engines import (
    Gate,
    RecordingCaller,
    answers,
    config_of,
    counted,
    pending_of,
    serving_plane,
    submit,
    tensors_of,
)

MICROSECOND = 1000
"""In the queue's nanoseconds."""


def with_priority(level: Any, **more: Any) -> PendingRequest:
    return pending_of(parameters={"priority": level}, **more)


def policy_queue(levels: int = 0, default: int = 0, policies: Any = None, **policy: Any) -> PolicyQueue:
    batching = DynamicBatching(
        priority_levels=levels,
        default_priority_level=default,
        default_queue_policy=QueuePolicy(**policy),
        priority_queue_policies=policies or {},
    )
    return PolicyQueue(batching, "m")


def living(queue: Any) -> list[PendingRequest]:
    return [pending for pending in queue if not pending.cancelled]


def recording_callback() -> tuple[list[Any], Any]:
    received: list[Any] = []
    return received, received.append


def test_first_in_first_out() -> None:
    queue = FifoQueue()
    requests = [pending_of() for _ in range(5)]
    for pending in requests:
        queue.append(pending)
    assert list(queue) == requests
    assert queue.take(2) == requests[:2]
    requests[2].cancel()
    assert queue.take(1) == requests[3:4]
    assert queue.take(10) == requests[4:]
    assert not len(queue)


def test_cancelled_requests_at_the_front_are_dropped_on_access() -> None:
    for queue in (FifoQueue(), policy_queue(), policy_queue(3)):
        requests = [pending_of() for _ in range(3)]
        for pending in requests:
            queue.append(pending)
        for pending in requests:
            pending.cancel()
        assert queue.expire(0) is None
        assert not len(queue), type(queue).__name__


def test_urgent_requests_are_first_and_equals_in_order() -> None:
    queue = policy_queue(3, 2)
    plan = [3, 2, 1, 0, 3, 1, 2]
    requests = [with_priority(level) for level in plan]
    for pending in requests:
        queue.append(pending)
    expected = [requests[number] for number in (2, 5, 1, 3, 6, 0, 4)]
    assert list(queue) == expected
    assert len(queue) == 7
    assert queue.take(4) == expected[:4]
    assert queue.take(4) == expected[4:]


def test_a_request_without_a_priority_has_the_default_one() -> None:
    queue = policy_queue(5, 4)
    late, default, early = with_priority(5), pending_of(), with_priority(3)
    for pending in (late, default, early):
        queue.append(pending)
    assert queue.take(3) == [early, default, late]


def test_without_levels_a_priority_has_no_effect() -> None:
    queue = policy_queue(max_queue_size=10)
    requests = [with_priority(2), with_priority(1), with_priority(999)]
    for pending in requests:
        queue.append(pending)
    assert queue.take(3) == requests


@pytest.mark.parametrize("priority", [4, -1, "1", 1.0, True, "x" * 10_000])
def test_a_priority_that_is_none_is_refused(priority: Any) -> None:
    queue = policy_queue(3, 2)
    with pytest.raises(InvalidArgument, match=r"use 1 \(most urgent\) to 3") as refusal:
        queue.append(with_priority(priority))
    assert len(refusal.value.message) < 300
    assert not len(queue)


def test_a_full_queue_refuses_in_triton_s_words_and_counts_only_live_requests() -> None:
    queue = policy_queue(max_queue_size=2)
    requests = [pending_of() for _ in range(2)]
    for pending in requests:
        queue.append(pending)
    with pytest.raises(Unavailable, match="^Exceeds maximum queue size"):
        queue.append(pending_of())
    requests[1].cancel()
    third = pending_of()
    queue.append(third)
    with pytest.raises(Unavailable):
        queue.append(pending_of())
    assert queue.take(5) == [requests[0], third]
    queue.append(pending_of())


def test_each_level_has_its_own_size() -> None:
    queue = policy_queue(2, 2, {1: QueuePolicy(max_queue_size=1)}, max_queue_size=2)
    queue.append(with_priority(1))
    queue.append(with_priority(2))
    queue.append(with_priority(2))
    for level in (1, 2):
        with pytest.raises(Unavailable):
            queue.append(with_priority(level))


def test_an_expired_request_is_rejected() -> None:
    queue = policy_queue(default_timeout_microseconds=10)
    heard, done = recording_callback()
    early, late = pending_of(arrived_ns=0, done=done), pending_of(arrived_ns=5 * MICROSECOND, done=done)
    queue.append(early)
    queue.append(late)
    assert queue.expire(0) == 10 * MICROSECOND
    assert heard == []
    assert queue.expire(10 * MICROSECOND) == 15 * MICROSECOND
    (error,) = heard
    assert isinstance(error, Unavailable)
    assert error.message == "Request timeout expired"
    assert living(queue) == [late]
    assert queue.expire(1_000 * MICROSECOND) is None
    assert len(heard) == 2
    assert queue.take(5) == []


def test_a_request_that_runs_is_not_rejected() -> None:
    queue = policy_queue(default_timeout_microseconds=10)
    heard, done = recording_callback()
    queue.append(pending_of(done=done))
    (running,) = queue.take(1)
    running.state = RUNNING
    assert queue.expire(1_000_000) is None
    assert heard == []


def test_a_late_request_may_be_put_behind_the_others_instead() -> None:
    queue = policy_queue(2, 1, default_timeout_microseconds=10, timeout_action="delay")
    first, second, other = (pending_of(arrived_ns=n * MICROSECOND) for n in range(3))
    low = with_priority(2, arrived_ns=3 * MICROSECOND)
    for pending in (first, second, other, low):
        queue.append(pending)
    assert queue.expire(11 * MICROSECOND) == 12 * MICROSECOND
    assert list(queue) == [other, first, second, low]
    newcomer = pending_of(arrived_ns=11 * MICROSECOND)
    queue.append(newcomer)
    # Behind the punctual ones of its own level, before the next level.
    assert queue.take(5) == [other, newcomer, first, second, low]
    assert len(queue) == 0


def test_late_requests_still_count_for_the_size_of_the_queue() -> None:
    queue = policy_queue(default_timeout_microseconds=10, timeout_action="delay", max_queue_size=1)
    queue.append(pending_of())
    queue.expire(20 * MICROSECOND)
    with pytest.raises(Unavailable):
        queue.append(pending_of())


@pytest.mark.parametrize(
    ("default", "allowed", "wanted", "expected"),
    [
        (10, False, 5, 10),
        (10, True, 5, 5),
        (10, True, 50, 10),
        (10, True, 0, 10),
        (10, True, -3, 10),
        (10, True, "5", 10),
        (10, True, True, 10),
        (0, True, 5, 5),
        (0, False, 5, None),
        (0, True, 0, None),
    ],
)
def test_a_caller_may_shorten_its_time_where_that_is_allowed(
    default: int, allowed: bool, wanted: Any, expected: int | None
) -> None:
    queue = policy_queue(default_timeout_microseconds=default, allow_timeout_override=allowed, max_queue_size=9)
    queue.append(pending_of(parameters={"timeout": wanted}))
    assert queue.expire(0) == (None if expected is None else expected * MICROSECOND)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["keep", "cancel"]), st.integers(0, 3)), max_size=40))
def test_after_any_cancellation_the_others_keep_their_order(plan: list[tuple[int, str, int]]) -> None:
    queue = policy_queue(3, 2)
    expected: dict[int, list[PendingRequest]] = {1: [], 2: [], 3: []}
    taken: list[PendingRequest] = []
    for level, fate, take in plan:
        pending = with_priority(level)
        queue.append(pending)
        if fate == "cancel":
            pending.cancel()
        else:
            expected[level or 2].append(pending)
        batch = queue.take(take)
        in_order = [pending for level in (1, 2, 3) for pending in expected[level]]
        assert batch == in_order[: len(batch)]
        assert len(batch) == min(take, len(in_order))
        for one in batch:
            one.state = RUNNING
            for waiting in expected.values():
                if one in waiting:
                    waiting.remove(one)
        taken += batch
        assert living(queue) == [pending for level in (1, 2, 3) for pending in expected[level]]
    assert len(set(map(id, taken))) == len(taken)


@pytest.mark.parametrize("make", [FifoQueue, policy_queue])
def test_a_cancelled_request_leaves_only_its_slot(make: Any) -> None:
    """Behind one that waits for long, many may give up: their tensors must not stay."""
    queue = make()
    queue.append(pending_of())
    array = np.zeros((1, 1000))
    alive = weakref.ref(array)
    pending = pending_of(INPUT0=array)
    queue.append(pending)
    pending.cancel()
    del array, pending
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("make", [FifoQueue, policy_queue])
def test_places_of_the_cancelled_do_not_add_up(make: Any) -> None:
    queue = make()
    first, last = pending_of(), pending_of()
    queue.append(first)
    for _ in range(5000):
        pending = pending_of()
        queue.append(pending)
        pending.cancel()
    queue.append(last)
    queue.expire(0)
    assert len(queue) < 100
    assert queue.take(5) == [first, last]


# Through a real plane.


def slow(name: str = "m", **batching: Any) -> Any:
    return config_of(
        name,
        max_batch_size=1,
        instance_groups=(InstanceGroup(name, runs="thread"),),
        scheduling=DynamicBatching(**batching),
    )


def row(number: int) -> Any:
    return np.array([[number]])


def test_priorities_through_a_plane() -> None:
    async def main() -> None:
        gate = Gate()
        async with serving_plane([(slow(priority_levels=3, default_priority_level=2), gate)]) as plane:
            requests = [submit(plane, "m", INPUT0=row(0))]
            await gate.entered()
            for number, level in enumerate([3, 0, 1, 2, 1], 1):
                requests.append(submit(plane, "m", INPUT0=row(number), request={"parameters": {"priority": level}}))
            gate.let(6)
            await answers(requests)
            assert [int(call[0, 0]) for call in gate.received] == [0, 3, 5, 2, 4, 1]
            with pytest.raises(InvalidArgument):
                submit(plane, "m", INPUT0=row(9), request={"parameters": {"priority": 4}})
            assert counted(plane, "m").in_flight == 0
            assert counted(plane, "m").failures == {"OTHER": 1}

    asyncio.run(main())


def test_a_full_queue_and_a_time_out_through_a_plane() -> None:
    async def main() -> None:
        gate = Gate()
        policy = QueuePolicy(default_timeout_microseconds=500_000, max_queue_size=2)
        async with serving_plane([(slow(default_queue_policy=policy), gate)]) as plane:
            running = submit(plane, "m", INPUT0=row(0))
            await gate.entered()
            waiting = [submit(plane, "m", INPUT0=row(number)) for number in (1, 2)]
            with pytest.raises(Unavailable, match="maximum queue size"):
                submit(plane, "m", INPUT0=row(3))
            # The instance is busy: it is the timer that tells them.
            for result in await answers(waiting):
                assert isinstance(result, Unavailable)
            assert not running.received
            gate.let()
            await answers([running])
            statistics = counted(plane, "m")
            assert statistics.failures["REJECTED"] == 3
            assert (statistics.executions, statistics.in_flight) == (1, 0)
            assert len(gate.received) == 1

    asyncio.run(main())


@pytest.mark.parametrize("policy", [QueuePolicy(), QueuePolicy(max_queue_size=10)])
def test_a_queue_of_cancelled_requests_leaves_the_loop_in_peace(policy: QueuePolicy) -> None:
    async def main() -> int:
        gate = Gate()
        async with serving_plane([(slow(default_queue_policy=policy), gate)]) as plane:
            running = submit(plane, "m", INPUT0=row(0))
            await gate.entered()
            given_up = submit(plane, "m", INPUT0=row(1))
            given_up.pending.cancel()
            assert isinstance(await given_up.answer(), Cancelled)
            gate.let()
            await running.answer()
            calls = 0
            loop = asyncio.get_running_loop()
            plain = loop.call_later

            def counting(*args: Any, **more: Any) -> Any:
                nonlocal calls
                calls += 1
                return plain(*args, **more)

            loop.call_later = counting  # type: ignore[method-assign]
            for _ in range(200):
                await asyncio.sleep(0)
            return calls

    assert asyncio.run(main()) == 0


def test_a_callback_that_raises_on_timeout_does_not_affect_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        gate = Gate()
        policy = QueuePolicy(default_timeout_microseconds=500_000)
        async with serving_plane([(slow(default_queue_policy=policy), gate)]) as plane:
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda loop, context: None)
            running = submit(plane, "m", INPUT0=row(0))
            await gate.entered()

            class FailingCaller(RecordingCaller):
                def __call__(self, result: Any) -> None:
                    super().__call__(result)
                    raise RuntimeError("this caller has gone")

            gone = FailingCaller()
            plane.infer(InferRequest("m", tensors_of(INPUT0=row(1))), gone)
            other = submit(plane, "m", INPUT0=row(2))
            assert isinstance(await asyncio.wait_for(other.answer(), 30), Unavailable)
            assert len(gone.received) == 1
            gate.let()
            await running.answer()

    asyncio.run(main())
