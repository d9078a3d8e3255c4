# SPDX-License-Identifier: Apache-2.0
"""Sleep of a version: requests in flight end first, later ones wait and wake it, and every one is answered once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import numpy as np
import pytest

from headrace.backends.contract import Placement, SleepLevel
from headrace.core.dtypes import FP32
from headrace.core.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted, Unavailable
from headrace.core.requests import InferRequest, InferResponse
from headrace.core.tensors import Tensor
from headrace.engine import sleep as sleep_module
from headrace.engine.dataplane import DataPlane
from headrace.engine.repository.states import State
from headrace.engine.sleep import SleepGate
from headrace.engine.versions import ModelVersion
from headrace.models.config.types import InputSpec, InstanceGroup, OutputSpec
from support.engines import config_of, ensemble, plane_of, step


class Sleeper:
    """A model that doubles, knows whether it sleeps, and fails a request that reaches it asleep."""

    def __init__(self) -> None:
        self.level = 0
        self.computed = 0
        self.calls: list[str] = []
        self.problem: Exception | None = None
        """Raised by the next sleep or wake."""
        self.hold = threading.Event()
        self.hold.set()
        """Cleared: computing, sleeping and waking wait."""
        self.closed = 0

    def open(self, placement: Placement) -> Sleeper:
        return self

    def compute(self, inputs: Mapping[str, Any], requested: Collection[str]) -> Mapping[str, Any]:
        if self.level:
            raise RuntimeError("computed while asleep")
        self.hold.wait(30)
        self.computed += 1
        return {"OUTPUT0": inputs["INPUT0"] * 2}

    def sleep(self, level: SleepLevel) -> Mapping[str, int]:
        self.change(f"sleep {level}")
        self.level = level
        return {"host": 100 * level}

    def wake(self) -> None:
        self.change("wake")
        self.level = 0

    def change(self, call: str) -> None:
        self.hold.wait(30)
        self.calls.append(call)
        problem, self.problem = self.problem, None
        if problem is not None:
            raise problem

    def close(self) -> None:
        self.closed += 1


def request(value: float = 1.0) -> InferRequest:
    return InferRequest("m", [Tensor("INPUT0", FP32, np.full((1, 4), value, np.float32))], "", str(value))


def run(test: Callable[[DataPlane, Sleeper], Awaitable[None]], runs: str = "thread", **more: Any) -> None:
    async def main() -> None:
        model = Sleeper()
        spec: dict[str, Any] = {"instance_groups": (InstanceGroup("m", runs=runs),), **more}  # type: ignore[arg-type]
        plane = await plane_of([(config_of("m", **spec), model), (config_of("plain"), lambda inputs: inputs)])
        async with asyncio.timeout(60):
            await test(plane, model)
            await version_of(plane).retire(5)
        assert model.closed == 2  # the instance, and the model

    asyncio.run(main())


def version_of(plane: DataPlane) -> ModelVersion:
    version = plane.find("m")
    assert isinstance(version, ModelVersion)
    return version


def gate_of(plane: DataPlane) -> SleepGate:
    gate = version_of(plane).gate
    assert gate is not None
    return gate


def ask(plane: DataPlane, value: float = 1.0) -> asyncio.Future[float]:
    """The first number of the answer."""
    future: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def done(result: InferResponse | BaseException) -> None:
        assert not future.done(), "answered twice"
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(float(result.outputs[0].array[0, 0]))

    plane.infer(request(value), done)
    return future


async def until(check: Callable[[], Any]) -> None:
    while not check():
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("runs", ["inline", "thread"])
@pytest.mark.parametrize("level", [1, 2])
def test_a_request_wakes_a_model(runs: str, level: SleepLevel) -> None:
    async def test(plane: DataPlane, model: Sleeper) -> None:
        assert await ask(plane, 3) == 6
        reports = await plane.sleep("m", level)
        assert (reports["1"].state, reports["1"].level, reports["1"].freed) == ("asleep", level, {"host": 100 * level})
        (entry,) = (entry for entry in plane.states() if entry.name == "m")
        assert entry.state is State.READY
        assert entry.reason == f"asleep at level {level}: the next request wakes it"
        assert plane.is_ready("m")
        assert plane.config("m").name == "m"
        assert plane.metadata("m").inputs[0].name == "INPUT0"
        assert model.calls == [f"sleep {level}"]  # none of this wakes it
        assert await ask(plane, 4) == 8
        assert model.calls == [f"sleep {level}", "wake"]
        assert gate_of(plane).report.state == "awake"
        assert gate_of(plane).report.wakes == 1
        assert all(not entry.reason for entry in plane.states())
        assert version_of(plane).statistics.received == 2

    run(test, runs)


def test_the_express_path_is_closed_while_it_sleeps() -> None:
    specs = {
        "inputs": (InputSpec("INPUT0", FP32, (4,)),),
        "outputs": (OutputSpec("OUTPUT0", FP32, (4,)),),
        "scheduling": None,
        "max_batch_size": 1,
    }

    async def test(plane: DataPlane, model: Sleeper) -> None:
        version = version_of(plane)
        express = version.express
        assert express is not None
        answer = plane.answer(request(3))
        assert answer is not None
        assert answer.outputs[0].array[0, 0] == 6
        await plane.sleep("m", 1)
        assert plane.answer(request(3)) is None
        version.record_timelines(None)
        assert version.express is None
        assert await ask(plane, 3) == 6
        assert version.express is express
        assert plane.answer(request(3)) is not None

    run(test, "inline", **specs)


def test_requests_in_flight_end_first_and_later_ones_wait() -> None:
    async def test(plane: DataPlane, model: Sleeper) -> None:
        model.hold.clear()
        first = [ask(plane, value) for value in range(5)]
        await until(lambda: version_of(plane).statistics.in_flight == 5)
        sleeping = asyncio.create_task(plane.sleep("m", 2))
        await until(lambda: gate_of(plane).report.state == "falling asleep")
        later = [ask(plane, value) for value in range(10, 15)]
        await asyncio.sleep(0.05)
        assert not sleeping.done()
        assert not model.calls
        model.hold.set()
        assert await asyncio.gather(*first) == [0, 2, 4, 6, 8]
        await sleeping
        assert await asyncio.gather(*later) == [20, 22, 24, 26, 28]
        assert model.calls == ["sleep 2", "wake"]

    run(test)


def test_many_requests_while_it_sleeps_and_wakes_again_and_again() -> None:
    async def test(plane: DataPlane, model: Sleeper) -> None:
        async def client(number: int) -> None:
            for turn in range(30):
                assert await ask(plane, number + turn) == 2 * (number + turn)
                await asyncio.sleep(0.001 * (number % 3))

        async def operator() -> None:
            while not clients.done():
                await plane.sleep("m", 2)
                await asyncio.sleep(0.002)
                await plane.wake("m")
                await plane.sleep("m", 1)

        clients = asyncio.gather(*(client(number) for number in range(20)))
        await asyncio.gather(clients, operator())
        await plane.wake("m")
        assert gate_of(plane).report.wakes == model.calls.count("wake") >= 2
        assert all("wake" not in pair for pair in zip(model.calls, model.calls[1:], strict=False) if pair[0] == pair[1])
        statistics = version_of(plane).statistics
        assert statistics.in_flight == 0
        assert statistics.received == 20 * 30

    run(test)


def test_it_sleeps_deeper_but_not_lighter() -> None:
    async def test(plane: DataPlane, model: Sleeper) -> None:
        await plane.sleep("m", 1)
        reports = await plane.sleep("m", 2)
        assert (reports["1"].level, reports["1"].freed) == (2, {"host": 300})
        assert (await plane.sleep("m", 1))["1"].level == 2
        assert model.calls == ["sleep 1", "sleep 2"]
        assert (await plane.wake("m"))["1"].state == "awake"
        assert (await plane.wake("m"))["1"].state == "awake"
        assert model.calls == ["sleep 1", "sleep 2", "wake"]

    run(test)


def test_several_callers_at_once_are_one_change() -> None:
    async def test(plane: DataPlane, model: Sleeper) -> None:
        await asyncio.gather(*(plane.sleep("m", 2) for _ in range(5)))
        assert model.calls == ["sleep 2"]
        await asyncio.gather(*(plane.wake("m") for _ in range(5)), *(ask(plane, value) for value in range(5)))
        assert model.calls == ["sleep 2", "wake"]

    run(test)


def test_a_model_that_does_not_fall_asleep_serves_on() -> None:
    async def test(plane: DataPlane, model: Sleeper) -> None:
        model.problem = FailedPrecondition("it keeps state")
        model.hold.clear()
        sleeping = asyncio.create_task(plane.sleep("m", 2))
        await until(lambda: gate_of(plane).report.state == "falling asleep")
        waiting = ask(plane, 5)
        model.hold.set()
        with pytest.raises(FailedPrecondition, match="it keeps state"):
            await sleeping
        assert await waiting == 10
        assert model.calls == ["sleep 2"]
        await plane.sleep("m", 1)
        model.problem = FailedPrecondition("it keeps state")
        with pytest.raises(FailedPrecondition, match="it keeps state"):
            await plane.sleep("m", 2)
        assert gate_of(plane).report.level == 1
        assert await ask(plane, 6) == 12

    run(test)


def test_a_failed_wake_is_reported_to_all_and_tried_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(sleep_module, "monotonic", lambda: now[0])

    async def test(plane: DataPlane, model: Sleeper) -> None:
        await plane.sleep("m", 2)
        model.problem = ResourceExhausted("no room for the weights")
        model.hold.clear()
        waiting = [ask(plane, value) for value in range(4)]
        model.hold.set()
        for future in waiting:
            with pytest.raises(ResourceExhausted, match="no room for the weights"):
                await future
        with pytest.raises(ResourceExhausted, match="no room for the weights"):
            ask(plane)
        assert model.calls == ["sleep 2", "wake"]
        assert gate_of(plane).report.state == "asleep"
        now[0] += 1.5
        model.problem = ValueError("secret words")
        with pytest.raises(Exception, match="the server's log has the details") as caught:
            await ask(plane)
        assert "secret" not in str(caught.value)
        now[0] += 1.5
        assert await ask(plane, 7) == 14
        assert version_of(plane).statistics.in_flight == 0

    run(test)


def test_a_request_waits_only_so_long() -> None:
    async def test(plane: DataPlane, model: Sleeper) -> None:
        await plane.sleep("m", 2)
        gate_of(plane)._wait_seconds = 0.05
        model.hold.clear()
        with pytest.raises(Unavailable, match="'m' version 1 is waking and does not serve after") as caught:
            await ask(plane)
        assert caught.value.retry_after_seconds
        model.hold.set()
        await plane.wake("m")
        assert model.computed == 0
        assert await ask(plane) == 2

    run(test)


def test_a_model_in_use_for_too_long_stays_awake() -> None:
    async def test(plane: DataPlane, model: Sleeper) -> None:
        gate_of(plane)._wait_seconds = 0.05
        model.hold.clear()
        asked = ask(plane, 2)
        await until(lambda: version_of(plane).statistics.in_flight == 1)
        with pytest.raises(Unavailable, match=r"has 1 requests in flight after 0\.05 s and stays awake"):
            await plane.sleep("m", 2)
        model.hold.set()
        assert await asked == 4
        assert not model.calls
        assert await ask(plane) == 2

    run(test)


def test_a_request_that_is_cancelled_while_it_waits() -> None:
    async def test(plane: DataPlane, model: Sleeper) -> None:
        await plane.sleep("m", 2)
        model.hold.clear()
        results: list[Any] = []
        pending = plane.infer(request(), results.append)
        other = ask(plane, 9)
        pending.cancel()
        assert len(results) == 1
        assert gate_of(plane).waiting == 1
        model.hold.set()
        assert await other == 18
        assert len(results) == 1
        assert model.computed == 1

    run(test)


def test_a_wrong_request_does_not_wake_it() -> None:
    async def test(plane: DataPlane, model: Sleeper) -> None:
        await plane.sleep("m", 1)
        with pytest.raises(InvalidArgument):
            plane.infer(InferRequest("m", [Tensor("WRONG", FP32, np.zeros((1, 4), np.float32))]), lambda _: None)
        assert model.calls == ["sleep 1"]

    run(test)


def test_a_caller_that_gives_up_leaves_no_model_half_asleep() -> None:
    async def test(plane: DataPlane, model: Sleeper) -> None:
        model.hold.clear()
        caller = asyncio.create_task(plane.sleep("m", 2))
        await until(lambda: gate_of(plane).report.state == "falling asleep")
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        waiting = ask(plane, 5)
        model.hold.set()
        assert await waiting == 10
        assert model.calls == ["sleep 2", "wake"]

    run(test)


@pytest.mark.parametrize("while_waking", [False, True])
def test_a_sleeping_version_retires(while_waking: bool) -> None:
    async def test(plane: DataPlane, model: Sleeper) -> None:
        await plane.sleep("m", 2)
        version = version_of(plane)
        if while_waking:
            model.hold.clear()
            waiting = ask(plane)
            retiring = asyncio.create_task(version.retire(0))
            with pytest.raises(Unavailable, match="was unloaded"):
                await waiting
            assert not retiring.done()
            model.hold.set()
            await retiring
        else:
            await version.retire(0)
        with pytest.raises(Unavailable, match="was unloaded"):
            ask(plane)
        with pytest.raises(Unavailable, match="was unloaded"):
            await version.sleep(2)
        assert model.closed == 2

    async def main() -> None:
        model = Sleeper()
        plane = await plane_of([(config_of("m"), model)])
        async with asyncio.timeout(60):
            await test(plane, model)

    asyncio.run(main())


def test_models_that_cannot_sleep_are_refused_by_name() -> None:
    async def test(plane: DataPlane, model: Sleeper) -> None:
        with pytest.raises(
            FailedPrecondition, match="model 'plain' cannot sleep: backend 'function' does not support it"
        ):
            await plane.sleep("plain", 1)
        with pytest.raises(NotFound, match="unknown model: 'nobody'"):
            await plane.sleep("nobody", 1)
        with pytest.raises(NotFound, match="unknown model: 'nobody'"):
            await plane.wake("nobody")
        with pytest.raises(FailedPrecondition, match="model 'plain' cannot sleep"):
            await plane.wake("plain")
        assert plane.sleep_reports("plain") == {}
        assert plane.sleep_reports("nobody") == {}

    run(test)


def test_an_ensemble_is_refused_and_wakes_its_models() -> None:
    async def main() -> None:
        model = Sleeper()
        whole = ensemble(step("m", "INPUT0=IN", "OUTPUT0=OUT"))
        plane = await plane_of([(config_of("m"), model), whole])
        with pytest.raises(FailedPrecondition, match="'ensemble' is an ensemble and has no memory"):
            await plane.sleep("ensemble", 1)
        await plane.sleep("m", 2)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        plane.infer(InferRequest("ensemble", [Tensor("IN", FP32, np.ones((1, 4), np.float32))]), future.set_result)
        result = await asyncio.wait_for(future, 30)
        assert result.outputs[0].array[0, 0] == 2
        assert model.calls == ["sleep 2", "wake"]

    asyncio.run(main())
