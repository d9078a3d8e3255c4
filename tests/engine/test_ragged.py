# SPDX-License-Identifier: Apache-2.0
"""Requests of different sizes in one batch: laid end to end with a description, or filled up and cut back."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.dtypes import BF16, BYTES, FP32, INT32, INT64, float32_to_bf16
from headrace.core.errors import Internal
from headrace.core.tensors import Tensor
from headrace.engine.execution.concatenation import RaggedConcatenator
from headrace.models.config.types import BatchInput, BatchInputKind, BatchOutput, InputSpec, ModelConfig, OutputSpec
from support.engines import answers, array_of, config_of, counted, pending_of, serving_plane, submit

RAGGED = InputSpec("INPUT0", INT64, (-1,), allow_ragged_batch=True)


def ragged(kind: BatchInputKind | None = None, dtype: Any = INT32, **more: Any) -> ModelConfig:
    described = () if kind is None else (BatchInput(kind, ("DESCRIPTION",), dtype, "INPUT0"),)
    settings: dict[str, Any] = {"inputs": (RAGGED,), "batch_inputs": described, **more}
    return config_of("m", **settings)


def three() -> list[Any]:
    """Of 2, 3 and (two rows of) 1 elements."""
    return [
        pending_of(INPUT0=np.array([[1, 2]])),
        pending_of(INPUT0=np.array([[3, 4, 5]])),
        pending_of(rows=2, INPUT0=np.array([[6], [7]])),
    ]


def test_a_ragged_input_is_laid_end_to_end() -> None:
    assert RaggedConcatenator(ragged()).concatenate(three()) == {
        "INPUT0": pytest.approx(np.array([1, 2, 3, 4, 5, 6, 7]))
    }
    # Alone too: the model sees one form of it.
    assert RaggedConcatenator(ragged()).concatenate(three()[2:])["INPUT0"].tolist() == [6, 7]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("BATCH_ELEMENT_COUNT", [2, 3, 2]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT", [2, 5, 7]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", [0, 2, 5, 7]),
        ("BATCH_ITEM_SHAPE", [[2], [3], [1], [1]]),
        ("BATCH_ITEM_SHAPE_FLATTEN", [2, 3, 1, 1]),
    ],
)
@pytest.mark.parametrize("dtype", [INT32, FP32])
def test_the_contents_of_a_batch_input(kind: BatchInputKind, expected: list[Any], dtype: Any) -> None:
    described = RaggedConcatenator(ragged(kind, dtype)).concatenate(three())["DESCRIPTION"]
    assert described.tolist() == expected
    assert described.dtype == dtype.numpy


def test_the_largest_count_may_be_a_shape() -> None:
    described = RaggedConcatenator(ragged("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE")).concatenate(three())["DESCRIPTION"]
    assert described.shape == (3,)


def test_item_shapes_have_every_dimension() -> None:
    spec = InputSpec("INPUT0", INT64, (-1, -1), allow_ragged_batch=True)
    batch = [pending_of(INPUT0=np.zeros((1, 2, 3), np.int64)), pending_of(rows=2, INPUT0=np.zeros((2, 4, 1), np.int64))]
    shapes = RaggedConcatenator(ragged("BATCH_ITEM_SHAPE", inputs=(spec,))).concatenate(batch)["DESCRIPTION"]
    assert shapes.tolist() == [[2, 3], [4, 1], [4, 1]]
    flat = RaggedConcatenator(ragged("BATCH_ITEM_SHAPE_FLATTEN", inputs=(spec,))).concatenate(batch)["DESCRIPTION"]
    assert flat.tolist() == [2, 3, 4, 1, 4, 1]


def test_a_description_may_have_several_names_and_plain_inputs_beside_it() -> None:
    config = ragged(
        inputs=(RAGGED, InputSpec("PLAIN", INT64, (1,))),
        batch_inputs=(BatchInput("BATCH_ELEMENT_COUNT", ("D0", "D1"), INT32, "INPUT0"),),
    )
    batch = [pending_of(INPUT0=np.ones((1, n), np.int64), PLAIN=np.array([[n]])) for n in (2, 1)]
    concatenated = RaggedConcatenator(config).concatenate(batch)
    assert concatenated["D0"].tolist() == concatenated["D1"].tolist() == [2, 1]
    assert concatenated["PLAIN"].tolist() == [[2], [1]]


def test_reshape_applies_to_the_other_inputs() -> None:
    config = ragged(inputs=(RAGGED, InputSpec("PLAIN", INT64, (1,), reshape=())))
    batch = [pending_of(INPUT0=np.ones((1, n), np.int64), PLAIN=np.array([[n]])) for n in (2, 1)]
    assert RaggedConcatenator(config).concatenate(batch)["PLAIN"].tolist() == [2, 1]


SCATTER = (BatchOutput(("OUTPUT0",), "INPUT0"),)


def test_scattered_outputs_have_the_shapes_of_their_input() -> None:
    concatenator = RaggedConcatenator(ragged(batch_outputs=SCATTER, outputs=(OutputSpec("OUTPUT0", INT64, (-1,)),)))
    answered = concatenator.split(three(), {"OUTPUT0": np.arange(7) * 10})
    assert [[tensor.array.tolist() for tensor in outputs] for outputs in answered] == [
        [[[0, 10]]],
        [[[20, 30, 40]]],
        [[[50], [60]]],
    ]
    assert answered[0][0].dtype is INT64


def test_scattered_and_plain_outputs_in_the_requested_order() -> None:
    config = ragged(
        batch_outputs=SCATTER, outputs=(OutputSpec("OUTPUT0", INT64, (-1,)), OutputSpec("PLAIN", INT64, (1,)))
    )
    concatenator = RaggedConcatenator(config)
    result = {"OUTPUT0": np.arange(7), "PLAIN": np.array([[1], [2], [3], [3]])}
    batch = three()
    batch[1] = pending_of(INPUT0=np.array([[3, 4, 5]]), outputs=["PLAIN", "OUTPUT0"])
    answered = concatenator.split(batch, result)
    assert [[tensor.name for tensor in outputs] for outputs in answered] == [
        ["OUTPUT0", "PLAIN"],
        ["PLAIN", "OUTPUT0"],
        ["OUTPUT0", "PLAIN"],
    ]
    assert answered[1][0].array.tolist() == [[2]]
    assert answered[2][1].array.tolist() == [[3], [3]]
    for missing in ("OUTPUT0", "PLAIN"):
        with pytest.raises(Internal, match=f"did not return its output '{missing}'"):
            concatenator.split(batch, {name: array for name, array in result.items() if name != missing})


@pytest.mark.parametrize(
    "wrong", [np.arange(6), np.arange(8), np.zeros(7, np.float64), np.zeros(7, np.int32), np.arange(0)]
)
def test_scattered_outputs_that_cannot_be_right(wrong: Any) -> None:
    concatenator = RaggedConcatenator(ragged(batch_outputs=SCATTER, outputs=(OutputSpec("OUTPUT0", INT64, (-1,)),)))
    with pytest.raises(Internal, match="'OUTPUT0'"):
        concatenator.split(three(), {"OUTPUT0": wrong})


def padded(pad: float = 0, like: str = "INPUT0", dims: Any = (-1,), dtype: Any = INT64) -> ModelConfig:
    return config_of(
        "m",
        inputs=(InputSpec("INPUT0", dtype, dims, pad_value=pad),),
        outputs=(OutputSpec("OUTPUT0", dtype, dims, padded_like=like),),
    )


def test_smaller_requests_are_filled_up() -> None:
    concatenated = RaggedConcatenator(padded(-1)).concatenate(three())["INPUT0"]
    assert concatenated.tolist() == [[1, 2, -1], [3, 4, 5], [6, -1, -1], [7, -1, -1]]


def test_equal_sizes_are_not_filled_up_and_one_is_not_copied() -> None:
    array = np.array([[1, 2]])
    assert RaggedConcatenator(padded()).concatenate([pending_of(INPUT0=array)])["INPUT0"] is array
    assert RaggedConcatenator(padded()).concatenate([pending_of(INPUT0=array)] * 2)["INPUT0"].tolist() == [
        [1, 2],
        [1, 2],
    ]


def test_every_dimension_is_filled_up() -> None:
    batch = [pending_of(INPUT0=np.ones((1, 1, 3), np.int64)), pending_of(INPUT0=np.ones((1, 2, 1), np.int64))]
    concatenated = RaggedConcatenator(padded(dims=(-1, -1))).concatenate(batch)["INPUT0"]
    assert concatenated.tolist() == [[[1, 1, 1], [0, 0, 0]], [[1, 0, 0], [1, 0, 0]]]


def test_strings_are_filled_up_with_empty_ones() -> None:
    batch = [pending_of(INPUT0=np.array([[b"a"]], object)), pending_of(INPUT0=np.array([[b"b", b"c"]], object))]
    assert RaggedConcatenator(padded(7, dtype=BYTES)).concatenate(batch)["INPUT0"].tolist() == [
        [b"a", b""],
        [b"b", b"c"],
    ]


@pytest.mark.parametrize("value", [0.0, 1.0, -1.5])
def test_bf16_is_filled_up_with_the_number_not_with_its_bits(value: float) -> None:
    bits = [np.array([[0x4000] * n], np.uint16) for n in (1, 2)]
    batch = [pending_of(INPUT0=Tensor("INPUT0", BF16, array)) for array in bits]
    concatenated = RaggedConcatenator(padded(value, dtype=BF16)).concatenate(batch)["INPUT0"]
    assert concatenated.dtype == np.uint16
    assert concatenated[0, 1] == float32_to_bf16(np.array([value], np.float32))[0]


def test_outputs_are_cut_back() -> None:
    concatenator = RaggedConcatenator(padded())
    batch = three()
    answered = concatenator.split(batch, {"OUTPUT0": concatenator.concatenate(batch)["INPUT0"]})
    assert [outputs[0].array.tolist() for outputs in answered] == [[[1, 2]], [[3, 4, 5]], [[6], [7]]]


def test_only_variable_sizes_are_split_and_only_where_configured() -> None:
    config = config_of(
        "m",
        inputs=(InputSpec("INPUT0", INT64, (-1,), pad_value=0),),
        outputs=(
            OutputSpec("A", INT64, (-1, 4), padded_like="INPUT0"),
            OutputSpec("B", INT64, (4, -1), padded_like="INPUT0"),
            OutputSpec("C", INT64, (-1,)),
        ),
    )
    result = {
        "A": np.zeros((4, 3, 4), np.int64),
        "B": np.zeros((4, 4, 3), np.int64),
        "C": np.zeros((4, 3), np.int64),
    }
    answered = RaggedConcatenator(config).split(three(), result)
    assert [[tensor.shape for tensor in outputs] for outputs in answered] == [
        [(1, 2, 4), (1, 4, 2), (1, 3)],
        [(1, 3, 4), (1, 4, 3), (1, 3)],
        [(2, 1, 4), (2, 4, 1), (2, 3)],
    ]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6)), min_size=1, max_size=20), st.booleans())
def test_any_sizes_through_a_plane(sizes: list[tuple[int, int]], pad: bool) -> None:
    async def main() -> None:
        outputs = (OutputSpec("OUTPUT0", INT64, (-1,)),)
        config = padded() if pad else ragged(batch_outputs=SCATTER, outputs=outputs)
        async with serving_plane([(config, lambda inputs: {"OUTPUT0": inputs["INPUT0"] * 2})]) as plane:
            arrays = [np.full((rows, width), number + 1) for number, (rows, width) in enumerate(sizes)]
            results = await answers([submit(plane, "m", INPUT0=array) for array in arrays])
            for array, result in zip(arrays, results, strict=True):
                assert array_of(result).tolist() == (array * 2).tolist()
            assert counted(plane, "m").log.reasons["shape change"] == 0

    asyncio.run(main())


def test_descriptions_are_made_for_plain_inputs_too() -> None:
    async def main() -> None:
        seen: list[Any] = []

        def compute(inputs: Any) -> Any:
            seen.append(inputs["DESCRIPTION"].tolist())
            return {"OUTPUT0": inputs["INPUT0"]}

        config = ragged("BATCH_ELEMENT_COUNT", inputs=(InputSpec("INPUT0", INT64, (2,)),))
        async with serving_plane([(config, compute)]) as plane:
            await answers([submit(plane, "m", INPUT0=np.zeros((rows, 2), np.int64)) for rows in (1, 3)])
        assert seen == [[2, 6]]

    asyncio.run(main())


def test_a_wrong_scatter_costs_the_guilty_request_only(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        config = ragged(batch_outputs=SCATTER, outputs=(OutputSpec("OUTPUT0", INT64, (-1,)),))

        def compute(inputs: Any) -> Any:
            flat = inputs["INPUT0"]
            return {"OUTPUT0": flat[:-1] if 13 in flat else flat}

        async with serving_plane([(config, compute)]) as plane:
            arrays = [np.full((1, number % 4 + 1), number) for number in (1, 13, 2)]
            results = await answers([submit(plane, "m", INPUT0=array) for array in arrays])
            assert isinstance(results[1], Internal)
            for position in (0, 2):
                assert np.array_equal(array_of(results[position]), arrays[position])

    with caplog.at_level(logging.ERROR, "headrace.engine"):
        asyncio.run(main())
    assert len(caplog.records) == 1
