# SPDX-License-Identifier: Apache-2.0
"""Where a batch is computed, and instances that answer for themselves: late, twice, out of order, or wrongly."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest

from headrace.backends.contract import Work
from headrace.core.dtypes import BF16, FP32, INT64, UINT16
from headrace.core.errors import Cancelled, Internal, InvalidArgument, Unavailable, Unimplemented
from headrace.core.requests import InferResponse
from headrace.core.tensors import Tensor
from headrace.engine.scheduling.scheduler import (
    ALONE_ABOVE_NS,
    ALONE_BELOW_NS,
    INLINE_BELOW_NS,
    THREAD_ABOVE_NS,
    ExecutionPlacement,
)
from headrace.models.config.types import DynamicBatching, InstanceGroup, OutputSpec
from support.engines import (
    Recorder,
    RecordingCaller,
    Streamed,
    answers,
    array_of,
    config_of,
    counted,
    serving_plane,
    submit,
)

QUICK, SLOW = INLINE_BELOW_NS // 2, THREAD_ABOVE_NS * 4


def row(number: int) -> Any:
    return np.array([[number]])


# The execution.


@pytest.mark.parametrize("runs", ["inline", "thread"])
@pytest.mark.parametrize("ns", [QUICK, SLOW])
def test_a_configured_pace_stays(runs: Any, ns: int) -> None:
    execution = ExecutionPlacement(runs)
    for _ in range(1000):
        execution.record(ns)
    assert execution.inline == (runs == "inline")


def test_a_model_begins_in_a_thread_and_a_quick_one_moves_into_the_loop() -> None:
    execution = ExecutionPlacement("auto")
    assert not execution.inline
    looks = 0
    while not execution.inline:
        execution.record(QUICK)
        looks += 1
        assert looks < 100
    assert looks > 2


def test_one_quick_execution_is_enough_for_others_may_have_waited_for_the_interpreter() -> None:
    execution = ExecutionPlacement("auto")
    for number in range(100):
        execution.record(QUICK if number % 8 == 5 else SLOW)
        if execution.inline:
            return
    raise AssertionError("it never moved")


def test_a_slow_model_stays_in_its_thread() -> None:
    execution = ExecutionPlacement("auto")
    for ns in (SLOW, INLINE_BELOW_NS, INLINE_BELOW_NS + 1) * 1000:
        execution.record(ns)
        assert not execution.inline


def inlined() -> ExecutionPlacement:
    # As on a machine of its own: nothing takes the core away.
    execution = ExecutionPlacement("auto", interruptions=lambda: 7)
    for _ in range(100):
        execution.record(QUICK)
    assert execution.inline
    return execution


def test_a_model_that_becomes_slow_leaves_the_loop_soon() -> None:
    execution = inlined()
    executions = 0
    while execution.inline:
        execution.record(SLOW)
        executions += 1
    assert executions < 10
    # And comes back when it is quick again.
    for _ in range(100):
        execution.record(QUICK)
    assert execution.inline


def test_one_slow_execution_among_many_does_not_move_a_model() -> None:
    execution = inlined()
    for number in range(1000):
        execution.record(THREAD_ABOVE_NS * 3 if number % 100 == 50 else QUICK)
        assert execution.inline


def test_a_model_that_is_slow_every_other_time_leaves_the_loop() -> None:
    execution = inlined()
    for number in range(100):
        execution.record(SLOW if number % 2 else QUICK)
        if not execution.inline:
            return
    raise AssertionError("half of all requests hold the loop up, and it never moved")


def test_a_long_execution_moves_it_to_a_thread_immediately() -> None:
    execution = inlined()
    execution.record(1_000_000_000)
    assert not execution.inline


def busy_machine() -> ExecutionPlacement:
    execution = ExecutionPlacement("auto", interruptions=count().__next__)
    for _ in range(100):
        execution.record(QUICK)
    assert execution.inline
    return execution


def test_an_execution_during_which_others_had_the_core_counts_once() -> None:
    execution = busy_machine()
    for number in range(1000):
        execution.record(QUICK if number % 2 else 10_000_000)
        assert execution.inline
    # But however busy the machine is, four slow ones in a row are enough, and one that no other program can explain.
    for _ in range(4):
        assert execution.inline
        execution.record(SLOW)
    assert not execution.inline
    execution = busy_machine()
    execution.record(30_000_000)
    assert not execution.inline


def test_a_model_that_computes_more_quickly_than_a_batch_is_formed_computes_alone() -> None:
    for compute_ns, alone in ((ALONE_BELOW_NS - 1, True), (ALONE_BELOW_NS, False)):
        execution = ExecutionPlacement("auto", interruptions=lambda: 7)
        for _ in range(8):
            assert not execution.alone
            execution.record(QUICK, 1, compute_ns)
        assert (execution.inline, execution.alone) == (True, alone)
    execution = ExecutionPlacement("auto", interruptions=lambda: 7)
    for _ in range(8):
        execution.record(SLOW, 1, 1)
    assert (execution.inline, execution.alone) == (False, False)


def test_a_model_that_becomes_slower_is_batched_again() -> None:
    execution = ExecutionPlacement("auto", interruptions=lambda: 7)
    for _ in range(8):
        execution.record(QUICK, 1, 1)
    for _ in range(4):
        assert execution.alone
        execution.record(ALONE_ABOVE_NS + 1)
    assert (execution.inline, execution.alone) == (True, False)
    execution.record(THREAD_ABOVE_NS)  # as any other now
    assert execution.inline


@pytest.mark.parametrize("runs", ["inline", "thread"])
def test_the_thread_is_the_configured_one(runs: Any) -> None:
    async def main() -> None:
        seen: list[str] = []

        def compute(inputs: Any) -> Any:
            seen.append(threading.current_thread().name)
            return {"OUTPUT0": inputs["INPUT0"]}

        async with serving_plane(
            [(config_of("m", instance_groups=(InstanceGroup("m", runs=runs),)), compute)]
        ) as plane:
            for number in range(20):
                assert array_of(await submit(plane, "m", INPUT0=row(number)).answer()).item() == number
        assert set(seen) == {threading.main_thread().name if runs == "inline" else "m_0_cpu"}

    asyncio.run(main())
    assert not any(thread.name == "m_0_cpu" for thread in threading.enumerate())


def test_answers_of_one_instance_are_in_order_whatever_its_pace() -> None:
    async def main() -> list[int]:
        order: list[int] = []
        config = config_of(
            "m",
            max_batch_size=1,
            instance_groups=(InstanceGroup("m", runs="auto"),),
            scheduling=DynamicBatching(preserve_ordering=True),
        )
        async with serving_plane([(config, Recorder())]) as plane:
            requests: list[RecordingCaller] = []
            for number in range(300):
                one = submit(plane, "m", INPUT0=row(number))
                reported = one.pending.done

                def done(result: Any, told: Any = reported) -> None:
                    order.append(int(array_of(result).item()))
                    told(result)

                one.pending.done = done
                requests.append(one)
            await answers(requests)
        return order

    assert asyncio.run(main()) == list(range(300))


# Instances that answer for themselves.


class Fake:
    """A `RequestInstance` that keeps what it is given, for the test to answer."""

    def __init__(self, at_once: Callable[[Sequence[Work], Callable[[], None]], None] | None = None) -> None:
        self.works: list[Work] = []
        self.batches: list[int] = []
        self.finished: list[Callable[[], None]] = []
        self.closed = False
        self._at_once = at_once
        self._more = asyncio.Event()

    def execute(self, batch: Sequence[Work], finished: Callable[[], None]) -> None:
        self.batches.append(len(batch))
        self.works += batch
        self.finished.append(finished)
        self._more.set()
        if self._at_once is not None:
            self._at_once(batch, finished)

    async def received(self, count: int) -> list[Work]:
        while len(self.works) < count:
            self._more.clear()
            await asyncio.wait_for(self._more.wait(), 30)
        return self.works

    def close(self) -> None:
        self.closed = True


def echoed(work: Work, add: int = 0) -> list[Tensor]:
    return [Tensor.of("OUTPUT0", work.request.inputs[0].array + add)]


def test_answers_may_arrive_in_any_order() -> None:
    async def main() -> None:
        fake = Fake()
        async with serving_plane([(config_of("m"), fake)]) as plane:
            requests = [submit(plane, "m", INPUT0=row(number)) for number in range(4)]
            works = await fake.received(4)
            assert fake.batches == [4]
            for position in (2, 0, 3):
                works[position].reply(echoed(works[position], 100))
            assert [len(request.received) for request in requests] == [1, 0, 1, 1]
            statistics = counted(plane, "m")
            assert (statistics.executions, statistics.in_flight) == (0, 1)
            works[1].reply(echoed(works[1], 100))
            assert [array_of(result).item() for result in await answers(requests)] == [100, 101, 102, 103]
            assert (statistics.executions, statistics.inferences, statistics.in_flight) == (1, 4, 0)
            fake.finished[0]()
        assert fake.closed

    asyncio.run(main())


@pytest.mark.parametrize("finish_first", [True, False])
def test_the_next_batch_starts_when_the_instance_is_idle(finish_first: bool) -> None:
    async def main() -> None:
        fake = Fake()
        async with serving_plane([(config_of("m"), fake)]) as plane:
            first = submit(plane, "m", INPUT0=row(1))
            (work,) = await fake.received(1)
            second = submit(plane, "m", INPUT0=row(2))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if not finish_first:
                work.reply(echoed(work))
                await asyncio.sleep(0)
            assert fake.batches == [1]
            fake.finished[0]()
            works = await fake.received(2)
            works[1].reply(echoed(works[1]))
            assert array_of(await second.answer()).item() == 2
            work.reply(echoed(work))
            assert array_of(await first.answer()).item() == 1
            fake.finished[1]()

    asyncio.run(main())


def test_an_instance_that_is_finished_twice_still_gets_one_batch_at_a_time() -> None:
    async def main() -> None:
        fake = Fake()
        async with serving_plane([(config_of("m", max_batch_size=1), fake)]) as plane:
            requests = [submit(plane, "m", INPUT0=row(number)) for number in range(3)]
            await fake.received(1)
            fake.finished[0]()
            fake.finished[0]()
            await fake.received(2)
            for _ in range(5):
                await asyncio.sleep(0)
            assert len(fake.works) == 2
            fake.finished[1]()
            for work in await fake.received(3):
                work.reply(echoed(work))
            await answers(requests)
            fake.finished[2]()

    asyncio.run(main())


def test_a_second_answer_changes_nothing() -> None:
    async def main() -> None:
        fake = Fake()
        async with serving_plane([(config_of("m"), fake)]) as plane:
            request = submit(plane, "m", INPUT0=row(1))
            (work,) = await fake.received(1)
            work.reply(echoed(work))
            work.reply(echoed(work, 5))
            work.reply(Internal("too late"))
            work.reply(None)
            assert array_of(await request.answer()).item() == 1
            assert len(request.received) == 1
            statistics = counted(plane, "m")
            assert (statistics.executions, statistics.settled) == (1, 1)
            fake.finished[0]()

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["none", "several"])
def test_a_model_that_is_not_decoupled_must_answer_once(kind: str) -> None:
    async def main() -> None:
        fake = Fake()
        async with serving_plane([(config_of("m"), fake)]) as plane:
            request = submit(plane, "m", INPUT0=row(1))
            (work,) = await fake.received(1)
            if kind == "none":
                work.reply(None)
            else:
                work.reply(echoed(work), final=False)
                work.reply(echoed(work))
            result = await request.answer()
            assert isinstance(result, Internal)
            assert "decoupled: true" in result.message
            assert len(request.received) == 1
            assert counted(plane, "m").in_flight == 0
            assert counted(plane, "m").failures == {"BACKEND": 1}
            fake.finished[0]()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ([], "did not return its output 'OUTPUT0'"),
        ([Tensor.of("OTHER", row(1))], "did not return its output 'OUTPUT0'"),
        ([Tensor.of("OUTPUT0", row(1).astype(np.float64))], "INT64"),
        ([Tensor.of("OUTPUT0", np.zeros((2, 1), np.int64))], "the first dimension must be 1"),
        ([Tensor.of("OUTPUT0", np.zeros((1, 2), np.int64))], r"declares \[1\]"),
    ],
)
def test_wrong_outputs_are_the_model_s_fault(outputs: list[Tensor], text: str) -> None:
    async def main() -> None:
        fake = Fake()
        config = config_of("m", outputs=(OutputSpec("OUTPUT0", INT64, (1,)),))
        async with serving_plane([(config, fake)]) as plane:
            requests = [submit(plane, "m", INPUT0=row(number)) for number in range(2)]
            works = await fake.received(2)
            works[0].reply(outputs)
            works[1].reply(echoed(works[1]))
            with pytest.raises(Internal, match=text):
                array_of(await requests[0].answer())
            assert array_of(await requests[1].answer()).item() == 1
            fake.finished[0]()

    asyncio.run(main())


@pytest.mark.parametrize(("declared", "given"), [(BF16, UINT16), (UINT16, BF16)])
def test_types_with_the_same_numpy_form_are_distinguished(declared: Any, given: Any) -> None:
    async def main() -> None:
        bits = np.array([[1]], np.uint16)
        fake = Fake(
            lambda batch, finished: [work.reply([Tensor("OUTPUT0", given, bits)]) for work in batch] + [finished()]
        )
        async with serving_plane([(config_of("m", outputs=(OutputSpec("OUTPUT0", declared, (1,)),)), fake)]) as plane:
            with pytest.raises(Internal, match=f"{given.name} for output 'OUTPUT0'.* declares {declared.name}"):
                array_of(await submit(plane, "m", INPUT0=row(1)).answer())

    asyncio.run(main())


def test_a_model_s_own_error_reaches_its_request_only() -> None:
    async def main() -> None:
        fake = Fake()
        async with serving_plane([(config_of("m"), fake)]) as plane:
            requests = [submit(plane, "m", INPUT0=row(number)) for number in range(2)]
            works = await fake.received(2)
            works[0].reply(InvalidArgument("not this one"))
            works[1].reply(echoed(works[1]), parameters={"a": 1})
            results = await answers(requests)
            assert isinstance(results[0], InvalidArgument)
            assert isinstance(results[1], InferResponse)
            assert results[1].parameters == {"a": 1}
            assert counted(plane, "m").executions == 1
            fake.finished[0]()

    asyncio.run(main())


def test_cancelled_work_is_reported_and_its_late_answer_is_dropped() -> None:
    async def main() -> None:
        fake = Fake()
        async with serving_plane([(config_of("m"), fake)]) as plane:
            request = submit(plane, "m", INPUT0=row(1))
            (work,) = await fake.received(1)
            assert not work.cancelled
            request.pending.cancel()
            assert work.cancelled
            assert work.request.inputs[0].array.item() == 1
            assert isinstance(await request.answer(), Cancelled)
            work.reply(echoed(work))
            assert len(request.received) == 1
            assert counted(plane, "m").failures == {"CANCELED": 1}
            assert counted(plane, "m").in_flight == 0
            fake.finished[0]()
            second = submit(plane, "m", INPUT0=row(2))
            (_, work) = await fake.received(2)
            work.reply(echoed(work))
            assert array_of(await second.answer()).item() == 2
            fake.finished[1]()

    asyncio.run(main())


@pytest.mark.parametrize("when", ["before", "after finished", "after a reply"])
def test_an_instance_that_raises_loses_neither_its_batch_nor_its_place(
    when: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        broken = True

        def execute(batch: Sequence[Work], finished: Callable[[], None]) -> None:
            if broken and when == "after a reply":
                batch[0].reply(echoed(batch[0]))
            if broken and when == "after finished":
                finished()
            if broken:
                raise RuntimeError("a secret of the model")
            for work in batch:
                work.reply(echoed(work))
            finished()

        fake = Fake(execute)
        async with serving_plane([(config_of("m"), fake)]) as plane:
            results = await answers([submit(plane, "m", INPUT0=row(number)) for number in range(2)])
            assert isinstance(results[1], Internal)
            assert "secret" not in results[1].message
            assert isinstance(results[0], InferResponse if when == "after a reply" else Internal)
            broken = False
            for number in range(3):
                assert array_of(await submit(plane, "m", INPUT0=row(number)).answer()).item() == number
            assert counted(plane, "m").in_flight == 0

    with caplog.at_level(logging.ERROR, "headrace.engine"):
        asyncio.run(main())
    assert len(caplog.records) == 1


# Streams.


def counting(batch: Sequence[Work], finished: Callable[[], None]) -> None:
    """As many answers as the number says; the last one empty for even numbers."""
    for work in batch:
        number = int(work.request.inputs[0].array.item())
        for answer in range(number):
            work.reply([Tensor.of("OUTPUT0", row(answer))], final=number % 2 == 1 and answer == number - 1)
        if number % 2 == 0:
            work.reply(None)
    finished()


def test_a_decoupled_model_may_answer_any_number_of_times() -> None:
    async def main() -> None:
        async with serving_plane([(config_of("m", decoupled=True), Fake(counting))]) as plane:
            streams = [Streamed(plane, "m", INPUT0=row(number)) for number in range(5)]
            for number, stream in enumerate(streams):
                answers = await stream.all()
                full = [array_of(answer).item() for answer, _ in answers if answer is not None]
                assert full == list(range(number))
                assert [final for _, final in answers] == [False] * (len(answers) - 1) + [True]
                assert (answers[-1][0] is None) == (number % 2 == 0)
            statistics = counted(plane, "m")
            assert (statistics.settled, statistics.in_flight, statistics.executions) == (5, 0, 1)
            assert statistics.total().success == 5
            with pytest.raises(Unimplemented, match="streaming call"):
                submit(plane, "m", INPUT0=row(1))

    asyncio.run(main())


def test_a_stream_of_an_ordinary_model_is_its_one_answer() -> None:
    async def main() -> None:
        async with serving_plane([(config_of("m"), Recorder())]) as plane:
            ((answer, final),) = await Streamed(plane, "m", INPUT0=row(3)).all()
            assert array_of(answer).item() == 3
            assert final

    asyncio.run(main())


def test_an_error_ends_a_stream() -> None:
    async def main() -> None:
        fake = Fake()
        async with serving_plane([(config_of("m", decoupled=True), fake)]) as plane:
            stream = Streamed(plane, "m", INPUT0=row(1))
            (work,) = await fake.received(1)
            work.reply(echoed(work), final=False)
            work.reply(Unavailable("no more"), final=False)
            work.reply(echoed(work))
            answers = await stream.all()
            assert [final for _, final in answers] == [False, True]
            assert isinstance(answers[1][0], Unavailable)
            assert counted(plane, "m").in_flight == 0
            fake.finished[0]()

    asyncio.run(main())


def test_a_wrong_answer_ends_a_stream() -> None:
    async def main() -> None:
        fake = Fake()
        config = config_of("m", decoupled=True, outputs=(OutputSpec("OUTPUT0", FP32, (1,)),))
        async with serving_plane([(config, fake)]) as plane:
            stream = Streamed(plane, "m", INPUT0=row(1))
            (work,) = await fake.received(1)
            work.reply(echoed(work), final=False)
            ((answer, final),) = await stream.all()
            assert isinstance(answer, Internal)
            assert final
            fake.finished[0]()

    asyncio.run(main())


def test_a_cancelled_stream_gets_no_more_responses() -> None:
    async def main() -> None:
        fake = Fake()
        async with serving_plane([(config_of("m", decoupled=True), fake)]) as plane:
            stream = Streamed(plane, "m", INPUT0=row(1))
            (work,) = await fake.received(1)
            work.reply(echoed(work), final=False)
            stream.pending.cancel()
            assert work.cancelled
            work.reply(echoed(work), final=False)
            work.reply(None)
            answers = await stream.all()
            assert [final for _, final in answers] == [False, True]
            assert isinstance(answers[1][0], Cancelled)
            assert counted(plane, "m").in_flight == 0
            fake.finished[0]()

    asyncio.run(main())
