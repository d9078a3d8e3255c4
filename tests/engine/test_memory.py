# SPDX-License-Identifier: Apache-2.0
"""Nothing of a request stays: not after an answer, and not after any way of failing; not even until the collector runs."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from headrace.core.errors import HeadraceError, InvalidArgument
from headrace.core.requests import InferRequest, RequestedOutput
from headrace.core.tensors import Tensor
from headrace.engine.cache import ResponseCache
from headrace.engine.dataplane import DataPlane
from headrace.models.config.types import (
    DynamicBatching,
    EnsembleScheduling,
    EnsembleStep,
    InputSpec,
    InstanceGroup,
    OutputSpec,
    QueuePolicy,
)
from support.engines import Gate, RecordingCaller, config_of, counted, serving_plane, tensors_of
from support.waiting import eventually_async

REQUESTS = 2_000
TOGETHER = 50
WARM_UP = 600
ALLOWED = REQUESTS / 10
"""Objects more, or circles: one for every request would be ten times as many."""

THREAD = {"instance_groups": (InstanceGroup("m", runs="thread"),)}
WIDTH = 2048
"""16 KiB a request: a leak of each would be 32 MB."""


def raising(_: Any) -> Any:
    raise RuntimeError("broken")


def refusing(_: Any) -> Any:
    raise InvalidArgument("not this")


class Replies:
    """A `RequestInstance` that answers at once, in whatever way."""

    def __init__(self, reply: Callable[[Any], None]) -> None:
        self._reply = reply

    def execute(self, batch: Any, finished: Any) -> None:
        for work in batch:
            self._reply(work)
        finished()

    def close(self) -> None:
        pass


def raises_from_execute(work: Any) -> None:
    raise RuntimeError("broken")


def streams(work: Any) -> None:
    for _ in range(2):
        work.reply([Tensor.of("OUTPUT0", work.request.inputs[0].array)], final=False)
    work.reply(None)


def echoes(work: Any) -> None:
    work.reply([Tensor.of("OUTPUT0", work.request.inputs[0].array)])


TIMED = {"scheduling": DynamicBatching(default_queue_policy=QueuePolicy(default_timeout_microseconds=3_600_000_000))}

# What is asked of which model: each must be answered, or refused, by itself.
MODELS: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "answered": ({}, lambda inputs: {"OUTPUT0": inputs["INPUT0"]}, {}),
    "answered in a thread": (THREAD, lambda inputs: {"OUTPUT0": inputs["INPUT0"]}, {}),
    "answered one at a time": ({"scheduling": None}, lambda inputs: {"OUTPUT0": inputs["INPUT0"]}, {}),
    "answered by an instance": ({}, Replies(echoes), {}),
    "answered in time": (TIMED, lambda inputs: {"OUTPUT0": inputs["INPUT0"]}, {}),
    "a stream": ({"decoupled": True}, Replies(streams), {}),
    "refused: shape": ({"inputs": (InputSpec("INPUT0", None, (1,)),)}, raising, {}),
    "refused: input": ({"inputs": (InputSpec("OTHER", None, None),)}, raising, {}),
    "refused: output": ({}, raising, {"outputs": [RequestedOutput("X")]}),
    "refused: version": ({}, raising, {"model_version": "9"}),
    "refused: model": ({}, raising, {"model_name": "nope"}),
    "the model raises": ({}, raising, {}),
    "the model raises in a thread": (THREAD, raising, {}),
    "the model refuses": ({}, refusing, {}),
    "the model refuses in a thread": (THREAD, refusing, {}),
    "the output is wrong": ({}, lambda inputs: {"OUTPUT0": inputs["INPUT0"][:0]}, {}),
    "the output is missing": ({}, lambda inputs: {}, {}),
    "the instance raises": ({}, Replies(raises_from_execute), {}),
    "the instance's output is wrong": ({}, Replies(lambda work: work.reply([])), {}),
    "the instance does not answer": ({}, Replies(lambda work: work.reply(None)), {}),
}


@pytest.fixture(scope="module", autouse=True)
def all_others_set_aside() -> Iterator[None]:
    """Millions of objects of other tests, which the collector would look at each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Twenty thousand tracebacks are not what is looked at here."""
    logging.disable(logging.CRITICAL)
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    logging.disable(logging.NOTSET)


class Count:
    """A caller that keeps nothing."""

    def __init__(self) -> None:
        self.left = 0
        self._none_left = asyncio.Event()

    def on_result(self, result: Any = None) -> None:
        self.left -= 1
        if not self.left:
            self._none_left.set()

    def streamed(self, result: Any, final: bool) -> None:
        if final:
            self.on_result()

    async def wait_for_all(self) -> None:
        # At least one turn, in which schedulers see what has become of their queues.
        await asyncio.sleep(0)
        if self.left:
            self._none_left.clear()
            await asyncio.wait_for(self._none_left.wait(), 30)


def make(plane: DataPlane, kind: str, count: Count, inputs: Any = None) -> Any:
    """Ask once; answered or refused, it is counted."""
    changes = dict(MODELS[kind][2])
    inputs = inputs or tensors_of(INPUT0=np.zeros((1, WIDTH)))
    request = InferRequest(changes.pop("model_name", "m"), inputs, **changes)
    count.left += 1
    try:
        if kind == "a stream":
            return plane.infer_stream(request, count.streamed)
        return plane.infer(request, count.on_result)
    except HeadraceError:
        count.on_result()
        return None


async def many(ask: Callable[[], Any], count: Count, requests: int, together: int = TOGETHER) -> None:
    for _ in range(requests // together):
        for _ in range(together):
            ask()
        await count.wait_for_all()


async def flat(ask: Callable[[], Any], count: Count) -> None:
    """Ask very often: no object more than before, no circle for the collector, no memory."""
    # First what is kept on purpose: the records of the last 256 batches, and whatever is made once.
    await many(ask, count, WARM_UP, 2)
    await many(ask, count, WARM_UP)
    gc.collect()
    process = psutil.Process()
    objects, rss = len(gc.get_objects()), process.memory_info().rss
    await many(ask, count, REQUESTS)
    assert gc.collect() < ALLOWED
    await no_more_than(objects)
    assert process.memory_info().rss - rss < 16 * 1024 * 1024


async def no_more_than(objects: int) -> None:
    """A thread may need a moment until it has let go of its last batch."""
    await eventually_async(lambda: len(gc.get_objects()) - objects < ALLOWED, within=30, message="objects are gone")


@pytest.mark.parametrize("kind", MODELS)
def test_no_growth(kind: str) -> None:
    async def main() -> None:
        settings, model, _ = MODELS[kind]
        async with serving_plane([(config_of("m", **settings), model)]) as plane:
            count = Count()
            await flat(lambda: make(plane, kind, count), count)
            assert counted(plane, "m").in_flight == 0

    asyncio.run(main())


@pytest.mark.parametrize("kind", MODELS)
def test_a_request_is_freed_when_it_is_answered(kind: str) -> None:
    async def main() -> None:
        settings, model, _ = MODELS[kind]
        async with serving_plane([(config_of("m", **settings), model)]) as plane:
            await ask_and_forget(plane, kind)

    asyncio.run(main())


async def ask_and_forget(plane: DataPlane, kind: str) -> None:
    """Ask once, and wait until nobody holds the request's array any more."""
    count = Count()
    array = np.zeros((1, WIDTH))
    alive = weakref.ref(array)
    inputs = tensors_of(INPUT0=array)
    del array
    pending = make(plane, kind, count, inputs)
    del inputs
    await count.wait_for_all()
    del pending
    # A thread has to let go of what it passed on.
    await eventually_async(lambda: alive() is None, message="the request's array is gone")


