# SPDX-License-Identifier: Apache-2.0
"""Shape tensors have no batch dimension; requests share a batch if their values are equal, and the model gets them once."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from headrace.core.dtypes import FP32, INT32
from headrace.core.errors import InvalidArgument
from headrace.models.config.types import InputSpec, OutputSpec
from support.engines import answers, ask, config_of, serving_plane, submit


class Shaped:
    """Notes the shape tensor and the rows of each execution."""

    def __init__(self) -> None:
        self.received: list[tuple[Any, int]] = []

    def __call__(self, inputs: Any) -> Any:
        self.received.append((inputs["SHAPE"].tolist(), len(inputs["X"])))
        return {"Y": inputs["X"]}


CONFIG = config_of(
    "m",
    max_batch_size=8,
    inputs=(InputSpec("X", FP32, (2,)), InputSpec("SHAPE", INT32, (2,), is_shape_tensor=True)),
    outputs=(OutputSpec("Y", FP32, (2,)),),
)


def _x(rows: int, value: float = 0) -> Any:
    return np.full((rows, 2), value, np.float32)


def _shape(*values: int) -> Any:
    return np.array(values, np.int32)


def test_equal_values_share_a_batch_and_others_do_not() -> None:
    async def main() -> None:
        model = Shaped()
        async with serving_plane([(CONFIG, model)]) as plane:
            given = [(1, 4, 5), (2, 4, 5), (1, 5, 4), (1, 4, 5)]
            requests = [submit(plane, "m", X=_x(rows, n), SHAPE=_shape(*to)) for n, (rows, *to) in enumerate(given)]
            for n, answer in enumerate(await answers(requests)):
                assert answer.outputs[0].array.tolist() == _x(given[n][0], n).tolist()
        assert model.received == [([4, 5], 3), ([5, 4], 1), ([4, 5], 1)]

    asyncio.run(main())


def test_a_batch_dimension_is_accepted_where_its_rows_are_equal() -> None:
    async def main() -> None:
        model = Shaped()
        async with serving_plane([(CONFIG, model)]) as plane:
            requests = [
                submit(plane, "m", X=_x(2), SHAPE=np.array([[4, 5], [4, 5]], np.int32)),
                submit(plane, "m", X=_x(1), SHAPE=_shape(4, 5)),
            ]
            await answers(requests)
            assert model.received == [([[4, 5], [4, 5]], 3)]
            with pytest.raises(InvalidArgument, match="different values in its rows"):
                await ask(plane, "m", X=_x(2), SHAPE=np.array([[4, 5], [4, 6]], np.int32))
            with pytest.raises(InvalidArgument, match=r"Expected \[-1,2\], got \[1,3\]"):
                await ask(plane, "m", X=_x(1), SHAPE=np.array([[4, 5, 6]], np.int32))
            with pytest.raises(InvalidArgument, match="unexpected shape"):
                await ask(plane, "m", X=_x(1), SHAPE=_shape(4, 5, 6))

    asyncio.run(main())
