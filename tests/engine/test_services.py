# SPDX-License-Identifier: Apache-2.0
"""What the engine does for models: calls between them, through the same door as everyone's."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from headrace.core.clock import SystemClock
from headrace.core.errors import Cancelled, FailedPrecondition, InvalidArgument, NotFound, Unavailable
from headrace.core.requests import InferRequest
from headrace.core.telemetry.metrics import Registry
from headrace.engine.dataplane import DataPlane
from headrace.engine.services import ModelServices
from headrace.models.config.types import InstanceGroup
from support.engines import Gate, Recorder, array_of, config_of, counted, plane_of, serving_plane, tensors_of


def services_of(plane: DataPlane | None) -> ModelServices:
    services = ModelServices(Registry(SystemClock()))
    services.plane = plane
    return services


def row(number: int) -> InferRequest:
    return InferRequest("m", tensors_of(INPUT0=np.array([[number]])))


class Answers:
    def __init__(self) -> None:
        self.received: list[tuple[Any, bool]] = []
        self.last = asyncio.Event()

    def __call__(self, answer: Any, final: bool = True) -> None:
        self.received.append((answer, final))
        if final:
            self.last.set()


def test_a_model_may_call_another() -> None:
    async def main() -> None:
        async with serving_plane([(config_of("m"), Recorder(lambda rows: rows + 1))]) as plane:
            answers = Answers()
            services_of(plane).infer(row(1), answers)
            await asyncio.wait_for(answers.last.wait(), 30)
            ((answer, final),) = answers.received
            assert (array_of(answer).item(), final) == (2, True)
            assert counted(plane, "m").inferences == 1

    asyncio.run(main())


def test_a_call_can_be_cancelled() -> None:
    async def main() -> None:
        gate = Gate()
        async with serving_plane(
            [(config_of("m", instance_groups=(InstanceGroup("m", runs="thread"),)), gate)]
        ) as plane:
            answers = Answers()
            cancel = services_of(plane).infer(row(1), answers)
            await gate.entered()
            cancel()
            assert isinstance(answers.received[0][0], Cancelled)
            gate.let()

    asyncio.run(main())


def test_wrong_calls_raise_immediately_and_failures_are_answers() -> None:
    async def main() -> None:
        def refuse(_: Any) -> Any:
            raise InvalidArgument("no")

        async with serving_plane([(config_of("m"), refuse)]) as plane:
            services = services_of(plane)
            with pytest.raises(NotFound):
                services.infer(InferRequest("nope", tensors_of(INPUT0=np.zeros((1, 1)))), Answers())
            answers = Answers()
            services.infer(row(1), answers)
            await asyncio.wait_for(answers.last.wait(), 30)
            assert isinstance(answers.received[0][0], InvalidArgument)

    asyncio.run(main())


def test_readiness_and_a_plane_that_is_not_there_yet() -> None:
    async def main() -> None:
        with pytest.raises(Unavailable, match="the engine is starting"):
            services_of(None).infer(row(1), Answers())
        services = services_of(await plane_of([(config_of("m"), Recorder())]))
        assert services.is_ready("m", "")
        assert services.is_ready("m", "1")
        assert not services.is_ready("m", "2")
        assert not services.is_ready("n", "")

    asyncio.run(main())


def test_loading_is_answered_in_the_loop() -> None:
    async def main() -> None:
        services = services_of(await plane_of([(config_of("m"), Recorder())]))
        for begin in (
            lambda done: services.load("m", "", {}, done),
            lambda done: services.unload("m", done),
        ):
            done = Answers()
            begin(done)
            await asyncio.wait_for(done.last.wait(), 30)
            assert isinstance(done.received[0][0], FailedPrecondition)
        done = Answers()
        services.load("../m", "", {}, done)
        await asyncio.wait_for(done.last.wait(), 30)
        assert isinstance(done.received[0][0], InvalidArgument | FailedPrecondition)

    asyncio.run(main())
