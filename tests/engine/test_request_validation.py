# SPDX-License-Identifier: Apache-2.0
"""What a model lets in: every way a request can be wrong, and the words that clients in the field look for."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.dtypes import BF16, BYTES, DTYPES, FP16, FP32, FP64, INT32, INT64, UINT16, float32_to_bf16
from headrace.core.errors import InvalidArgument
from headrace.core.requests import InferRequest, RequestedOutput
from headrace.core.tensors import Tensor
from headrace.engine.request_validation import RequestValidator
from headrace.models.config.types import BatchInput, ControlInput, InputSpec, OutputSpec, SequenceBatching, StateSpec
from support.engines import config_of, tensors_of

A = InputSpec("A", INT32, (2,))
B = InputSpec("B", FP32, (-1,))
OPTIONAL = InputSpec("OPT", INT32, (2,), optional=True)


def checker(*inputs: InputSpec, **more: Any) -> RequestValidator:
    settings: dict[str, Any] = {"inputs": inputs, "outputs": (OutputSpec("OUT", INT32, (2,)),), "max_batch_size": 4}
    return RequestValidator(config_of("m", **{**settings, **more}))


def request(*tensors: Tensor, outputs: str = "", **arrays: Any) -> InferRequest:
    names = [RequestedOutput(name) for name in outputs.split()]
    return InferRequest("m", [*tensors, *tensors_of(**arrays)], outputs=names)


def refused(check: RequestValidator, one: InferRequest, text: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{re.escape(text)}$"):
        check.check(one)


def a(rows: int = 1, width: int = 2) -> Any:
    return np.zeros((rows, width), np.int32)


def b(rows: int = 1, width: int = 3) -> Any:
    return np.zeros((rows, width), np.float32)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_right_requests_have_so_many_rows(rows: int) -> None:
    check = checker(A, B)
    assert check.check(request(A=a(rows), B=b(rows))) == rows
    assert check.check(request(B=b(rows, 0), A=a(rows), outputs="OUT")) == rows


def test_without_a_batch_dimension_a_request_is_one_row() -> None:
    check = checker(A, max_batch_size=0)
    assert check.check(request(A=np.zeros(2, np.int32))) == 1
    refused(check, request(A=a()), "unexpected shape for input 'A' for model 'm'. Expected [2], got [1,2].")


@pytest.mark.parametrize(
    ("given", "missing"),
    [("", "'A','B'"), ("A", "'B'"), ("B", "'A'"), ("A B X", ""), ("X Y Z", "'A','B'")],
)
def test_the_wrong_number_of_inputs_is_reported_in_tritons_words(given: str, missing: str) -> None:
    names = given.split()
    listed = ",".join(f"'{name}'" for name in names)
    refused(
        checker(A, B),
        request(**dict.fromkeys(names, a())),
        f"expected 2 inputs but got {len(names)} inputs for model 'm'. Got input(s) [{listed}], "
        f"but missing required input(s) [{missing}]. Please provide all required input(s).",
    )


def test_with_optional_inputs_the_number_is_a_range() -> None:
    check = checker(A, OPTIONAL)
    for arrays in ({"A": a(2)}, {"A": a(2), "OPT": a(2)}, {"OPT": a(2), "A": a(2)}):
        assert check.check(request(**arrays)) == 2
    refused(
        check,
        request(OPT=a()),
        "expected number of inputs between 1 and 2 but got 1 inputs for model 'm'. Got input(s) ['OPT'], "
        "but missing required input(s) ['A']. Please provide all required input(s).",
    )
    for arrays in ({}, {"A": a(), "OPT": a(), "X": a()}):
        with pytest.raises(InvalidArgument, match="between 1 and 2"):
            check.check(request(**arrays))
    with pytest.raises(InvalidArgument, match="unexpected inference input 'X'"):
        check.check(request(A=a(), X=a()))


def test_all_inputs_may_be_optional() -> None:
    check = checker(OPTIONAL)
    assert check.check(request()) == 1
    assert check.check(request(OPT=a(3))) == 3


def test_unknown_inputs_are_named_with_the_known_ones() -> None:
    with pytest.raises(InvalidArgument, match="unexpected inference input 'X' for model 'm': its inputs are 'A', 'B'"):
        checker(A, B).check(request(A=a(), X=a()))
    with pytest.raises(InvalidArgument, match="unexpected inference input 'X' for model 'm': its input is 'A'"):
        checker(A).check(request(X=a()))


def test_an_input_may_not_be_given_twice() -> None:
    twice = [Tensor.of("A", a()), Tensor.of("A", a())]
    for check in (checker(A, OPTIONAL), checker(A, OPTIONAL, InputSpec("OPT2", INT32, (2,), optional=True))):
        with pytest.raises(InvalidArgument, match="an input is given twice for model 'm': .'A','A'."):
            check.check(request(*twice))
    with pytest.raises(InvalidArgument):
        checker(A, B).check(request(*twice))
    with pytest.raises(InvalidArgument):
        checker(A).check(request(*twice))


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES.values() if dtype is not INT32], ids=lambda one: one.name)
def test_another_type_is_refused_in_tritons_words(dtype: Any) -> None:
    array = np.zeros((1, 2), dtype.numpy) if dtype is not BYTES else np.full((1, 2), b"", object)
    refused(
        checker(A),
        request(Tensor("A", dtype, array)),
        f"inference input 'A' data-type is '{dtype.name}', but model 'm' expects 'INT32'",
    )


def test_types_of_one_numpy_form_are_not_the_same() -> None:
    check = checker(InputSpec("A", BF16, (2,)))
    bits = np.zeros((1, 2), np.uint16)
    assert check.check(request(Tensor("A", BF16, bits))) == 1
    with pytest.raises(InvalidArgument, match="'UINT16', but model 'm' expects 'BF16'"):
        check.check(request(Tensor("A", UINT16, bits)))


@pytest.mark.parametrize(
    ("shape", "dims", "shown"),
    [
        ((1, 3), (2,), "Expected [-1,2], got [1,3]."),
        ((1,), (2,), "Expected [-1,2], got [1]."),
        ((1, 2, 1), (2,), "Expected [-1,2], got [1,2,1]."),
        ((1, 2), (), "Expected [-1], got [1,2]."),
        ((1, 2), (-1, 3), "Expected [-1,-1,3], got [1,2]."),
        ((1, 5, 2), (-1, 3), "Expected [-1,-1,3], got [1,5,2]."),
        ((1, 0), (2,), "Expected [-1,2], got [1,0]."),
    ],
)
def test_another_shape_is_refused_in_tritons_words(shape: tuple[int, ...], dims: tuple[int, ...], shown: str) -> None:
    refused(
        checker(InputSpec("A", INT32, dims)),
        request(A=np.zeros(shape, np.int32)),
        f"unexpected shape for input 'A' for model 'm'. {shown}",
    )


@pytest.mark.parametrize("shape", [(), (0, 2), (0,)])
def test_a_batch_dimension_of_at_least_one_is_needed(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument, match="input 'A' of model 'm' needs a batch dimension of at least 1"):
        checker(A).check(request(A=np.zeros(shape, np.int32)))


def test_a_batch_that_is_too_large_is_refused_in_tritons_words() -> None:
    refused(checker(A), request(A=a(5)), "inference request batch-size must be <= 4 for 'm'")


def test_inputs_of_one_request_have_the_same_batch_size() -> None:
    with pytest.raises(
        InvalidArgument, match="input 'B' batch size does not match other inputs for model 'm': 3 and 2"
    ):
        checker(A, B).check(request(A=a(2), B=b(3)))


def test_unknown_outputs_are_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidArgument, match="unexpected inference output 'X' for model 'm': it has 'OUT'"):
        checker(A).check(request(A=a(), outputs="OUT X"))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [FP16, FP32, FP64, BF16], ids=lambda one: one.name)
def test_finite_inputs_refuse_what_is_not(dtype: Any, bad: float) -> None:
    check = checker(InputSpec("A", dtype, (2,), finite=True))
    right, wrong = np.array([[1, 2]], np.float32), np.array([[1, bad]], np.float32)
    convert = float32_to_bf16 if dtype is BF16 else lambda array: array.astype(dtype.numpy)
    assert check.check(request(Tensor("A", dtype, convert(right)))) == 1
    with pytest.raises(InvalidArgument, match="input 'A' has NaN or infinite values"):
        check.check(request(Tensor("A", dtype, convert(wrong))))
    assert checker(InputSpec("A", dtype, (2,))).check(request(Tensor("A", dtype, convert(wrong)))) == 1


@pytest.mark.parametrize("dtype", [INT64, UINT16, BYTES, DTYPES["BOOL"]], ids=lambda one: one.name)
def test_types_other_than_floats_are_always_finite(dtype: Any) -> None:
    array = np.full((1, 2), b"nan", object) if dtype is BYTES else np.full((1, 2), 0x7FFF).astype(dtype.numpy)
    assert checker(InputSpec("A", dtype, (2,), finite=True)).check(request(Tensor("A", dtype, array))) == 1


def test_tensors_the_engine_makes_are_not_the_caller_s() -> None:
    described = BatchInput("BATCH_ELEMENT_COUNT", ("COUNT",), INT32, "A")
    check = checker(A, InputSpec("COUNT", INT32, (1,)), batch_inputs=(described,))
    assert check.check(request(A=a())) == 1
    with pytest.raises(InvalidArgument):
        check.check(request(A=a(), COUNT=a(1, 1)))
    sequences = SequenceBatching(
        controls=(ControlInput("START", "start", INT32),), states=(StateSpec("IN", "STATE", INT32, (2,)),)
    )
    check = checker(A, InputSpec("START", INT32, (1,)), InputSpec("IN", INT32, (2,)), scheduling=sequences)
    assert check.check(request(A=a())) == 1


def test_long_names_and_many_of_them_are_not_all_repeated() -> None:
    check = checker(A, B)
    for wrong in (
        request(**{f"{number:04}" + "x" * 1000: a() for number in range(1000)}),
        request(**{"A": a(), "x" * 100_000: a()}),
        request(A=a(), B=b(), outputs="x" * 100_000),
        request(*[Tensor.of("A", a())] * 2000),
    ):
        with pytest.raises(InvalidArgument) as refusal:
            check.check(wrong)
        assert len(refusal.value.message) < 2000


# Who may share a batch.


def test_fixed_shapes_need_no_key() -> None:
    assert not checker(A).needs_batch_key
    assert not checker(InputSpec("A", INT32, (-1,), allow_ragged_batch=True)).needs_batch_key
    assert not checker(InputSpec("A", INT32, (-1,), pad_value=0)).needs_batch_key
    assert checker(B).needs_batch_key
    assert checker(A, OPTIONAL).needs_batch_key
    assert checker(InputSpec("A", None, (2,))).needs_batch_key
    assert checker(InputSpec("A", INT32, None)).needs_batch_key


def test_keys_differ_by_shapes_types_and_names() -> None:
    check = checker(InputSpec("A", None, None, optional=True), InputSpec("B", None, None, optional=True))
    different = [
        request(A=a(1, 2)),
        request(A=a(1, 3)),
        request(A=a(1, 2).astype(np.int64)),
        request(B=a(1, 2)),
        request(A=a(1, 2), B=a(1, 2)),
        request(A=a(1, 2), B=a(1, 3)),
        request(A=a(1, 3), B=a(1, 2)),
        request(Tensor("A", BF16, np.zeros((1, 2), np.uint16))),
        request(Tensor("A", UINT16, np.zeros((1, 2), np.uint16))),
        request(),
    ]
    keys = [check.batch_key(one) for one in different]
    assert len(set(keys)) == len(different)
    assert check.batch_key(request(A=a(1, 2))) == check.batch_key(request(A=a(3, 2)))
    assert check.batch_key(request(A=a(), B=b())) == check.batch_key(request(B=b(), A=a()))


def test_ragged_and_padded_inputs_do_not_count_for_the_key() -> None:
    check = checker(InputSpec("A", INT32, (-1,), allow_ragged_batch=True), B)
    assert check.batch_key(request(A=a(1, 2), B=b())) == check.batch_key(request(A=a(1, 7), B=b()))
    assert check.batch_key(request(A=a(), B=b(1, 2))) != check.batch_key(request(A=a(), B=b(1, 3)))


@given(
    st.lists(st.integers(-1, 4), max_size=4).map(tuple),
    st.lists(st.integers(0, 4), max_size=5).map(tuple),
    st.integers(0, 3),
)
def test_any_shape_against_any_dims(dims: tuple[int, ...], shape: tuple[int, ...], most: int) -> None:
    check = checker(InputSpec("A", INT32, dims), max_batch_size=most)
    inner = shape[1:] if most else shape
    fits = len(inner) == len(dims) and all(want in (-1, size) for want, size in zip(dims, inner, strict=True))
    right = fits and (not most or (bool(shape) and 1 <= shape[0] <= most))
    one = request(A=np.zeros(shape, np.int32))
    if right:
        assert check.check(one) == (shape[0] if most else 1)
    else:
        with pytest.raises(InvalidArgument):
            check.check(one)
