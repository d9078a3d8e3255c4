# SPDX-License-Identifier: Apache-2.0
"""What a hostile tester found in batches: variable sizes in a reshape, padding that is cut back, batches nobody awaits."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from headrace.core.dtypes import FP32, INT64
from headrace.core.errors import Cancelled, Internal
from headrace.core.requests import InferRequest
from headrace.core.tensors import Tensor
from headrace.engine.execution.concatenation import BatchConcatenator, RaggedConcatenator
from headrace.engine.scheduling.dynamic_batcher import AutoDelay
from headrace.models.config.types import Dims, DynamicBatching, InputSpec, ModelConfig, OutputSpec
from support.engines import (
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


def reshaping(dims: Dims, wanted: Dims, most: int = 8, **more: Any) -> ModelConfig:
    return config_of(
        "m",
        max_batch_size=most,
        inputs=(InputSpec("INPUT0", INT64, dims, reshape=wanted, **more),),
        outputs=(OutputSpec("OUTPUT0", INT64, dims, reshape=wanted),),
    )


@pytest.mark.parametrize(
    ("most", "dims", "wanted", "sent", "seen"),
    [
        (8, (-1, 4), (-1, 2, 2), (2, 3, 4), (2, 3, 2, 2)),
        (8, (-1, 2, -1), (-1, 1, 2, -1), (2, 3, 2, 5), (2, 3, 1, 2, 5)),
        (8, (-1, 2, -1), (-1, 1, 2, -1), (1, 0, 2, 0), (1, 0, 1, 2, 0)),
        (0, (-1, 2, -1), (-1, 1, 2, -1), (3, 2, 5), (3, 1, 2, 5)),
        (8, (1,), (), (2, 1), (2,)),
    ],
)
def test_variable_sizes_stay_in_a_reshape(
    most: int, dims: Dims, wanted: Dims, sent: tuple[int, ...], seen: tuple[int, ...]
) -> None:
    array = np.arange(np.prod(sent)).reshape(sent)
    pending = pending_of(rows=sent[0] if most else 1, INPUT0=array)
    concatenator = BatchConcatenator(reshaping(dims, wanted, most))
    concatenated = concatenator.concatenate([pending])["INPUT0"]
    assert concatenated.shape == seen
    ((output,),) = concatenator.split([pending], {"OUTPUT0": concatenated})
    assert output.shape == sent
    assert np.array_equal(output.array, array)


def test_a_result_that_no_reshape_fits_is_the_models_fault() -> None:
    concatenator = BatchConcatenator(reshaping((-1, 4), (-1, 2, 2)))
    pending = pending_of(INPUT0=np.zeros((1, 3, 4), np.int64))
    for shape in ((1, 3, 2, 3), (5,), ()):
        with pytest.raises(Internal, match="reshape"):
            concatenator.split([pending], {"OUTPUT0": np.zeros(shape, np.int64)})


def test_a_padded_input_may_be_reshaped() -> None:
    concatenator = RaggedConcatenator(reshaping((-1, 4), (-1, 2, 2), pad_value=0))
    batch = [pending_of(INPUT0=np.ones((1, size, 4), np.int64)) for size in (1, 3)]
    assert concatenator.concatenate(batch)["INPUT0"].shape == (2, 3, 2, 2)


def test_padding_is_cut_where_the_input_varies() -> None:
    """The first size of the input is fixed, and is not the one to cut by."""
    config = config_of(
        "m",
        inputs=(InputSpec("INPUT0", INT64, (2, -1), pad_value=0),),
        outputs=(OutputSpec("OUTPUT0", INT64, (2, -1), padded_like="INPUT0"),),
    )
    arrays = [np.arange(1, 2 * size + 1).reshape(1, 2, size) for size in (1, 4, 3)]
    batch = [pending_of(INPUT0=array) for array in arrays]
    concatenator = RaggedConcatenator(config)
    answered = concatenator.split(batch, {"OUTPUT0": concatenator.concatenate(batch)["INPUT0"]})
    assert [output.array.tolist() for (output,) in answered] == [array.tolist() for array in arrays]


def test_a_delay_is_learned_from_batches_whose_callers_all_cancelled() -> None:
    """An error here would cost the next caller its answer."""
    delay = AutoDelay(500, 8)
    for now in range(200):
        delay.batch_finished([60_000_000], 0, 60_000_000)
        delay.adjust(now * 100_000_000)
    assert delay.nanoseconds == 0


def test_a_callback_may_cancel_another_request_of_its_batch() -> None:
    """As an ensemble does whose next step is refused. The other is answered, and counted, once."""

    async def main() -> None:
        models = [(config_of("m"), lambda inputs: {"OUTPUT0": inputs["INPUT0"]})]
        async with serving_plane(models) as plane:
            other = RecordingCaller()

            class First(RecordingCaller):
                def __call__(self, result: Any) -> None:
                    other.pending.cancel()
                    super().__call__(result)

            first = First()
            tensors = [Tensor.of("INPUT0", np.array([[1]]))]
            first.pending = plane.infer(InferRequest("m", tensors), first)
            other.pending = plane.infer(InferRequest("m", tensors), other)
            reported = await answers([first, other])
            assert isinstance(reported[1], Cancelled)
            statistics = counted(plane, "m")
            assert statistics.log.recent[0].requests == 2
            total = statistics.total()
            assert (statistics.in_flight, total.success, total.fail) == (0, 1, 1)
            assert len(other.received) == 1

    asyncio.run(main())


class Replies:
    """An instance that answers every other request with an error."""

    def execute(self, works: Any, finished: Any) -> None:
        for number, work in enumerate(works):
            work.reply(Internal("no") if number % 2 else [Tensor("OUTPUT0", FP32, np.zeros((1, 1), np.float32))])
        finished()

    def close(self) -> None:
        pass


def test_only_rows_that_succeed_are_inferences() -> None:
    async def main() -> None:
        config = config_of("m", outputs=(OutputSpec("OUTPUT0", FP32, (1,)),), scheduling=DynamicBatching())
        async with serving_plane([(config, Replies())]) as plane:
            row = np.zeros((1, 1), np.float32)
            reported = await answers([submit(plane, "m", INPUT0=row) for _ in range(4)])
            assert [isinstance(one, Internal) for one in reported] == [False, True, False, True]
            assert array_of(reported[0]).shape == (1, 1)
            statistics = counted(plane, "m")
            assert (statistics.executions, statistics.inferences, statistics.total().success) == (1, 2, 2)
            # Of a caller that gives up, too.
            streamed = Streamed(plane, "m", INPUT0=row)
            streamed.pending.cancel()
            await streamed.all()
            assert statistics.inferences == 2

    asyncio.run(main())


def test_a_delay_is_not_much_longer_than_the_arrival_time_of_companions() -> None:
    """Two clients that send their next requests when both are answered: they come together, and nobody else does."""
    delay = AutoDelay(30, 8)
    now_ns, compute_ns, apart_ns = 0, 200_000, 100_000
    chosen = []
    for _ in range(4000):
        took_ns = max(delay.nanoseconds, apart_ns) + compute_ns
        now_ns += took_ns
        delay.batch_finished([took_ns, took_ns - apart_ns], 2, compute_ns)
        delay.adjust(now_ns)
        chosen.append(delay.nanoseconds)
    late = chosen[1000:]
    assert sum(late) / len(late) < 1_000_000
