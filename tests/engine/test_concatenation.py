# SPDX-License-Identifier: Apache-2.0
"""A batch and back: everybody gets their own rows, whoever they were computed with and whatever the model returns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.dtypes import BF16, BYTES, DTYPES, FP32, INT64, UINT16, DType
from headrace.core.errors import Internal, InvalidArgument
from headrace.core.requests import InferResponse
from headrace.core.tensors import Tensor
from headrace.engine.execution.concatenation import BatchConcatenator
from headrace.models.config.types import InputSpec, InstanceGroup, OutputSpec
from support.engines import Recorder, answers, array_of, config_of, counted, pending_of, serving_plane, submit


def tensor(array: Any, dtype: DType | None = None, name: str = "INPUT0") -> Tensor:
    return Tensor.of(name, array) if dtype is None else Tensor(name, dtype, array)


def values(dtype: DType, shape: tuple[int, ...], first: int = 0) -> Any:
    count = int(np.prod(shape))
    if dtype is BYTES:
        array = np.empty(count, object)
        array[:] = [b"%d" % number * (number % 3) for number in range(first, first + count)]
        return array.reshape(shape)
    return (np.arange(first, first + count) % 100).astype(dtype.numpy).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("declared", [True, False])
def test_every_type_is_returned_unchanged(dtype: DType, declared: bool) -> None:
    async def main() -> None:
        model = Recorder()
        spec = dtype if declared else None
        config = config_of("m", inputs=(InputSpec("INPUT0", spec, (3,)),), outputs=(OutputSpec("OUTPUT0", spec, (3,)),))
        async with serving_plane([(config, model)]) as plane:
            tensors = [tensor(values(dtype, (1 + n % 3, 3), 10 * n), dtype) for n in range(6)]
            results = await answers([submit(plane, "m", INPUT0=tensor) for tensor in tensors])
            assert model.rows == [12]
            for one, result in zip(tensors, results, strict=True):
                assert isinstance(result, InferResponse)
                assert result.outputs[0].dtype is dtype
                assert array_of(result).dtype == dtype.numpy
                assert array_of(result).tolist() == one.array.tolist()

    asyncio.run(main())


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 5),
            st.sampled_from([(2,), (3,), (1, 2)]),
            st.sampled_from(["INT32", "UINT16", "BF16", "FP32", "BYTES"]),
        ),
        min_size=1,
        max_size=30,
    ),
    st.integers(5, 12),
)
def test_any_mixture_is_split_again_unchanged(plans: list[tuple[int, tuple[int, ...], str]], max_rows: int) -> None:
    async def main() -> None:
        model = Recorder()
        tensors = [
            tensor(values(DTYPES[name], (rows, *rest), number), DTYPES[name])
            for number, (rows, rest, name) in enumerate(plans)
        ]
        async with serving_plane([(config_of("m", max_batch_size=max_rows), model)]) as plane:
            results = await answers([submit(plane, "m", INPUT0=tensor) for tensor in tensors])
            for one, result in zip(tensors, results, strict=True):
                assert isinstance(result, InferResponse)
                assert result.outputs[0].dtype is one.dtype
                assert array_of(result).shape == one.shape
                assert array_of(result).tolist() == one.array.tolist()
            assert all(rows <= max_rows for rows in model.rows)
            assert counted(plane, "m").inferences == sum(model.rows) == sum(rows for rows, _, _ in plans)

    asyncio.run(main())


def test_types_of_one_numpy_form_are_not_mixed() -> None:
    async def main() -> None:
        model = Recorder()
        bits = np.array([[0x3F80]], np.uint16)
        for dims in (None, (1,)):
            config = config_of("m", inputs=(InputSpec("INPUT0", None, dims),))
            async with serving_plane([(config, model)]) as plane:
                model.received.clear()
                results = await answers([submit(plane, "m", INPUT0=tensor(bits, dtype)) for dtype in (BF16, UINT16)])
                assert len(model.received) == 2
                assert [result.outputs[0].dtype for result in results] == [BF16, UINT16]  # type: ignore[union-attr]

    asyncio.run(main())


def test_a_lone_request_is_not_copied() -> None:
    async def main() -> None:
        model = Recorder()
        array = np.zeros((2, 1000))
        async with serving_plane([(config_of("m"), model)]) as plane:
            result = await submit(plane, "m", INPUT0=array).answer()
            assert model.received[0] is array
            assert np.shares_memory(array_of(result), array)

    asyncio.run(main())


def test_inputs_may_be_in_any_order() -> None:
    concatenator = BatchConcatenator(config_of("m", inputs=(InputSpec("A", INT64, (1,)), InputSpec("B", INT64, (1,)))))
    batch = [
        pending_of(A=np.array([[1]]), B=np.array([[10]])),
        pending_of(B=np.array([[20]]), A=np.array([[2]])),
        pending_of(rows=2, A=np.array([[3], [4]]), B=np.array([[30], [40]])),
    ]
    concatenated = concatenator.concatenate(batch)
    assert concatenated["A"].ravel().tolist() == [1, 2, 3, 4]
    assert concatenated["B"].ravel().tolist() == [10, 20, 30, 40]


def test_the_model_gets_the_requested_outputs() -> None:
    concatenator = BatchConcatenator(config_of("m", outputs=tuple(OutputSpec(name, INT64, (1,)) for name in "ABC")))
    assert list(concatenator.requested_outputs([pending_of(outputs="B"), pending_of(outputs="AB")])) == ["B", "A"]
    assert list(concatenator.requested_outputs([pending_of(outputs="B"), pending_of()])) == ["A", "B", "C"]


def test_unrequested_outputs_may_be_missing_and_requested_ones_may_not() -> None:
    concatenator = BatchConcatenator(config_of("m", outputs=tuple(OutputSpec(name, INT64, (1,)) for name in "AB")))
    array = np.array([[1]])
    (outputs,) = concatenator.split([pending_of(outputs="A", INPUT0=array)], {"A": array})
    assert [output.name for output in outputs] == ["A"]
    with pytest.raises(Internal, match="model 'm' did not return its output 'B'"):
        concatenator.split(
            [pending_of(outputs="A", INPUT0=array), pending_of(INPUT0=array)], {"A": np.array([[1], [2]])}
        )
    with pytest.raises(Internal, match="did not return its output 'B'"):
        concatenator.split([pending_of(INPUT0=array)], {"A": array})


@pytest.mark.parametrize("batched", [True, False])
def test_reshape(batched: bool) -> None:
    concatenator = BatchConcatenator(
        config_of(
            "m",
            max_batch_size=8 if batched else 0,
            inputs=(InputSpec("INPUT0", INT64, (4,), reshape=(2, 2)), InputSpec("ONE", INT64, (1,), reshape=())),
            outputs=(OutputSpec("OUTPUT0", INT64, (2, 2), reshape=(4,)),),
        )
    )
    front = (1,) if batched else ()
    batch = [
        pending_of(INPUT0=np.arange(4).reshape(*front, 4), ONE=np.zeros((*front, 1), np.int64))
        for _ in range(3 if batched else 1)
    ]
    count = (3,) if batched else ()
    concatenated = concatenator.concatenate(batch)
    assert concatenated["INPUT0"].shape == (*count, 2, 2)
    assert concatenated["ONE"].shape == count
    answered = concatenator.split(batch, {"OUTPUT0": np.tile(np.arange(4), 3 if batched else 1).reshape(*count, 4)})
    for (output,) in answered:
        assert output.array.shape == (*front, 2, 2)
        assert output.array.ravel().tolist() == [0, 1, 2, 3]
    with pytest.raises(Internal, match="cannot be reshaped"):
        concatenator.split(batch, {"OUTPUT0": np.zeros((*count, 5), np.int64)})


def test_a_variable_reshape_keeps_rows_apart() -> None:
    concatenator = BatchConcatenator(config_of("m", inputs=(InputSpec("INPUT0", INT64, (1,), reshape=()),)))
    concatenated = concatenator.concatenate(
        [pending_of(INPUT0=np.array([[1]])), pending_of(rows=2, INPUT0=np.array([[2], [3]]))]
    )
    assert concatenated["INPUT0"].tolist() == [1, 2, 3]


# Outputs that cannot be right.


def raising(_: Any) -> Any:
    raise RuntimeError("a secret of the model")


def refusing(_: Any) -> Any:
    raise InvalidArgument("13 is not a number I like")


FAULTS: dict[str, Callable[[Any], Any]] = {
    "raises": raising,
    "too few rows": lambda rows: rows[:-1],
    "too many rows": lambda rows: np.concatenate([rows, rows]),
    "no rows": lambda rows: rows[:0],
    "no dimension": lambda rows: rows.sum(),
    "a scalar array": lambda rows: np.array(5, rows.dtype),
    "nothing": lambda rows: None,
    "a number": lambda rows: 5,
    "a text": lambda rows: "rows",
    "another type": lambda rows: rows.astype(np.float64),
    "the other byte order": lambda rows: rows.astype(">i4"),
    "objects": lambda rows: rows.astype(object),
    "a list": lambda rows: rows.tolist(),
    "another width": lambda rows: rows[:, :1],
    "one dimension more": lambda rows: rows[..., None],
    "one dimension less": lambda rows: rows[:, 0],
}


def fails_on_13(compute: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """For batches with the number 13."""
    return lambda rows: compute(rows) if np.any(rows == 13) else rows


@pytest.mark.parametrize("runs", ["inline", "thread"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_failing_model_fails_only_the_request_that_caused_it(
    fault: str, runs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The batch is computed again one by one: the innocent get their answers, and the model's own words stay inside."""

    async def main() -> None:
        model = Recorder(fails_on_13(FAULTS[fault]))
        config = config_of(
            "m",
            inputs=(InputSpec("INPUT0", DTYPES["INT32"], (2,)),),
            outputs=(OutputSpec("OUTPUT0", DTYPES["INT32"], (2,)),),
            instance_groups=(InstanceGroup("m", runs=runs),),
        )
        async with serving_plane([(config, model)]) as plane:
            numbers = [1, 13, 2, 3]
            arrays = [np.full((1, 2), number, np.int32) for number in numbers]
            results = await answers([submit(plane, "m", INPUT0=array) for array in arrays])
            for number, array, result in zip(numbers, arrays, results, strict=True):
                if number == 13:
                    assert isinstance(result, Internal)
                    assert "'m'" in result.message
                    assert "secret" not in str(result)
                else:
                    assert np.array_equal(array_of(result), array)
            assert model.rows == [4, 1, 1, 1, 1]
            statistics = counted(plane, "m")
            assert (statistics.executions, statistics.inferences) == (3, 3)
            assert statistics.failures == {"BACKEND": 1}
            assert statistics.in_flight == 0
            # And it goes on.
            assert array_of(await submit(plane, "m", INPUT0=arrays[0]).answer()).tolist() == [[1, 1]]

    with caplog.at_level(logging.ERROR, "headrace.engine"):
        asyncio.run(main())
    assert len(caplog.records) == 1


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lone_request_may_be_the_guilty_one(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> Any:
        model = Recorder(fails_on_13(FAULTS[fault]))
        spec = InputSpec("INPUT0", DTYPES["INT32"], (2,))
        config = config_of("m", inputs=(spec,), outputs=(OutputSpec("OUTPUT0", DTYPES["INT32"], (2,)),))
        async with serving_plane([(config, model)]) as plane:
            result = await submit(plane, "m", INPUT0=np.full((2, 2), 13, np.int32)).answer()
            assert len(model.received) == 1
            assert counted(plane, "m").executions == 0
            return result

    with caplog.at_level(logging.ERROR, "headrace.engine"):
        assert isinstance(asyncio.run(main()), Internal)
    assert len(caplog.records) == 1


def test_a_model_s_own_refusal_reaches_its_caller_and_not_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with serving_plane([(config_of("m"), Recorder(fails_on_13(refusing)))]) as plane:
            results = await answers([submit(plane, "m", INPUT0=np.array([[number]])) for number in (1, 13)])
            assert array_of(results[0]).item() == 1
            assert isinstance(results[1], InvalidArgument)
            assert results[1].message == "13 is not a number I like"

    with caplog.at_level(logging.ERROR, "headrace.engine"):
        asyncio.run(main())
    assert not caplog.records


def test_an_output_the_configuration_does_not_have_is_left_out() -> None:
    concatenator = BatchConcatenator(config_of("m", outputs=(OutputSpec("A", FP32, (-1,)),)))
    pending = pending_of(INPUT0=np.zeros((1, 1)))
    ((output,),) = concatenator.split([pending], {"A": np.zeros((1, 7), np.float32), "B": 5})  # type: ignore[dict-item]
    assert output.name == "A"


def test_bf16_is_its_bits_and_nothing_else() -> None:
    concatenator = BatchConcatenator(config_of("m", outputs=(OutputSpec("A", BF16, (1,)),)))
    pending = pending_of(INPUT0=np.zeros((1, 1)))
    ((output,),) = concatenator.split([pending], {"A": np.array([[0x3F80]], np.uint16)})
    assert output.dtype is BF16
    with pytest.raises(Internal, match="16 bits of BF16"):
        concatenator.split([pending], {"A": np.zeros((1, 1), np.float32)})
