# SPDX-License-Identifier: Apache-2.0
"""When a batch is made and of whom: Triton's rules, as a table, through a real plane, and for any queue at all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.requests import InferRequest, RequestedOutput
from headrace.engine.scheduling.dynamic_batcher import BatchChoice, BatchRules, choose_batch
from headrace.engine.scheduling.pending_request import BatchLog, BatchRecord, PendingRequest
from headrace.models.config.types import DynamicBatching, OutputSpec
from support.engines import (
    Recorder,
    RecordingCaller,
    answers,
    array_of,
    config_of,
    counted,
    pending_of,
    run_engine,
    serving_plane,
    submit,
    tensors_of,
)
from support.properties import examples
from support.virtual_time import LoopClock

RULES = BatchRules(8, frozenset({2, 6}))
DELAY = 1000
"""The 10 s of 2018, in the pure tests."""

DELAY_SECONDS = 90.0
"""Through a plane: in virtual time, or longer than any test waits."""


def queue_of(*sizes: int, arrived_ns: int = 0) -> list[PendingRequest]:
    return [pending_of(rows, arrived_ns=arrived_ns) for rows in sizes]


@pytest.mark.parametrize(
    ("sizes", "chosen", "reason"),
    [
        ((2,), 1, "preferred"),
        ((6,), 1, "preferred"),
        ((1,), 0, None),
        ((3,), 0, None),
        ((7,), 1, "full"),
        ((8,), 1, "full"),
        ((1, 3), 0, None),
        ((3, 7), 1, "full"),
        ((3, 4), 1, "full"),
        ((1,) * 6, 6, "preferred"),
        ((1,) * 3, 2, "preferred"),
        ((1,) * 5, 2, "preferred"),
        ((1,) * 7, 6, "preferred"),
        ((1,) * 20, 6, "preferred"),
        # 2 is preferred, and after it nothing that fits under 6 is: 2 goes now.
        ((2, 5), 1, "preferred"),
        ((5, 1, 2), 2, "preferred"),
        # 5 + 2 passes the largest preferred size: what was gathered before goes.
        ((5, 2), 1, "full"),
        ((5, 3), 1, "full"),
        ((4, 1, 1), 3, "preferred"),
        ((4, 1, 3), 2, "full"),
    ],
)
def test_the_2018_table(sizes: tuple[int, ...], chosen: int, reason: str | None) -> None:
    choice = choose_batch(queue_of(*sizes), RULES, DELAY, 0)
    assert choice.requests == chosen
    if chosen:
        assert choice.reason == reason
    else:
        assert choice.wait_ns == DELAY


@pytest.mark.parametrize(
    ("sizes", "chosen", "reason"),
    [
        ((1,), 1, "delay expired"),
        ((3,), 1, "delay expired"),
        ((1, 3), 2, "delay expired"),
        # All that fits into a batch, preferred or not.
        ((1, 1, 1), 3, "delay expired"),
        ((3, 4), 2, "full"),
        ((3, 7), 1, "full"),
        ((1,) * 20, 8, "full"),
    ],
)
def test_after_the_delay_all_requests_that_fit_are_batched(sizes: tuple[int, ...], chosen: int, reason: str) -> None:
    assert choose_batch(queue_of(*sizes), RULES, DELAY, DELAY) == BatchChoice(chosen, reason)  # type: ignore[arg-type]


def test_the_wait_is_what_is_left_of_the_oldest_ones_delay() -> None:
    queue = queue_of(1, arrived_ns=300) + queue_of(3, arrived_ns=700)
    assert choose_batch(queue, RULES, DELAY, 900) == BatchChoice(0, wait_ns=400)
    assert choose_batch(queue, RULES, DELAY, 1299) == BatchChoice(0, wait_ns=1)
    assert choose_batch(queue, RULES, DELAY, 1300) == BatchChoice(2, "delay expired")


def test_the_oldest_is_not_always_in_front() -> None:
    """With priorities a younger request may stand before an older one."""
    queue = queue_of(1, arrived_ns=700) + queue_of(3, arrived_ns=300)
    assert choose_batch(queue, RULES, DELAY, 900) == BatchChoice(0, wait_ns=400)


def test_without_a_delay_everything_is_dispatched_immediately() -> None:
    assert choose_batch(queue_of(1), RULES, 0, 0) == BatchChoice(1, "idle instance")
    assert choose_batch(queue_of(1, 3), RULES, 0, 0) == BatchChoice(2, "idle instance")
    assert choose_batch(queue_of(1, 1, 1), RULES, 0, 0) == BatchChoice(2, "preferred")


def test_without_preferred_sizes_the_largest_batch_is_what_is_waited_for() -> None:
    rules = BatchRules(8)
    assert choose_batch(queue_of(3, 4), rules, DELAY, 0) == BatchChoice(0, wait_ns=DELAY)
    assert choose_batch(queue_of(4, 4), rules, DELAY, 0) == BatchChoice(2, "full")
    assert choose_batch(queue_of(4, 5), rules, DELAY, 0) == BatchChoice(1, "full")
    assert choose_batch(queue_of(3, 4), rules, 0, 0) == BatchChoice(2, "idle instance")
    assert choose_batch(queue_of(*[1] * 20), rules, 0, 0) == BatchChoice(8, "full")


def test_another_shape_ends_a_batch() -> None:
    queue = [pending_of(1, "a"), pending_of(1, "a"), pending_of(1, "b"), pending_of(1, "a")]
    rules = BatchRules(8, by_shape=True)
    assert choose_batch(queue, rules, DELAY, 0) == BatchChoice(2, "shape change")
    assert choose_batch(queue[2:], rules, DELAY, 0) == BatchChoice(1, "shape change")
    assert choose_batch(queue[3:], rules, DELAY, 0) == BatchChoice(0, wait_ns=DELAY)
    # A preferred size that was reached before is taken first.
    assert choose_batch(queue, BatchRules(8, frozenset({1, 4}), by_shape=True), DELAY, 0) == BatchChoice(1, "preferred")


def test_shapes_are_not_compared_where_they_cannot_differ() -> None:
    queue = [pending_of(1, "a"), pending_of(1, "b")]
    assert choose_batch(queue, BatchRules(2), DELAY, 0) == BatchChoice(2, "full")


def test_the_cancelled_are_passed_over() -> None:
    queue = queue_of(1, 1, 1, 1, 3)
    queue[0].cancel()
    queue[2].cancel()
    assert choose_batch(queue, RULES, DELAY, 0) == BatchChoice(2, "preferred")
    assert choose_batch(queue[2:], RULES, DELAY, 0) == BatchChoice(0, wait_ns=DELAY)
    # A cancelled one does not make the others old either.
    older = pending_of(1, arrived_ns=-5000)
    older.cancel()
    assert choose_batch([older, *queue_of(1)], RULES, DELAY, 0) == BatchChoice(0, wait_ns=DELAY)


def reference(sizes: Sequence[int], keys: Sequence[int], rules: BatchRules, delay: int, waited: int) -> int:
    """Triton's rules again, the slow way: how many requests go now, 0 for none."""
    longest = 0
    while longest < len(sizes):
        fits = sum(sizes[: longest + 1]) <= rules.max_rows or longest == 0
        if not fits or (rules.by_shape and keys[longest] != keys[0]):
            break
        longest += 1
    totals = [sum(sizes[: count + 1]) for count in range(longest)]
    exact = [count + 1 for count, total in enumerate(totals) if total in rules.preferred]
    expired = delay != 0 and waited >= delay
    # The first request that would pass the largest preferred size, when no preferred size comes before it.
    over = [count for count in range(1, len(sizes)) if sum(sizes[: count + 1]) > rules.largest_preferred]
    saturated = over[0] if over and over[0] <= longest else 0
    if not expired:
        before = [count for count in exact if not saturated or count <= saturated]
        after = [count for count in exact if saturated and count > saturated]
        if before or after:
            return max(before + after)
        if saturated:
            return saturated
    stuck = longest < len(sizes) or totals[-1] >= rules.largest_preferred
    return longest if stuck or expired or delay == 0 else 0


