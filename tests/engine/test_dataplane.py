# SPDX-License-Identifier: Apache-2.0
"""The data plane: names and versions, what models say of themselves, and every answer to its own caller."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace.core.dtypes import BF16, FP32, INT64
from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument, NotFound, Unavailable
from headrace.core.requests import InferRequest, InferResponse, RequestedOutput
from headrace.core.tensors import Tensor
from headrace.engine.dataplane import TensorMetadata
from headrace.engine.engine import EngineSettings, open_engine
from headrace.engine.repository.states import State
from headrace.models.config.types import InputSpec, InstanceGroup, OutputSpec
from support.engines import Recorder, array_of, ask, builtin_plane, config_of, counted, plane_of, serving_plane, submit

PAYLOADS = 32_000
MANY_PAYLOADS = int(os.environ.get("HEADRACE_TEST_PAYLOADS", "1000000"))
"""Unique requests in the last test: some ten seconds of them."""

ROW = np.zeros((1, 2), np.int32)
IMAGE = np.zeros((1, 3, 224, 224), np.float32)


def test_the_built_in_models_are_known_by_name_and_version() -> None:
    async def main() -> None:
        plane = await builtin_plane()
        assert plane.model_names() == ["first1000", "identity"]
        assert plane.ready
        assert plane.is_ready("identity")
        assert plane.is_ready("identity", "1")
        assert not plane.is_ready("identity", "2")
        assert not plane.is_ready("nope")
        index = await plane.index()
        assert [(entry.name, entry.version, entry.state) for entry in index] == [
            ("first1000", "1", State.READY),
            ("identity", "1", State.READY),
        ]
        assert await plane.index(ready_only=True) == index

    asyncio.run(main())


@pytest.mark.parametrize("version", ["", "1"])
def test_an_answer_names_its_model_version_and_request(version: str) -> None:
    async def main() -> None:
        plane = await builtin_plane()
        response = await ask(plane, "identity", INPUT0=ROW, request={"model_version": version, "id": "seven"})
        assert (response.model_name, response.model_version, response.id) == ("identity", "1", "seven")
        assert [output.name for output in response.outputs] == ["OUTPUT0"]

    asyncio.run(main())


def test_first1000_gives_the_first_thousand_of_each_image() -> None:
    async def main() -> None:
        images = np.arange(2 * 3 * 224 * 224, dtype=np.float32).reshape(2, 3, 224, 224)
        response = await ask(await builtin_plane(), "first1000", INPUT0=images)
        assert np.array_equal(array_of(response), images.reshape(2, -1)[:, :1000])

    asyncio.run(main())


@pytest.mark.parametrize(
    ("model", "array", "changes", "kind", "text"),
    [
        ("nope", ROW, {}, NotFound, "^Request for unknown model: 'nope' is not found$"),
        (
            "identity",
            ROW,
            {"model_version": "2"},
            NotFound,
            "^Request for unknown model: 'identity' version 2 is not found$",
        ),
        ("identity", ROW, {"model_version": "x" * 1000}, NotFound, "version x{32} is not found$"),
        ("..", ROW, {}, InvalidArgument, "not allowed"),
        ("", ROW, {}, InvalidArgument, "."),
        (
            "identity",
            ROW,
            {"outputs": [RequestedOutput("Y")]},
            InvalidArgument,
            "unexpected inference output 'Y' for model 'identity'",
        ),
        ("identity", np.zeros((), np.int32), {}, InvalidArgument, "batch dimension"),
        ("identity", np.zeros((0, 2), np.int32), {}, InvalidArgument, "batch dimension"),
        (
            "identity",
            np.zeros((65, 2), np.int32),
            {},
            InvalidArgument,
            "^inference request batch-size must be <= 64 for 'identity'$",
        ),
        (
            "first1000",
            np.zeros((1, 16), np.float32),
            {},
            InvalidArgument,
            r"Expected \[-1,3,224,224\], got \[1,16\]\.$",
        ),
        (
            "first1000",
            IMAGE.astype(np.float64),
            {},
            InvalidArgument,
            "data-type is 'FP64', but model 'first1000' expects 'FP32'",
        ),
    ],
)
def test_what_is_refused(model: str, array: Any, changes: dict[str, Any], kind: type[Exception], text: str) -> None:
    async def main() -> None:
        plane = await builtin_plane()
        # At once, and by both doors.
        for infer in (plane.infer, plane.infer_stream):
            with pytest.raises(kind, match=text):
                infer(InferRequest(model, [Tensor.of("INPUT0", array)], **changes), lambda *_: None)
        assert all(version.statistics.in_flight == 0 for version in plane.statistics())

    asyncio.run(main())


def test_the_largest_batch_is_let_in() -> None:
    async def main() -> None:
        response = await ask(await builtin_plane(), "identity", INPUT0=np.zeros((64, 1)))
        assert response.outputs[0].shape == (64, 1)

    asyncio.run(main())


def test_metadata() -> None:
    async def main() -> None:
        plane = await builtin_plane()
        metadata = plane.metadata("first1000")
        assert (metadata.name, metadata.versions) == ("first1000", ("1",))
        assert metadata.inputs == (TensorMetadata("INPUT0", "FP32", (-1, 3, 224, 224)),)
        assert metadata.outputs == (TensorMetadata("OUTPUT0", "FP32", (-1, 1000)),)
        config = config_of(
            "m",
            platform="onnxruntime_onnx",
            max_batch_size=0,
            inputs=(InputSpec("A", BF16, (2, -1)),),
            outputs=(OutputSpec("B", INT64, ()),),
        )
        metadata = (await plane_of([(config, Recorder())])).metadata("m", "1")
        assert metadata.platform == "onnxruntime_onnx"
        assert metadata.inputs == (TensorMetadata("A", "BF16", (2, -1)),)
        assert metadata.outputs == (TensorMetadata("B", "INT64", ()),)

    asyncio.run(main())


@pytest.mark.parametrize("question", ["metadata", "config", "statistics"])
def test_questions_about_models_that_are_not_there(question: str) -> None:
    async def main() -> None:
        plane = await builtin_plane()
        ask_about: Callable[..., Any] = getattr(plane, question)
        with pytest.raises(NotFound, match="^Request for unknown model: 'nope' is not found$"):
            ask_about("nope")
        unknown_version: type[HeadraceError] = NotFound
        text = "^Request for unknown model: 'identity' version 7 is not found$"
        if question == "statistics":  # another code and another message, as in Triton
            unknown_version, text = InvalidArgument, "^requested model version is not available for model 'identity'$"
        with pytest.raises(unknown_version, match=text):
            ask_about("identity", "7")
        with pytest.raises(InvalidArgument):
            ask_about("../../etc")

    asyncio.run(main())


def test_configurations_and_statistics() -> None:
    async def main() -> None:
        plane = await builtin_plane()
        assert plane.config("identity").max_batch_size == 64
        assert plane.config("first1000", "1").inputs[0].dtype is FP32
        assert {version.name for version in plane.statistics()} == {"identity", "first1000"}
        await ask(plane, "identity", INPUT0=np.zeros((3, 1)))
        for asked in (("identity",), ("identity", "1")):
            (version,) = plane.statistics(*asked)
            assert (version.version_text, version.statistics.inferences) == ("1", 3)
        assert counted(plane, "first1000").inferences == 0

    asyncio.run(main())


def test_built_in_models_are_not_loaded_and_unloaded() -> None:
    async def main() -> None:
        plane = await builtin_plane()
        for change in (plane.load("identity"), plane.unload("identity")):
            with pytest.raises(FailedPrecondition, match="built-in models are always loaded"):
                await change

    asyncio.run(main())


def test_a_server_that_stops_is_not_ready() -> None:
    async def main() -> None:
        plane = await builtin_plane()
        plane.accepting = False
        assert not plane.ready
        with pytest.raises(Unavailable, match="stopping"):
            await ask(plane, "nope", INPUT0=ROW)
        # What is there still serves: requests on their way are finished.
        assert await ask(plane, "identity", INPUT0=ROW)

    asyncio.run(main())


def test_an_engine_closes_its_models() -> None:
    async def main() -> None:
        engine = open_engine(EngineSettings())
        await engine.start()
        request = submit(engine.plane, "identity", INPUT0=ROW)
        await engine.close(10)
        assert isinstance(await request.answer(), InferResponse)
        with pytest.raises(Unavailable):
            submit(engine.plane, "identity", INPUT0=ROW)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("runs", "payloads"),
    [
        ("inline", PAYLOADS),
        ("thread", PAYLOADS),
        pytest.param("inline", MANY_PAYLOADS, marks=pytest.mark.slow),
        pytest.param("thread", MANY_PAYLOADS // 10, marks=pytest.mark.slow),
    ],
)
def test_every_one_of_many_answers_reaches_its_own_caller(runs: Any, payloads: int) -> None:
    """64 callers ask one question after the other, no two questions the same; each checks every answer it gets."""
    callers = 64
    item = payloads // callers

    class Caller:
        def __init__(self, number: int, infer: Callable[..., Any], finished: Callable[[], None]) -> None:
            self.answered = 0
            self._next = number * item
            self._last = self._next + item
            self._infer = infer
            self._finished = finished
            self.ask()

        def ask(self) -> None:
            array = np.array([[self._next]], np.int64)
            self._infer(InferRequest("m", [Tensor("INPUT0", INT64, array)]), self.on_result)

        def on_result(self, result: Any) -> None:
            if result.outputs[0].array.tolist() != [[self._next * 3 + 1]]:
                raise AssertionError(f"{self._next} got {result.outputs[0].array}")
            self.answered += 1
            self._next += 1
            if self._next < self._last:
                self.ask()
            else:
                self._finished()

    async def main() -> None:
        config = config_of(
            "m",
            inputs=(InputSpec("INPUT0", INT64, (1,)),),
            outputs=(OutputSpec("OUTPUT0", INT64, (1,)),),
            instance_groups=(InstanceGroup("m", runs=runs),),
        )
        async with serving_plane([(config, lambda inputs: {"OUTPUT0": inputs["INPUT0"] * 3 + 1})]) as plane:
            done = asyncio.Event()
            left = callers

            def finished() -> None:
                nonlocal left
                left -= 1
                if not left:
                    done.set()

            everyone = [Caller(number, plane.infer, finished) for number in range(callers)]
            await asyncio.wait_for(done.wait(), 100)
            assert [caller.answered for caller in everyone] == [item] * callers
            statistics = counted(plane, "m")
            assert statistics.total().success == statistics.inferences == item * callers
            assert statistics.in_flight == 0
            # They did share batches.
            assert statistics.executions < item * callers / 8

    asyncio.run(main())