class Holder:
    """A caller that holds its handle, to be able to give up: as every protocol does."""

    def __init__(self, plane: DataPlane, count: Count, stream: bool) -> None:
        self._count = count
        count.left += 1
        one = InferRequest("m", tensors_of(INPUT0=np.zeros((1, WIDTH))))
        self.pending = plane.infer_stream(one, self.streamed) if stream else plane.infer(one, self.on_result)

    def on_result(self, result: Any) -> None:
        self._count.on_result()

    def streamed(self, result: Any, final: bool) -> None:
        self._count.streamed(result, final)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("cancel", [True, False])
@pytest.mark.parametrize("kind", [kind for kind in MODELS if not kind.startswith("refused")])
def test_a_request_whose_handle_is_kept_is_freed_too(kind: str, cancel: bool, stream: bool) -> None:
    async def main() -> None:
        settings, model, _ = MODELS[kind]
        settings = {**settings, "decoupled": stream and settings.get("decoupled", False)}
        async with serving_plane([(config_of("m", **settings), model)]) as plane:
            count = Count()
            holder = Holder(plane, count, stream)
            alive = weakref.ref(holder)
            if cancel:
                await asyncio.sleep(0)
                holder.pending.cancel()
            await count.wait_for_all()
            del holder
            await eventually_async(lambda: alive() is None, message="the caller is gone")

    asyncio.run(main())


# Requests that give up, or come too many, behind an instance that is busy.


def busy(**policy: Any) -> dict[str, Any]:
    return {**THREAD, "max_batch_size": 1, "scheduling": DynamicBatching(default_queue_policy=QueuePolicy(**policy))}


def request(parameters: Any = None) -> InferRequest:
    return InferRequest("m", tensors_of(INPUT0=np.zeros((1, WIDTH))), parameters=parameters or {})


