# SPDX-License-Identifier: Apache-2.0
"""Who computes when: one after the other, side by side, in order, within limits; and what giving up and closing do."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest

from headrace.core.errors import Cancelled, InvalidArgument, Unavailable
from headrace.core.requests import InferRequest
from headrace.core.tensors import Tensor
from headrace.engine.dataplane import BackgroundPlane
from headrace.engine.scheduling.pending_request import ResponseOrder
from headrace.engine.scheduling.rate_limiter import RateLimiter
from headrace.models.config.types import DynamicBatching, InstanceGroup, ModelConfig, QueuePolicy, Resource
from support.engines import (
    Gate,
    Recorder,
    RecordingCaller,
    Streamed,
    answers,
    array_of,
    config_of,
    counted,
    pending_of,
    serving_plane,
    submit,
)
from support.waiting import eventually_async

NO_BATCHING: dict[str, Any] = {"scheduling": None}


def threads(name: str = "m", count: int = 1, **more: Any) -> dict[str, Any]:
    return {"instance_groups": (InstanceGroup(name, count=count, runs="thread", **more),)}


def row(number: int) -> Any:
    return np.array([[number]])


def numbers(given: list[Any]) -> list[Any]:
    return [array.ravel().tolist() for array in given]


def test_without_batching_each_request_is_computed_alone_and_in_order() -> None:
    async def main() -> None:
        model = Recorder()
        async with serving_plane([(config_of("m", **NO_BATCHING), model)]) as plane:
            results = await answers([submit(plane, "m", INPUT0=row(number)) for number in range(20)])
            assert numbers(model.received) == [[number] for number in range(20)]
            assert numbers([array_of(result) for result in results]) == [[number] for number in range(20)]
            assert counted(plane, "m").log.reasons["one at a time"] == 20

    asyncio.run(main())


def test_a_model_without_a_batch_dimension_gets_arrays_as_they_are() -> None:
    async def main() -> None:
        model = Recorder()
        async with serving_plane([(config_of("m", max_batch_size=0), model)]) as plane:
            arrays = [np.array(7), np.zeros((0, 3)), np.zeros((2, 2)), np.zeros((2, 2))]
            results = await answers([submit(plane, "m", INPUT0=array) for array in arrays])
            assert [given.shape for given in model.received] == [(), (0, 3), (2, 2), (2, 2)]
            assert [array_of(result).shape for result in results] == [(), (0, 3), (2, 2), (2, 2)]
            assert counted(plane, "m").inferences == 4

    asyncio.run(main())


def test_instances_compute_side_by_side() -> None:
    async def main() -> None:
        together = threading.Barrier(3)

        def compute(inputs: Any) -> Any:
            together.wait(30)
            return {"OUTPUT0": inputs["INPUT0"]}

        async with serving_plane([(config_of("m", max_batch_size=1, **threads(count=3)), compute)]) as plane:
            # Three must be in `compute` at once, or none gets through.
            results = await answers([submit(plane, "m", INPUT0=row(number)) for number in range(3)])
            assert numbers([array_of(result) for result in results]) == [[0], [1], [2]]
            used = {record.instance for record in counted(plane, "m").log.recent}
            assert used == {"m_0_cpu", "m_1_cpu", "m_2_cpu"}

    asyncio.run(main())


def test_requests_that_arrive_during_a_computation_form_the_next_batch() -> None:
    async def main() -> None:
        gate = Gate()
        async with serving_plane([(config_of("m", **threads()), gate)]) as plane:
            callers = [submit(plane, "m", INPUT0=row(0))]
            await gate.entered()
            for number in range(1, 6):
                callers.append(submit(plane, "m", INPUT0=row(number)))
                await asyncio.sleep(0)
            gate.let(2)
            await answers(callers)
            assert numbers(gate.received) == [[0], [1, 2, 3, 4, 5]]

    asyncio.run(main())


class Slow:
    """Computes the even numbers at once and the odd ones when told."""

    def __init__(self) -> None:
        self.odd = threading.Event()

    def __call__(self, inputs: Any) -> Any:
        if inputs["INPUT0"].item() % 2 and not self.odd.wait(30):
            raise TimeoutError
        return {"OUTPUT0": inputs["INPUT0"]}


@pytest.mark.parametrize("preserve", [True, False])
def test_answers_are_in_the_order_of_the_requests_if_configured(preserve: bool) -> None:
    async def main() -> list[int]:
        order: list[int] = []
        slow = Slow()
        config = config_of(
            "m", max_batch_size=1, scheduling=DynamicBatching(preserve_ordering=preserve), **threads(count=2)
        )
        async with serving_plane([(config, slow)]) as plane:
            asked = []
            for number in (1, 2, 4):
                one = RecordingCaller()
                asked.append(one)
                request = InferRequest("m", [Tensor.of("INPUT0", row(number))])

                def done(result: Any, one: RecordingCaller = one) -> None:
                    order.append(int(array_of(result).item()))
                    one(result)

                plane.infer(request, done)
            await eventually_async(lambda: counted(plane, "m").executions == 2)
            if not preserve:
                await asked[2].answer()
            assert order == ([] if preserve else [2, 4])
            slow.odd.set()
            await answers(asked)
        return order

    assert asyncio.run(main()) == ([1, 2, 4] if preserve else [2, 4, 1])


def test_a_cancelled_request_does_not_block_the_ordered_answers_of_others() -> None:
    async def main() -> None:
        slow = Slow()
        config = config_of(
            "m", max_batch_size=1, scheduling=DynamicBatching(preserve_ordering=True), **threads(count=2)
        )
        async with serving_plane([(config, slow)]) as plane:
            odd, even = (submit(plane, "m", INPUT0=row(number)) for number in (1, 2))
            await eventually_async(lambda: counted(plane, "m").executions == 1)
            assert not even.received
            odd.pending.cancel()
            assert array_of(await even.answer()).item() == 2
            slow.odd.set()

    asyncio.run(main())


def test_a_failing_callback_does_not_block_the_ordered_answers_of_others() -> None:
    heard: list[Any] = []

    def fails(result: Any) -> None:
        raise RuntimeError("this caller has gone")

    order = ResponseOrder()
    first, second = pending_of(done=fails), pending_of(done=heard.append)
    order.track(first)
    order.track(second)
    second.reply([])
    assert not heard
    try:
        first.reply([])
    except RuntimeError:
        pass
    assert len(heard) == 1


class Streams:
    """A decoupled instance: two answers and an empty last one, for each request."""

    def execute(self, batch: Any, finished: Any) -> None:
        for work in batch:
            (tensor,) = work.request.inputs
            for _ in range(2):
                work.reply([Tensor.of("OUTPUT0", tensor.array)], final=False)
            work.reply(None)
        finished()

    def close(self) -> None:
        pass


def test_ordered_streams_end() -> None:
    async def main() -> None:
        config = config_of(
            "m",
            max_batch_size=1,
            decoupled=True,
            scheduling=DynamicBatching(preserve_ordering=True),
            instance_groups=(InstanceGroup("m", count=2),),
        )
        async with serving_plane([(config, Streams())]) as plane:
            streams = [Streamed(plane, "m", INPUT0=row(number)) for number in range(4)]
            for number, stream in enumerate(streams):
                told = await stream.all()
                assert [final for _, final in told] == [False, False, True]
                assert [array_of(answer).item() for answer, _ in told[:2]] == [number] * 2
                assert told[2][0] is None

    asyncio.run(main())


def limited(name: str, group: str = "", *, count: int = 1, of: str = "R", priority: int = 0) -> ModelConfig:
    resources = (Resource(of, count, is_global=True),)
    return config_of(name, max_batch_size=1, **threads(group or name, resources=resources, priority=priority))


@pytest.mark.parametrize("group", ["", "shared"])
def test_models_that_share_a_resource_take_turns(group: str) -> None:
    """Also when their instances have the same name, as those of two versions of a model do."""

    async def main() -> None:
        first, second = Gate(), Gate()
        models = [(limited("a", group), first), (limited("b", group), second)]
        async with serving_plane(models, limiter=RateLimiter({"R": 1})) as plane:
            callers = [submit(plane, "a", INPUT0=row(1))]
            await first.entered()
            callers += [submit(plane, "b", INPUT0=row(2)), submit(plane, "a", INPUT0=row(3))]
            for _ in range(10):
                await asyncio.sleep(0)
            assert not second.received
            assert len(first.received) == 1
            first.let(2)
            second.let()
            await answers(callers)
            assert (len(first.received), len(second.received)) == (2, 1)

    asyncio.run(main())


def test_enough_of_a_resource_lets_them_run_together() -> None:
    async def main() -> None:
        first, second = Gate(), Gate()
        async with serving_plane(
            [(limited("a"), first), (limited("b"), second)], limiter=RateLimiter({"R": 2})
        ) as plane:
            callers = [submit(plane, "a", INPUT0=row(1)), submit(plane, "b", INPUT0=row(2))]
            await first.entered()
            await second.entered()
            first.let()
            second.let()
            await answers(callers)

    asyncio.run(main())


class Instance:
    def __init__(self, name: str, count: int = 1, *, is_global: bool = False, device: str = "cpu0", priority: int = 0):
        self.name = name
        self.resources = (Resource("R", count, is_global),)
        self.device = device
        self.priority = priority


def never() -> None:
    raise AssertionError("woken for nothing")


def test_the_limiter_counts_per_device_unless_a_resource_is_global() -> None:
    here, there = Instance("a", device="gpu0"), Instance("b", device="gpu1")
    limiter = RateLimiter({"R": 1})
    assert limiter.acquire(here, never)
    assert limiter.acquire(there, never)
    here, there = (Instance(name, is_global=True, device=device) for name, device in (("a", "gpu0"), ("b", "gpu1")))
    limiter = RateLimiter({"R": 1})
    woken: list[str] = []
    assert limiter.acquire(here, never)
    assert not limiter.acquire(there, lambda: woken.append("b"))
    assert woken == []
    limiter.release(here)
    assert woken == ["b"]
    assert limiter.acquire(there, never)


def test_a_resource_without_a_limit_has_as_much_as_its_greediest_user_needs() -> None:
    limiter = RateLimiter()
    small, large = Instance("small", 1), Instance("large", 3)
    limiter.admit(small)
    limiter.admit(large)
    assert limiter.acquire(large, never)
    woken: list[int] = []
    assert not limiter.acquire(small, lambda: woken.append(1))
    limiter.release(large)
    assert woken == [1]


def test_an_instance_that_could_never_run_is_not_admitted() -> None:
    with pytest.raises(InvalidArgument, match="--rate-limit-resource=R:3"):
        RateLimiter({"R": 2}).admit(Instance("a", 3))


def test_priority_two_gets_half_the_turns_of_priority_one() -> None:
    limiter = RateLimiter({"R": 1})
    urgent, other = Instance("urgent", priority=1), Instance("other", priority=2)
    turns: list[str] = []
    for _ in range(30):
        wakes: list[Instance] = []
        blocker = Instance("blocker")
        assert limiter.acquire(blocker, never)
        for instance in (other, urgent):
            assert not limiter.acquire(instance, partial(wakes.append, instance))
        limiter.release(blocker)
        assert len(wakes) == 2
        assert limiter.acquire(wakes[0], never)
        turns.append(wakes[0].name)
        limiter.release(wakes[0])
    assert turns.count("urgent") == 2 * turns.count("other")


@pytest.mark.parametrize(
    ("scheduling", "sizes", "expected"),
    [
        (DynamicBatching((2, 4), 30_000_000), (1, 1, 4), ["preferred", "preferred"]),
        (DynamicBatching((), 0), (3, 3, 3), ["full", "idle instance"]),
        (DynamicBatching((), 20_000), (3,), ["delay expired"]),
        (None, (1, 1), ["one at a time", "one at a time"]),
    ],
)
def test_every_batch_records_why_it_was_formed(scheduling: Any, sizes: tuple[int, ...], expected: list[str]) -> None:
    async def main() -> None:
        async with serving_plane([(config_of("m", max_batch_size=8, scheduling=scheduling), Recorder())]) as plane:
            callers = [submit(plane, "m", INPUT0=np.zeros((size, 1))) for size in sizes]
            await answers(callers)
            records = [one.pending.batch_record for one in callers]
            assert sorted({record.reason for record in records}) == sorted(set(expected))
            assert sum(1 / record.requests for record in records) == pytest.approx(len(expected))
            assert sum(record.rows / record.requests for record in records) == pytest.approx(sum(sizes))
            assert all(record.instance == "m_0_cpu" for record in records)
            assert records[-1].left_waiting == 0
            reasons = counted(plane, "m").log.reasons
            assert {reason: count for reason, count in reasons.items() if count} == Counter(expected)

    asyncio.run(main())


def test_cancelled_work_never_reaches_the_model() -> None:
    async def main() -> None:
        gate = Gate()
        async with serving_plane([(config_of("m", **threads()), gate)]) as plane:
            callers = [submit(plane, "m", INPUT0=row(0))]
            await gate.entered()
            callers += [submit(plane, "m", INPUT0=row(number)) for number in range(1, 5)]
            for number in (1, 3):
                callers[number].pending.cancel()
                assert isinstance(await callers[number].answer(), Cancelled)
            gate.let(2)
            results = await answers(callers)
            assert numbers(gate.received) == [[0], [2, 4]]
            assert [isinstance(result, Cancelled) for result in results] == [False, True, False, True, False]
            statistics = counted(plane, "m")
            assert statistics.failures == {"CANCELED": 2}
            assert (statistics.executions, statistics.inferences, statistics.in_flight) == (2, 3, 0)

    asyncio.run(main())


@pytest.mark.parametrize("scheduling", [None, DynamicBatching(), DynamicBatching((2,), 1000)])
@pytest.mark.parametrize("cancelled", [1, 2, 5])
def test_an_instance_whose_whole_queue_was_cancelled_continues(scheduling: Any, cancelled: int) -> None:
    async def main() -> None:
        gate = Gate()
        async with serving_plane([(config_of("m", scheduling=scheduling, **threads()), gate)]) as plane:
            for number in range(3):
                running = submit(plane, "m", INPUT0=row(number))
                await gate.entered()
                waiting = [submit(plane, "m", INPUT0=row(99)) for _ in range(cancelled)]
                await asyncio.sleep(0)
                for one in waiting:
                    one.pending.cancel()
                gate.let()
                assert array_of(await running.answer()).item() == number
            assert numbers(gate.received) == [[0], [1], [2]]

    asyncio.run(main())


def test_running_work_is_not_waited_for() -> None:
    async def main() -> None:
        gate = Gate()
        async with serving_plane([(config_of("m", **threads()), gate)]) as plane:
            caller = submit(plane, "m", INPUT0=row(0))
            await gate.entered()
            caller.pending.cancel()
            assert isinstance(await caller.answer(), Cancelled)
            assert counted(plane, "m").in_flight == 0
            gate.let(2)
            await submit(plane, "m", INPUT0=row(1)).answer()
            assert len(caller.received) == 1
            # There is no such thing as a batch of no rows.
            assert set(counted(plane, "m").batches) == {1}

    asyncio.run(main())


@pytest.mark.parametrize("policy", [QueuePolicy(), QueuePolicy(max_queue_size=10)])
def test_closing_fails_waiting_requests_and_lets_running_ones_finish(policy: QueuePolicy) -> None:
    async def main() -> None:
        gate = Gate()
        config = config_of("m", scheduling=DynamicBatching(default_queue_policy=policy), **threads())
        async with serving_plane([(config, gate)]) as plane:
            (version,) = plane.statistics("m")
            running = submit(plane, "m", INPUT0=row(0))
            await gate.entered()
            waiting = [submit(plane, "m", INPUT0=row(number)) for number in range(1, 4)]
            retiring = asyncio.create_task(version.retire(0.01))
            for result in await answers(waiting):
                assert isinstance(result, Unavailable)
                assert result.message == "model 'm' version 1 was unloaded"
            assert not running.received
            gate.let()
            await asyncio.wait_for(retiring, 30)
            assert array_of(await running.answer()).item() == 0
            assert numbers(gate.received) == [[0]]
            assert counted(plane, "m").in_flight == 0

    asyncio.run(main())


def test_retiring_waits_for_what_is_in_flight() -> None:
    async def main() -> None:
        gate = Gate()
        async with serving_plane([(config_of("m", max_batch_size=1, **threads()), gate)]) as plane:
            (version,) = plane.statistics("m")
            callers = [submit(plane, "m", INPUT0=row(number)) for number in range(3)]
            await gate.entered()
            retiring = asyncio.create_task(version.retire(30))
            gate.let(3)
            await asyncio.wait_for(retiring, 30)
            assert numbers([array_of(result) for result in await answers(callers)]) == [[0], [1], [2]]

    asyncio.run(main())


def test_a_version_that_was_retired_takes_nothing_more() -> None:
    async def main() -> None:
        async with serving_plane([(config_of("m"), Recorder())]) as plane:
            (version,) = plane.statistics("m")
            await version.retire(0)
            with pytest.raises(Unavailable):
                submit(plane, "m", INPUT0=row(1))
            assert counted(plane, "m").in_flight == 0

    asyncio.run(main())


@pytest.mark.parametrize("runs", ["inline", "thread"])
def test_a_caller_that_fails_does_not_cost_the_others_their_answers(
    runs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with serving_plane(
            [(config_of("m", instance_groups=(InstanceGroup("m", runs=runs),)), Recorder())]
        ) as plane:
            callers = [RecordingCaller() for _ in range(3)]
            for number, one in enumerate(callers):

                def done(result: Any, one: RecordingCaller = one, number: int = number) -> None:
                    one(result)
                    if number == 1:
                        raise RuntimeError("this caller has gone")

                plane.infer(InferRequest("m", [Tensor.of("INPUT0", row(number))]), done)
            await answers(callers)
            assert counted(plane, "m").executions == 1
            assert await submit(plane, "m", INPUT0=row(9)).answer()

    asyncio.run(main())
    assert [record.message for record in caplog.records] == ["Could not deliver a response."]


@pytest.mark.parametrize("levels", [0, 3])
def test_the_background_waits_for_all_others(levels: int) -> None:
    async def main() -> None:
        gate = Gate()
        batching = DynamicBatching(
            priority_levels=levels, default_queue_policy=QueuePolicy(max_queue_size=2 if levels else 0)
        )
        async with serving_plane([(config_of("m", max_batch_size=2, scheduling=batching, **threads()), gate)]) as plane:
            behind = BackgroundPlane(plane)
            callers = [submit(plane, "m", INPUT0=row(0))]
            await gate.entered()
            callers += [submit(behind, "m", INPUT0=row(number)) for number in (11, 12, 13)]
            callers[1].pending.cancel()
            callers += [submit(plane, "m", INPUT0=row(1))]
            callers += [submit(plane, "m", request={"parameters": {"priority": levels}}, INPUT0=row(2))]
            callers += [submit(behind, "m", INPUT0=row(14))]
            gate.let(4)
            await answers(callers)
            assert numbers(gate.received) == [[0], [1, 2], [12, 13], [14]]
            assert plane.answer(InferRequest("m", ())) is None
            assert behind.answer(InferRequest("m", ())) is None

    asyncio.run(main())


def test_a_closing_model_refuses_the_background_too() -> None:
    async def main() -> None:
        gate = Gate()
        async with serving_plane([(config_of("m", max_batch_size=1, **threads()), gate)]) as plane:
            first = submit(plane, "m", INPUT0=row(0))
            await gate.entered()
            waiting = submit(BackgroundPlane(plane), "m", INPUT0=row(1))
            plane.find("m")._scheduler.close(Unavailable("the model is leaving"))
            assert isinstance((await answers([waiting]))[0], Unavailable)
            gate.let(1)
            await answers([first])

    asyncio.run(main())