@settings(max_examples=examples(400))
@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 1), st.booleans()), min_size=1, max_size=24),
    st.integers(1, 8),
    st.frozensets(st.integers(1, 8), max_size=3),
    st.booleans(),
    st.sampled_from([0, DELAY]),
    st.sampled_from([0, DELAY // 2, DELAY]),
)
def test_any_queue(
    plan: list[tuple[int, int, bool]],
    max_rows: int,
    preferred: frozenset[int],
    by_shape: bool,
    delay: int,
    waited: int,
) -> None:
    """Run a queue to its end: nobody is moved, split or forgotten, no batch is too large, and it does end."""
    rules = BatchRules(max_rows, frozenset(size for size in preferred if size <= max_rows), by_shape)
    everyone = [pending_of(min(rows, max_rows), key) for rows, key, _ in plan]
    for pending, (_, _, cancelled) in zip(everyone, plan, strict=True):
        if cancelled:
            pending.cancel()
    living = [pending for pending in everyone if not pending.cancelled]
    waiting = list(everyone)
    served: list[PendingRequest] = []
    now = waited
    while any(not pending.cancelled for pending in waiting):
        queue = [pending for pending in waiting if not pending.cancelled]
        choice = choose_batch(waiting, rules, delay, now)
        sizes, keys = [pending.rows for pending in queue], [pending.key for pending in queue]
        assert choice.requests == reference(sizes, keys, rules, delay, now)  # type: ignore[arg-type]
        if choice.requests == 0:
            assert 0 < choice.wait_ns <= delay
            now += choice.wait_ns
            assert choose_batch(waiting, rules, delay, now).requests
            continue
        batch = queue[: choice.requests]
        assert sum(pending.rows for pending in batch) <= max_rows
        assert not by_shape or len({pending.key for pending in batch}) == 1
        served += batch
        waiting = queue[choice.requests :]
    assert served == living


def test_a_record_is_a_sentence_and_the_log_is_bounded() -> None:
    log = BatchLog()
    record = BatchRecord("preferred", 2, 6, 1, 1500, "m_0_cpu")
    assert str(record) == "6 row(s) of 2 request(s) on m_0_cpu: preferred, oldest waited 2 us, 1 left waiting"
    for _ in range(1000):
        log.add(record)
    assert len(log.recent) == 256
    assert log.reasons["preferred"] == sum(log.reasons.values()) == 1000


# Through a real plane: the same numbers as the batcher's test of 2018.

Result = tuple[int, int]
"""Executions and inferences."""


def batching(delay_seconds: float, **more: Any) -> DynamicBatching:
    return DynamicBatching((2, 6), round(delay_seconds * 1e6), **more)


def rows(count: int, first: int = 0) -> Any:
    return np.arange(first, first + count, dtype=np.int64).reshape(-1, 1)


async def turns(times: int = 5) -> None:
    """Let everything happen that needs no waiting."""
    for _ in range(times):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("sizes", "at_once", "in_the_end"),
    [
        ((1,), (0, 0), (1, 1)),
        ((3,), (0, 0), (1, 3)),
        ((7,), (1, 7), (1, 7)),
        ((2,), (1, 2), (1, 2)),
        ((1, 3), (0, 0), (1, 4)),
        ((3, 7), (2, 10), (2, 10)),
        ((3, 4), (1, 3), (2, 7)),
        ((1,) * 6, (1, 6), (1, 6)),
        ((1,) * 3, (1, 2), (2, 3)),
    ],
)
def test_the_numbers_of_2018(sizes: tuple[int, ...], at_once: Result, in_the_end: Result) -> None:
    async def main(clock: LoopClock) -> None:
        model = Recorder(lambda given: given * 2)
        config = config_of("m", max_batch_size=8, scheduling=batching(DELAY_SECONDS))
        async with serving_plane([(config, model)]) as plane:
            began = clock.monotonic()
            requests = [submit(plane, "m", INPUT0=rows(size, 100 * number)) for number, size in enumerate(sizes)]
            await turns()
            statistics = counted(plane, "m")
            assert (statistics.executions, statistics.inferences) == at_once
            assert clock.monotonic() == began
            for number, (size, result) in enumerate(zip(sizes, await answers(requests), strict=True)):
                assert np.array_equal(array_of(result), rows(size, 100 * number) * 2)
            assert (statistics.executions, statistics.inferences) == in_the_end
            assert len(model.received) == in_the_end[0]
            waited = [record.oldest_waited_ns for record in statistics.log.recent if record.reason == "delay expired"]
            assert waited == [pytest.approx(DELAY_SECONDS * 1e9)] * (in_the_end[0] - at_once[0])
            assert clock.monotonic() - began == pytest.approx(DELAY_SECONDS if waited else 0.0)

    run_engine(main)


