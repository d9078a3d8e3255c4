# SPDX-License-Identifier: Apache-2.0
"""What a hostile tester found in ensembles: two steps that answer several times, and inputs that are left out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from headrace.core.dtypes import INT64
from headrace.core.errors import InvalidArgument
from headrace.core.requests import RequestedOutput
from headrace.core.tensors import Tensor
from headrace.models.config.types import (
    EnsembleScheduling,
    EnsembleStep,
    InputSpec,
    InstanceGroup,
    ModelConfig,
    OutputSpec,
)
from support.engines import Streamed, array_of, config_of, counted, serving_plane, submit
from support.waiting import eventually_async

ONE = np.array([[1]])


def ensemble(
    inputs: tuple[InputSpec, ...], outputs: tuple[str, ...], *steps: tuple[str, Mapping[str, str], Mapping[str, str]]
) -> tuple[ModelConfig, None]:
    scheduling = EnsembleScheduling(tuple(EnsembleStep(name, -1, given, taken) for name, given, taken in steps))
    specs = tuple(OutputSpec(name, INT64, (1,)) for name in outputs)
    return ModelConfig("e", "", max_batch_size=8, inputs=inputs, outputs=specs, scheduling=scheduling), None


def same(inputs: Any) -> Any:
    return {"OUTPUT0": inputs["INPUT0"]}


class Counting:
    """Answers as often as it is told, with 0, 1, 2 and so on."""

    def execute(self, works: Any, finished: Any) -> None:
        for work in works:
            for number in range(int(work.request.inputs[0].array.item())):
                work.reply([Tensor("OUTPUT0", INT64, np.array([[number]]))], final=False)
            work.reply(None)
        finished()

    def close(self) -> None:
        pass


@pytest.mark.parametrize("times", [0, 1, 3])
def test_two_steps_with_several_answers_each_give_every_pair(times: int) -> None:
    async def main() -> None:
        counting = config_of(
            "counting",
            decoupled=True,
            inputs=(InputSpec("INPUT0", INT64, (1,)),),
            outputs=(OutputSpec("OUTPUT0", INT64, (1,)),),
        )
        graph = ensemble(
            (InputSpec("IN", INT64, (1,)),),
            ("A", "B"),
            ("counting", {"INPUT0": "IN"}, {"OUTPUT0": "x"}),
            ("counting", {"INPUT0": "IN"}, {"OUTPUT0": "B"}),
            ("same", {"INPUT0": "x"}, {"OUTPUT0": "A"}),
        )
        async with serving_plane([(counting, Counting()), (config_of("same"), same), graph]) as plane:
            answers = await Streamed(plane, "e", IN=np.array([[times]])).all()
            pairs = [(array_of(one, "A").item(), array_of(one, "B").item()) for one, _ in answers if one is not None]
            assert sorted(pairs) == [(a, b) for a in range(times) for b in range(times)]
            assert [final for _, final in answers] == [False] * (len(answers) - 1) + [True]
            assert counted(plane, "e").in_flight == 0

    asyncio.run(main())


def test_an_input_that_is_left_out_matters_only_to_outputs_that_need_it() -> None:
    async def main() -> None:
        graph = ensemble(
            (InputSpec("A", INT64, (1,)), InputSpec("B", INT64, (1,), optional=True)),
            ("OA", "OB"),
            ("same", {"INPUT0": "A"}, {"OUTPUT0": "OA"}),
            ("same", {"INPUT0": "B"}, {"OUTPUT0": "OB"}),
        )
        async with serving_plane([(config_of("same"), same), graph]) as plane:
            answer = await submit(plane, "e", A=ONE, request={"outputs": [RequestedOutput("OA")]}).answer()
            assert array_of(answer, "OA").tolist() == [[1]]
            answer = await submit(plane, "e", A=ONE).answer()
            assert isinstance(answer, InvalidArgument)
            assert "'OB' cannot be computed without an input that was left out ('B')" in answer.message

    asyncio.run(main())


def test_an_input_that_is_left_out_is_left_out_for_members_that_can_do_without_it() -> None:
    """Also between members: what a member does not produce because of it is left out for the next one."""
    seen: list[tuple[str, list[str]]] = []

    def adds(name: str) -> Any:
        def add(inputs: Any) -> Any:
            seen.append((name, sorted(inputs)))
            return {"SUM": sum(inputs.values())}

        return add

    def adding(name: str) -> Any:
        return config_of(
            name,
            max_batch_size=1,
            inputs=(InputSpec("A", INT64, (1,)), InputSpec("B", INT64, (1,), optional=True)),
            outputs=(OutputSpec("SUM", INT64, (1,)),),
        )

    async def main() -> None:
        graph = ensemble(
            (InputSpec("X", INT64, (1,)), InputSpec("Y", INT64, (1,), optional=True)),
            ("OUT",),
            ("same", {"INPUT0": "Y"}, {"OUTPUT0": "copy"}),
            ("first", {"A": "X", "B": "Y"}, {"SUM": "sum"}),
            ("second", {"A": "sum", "B": "copy"}, {"SUM": "OUT"}),
        )
        models = [
            (config_of("same"), same),
            (adding("first"), adds("first")),
            (adding("second"), adds("second")),
            graph,
        ]
        async with serving_plane(models) as plane:
            answer = await submit(plane, "e", X=ONE, Y=ONE).answer()
            assert array_of(answer, "OUT").tolist() == [[3]]
            assert seen == [("first", ["A", "B"]), ("second", ["A", "B"])]
            seen.clear()
            answer = await submit(plane, "e", X=ONE).answer()
            assert array_of(answer, "OUT").tolist() == [[1]]
            assert seen == [("first", ["A"]), ("second", ["A"])]

    asyncio.run(main())


class Twice:
    """Answers 0, and then 1 as its last."""

    def execute(self, works: Any, finished: Any) -> None:
        for work in works:
            for number in (0, 1):
                work.reply([Tensor("OUTPUT0", INT64, np.array([[number]]))], final=number == 1)
        finished()

    def close(self) -> None:
        pass


def test_each_of_several_answers_gets_its_own_result_whichever_is_ready_first() -> None:
    """The last of them is not passed on to the way of the first, which waits for the same step."""

    async def main() -> None:
        second = threading.Event()

        def late(inputs: Any) -> Any:
            if inputs["INPUT0"].item() == 0:
                second.wait(30)
            return {"OUTPUT0": inputs["INPUT0"]}

        settings: dict[str, Any] = {
            "inputs": (InputSpec("INPUT0", INT64, (1,)),),
            "outputs": (OutputSpec("OUTPUT0", INT64, (1,)),),
        }
        twice = config_of("twice", decoupled=True, **settings)
        two = (InstanceGroup("late", count=2, runs="thread"),)
        graph = ensemble(
            (InputSpec("IN", INT64, (1,)),),
            ("OUT",),
            ("twice", {"INPUT0": "IN"}, {"OUTPUT0": "x"}),
            ("late", {"INPUT0": "x"}, {"OUTPUT0": "OUT"}),
        )
        models = [(twice, Twice()), (config_of("late", max_batch_size=1, instance_groups=two), late), graph]
        async with serving_plane(models) as plane:
            streamed = Streamed(plane, "e", IN=ONE)
            await eventually_async(lambda: streamed.received)
            second.set()
            answers = await streamed.all()
            assert [(array_of(one, "OUT").item(), final) for one, final in answers] == [(1, False), (0, True)]

    asyncio.run(main())
