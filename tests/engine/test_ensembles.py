# SPDX-License-Identifier: Apache-2.0
"""Graphs of models behind one name: chains, diamonds, fans; what goes wrong on the way; and streams within."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from headrace.backends.contract import Work
from headrace.core.errors import Cancelled, Internal, InvalidArgument, NotFound, Unavailable
from headrace.core.requests import InferRequest, RequestedOutput
from headrace.core.tensors import Tensor
from headrace.models.config.types import (
    DynamicBatching,
    EnsembleScheduling,
    InputSpec,
    InstanceGroup,
    ModelConfig,
    OutputSpec,
    QueuePolicy,
)
from support.engines import (
    Gate,
    Recorder,
    RecordingCaller,
    Streamed,
    answers,
    array_of,
    config_of,
    counted,
    ensemble,
    serving_plane,
    step,
    submit,
    tensors_of,
)


def add(number: int) -> Recorder:
    return Recorder(lambda rows: rows + number)


def two_inputs(name: str, compute: Callable[[Any, Any], Any]) -> tuple[ModelConfig, Any]:
    config = config_of(name, inputs=(InputSpec("A", None, None), InputSpec("B", None, None)))
    return config, lambda inputs: {"OUTPUT0": compute(inputs["A"], inputs["B"])}


def row(number: int) -> Any:
    return np.array([[number]])


CHAIN = (step("one", "INPUT0=IN", "OUTPUT0=middle"), step("ten", "INPUT0=middle", "OUTPUT0=OUT"))


def test_a_chain() -> None:
    async def main() -> None:
        models = [(config_of("one"), add(1)), (config_of("ten"), Recorder(lambda rows: rows * 10)), ensemble(*CHAIN)]
        async with serving_plane(models) as plane:
            requests = [submit(plane, "ensemble", IN=row(number), request={"id": f"{number}"}) for number in range(5)]
            results = await answers(requests)
            assert [array_of(result, "OUT").item() for result in results] == [10, 20, 30, 40, 50]
            assert [result.id for result in results] == ["0", "1", "2", "3", "4"]  # type: ignore[union-attr]
            assert {result.model_name for result in results} == {"ensemble"}  # type: ignore[union-attr]
            # Steps of different requests share their models' batches.
            assert counted(plane, "one").executions == 1
            statistics = counted(plane, "ensemble")
            assert (statistics.total().success, statistics.inferences, statistics.in_flight) == (5, 5, 0)

    asyncio.run(main())


def test_the_order_of_the_steps_does_not_matter() -> None:
    async def main() -> None:
        models = [(config_of("one"), add(1)), (config_of("ten"), add(10)), ensemble(*reversed(CHAIN))]
        async with serving_plane(models) as plane:
            assert array_of(await submit(plane, "ensemble", IN=row(1)).answer(), "OUT").item() == 12

    asyncio.run(main())


def test_a_diamond_runs_both_sides_concurrently() -> None:
    async def main() -> None:
        left, right = Gate(), Gate()
        threads = {"instance_groups": (InstanceGroup("g", runs="thread"),)}
        models = [
            (config_of("source"), add(1)),
            (config_of("left", **threads), left),
            (config_of("right", **threads), right),
            two_inputs("sum", lambda a, b: a * 100 + b),
            ensemble(
                step("source", "INPUT0=IN", "OUTPUT0=s"),
                step("left", "INPUT0=s", "OUTPUT0=l"),
                step("right", "INPUT0=s", "OUTPUT0=r"),
                step("sum", "A=l B=r", "OUTPUT0=OUT"),
            ),
        ]
        async with serving_plane(models) as plane:
            request = submit(plane, "ensemble", IN=row(4))
            await left.entered()
            await right.entered()
            right.let()
            left.let()
            assert array_of(await request.answer(), "OUT").item() == 505
            assert counted(plane, "source").executions == 1

    asyncio.run(main())


def test_a_fan_out_and_several_inputs() -> None:
    async def main() -> None:
        models = [
            (config_of("one"), add(1)),
            (config_of("two"), add(2)),
            two_inputs("pair", lambda a, b: a * b),
            ensemble(
                step("one", "INPUT0=X", "OUTPUT0=P"),
                step("two", "INPUT0=X", "OUTPUT0=Q"),
                step("pair", "A=X B=Y", "OUTPUT0=R"),
                inputs="X Y",
                outputs="P Q R",
            ),
        ]
        async with serving_plane(models) as plane:
            result = await submit(plane, "ensemble", X=row(3), Y=row(5)).answer()
            assert [array_of(result, name).item() for name in "PQR"] == [4, 5, 15]
            # Only what is asked for, in that order.
            wanted = {"outputs": [RequestedOutput("R"), RequestedOutput("P")]}
            result = await submit(plane, "ensemble", X=row(3), Y=row(5), request=wanted).answer()
            assert [output.name for output in result.outputs] == ["R", "P"]
            with pytest.raises(InvalidArgument, match="unexpected inference output 'S'"):
                submit(plane, "ensemble", X=row(3), Y=row(5), request={"outputs": [RequestedOutput("S")]})

    asyncio.run(main())


def test_tensors_pass_from_step_to_step_without_a_copy() -> None:
    async def main() -> None:
        first, second = Recorder(), Recorder()
        models = [(config_of("one"), first), (config_of("ten"), second), ensemble(*CHAIN)]
        async with serving_plane(models) as plane:
            array = np.zeros((1, 100_000))
            result = await submit(plane, "ensemble", IN=array).answer()
            for seen in (first.received[0], second.received[0], array_of(result, "OUT")):
                assert np.shares_memory(seen, array)

    asyncio.run(main())


def test_a_step_may_name_its_version() -> None:
    async def main() -> None:
        models = [(config_of("one"), add(1))]
        for version, right in ((1, True), (2, False)):
            config = ensemble(step("one", "INPUT0=IN", "OUTPUT0=OUT", version))
            async with serving_plane([*models, config]) as plane:
                result = await submit(plane, "ensemble", IN=row(1)).answer()
                if right:
                    assert array_of(result, "OUT").item() == 2
                else:
                    assert isinstance(result, NotFound)
                    assert "version 2" in result.message

    asyncio.run(main())


# What goes wrong.


def test_a_failing_step_names_the_ensemble_and_costs_its_request_only(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        def compute(inputs: Any) -> Any:
            if np.any(inputs["INPUT0"] == 13):
                raise RuntimeError("a secret")
            return {"OUTPUT0": inputs["INPUT0"]}

        models = [(config_of("one"), compute), (config_of("ten"), add(10)), ensemble(*CHAIN)]
        async with serving_plane(models) as plane:
            results = await answers([submit(plane, "ensemble", IN=row(number)) for number in (1, 13, 2)])
            assert [array_of(results[position], "OUT").item() for position in (0, 2)] == [11, 12]
            assert isinstance(results[1], Internal)
            assert results[1].message.startswith("in ensemble 'ensemble', model 'one' failed")
            assert "secret" not in results[1].message
            statistics = counted(plane, "ensemble")
            assert (statistics.total().success, statistics.total().fail, statistics.in_flight) == (2, 1, 0)

    asyncio.run(main())


def test_a_step_that_refuses_immediately_is_reported_after_infer_has_returned() -> None:
    async def main() -> None:
        async with serving_plane([ensemble(*CHAIN)]) as plane:
            request = submit(plane, "ensemble", IN=row(1))
            assert not request.received
            result = await request.answer()
            assert isinstance(result, NotFound)
            assert result.message == "in ensemble 'ensemble', Request for unknown model: 'one' is not found"
            assert counted(plane, "ensemble").in_flight == 0

    asyncio.run(main())


def test_after_a_refusal_the_other_steps_are_not_begun() -> None:
    async def main() -> None:
        other = Recorder()
        models = [
            (config_of("other"), other),
            ensemble(
                step("gone", "INPUT0=IN", "OUTPUT0=P"),
                step("other", "INPUT0=IN", "OUTPUT0=Q"),
                outputs="P Q",
            ),
        ]
        async with serving_plane(models) as plane:
            assert isinstance(await submit(plane, "ensemble", IN=row(1)).answer(), NotFound)
            for _ in range(5):
                await asyncio.sleep(0)
            assert not other.received

    asyncio.run(main())


def test_a_full_queue_of_a_step_is_the_ensemble_s_answer() -> None:
    async def main() -> None:
        gate = Gate()
        inner = config_of(
            "one",
            max_batch_size=1,
            instance_groups=(InstanceGroup("one", runs="thread"),),
            scheduling=DynamicBatching(default_queue_policy=QueuePolicy(max_queue_size=1)),
        )
        async with serving_plane([(inner, gate), ensemble(step("one", "INPUT0=IN", "OUTPUT0=OUT"))]) as plane:
            requests = [submit(plane, "ensemble", IN=row(0))]
            await gate.entered()
            requests += [submit(plane, "ensemble", IN=row(number)) for number in (1, 2)]
            assert isinstance(await requests[2].answer(), Unavailable)
            gate.let(2)
            results = await answers(requests)
            assert [array_of(result, "OUT").item() for result in results[:2]] == [0, 1]
            assert counted(plane, "ensemble").failures["REJECTED"] == 1

    asyncio.run(main())


def test_an_output_that_no_step_can_make_is_an_error() -> None:
    async def main() -> None:
        models = [
            (config_of("one"), add(1)),
            ensemble(step("one", "INPUT0=IN", "OUTPUT0=x"), step("one", "INPUT0=nowhere", "OUTPUT0=OUT")),
        ]
        async with serving_plane(models) as plane:
            result = await submit(plane, "ensemble", IN=row(1)).answer()
            assert isinstance(result, Internal)
            assert "output 'OUT' was not produced" in result.message

    asyncio.run(main())


def test_wrong_requests_are_refused_at_the_door() -> None:
    async def main() -> None:
        async with serving_plane([(config_of("one"), add(1)), ensemble(*CHAIN)]) as plane:
            with pytest.raises(InvalidArgument, match="unexpected inference input 'X' for model 'ensemble'"):
                submit(plane, "ensemble", X=row(1))
            with pytest.raises(InvalidArgument, match="batch-size must be <= 64 for 'ensemble'"):
                submit(plane, "ensemble", IN=np.zeros((65, 1)))
            assert counted(plane, "ensemble").failures == {"OTHER": 2}

    asyncio.run(main())


# Giving up.


def gated() -> tuple[Gate, list[Any]]:
    gate = Gate()
    inner = config_of("one", max_batch_size=1, instance_groups=(InstanceGroup("one", runs="thread"),))
    return gate, [(inner, gate), (config_of("ten"), add(10)), ensemble(*CHAIN)]


def test_giving_up_reaches_the_steps() -> None:
    async def main() -> None:
        gate, models = gated()
        async with serving_plane(models) as plane:
            running, waiting, other = (submit(plane, "ensemble", IN=row(number)) for number in range(3))
            await gate.entered()
            for asked in (running, waiting):
                asked.pending.cancel()
                assert isinstance(await asked.answer(), Cancelled)
            gate.let(2)
            assert array_of(await other.answer(), "OUT").item() == 12
            # The first was being computed; the second was never seen; neither went on to the next model.
            assert [call.item() for call in gate.received] == [0, 2]
            assert counted(plane, "ten").inferences == 1
            assert counted(plane, "one").failures["CANCELED"] == 2
            assert counted(plane, "ensemble").in_flight == 0

    asyncio.run(main())


def test_cancelling_immediately() -> None:
    async def main() -> None:
        gate, models = gated()
        async with serving_plane(models) as plane:
            request = submit(plane, "ensemble", IN=row(1))
            request.pending.cancel()
            assert isinstance(await request.answer(), Cancelled)
            for _ in range(5):
                await asyncio.sleep(0)
            assert not gate.received
            assert len(request.received) == 1

    asyncio.run(main())


def test_no_more_are_in_flight_than_allowed() -> None:
    async def main() -> None:
        gate = Gate()
        inner = config_of("one", max_batch_size=1, instance_groups=(InstanceGroup("one", count=8, runs="thread"),))
        graph = ensemble(step("one", "INPUT0=IN", "OUTPUT0=OUT"), most=2)
        async with serving_plane([(inner, gate), graph]) as plane:
            requests = [submit(plane, "ensemble", IN=row(number)) for number in range(6)]
            await gate.entered(2)
            for _ in range(20):
                await asyncio.sleep(0)
            assert len(gate.received) == 2
            # One that waits gives up, one that runs gives up: the next takes its place.
            requests[2].pending.cancel()
            requests[0].pending.cancel()
            await gate.entered()
            assert gate.received[2].item() == 3
            gate.let(6)
            results = await answers(requests)
            assert [isinstance(result, Cancelled) for result in results] == [True, False, True, False, False, False]
            assert counted(plane, "ensemble").in_flight == 0

    asyncio.run(main())


def test_retiring_fails_waiting_requests() -> None:
    async def main() -> None:
        gate = Gate()
        inner = config_of("one", max_batch_size=1, instance_groups=(InstanceGroup("one", runs="thread"),))
        graph = ensemble(step("one", "INPUT0=IN", "OUTPUT0=OUT"), most=1)
        async with serving_plane([(inner, gate), graph]) as plane:
            running, waiting = (submit(plane, "ensemble", IN=row(number)) for number in range(2))
            await gate.entered()
            (version,) = plane.statistics("ensemble")
            await version.retire(0.01)
            result = await waiting.answer()
            assert isinstance(result, Unavailable)
            assert result.message == "model 'ensemble' version 1 was unloaded"
            gate.let()
            assert array_of(await running.answer(), "OUT").item() == 0

    asyncio.run(main())


# Ensembles of ensembles, and streams.


def test_an_ensemble_may_be_a_step() -> None:
    async def main() -> None:
        outer = config_of(
            "outer",
            inputs=(InputSpec("I", None, None),),
            outputs=(OutputSpec("O", None, None),),
            scheduling=EnsembleScheduling((step("ensemble", "IN=I", "OUT=x"), step("one", "INPUT0=x", "OUTPUT0=O"))),
        )
        models = [(config_of("one"), add(1)), (config_of("ten"), add(10)), ensemble(*CHAIN), (outer, None)]
        async with serving_plane(models) as plane:
            assert array_of(await submit(plane, "outer", I=row(1)).answer(), "O").item() == 13

    asyncio.run(main())


class Counting:
    """A decoupled instance: 0, 1, 2 ... up to its input; the last answer is empty or not."""

    def __init__(self, empty_last: bool) -> None:
        self._empty_last = empty_last

    def execute(self, batch: Sequence[Work], finished: Callable[[], None]) -> None:
        for work in batch:
            number = int(work.request.inputs[0].array.item())
            for answer in range(number):
                work.reply([Tensor.of("OUTPUT0", row(answer))], final=not self._empty_last and answer == number - 1)
            if self._empty_last or not number:
                work.reply(None)
        finished()

    def close(self) -> None:
        pass


@pytest.mark.parametrize("empty_last", [True, False])
def test_the_rest_of_the_graph_runs_for_each_answer_of_a_decoupled_step(empty_last: bool) -> None:
    async def main() -> None:
        models = [
            (config_of("one", decoupled=True), Counting(empty_last)),
            (config_of("ten"), add(10)),
            ensemble(*CHAIN, decoupled=True),
        ]
        async with serving_plane(models) as plane:
            for number in (3, 1, 0):
                answers = await Streamed(plane, "ensemble", IN=row(number)).all()
                full = sorted(array_of(answer, "OUT").item() for answer, _ in answers if answer is not None)
                assert full == [10 + answer for answer in range(number)]
                assert [final for _, final in answers] == [False] * (len(answers) - 1) + [True]
            statistics = counted(plane, "ensemble")
            assert (statistics.received, statistics.in_flight) == (3, 0)

    asyncio.run(main())


@pytest.mark.parametrize("empty_last", [True, False])
@pytest.mark.parametrize("slow", ["none", "other"])
def test_a_decoupled_step_beside_a_slow_one(slow: str, empty_last: bool) -> None:
    """Every answer of the one goes with the answer of the other, whoever comes first."""

    async def main() -> None:
        gate = Gate()
        other: Any = (config_of("other"), add(100))
        if slow == "other":
            other = (config_of("other", instance_groups=(InstanceGroup("g", runs="thread"),)), gate)
        models = [
            (config_of("one", decoupled=True), Counting(empty_last)),
            other,
            two_inputs("sum", lambda a, b: a * 1000 + b),
            ensemble(
                step("one", "INPUT0=IN", "OUTPUT0=x"),
                step("other", "INPUT0=IN", "OUTPUT0=y"),
                step("sum", "A=x B=y", "OUTPUT0=OUT"),
                decoupled=True,
            ),
        ]
        async with serving_plane(models) as plane:
            stream = Streamed(plane, "ensemble", IN=row(3))
            if slow == "other":
                await gate.entered()
                for _ in range(5):
                    await asyncio.sleep(0)
                gate.let()
            answers = await stream.all()
            beside = 3 if slow == "other" else 103
            full = sorted(array_of(answer, "OUT").item() for answer, _ in answers if answer is not None)
            assert full == [beside, 1000 + beside, 2000 + beside]
            assert counted(plane, "ensemble").in_flight == 0

    asyncio.run(main())


def test_a_decoupled_step_behind_a_call_for_one_answer() -> None:
    """It is refused at the door or answered with an error, but never left without an answer."""

    async def main() -> None:
        models = [
            (config_of("one", decoupled=True), Counting(empty_last=True)),
            (config_of("ten"), add(10)),
            ensemble(*CHAIN, decoupled=False),
        ]
        async with serving_plane(models) as plane:
            for number in (0, 3):
                request = submit(plane, "ensemble", IN=row(number))
                assert isinstance(await request.answer(), Internal)
                for _ in range(10):
                    await asyncio.sleep(0)
                assert len(request.received) == 1
            assert counted(plane, "ensemble").in_flight == 0

    asyncio.run(main())


@pytest.mark.parametrize("fate", ["answered", "failed", "refused", "cancelled"])
def test_nothing_of_a_request_stays_in_a_circle(fate: str) -> None:
    async def main() -> None:
        def compute(inputs: Any) -> Any:
            if fate == "failed":
                raise InvalidArgument("no")
            return {"OUTPUT0": inputs["INPUT0"] + 1}

        models: list[Any] = [(config_of("ten"), add(10)), ensemble(*CHAIN)]
        if fate != "refused":
            models.append((config_of("one"), compute))
        async with serving_plane(models) as plane:
            for _ in range(2):
                array = np.zeros((1, 1))
                alive = weakref.ref(array)
                request = RecordingCaller()
                request.pending = plane.infer(InferRequest("ensemble", tensors_of(IN=array)), request)
                if fate == "cancelled":
                    await asyncio.sleep(0)
                    request.pending.cancel()
                await request.answer()
                del request, array
                for _ in range(5):
                    await asyncio.sleep(0)
            assert alive() is None

    gc.collect()
    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()