def test_requests_of_two_and_six_rows_are_dispatched_immediately() -> None:
    async def main() -> None:
        async with serving_plane(
            [(config_of("m", max_batch_size=8, scheduling=batching(DELAY_SECONDS)), Recorder())]
        ) as plane:
            for size in (2, 6):
                await submit(plane, "m", INPUT0=rows(size)).answer()
            statistics = counted(plane, "m")
            assert (statistics.executions, statistics.inferences) == (2, 8)

    asyncio.run(main())


def test_late_companions_complete_a_preferred_size() -> None:
    """Three in one turn, three in another: 2 go, 1 waits, and goes with the 3 that come, once they are 6 or 2."""

    async def main() -> None:
        model = Recorder()
        async with serving_plane(
            [(config_of("m", max_batch_size=8, scheduling=batching(DELAY_SECONDS)), model)]
        ) as plane:
            requests = [submit(plane, "m", INPUT0=rows(1)) for _ in range(3)]
            await turns()
            assert model.rows == [2]
            requests += [submit(plane, "m", INPUT0=rows(5))]
            await answers(requests)
            assert model.rows == [2, 6]

    asyncio.run(main())


def test_requests_for_different_outputs_share_a_batch() -> None:
    async def main() -> None:
        config = config_of(
            "m",
            max_batch_size=8,
            outputs=(OutputSpec("A", None, None), OutputSpec("B", None, None)),
            scheduling=batching(DELAY_SECONDS),
        )
        calls: list[int] = []

        def compute(inputs: Any) -> Any:
            calls.append(len(inputs["INPUT0"]))
            return {"A": inputs["INPUT0"] + 1, "B": inputs["INPUT0"] - 1}

        async with serving_plane([(config, compute)]) as plane:
            wanted = [["A"], ["B"], ["B", "A"], []]
            requests = [
                submit(plane, "m", INPUT0=rows(1, number), request={"outputs": [RequestedOutput(n) for n in names]})
                for number, names in enumerate(wanted)
            ]
            requests.append(submit(plane, "m", INPUT0=rows(2, 10)))
            results = await answers(requests)
            assert calls == [6]
            for number, (names, result) in enumerate(zip([*wanted[:3], ["A", "B"]], results, strict=False)):
                assert [output.name for output in result.outputs] == names  # type: ignore[union-attr]
                for name in names:
                    assert array_of(result, name).tolist() == [[number + (1 if name == "A" else -1)]]

    asyncio.run(main())


