# SPDX-License-Identifier: Apache-2.0
"""The batcher: everybody gets their own rows, whoever they were computed with and whatever happened to others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.dtypes import BF16, BYTES, DTYPES, UINT16, DType
from headrace.core.errors import Internal
from headrace.core.messages import InferResponse
from headrace.core.tensors import Tensor
from headrace.engine.batching import Batcher

Result = InferResponse | BaseException


class Recorder:
    """A model that notes what it was given."""

    def __init__(self, compute: Callable[[Any], Any] = lambda rows: rows) -> None:
        self.given: list[Any] = []
        self._compute = compute

    def __call__(self, rows: Any) -> Any:
        self.given.append(rows)
        return self._compute(rows)


def tensor(array: Any, dtype: DType | None = None) -> Tensor:
    return Tensor.of("INPUT0", array) if dtype is None else Tensor("INPUT0", dtype, array)


def run(batcher: Batcher, tensors: list[Tensor], rounds: int = 1) -> list[Result]:
    """Submit all in one turn of the loop (or several) and wait for every answer."""

    async def main() -> list[Result]:
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Result]] = []
        for number, one in enumerate(tensors):
            if number and number % -(-len(tensors) // rounds) == 0:
                await asyncio.sleep(0)
            future = loop.create_future()
            futures.append(future)
            batcher.submit(one, f"id {number}", future.set_result)
        return await asyncio.wait_for(asyncio.gather(*futures), 10)

    return asyncio.run(main())


def array_of(result: Result) -> Any:
    assert isinstance(result, InferResponse)
    (output,) = result.outputs
    assert output.name == "OUTPUT0"
    return output.array


def test_every_caller_gets_its_own_rows() -> None:
    model = Recorder(lambda rows: rows * 10)
    batcher = Batcher("m", model, 64)
    tensors = [tensor(np.full((1 + number % 5, 3), number, np.int64)) for number in range(1000)]
    results = run(batcher, tensors, rounds=7)
    for number, (one, result) in enumerate(zip(tensors, results, strict=True)):
        assert np.array_equal(array_of(result), one.array * 10)
        assert isinstance(result, InferResponse)
        assert (result.id, result.model_name, result.model_version) == (f"id {number}", "m", "1")
    assert batcher.rows == sum(len(one.array) for one in tensors) == sum(map(len, model.given))
    assert batcher.batches == len(model.given) < 1000
    assert max(map(len, model.given)) <= 64


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 5),
            st.sampled_from([(2,), (3,), (1, 2)]),
            st.sampled_from(["INT32", "UINT16", "BF16", "FP32"]),
        ),
        min_size=1,
        max_size=30,
    ),
    st.integers(5, 12),
)
def test_any_mixture_is_given_back_as_it_came(plans: list[tuple[int, tuple[int, ...], str]], max_rows: int) -> None:
    model = Recorder()
    tensors = [
        tensor(np.full((rows, *rest), number).astype(DTYPES[name].numpy), DTYPES[name])
        for number, (rows, rest, name) in enumerate(plans)
    ]
    batcher = Batcher("m", model, max_rows)
    results = run(batcher, tensors)
    for one, result in zip(tensors, results, strict=True):
        answer = array_of(result)
        assert answer.shape == one.shape
        assert answer.dtype == one.array.dtype
        assert np.array_equal(answer, one.array)
        assert isinstance(result, InferResponse)
        assert result.outputs[0].dtype is one.dtype
    assert all(len(rows) <= max_rows for rows in model.given)
    assert batcher.rows == sum(len(one.array) for one in tensors)


def test_shapes_and_types_are_never_mixed() -> None:
    model = Recorder()
    forms = [((1, 2), np.int32), ((1, 3), np.int32), ((1, 2), np.int64), ((1, 2, 1), np.int32)]
    arrays = [np.zeros(shape, kind) for shape, kind in forms]
    run(Batcher("m", model, 64), [tensor(array) for array in arrays for _ in range(3)])
    assert [(rows.shape, rows.dtype) for rows in model.given] == [((3, *a.shape[1:]), a.dtype) for a in arrays]


def test_types_of_one_numpy_form_are_not_mixed_either() -> None:
    model = Recorder()
    bits = np.array([[0x3F80]], np.uint16)
    results = run(Batcher("m", model, 64), [tensor(bits, BF16), tensor(bits, UINT16)])
    assert len(model.given) == 2
    assert [result.outputs[0].dtype for result in results if isinstance(result, InferResponse)] == [BF16, UINT16]


def test_strings_share_a_batch() -> None:
    model = Recorder()
    tensors = [tensor(np.array([[b"a%d" % number, b""]], object), BYTES) for number in range(5)]
    results = run(Batcher("m", model, 64), tensors)
    assert len(model.given) == 1
    assert [array_of(result).tolist() for result in results] == [one.array.tolist() for one in tensors]


def test_a_batch_is_full_at_its_rows_not_at_its_requests() -> None:
    model = Recorder()
    run(Batcher("m", model, 8), [tensor(np.zeros((3, 1))) for _ in range(5)])
    assert [len(rows) for rows in model.given] == [6, 6, 3]


def test_a_lone_request_is_not_copied() -> None:
    model = Recorder()
    one = tensor(np.zeros((2, 1000)))
    (result,) = run(Batcher("m", model, 8), [one])
    assert model.given[0] is one.array
    assert np.shares_memory(array_of(result), one.array)


def broken(compute: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Goes wrong for batches of the number 13."""
    return lambda rows: compute(rows) if np.any(rows == 13) else rows