@pytest.mark.parametrize("policy", [{}, {"max_queue_size": 100_000}, {"default_timeout_microseconds": 3_600_000_000}])
def test_no_growth_by_those_who_give_up(policy: dict[str, Any]) -> None:
    async def main() -> None:
        gate = Gate()
        async with serving_plane([(config_of("m", **busy(**policy)), gate)]) as plane:
            count = Count()
            running = RecordingCaller()
            plane.infer(request(), running)
            await gate.entered()

            def give_up() -> None:
                count.left += 1
                plane.infer(request(), count.on_result).cancel()

            # One that stays: the others are not in front.
            waiting = RecordingCaller()
            plane.infer(request(), waiting)
            try:
                await flat(give_up, count)
            finally:
                gate.let(2)
            await running.answer()
            await waiting.answer()
            assert counted(plane, "m").failures == {"CANCELED": REQUESTS + 2 * WARM_UP}

    asyncio.run(main())


def test_no_growth_by_those_who_give_up_while_they_run() -> None:
    async def main() -> None:
        async with serving_plane([(config_of("m", **THREAD), lambda inputs: {"OUTPUT0": inputs["INPUT0"]})]) as plane:
            count = Count()

            async def give_up_running(requests: int) -> None:
                for _ in range(requests // TOGETHER):
                    count.left = TOGETHER
                    pendings = [plane.infer(request(), count.on_result) for _ in range(TOGETHER)]
                    await asyncio.sleep(0)
                    for pending in pendings:
                        pending.cancel()
                    del pending, pendings
                    await count.wait_for_all()

            await give_up_running(400 * TOGETHER)
            gc.collect()
            objects, rss = len(gc.get_objects()), psutil.Process().memory_info().rss
            await give_up_running(REQUESTS)
            assert gc.collect() < ALLOWED
            await no_more_than(objects)
            assert psutil.Process().memory_info().rss - rss < 16 * 1024 * 1024
            assert counted(plane, "m").in_flight == 0

    asyncio.run(main())


@pytest.mark.parametrize("policy", [{"max_queue_size": 1}, {"allow_timeout_override": True}])
def test_no_growth_by_those_who_are_rejected(policy: dict[str, Any]) -> None:
    async def main() -> None:
        gate = Gate()
        async with serving_plane([(config_of("m", **busy(**policy)), gate)]) as plane:
            count = Count()
            running, waiting = RecordingCaller(), RecordingCaller()
            plane.infer(request(), running)
            await gate.entered()
            plane.infer(request(), waiting)

            def rejected() -> None:
                count.left += 1
                try:
                    plane.infer(request({"timeout": 1}), count.on_result)
                except HeadraceError:
                    count.on_result()

            try:
                await flat(rejected, count)
            finally:
                gate.let(2)
            await running.answer()
            await waiting.answer()
            assert counted(plane, "m").failures["REJECTED"] >= REQUESTS

    asyncio.run(main())


def test_no_growth_by_hits_and_misses_of_the_cache() -> None:
    async def main() -> None:
        cache = ResponseCache(1024 * 1024)
        config = config_of("m", response_cache=True)
        async with serving_plane([(config, lambda inputs: {"OUTPUT0": inputs["INPUT0"]})], cache=cache) as plane:
            count = Count()
            number = 0

            def ask() -> None:
                nonlocal number
                number += 1
                count.left += 1
                array = np.full((1, WIDTH), number // 2)
                plane.infer(InferRequest("m", tensors_of(INPUT0=array)), count.on_result)

            await flat(ask, count)
            assert cache.used_bytes <= cache.capacity_bytes

    asyncio.run(main())


@pytest.mark.parametrize("fault", ["none", "raises", "refuses", "is gone"])
def test_no_growth_by_ensembles(fault: str) -> None:
    async def main() -> None:
        graph = config_of(
            "graph",
            inputs=(InputSpec("IN", None, None),),
            outputs=(OutputSpec("OUT", None, None),),
            scheduling=EnsembleScheduling(
                (
                    EnsembleStep("m", -1, {"INPUT0": "IN"}, {"OUTPUT0": "x"}),
                    EnsembleStep("nope" if fault == "is gone" else "n", -1, {"INPUT0": "x"}, {"OUTPUT0": "OUT"}),
                )
            ),
        )
        echo = lambda inputs: {"OUTPUT0": inputs["INPUT0"]}  # noqa: E731
        second = {"raises": raising, "refuses": refusing}.get(fault, echo)
        async with serving_plane([(config_of("m"), echo), (config_of("n"), second), (graph, None)]) as plane:
            count = Count()

            def ask() -> None:
                count.left += 1
                plane.infer(InferRequest("graph", tensors_of(IN=np.zeros((1, WIDTH)))), count.on_result)

            await flat(ask, count)
            assert counted(plane, "graph").in_flight == 0

    asyncio.run(main())