def test_shapes_and_types_are_never_mixed() -> None:
    async def main() -> None:
        model = Recorder()
        forms = [((1, 2), np.int32), ((1, 3), np.int32), ((1, 2), np.int64), ((1, 2, 1), np.int32)]
        arrays = [np.zeros(shape, kind) for shape, kind in forms]
        async with serving_plane([(config_of("m"), model)]) as plane:
            await answers([submit(plane, "m", INPUT0=array) for array in arrays for _ in range(3)])
            expected = [((3, *array.shape[1:]), array.dtype) for array in arrays]
            assert [(call.shape, call.dtype) for call in model.received] == expected
            assert counted(plane, "m").log.reasons["shape change"] == 3

    asyncio.run(main())


def test_one_that_is_cancelled_in_the_middle_is_not_computed() -> None:
    async def main() -> None:
        model = Recorder()
        async with serving_plane(
            [(config_of("m", max_batch_size=8, scheduling=batching(DELAY_SECONDS)), model)]
        ) as plane:
            requests: list[RecordingCaller] = [submit(plane, "m", INPUT0=rows(1, number)) for number in range(7)]
            requests[3].pending.cancel()
            requests[3].pending.cancel()
            results = await answers(requests)
            assert [call.ravel().tolist() for call in model.received] == [[0, 1, 2, 4, 5, 6]]
            assert [type(result).__name__ for result in results].count("Cancelled") == 1
            assert [len(request.received) for request in requests] == [1] * 7

    asyncio.run(main())


def test_a_caller_may_send_a_request_from_its_callback() -> None:
    async def main() -> list[int]:
        seen: list[int] = []
        finished = asyncio.Event()
        async with serving_plane([(config_of("m"), Recorder())]) as plane:

            class RequestingCaller(RecordingCaller):
                def __call__(self, result: Any) -> None:
                    seen.append(int(array_of(result)[0, 0]))
                    if len(seen) < 5:
                        self.pending = plane.infer(InferRequest("m", tensors_of(INPUT0=array_of(result) + 1)), self)
                    else:
                        finished.set()

            plane.infer(InferRequest("m", tensors_of(INPUT0=rows(1))), RequestingCaller())
            await asyncio.wait_for(finished.wait(), 30)
        return seen

    assert asyncio.run(main()) == [0, 1, 2, 3, 4]
