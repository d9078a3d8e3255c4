# SPDX-License-Identifier: Apache-2.0
"""The short way of plain requests: it answers what the long way would, and takes nothing that it should not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from headrace.core.dtypes import FP32
from headrace.core.errors import Internal, InvalidArgument, Unavailable
from headrace.core.requests import InferRequest, InferResponse
from headrace.core.tensors import Tensor
from headrace.engine.scheduling.scheduler import ALONE_BELOW_NS, ExecutionPlacement
from headrace.models.config.types import DynamicBatching, InputSpec, InstanceGroup, ModelConfig, OutputSpec
from support.engines import Recorder, config_of, counted, serving_plane, submit

ROW = np.arange(4, dtype=np.float32)


def plain(name: str = "plain", *, most: int = 8, dims: tuple[int, ...] = (4,), **more: Any) -> ModelConfig:
    """One tensor of fixed type and shape, one request at a time."""
    settings: dict[str, Any] = {
        "max_batch_size": most,
        "inputs": (InputSpec("INPUT0", FP32, (4,)),),
        "outputs": (OutputSpec("OUTPUT0", FP32, dims),),
        "scheduling": None,
    }
    return config_of(name, **{**settings, **more})


def doubled(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"OUTPUT0": inputs["INPUT0"] * 2}


def request(array: Any = None, model: str = "plain", **more: Any) -> InferRequest:
    return InferRequest(model, [Tensor.of("INPUT0", ROW[None] if array is None else array)], **more)


def run(test: Any) -> None:
    asyncio.run(test())


@pytest.mark.parametrize(("most", "shape"), [(8, (1, 4)), (8, (3, 4)), (0, (4,))])
def test_a_plain_request_is_answered_immediately(most: int, shape: tuple[int, ...]) -> None:
    async def main() -> None:
        async with serving_plane([(plain(most=most), doubled)]) as plane:
            array = np.random.default_rng(1).random(shape, dtype=np.float32)
            answer = plane.answer(request(array, id="seven"))
            assert isinstance(answer, InferResponse)
            assert (answer.model_name, answer.model_version, answer.id) == ("plain", "1", "seven")
            np.testing.assert_array_equal(answer.outputs[0].array, array * 2)
            statistics = counted(plane, "plain")
            rows = shape[0] if most else 1
            assert (statistics.executions, statistics.inferences, statistics.in_flight) == (1, rows, 0)
            assert statistics.total().success == 1
            assert statistics.log.reasons["one at a time"] == 1
            assert statistics.last_inference_ms > 0

    run(main)


@pytest.mark.parametrize(
    "config",
    [
        plain(scheduling=DynamicBatching(max_queue_delay_microseconds=100)),
        plain(scheduling=DynamicBatching(preferred_batch_sizes=(4,))),
        plain(
            scheduling=DynamicBatching(preserve_ordering=True),
            instance_groups=(InstanceGroup("plain", count=2, runs="inline"),),
        ),
        plain(scheduling=DynamicBatching(priority_levels=2)),
        plain(decoupled=True),
        plain(response_cache=True),
        plain(inputs=(InputSpec("INPUT0", FP32, (4,)), InputSpec("INPUT1", FP32, (4,), optional=True))),
        plain(outputs=(OutputSpec("OUTPUT0", FP32, (4,), reshape=(2, 2)),)),
    ],
    ids=["delay", "preferred size", "ordering", "priorities", "decoupled", "cache", "two inputs", "reshape"],
)
def test_other_models_have_no_express(config: ModelConfig) -> None:
    async def main() -> None:
        async with serving_plane([(config, doubled)]) as plane:
            (version,) = plane.statistics("plain")
            assert version.express is None
            assert plane.answer(request()) is None

    run(main)


def test_a_batching_model_computes_requests_at_once_only_while_it_is_quicker_than_a_batch() -> None:
    async def main() -> None:
        auto = plain(scheduling=DynamicBatching(), instance_groups=(InstanceGroup("plain", runs="auto"),))
        async with serving_plane([(auto, doubled)]) as plane:
            (version,) = plane.statistics("plain")
            execution = version._scheduler.idle[0].execution
            assert plane.answer(request()) is None
            for _ in range(8):
                execution.record(40_000, 1, ALONE_BELOW_NS + 1)
            assert execution.inline and not execution.alone
            assert plane.answer(request()) is None
            quick = version._scheduler.idle[0].execution = ExecutionPlacement("auto")
            for _ in range(8):
                quick.record(40_000, 1, ALONE_BELOW_NS - 1)
            quick.slow_ns = 1 << 62  # this machine may be slow
            answer = plane.answer(request())
            assert isinstance(answer, InferResponse)
            np.testing.assert_array_equal(answer.outputs[0].array, ROW[None] * 2)
            statistics = counted(plane, "plain")
            assert (statistics.executions, statistics.log.reasons["idle instance"]) == (1, 1)

    run(main)


def test_requests_of_any_size_that_the_model_takes_are_answered_and_no_others() -> None:
    async def main() -> None:
        variable = plain(inputs=(InputSpec("INPUT0", FP32, (-1,)),), outputs=(OutputSpec("OUTPUT0", FP32, (-1,)),))
        async with serving_plane([(variable, doubled)]) as plane:
            for shape in ((1, 4), (1, 5), (8, 4), (1, 4), (8, 5)):
                array = np.ones(shape, np.float32)
                answer = plane.answer(request(array))
                assert isinstance(answer, InferResponse)
                np.testing.assert_array_equal(answer.outputs[0].array, array * 2)
            for wrong in ((9, 4), (4,), (1, 1, 4)):
                assert plane.answer(request(np.ones(wrong, np.float32))) is None

    run(main)


def test_values_are_checked_every_time_where_the_model_takes_finite_ones_only() -> None:
    async def main() -> None:
        async with serving_plane([(plain(inputs=(InputSpec("INPUT0", FP32, (4,), finite=True),)), doubled)]) as plane:
            assert isinstance(plane.answer(request()), InferResponse)
            infinite = request(np.full((1, 4), np.inf, np.float32))
            assert plane.answer(infinite) is None
            with pytest.raises(InvalidArgument, match="NaN or infinite"):
                plane.infer(infinite, lambda _: None)

    run(main)


def test_a_shape_that_was_right_for_other_rows_is_not_taken_for_granted() -> None:
    async def main() -> None:
        variable = plain(inputs=(InputSpec("INPUT0", FP32, (-1,)),), outputs=(OutputSpec("OUTPUT0", FP32, (-1,)),))
        answers = iter([np.zeros((2, 4), np.float32), np.zeros((2, 4), np.float32)])
        async with serving_plane([(variable, lambda _: {"OUTPUT0": next(answers)})]) as plane:
            assert isinstance(plane.answer(request(np.ones((2, 4), np.float32))), InferResponse)
            with pytest.raises(Internal, match="first dimension must be 1"):
                plane.answer(request(np.ones((1, 4), np.float32)))

    run(main)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (request(ROW), "unexpected shape|batch dimension"),
        (request(np.zeros((1, 5), np.float32)), "unexpected shape"),
        (request(np.zeros((9, 4), np.float32)), "batch-size must be <= 8"),
        (request(np.zeros((0, 4), np.float32)), "at least 1"),
        (request(np.float32(1)), "batch dimension"),
        (request(np.zeros((1, 4), np.int32)), "data-type"),
        (InferRequest("plain", [Tensor.of("OTHER", ROW[None])]), "unexpected inference input"),
        (InferRequest("plain", []), "expected 1 inputs"),
    ],
)
def test_wrong_requests_are_refused_in_the_usual_words(wrong: InferRequest, text: str) -> None:
    async def main() -> None:
        async with serving_plane([(plain(), doubled)]) as plane:
            assert plane.answer(wrong) is None
            with pytest.raises(InvalidArgument, match=text):
                plane.infer(wrong, lambda _: None)
            assert counted(plane, "plain").total().fail == 1

    run(main)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({}, "did not return its output"),
        ({"OUTPUT0": np.zeros((1, 4))}, "declares FP32"),
        ({"OUTPUT0": np.zeros((2, 4), np.float32)}, "first dimension must be 1"),
        ({"OUTPUT0": np.zeros((1, 5), np.float32)}, "declares"),
    ],
)
def test_a_wrong_result_gets_the_usual_message(result: Mapping[str, Any], text: str) -> None:
    async def main() -> None:
        async with serving_plane([(plain(), lambda _: result)]) as plane:
            with pytest.raises(Internal, match=text):
                plane.answer(request())
            statistics = counted(plane, "plain")
            assert (statistics.total().fail, statistics.executions, statistics.in_flight) == (1, 0, 0)

    run(main)


def test_a_model_that_raises_fails_its_request_and_lives() -> None:
    def fragile(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        if inputs["INPUT0"][0, 0] < 0:
            raise InvalidArgument("no negative numbers")
        return doubled(inputs)

    async def main() -> None:
        async with serving_plane([(plain(), fragile)]) as plane:
            with pytest.raises(InvalidArgument, match="no negative numbers"):
                plane.answer(request(-ROW[None] - 1))
            assert isinstance(plane.answer(request()), InferResponse)
            statistics = counted(plane, "plain").total()
            assert (statistics.success, statistics.fail) == (1, 1)

    run(main)


def test_a_request_without_a_model_is_left_to_infer() -> None:
    async def main() -> None:
        async with serving_plane([(plain(), doubled)]) as plane:
            assert plane.answer(request(model="other")) is None
            assert plane.answer(request(model_version="7")) is None
            assert isinstance(plane.answer(request(model_version="1")), InferResponse)

    run(main)


def test_a_slow_model_leaves_the_loop() -> None:
    async def main() -> None:
        def slow(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
            time.sleep(0.002)
            return doubled(inputs)

        async with serving_plane([(plain(instance_groups=(InstanceGroup("plain", runs="auto"),)), slow)]) as plane:
            (version,) = plane.statistics("plain")
            version._scheduler.idle[0].execution.inline = True
            answers = [plane.answer(request()) for _ in range(5)]
            assert isinstance(answers[0], InferResponse)
            assert answers[-1] is None

    run(main)


def test_requests_that_wait_are_not_overtaken() -> None:
    async def main() -> None:
        recorder = Recorder(lambda rows: rows)
        async with serving_plane([(plain(), recorder)]) as plane:
            received: list[float] = []

            def note(result: Any) -> None:
                received.append(float(result.outputs[0].array[0, 0]))

            # A request with named outputs takes the long way: the plain one behind it must wait for it.
            from headrace.core.requests import RequestedOutput

            plane.infer(request(np.full((1, 4), 1, np.float32), outputs=[RequestedOutput("OUTPUT0")]), note)
            assert plane.answer(request(np.full((1, 4), 2, np.float32))) is None
            plane.infer(request(np.full((1, 4), 2, np.float32)), note)
            assert received == []
            await submit(plane, "plain", INPUT0=np.full((1, 4), 3, np.float32)).answer()
            assert received == [1, 2]

    run(main)


def test_a_retiring_version_takes_no_more_express_requests() -> None:
    async def main() -> None:
        async with serving_plane([(plain(), doubled)]) as plane:
            (version,) = plane.statistics("plain")
            await version.retire(1)
            assert plane.answer(request()) is None
            with pytest.raises(Unavailable):
                version.infer(request(), lambda _: None)

    run(main)


def test_express_answers_are_counted_whenever_statistics_are_read() -> None:
    async def main() -> None:
        async with serving_plane([(plain(), doubled)]) as plane:
            for _ in range(3):
                plane.answer(request())
            first = counted(plane, "plain")
            assert (first.executions, first.total().success, first.log.reasons["one at a time"]) == (3, 3, 3)
            plane.answer(request())
            plane.answer(request(np.zeros((5, 4), np.float32)))
            second = counted(plane, "plain")
            assert second is first
            assert (second.executions, second.inferences, second.in_flight) == (5, 9, 0)
            assert [record.rows for record in second.log.recent] == [1, 1, 1, 5, 1]
            (version,) = plane.statistics("plain")
            plane.answer(request())
            await version.retire(1)
            assert version._statistics.executions == 6

    run(main)