def raising(_: Any) -> Any:
    raise RuntimeError("a secret of the model")


FAULTS: dict[str, Callable[[Any], Any]] = {
    "raises": raising,
    "too few rows": lambda rows: rows[:-1],
    "too many rows": lambda rows: np.concatenate([rows, rows]),
    "no rows": lambda rows: rows[:0],
    "nothing": lambda rows: None,
    "a number": lambda rows: 5,
    "another type": lambda rows: rows.astype(np.float64),
    "a list": lambda rows: rows.tolist(),
}


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_model_that_goes_wrong_costs_its_own_batch_only(
    fault: str, together: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Batches are kept apart by their shapes: the middle one has 13 in it."""
    numbers = [1, 13, 2]
    tensors = [
        tensor(np.full((1, width + 1), number, np.int32))
        for width, number in enumerate(numbers)
        for _ in range(together)
    ]
    with caplog.at_level(logging.ERROR, "headrace.engine"):
        results = run(Batcher("m", broken(FAULTS[fault]), 64), tensors)
    for one, result in zip(tensors, results, strict=True):
        if one.array[0, 0] == 13:
            assert isinstance(result, Internal)
            assert "secret" not in str(result)
            assert "'m'" in result.message
        else:
            assert np.array_equal(array_of(result), one.array)
    assert len(caplog.records) == 1


def test_a_batcher_goes_on_after_a_fault() -> None:
    batcher = Batcher("m", broken(raising), 64)
    for number in (13, 1, 13, 2):
        (result,) = run(batcher, [tensor(np.full((1, 1), number))])
        assert isinstance(result, Internal) == (number == 13)


@pytest.mark.parametrize("model", [lambda rows: rows, raising])
def test_a_caller_that_fails_does_not_cost_the_others_their_answers(
    model: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    answered: list[int] = []

    async def main() -> None:
        batcher = Batcher("m", model, 64)

        def done(number: int, _: Result) -> None:
            if number == 1:
                raise RuntimeError("this caller has gone")
            answered.append(number)

        for number in range(3):
            batcher.submit(tensor(np.zeros((1, 1))), "", lambda result, number=number: done(number, result))
        await asyncio.sleep(0.01)

    with caplog.at_level(logging.ERROR, "headrace.engine"):
        asyncio.run(main())
    assert answered == [0, 2]


def test_a_caller_may_submit_again_from_its_answer() -> None:
    answers: list[Any] = []

    async def main() -> None:
        model = Recorder()
        batcher = Batcher("m", model, 64)
        finished = asyncio.Event()

        def again(result: Result) -> None:
            answers.append(array_of(result)[0, 0])
            if len(answers) < 5:
                batcher.submit(tensor(array_of(result) + 1), "", again)
            else:
                finished.set()

        batcher.submit(tensor(np.zeros((1, 1))), "", again)
        await asyncio.wait_for(finished.wait(), 10)

    asyncio.run(main())
    assert answers == [0, 1, 2, 3, 4]
