# SPDX-License-Identifier: Apache-2.0
"""Tensors from parsed JSON values."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from headrace.core.dtypes import (
    BF16,
    BOOL,
    BYTES,
    DTYPES,
    FP16,
    FP32,
    FP64,
    INT8,
    INT32,
    INT64,
    UINT8,
    UINT64,
    bf16_to_float32,
)
from headrace.core.errors import InvalidArgument
from headrace.core.tensors import tensor_from_values

INTEGERS = [dtype for dtype in DTYPES.values() if dtype.numpy.kind in "iu" and dtype is not BF16]
FLOATS = [FP16, FP32, FP64]


def values_of(dtype, shape, values):
    return tensor_from_values("x", dtype, shape, values).array


@given(st.data())
@pytest.mark.parametrize("dtype", [BOOL, *INTEGERS, *FLOATS], ids=lambda dtype: dtype.name)
def test_flat_and_nested_values_round_trip(dtype, data):
    shape = data.draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    # An empty dimension leaves no trace of those after it in a nested list, and there is nothing to compare.
    assume(0 not in shape[:-1])
    expected = data.draw(arrays.arrays(dtype.numpy, shape, elements=arrays.from_dtype(dtype.numpy, allow_nan=False)))
    for values in (expected.tolist(), expected.ravel().tolist()):
        array = values_of(dtype, list(shape), values)
        assert array.dtype == dtype.numpy
        assert array.shape == shape
        assert np.array_equal(array, expected)


@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda dtype: dtype.name)
def test_whole_numbers_fit_to_the_last_and_not_beyond(dtype):
    bounds = np.iinfo(dtype.numpy)
    assert values_of(dtype, [2], [bounds.min, bounds.max]).tolist() == [bounds.min, bounds.max]
    for beyond in (bounds.min - 1, bounds.max + 1, 10**400, -(10**400)):
        with pytest.raises(InvalidArgument, match=f"do not fit {dtype.name}"):
            values_of(dtype, [2], [0, beyond])


def test_large_and_small_integers_may_be_mixed():
    assert values_of(UINT64, [3], [1, 1 << 63, (1 << 64) - 1]).tolist() == [1, 1 << 63, (1 << 64) - 1]


@given(st.floats(allow_nan=False))
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
def test_floats_round_like_numpy_or_are_refused(dtype, value):
    with np.errstate(over="ignore"):
        expected = np.float64(value).astype(dtype.numpy)
    if math.isinf(expected) and not math.isinf(value):
        with pytest.raises(InvalidArgument, match=f"do not fit {dtype.name}"):
            values_of(dtype, [1], [value])
    else:
        assert values_of(dtype, [1], [value])[0] == expected


@pytest.mark.parametrize("dtype", [*FLOATS, BF16], ids=lambda dtype: dtype.name)
def test_nan_and_infinities_pass_as_themselves(dtype):
    array = values_of(dtype, [3], [math.nan, math.inf, -math.inf])
    wide = bf16_to_float32(array) if dtype is BF16 else array
    assert math.isnan(wide[0])
    assert wide[1:].tolist() == [math.inf, -math.inf]


@pytest.mark.parametrize("dtype", [*FLOATS, BF16], ids=lambda dtype: dtype.name)
def test_whole_numbers_are_real_numbers_too(dtype):
    array = values_of(dtype, [2], [2, -0.5])
    assert (bf16_to_float32(array) if dtype is BF16 else array).tolist() == [2.0, -0.5]


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(FP16, 65520.0), (FP16, 70000), (FP32, 3.5e38), (BF16, 3.4e38), (BF16, -3.4e38), (BF16, 1e39), (FP64, 10**400)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_finite_number_never_becomes_an_infinity(dtype, value):
    with pytest.raises(InvalidArgument, match=f"do not fit {dtype.name}"):
        values_of(dtype, [2], [0.0, value])


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (BOOL, 1),
        (BOOL, "true"),
        (BOOL, None),
        (INT32, True),
        (INT32, 1.0),
        (INT32, "1"),
        (INT64, 1e30),
        (UINT8, None),
        (UINT8, {}),
        (FP32, True),
        (FP32, "1.5"),
        (FP32, None),
        (FP32, {"a": 1}),
        (BF16, "1.5"),
        (BF16, False),
        (BYTES, 5),
        (BYTES, None),
        (BYTES, True),
        (BYTES, {"a": 1}),
        (BYTES, 1.5),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_anywhere(dtype, value):
    right = {"b": True, "i": 3, "u": 3, "f": 0.5, "O": "a"}["f" if dtype is BF16 else dtype.numpy.kind]
    for shape, values in (([1], [value]), ([2], [right, value]), ([2, 1], [[right], [value]]), ([], value)):
        with pytest.raises(InvalidArgument, match=f"of {dtype.name} has .*, which is not "):
            values_of(dtype, shape, values)


@pytest.mark.parametrize("dtype", [FP32, INT8, BOOL, BYTES], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize(
    "pattern", [[["v", "v"], ["v"]], ["v", ["v", "v"]], [["v"], "v", "v"], [["v", "v"], []], [[["v"]], [["v", "v"]]]]
)
def test_ragged_rows_are_refused(dtype, pattern):
    value = {"b": True, "i": 3, "f": 0.5, "O": "a"}[dtype.numpy.kind]

    def filled(part):
        return [filled(one) for one in part] if isinstance(part, list) else value

    values = filled(pattern)
    with pytest.raises(InvalidArgument, match="rows of different lengths"):
        values_of(dtype, [3], values)


@pytest.mark.parametrize("values", [[], [1], [1, 2, 3], [[1, 2], [3, 4]]])
def test_another_number_of_elements_is_refused(values):
    with pytest.raises(InvalidArgument, match=r"elements, but shape \[2\] needs 2"):
        values_of(FP32, [2], values)


@given(st.lists(st.text() | st.binary(), min_size=4, max_size=4))
def test_strings_become_bytes(values):
    expected = [value if isinstance(value, bytes) else value.encode() for value in values]
    assert values_of(BYTES, [4], values).tolist() == expected
    assert values_of(BYTES, [2, 2], [values[:2], values[2:]]).ravel().tolist() == expected
    assert all(type(element) is bytes for element in values_of(BYTES, [4], values))


def test_a_string_that_is_not_unicode_is_refused():
    with pytest.raises(InvalidArgument, match="surrogate"):
        values_of(BYTES, [1], ["\udfff"])


def test_one_string_is_one_element():
    assert values_of(BYTES, [1], "abc").tolist() == [b"abc"]
    assert values_of(BYTES, [], "abc").tolist() == b"abc"


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.name)
def test_nothing_is_a_value_of_every_type(dtype):
    assert values_of(dtype, [0], []).shape == (0,)
    assert values_of(dtype, [2, 0], [[], []]).shape == (2, 0)


def test_any_sequence_will_do():
    assert values_of(INT32, [3], range(3)).tolist() == [0, 1, 2]
    assert values_of(BYTES, [2], (b"a", "b")).tolist() == [b"a", b"b"]


def test_strings_for_numbers_do_not_multiply_in_memory():
    # Left to numpy, every string here would be as wide as the widest: 40 GB.
    values = ["x" * (1 << 20)] + [""] * 10_000
    tracemalloc.start()
    try:
        with pytest.raises(InvalidArgument, match="which is not a number"):
            values_of(FP32, [len(values)], values)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


@pytest.mark.parametrize("depth", [2, 50, 99])
def test_nested_values_are_flattened(depth):
    values = [1.5]
    for _ in range(depth):
        values = [values]
    assert values_of(FP32, [1], values).tolist() == [1.5]


@pytest.mark.parametrize("depth", [100, 2000])
def test_deep_nesting_is_refused(depth):
    values = [1.5]
    for _ in range(depth):
        values = [values]
    with pytest.raises(InvalidArgument, match=r"JSON nesting depth exceeds maximum allowed limit \(100\)"):
        values_of(FP32, [1], values)


def test_the_refusal_of_a_long_value_is_short():
    for wrong in ("x" * 10_000, b"x" * 10_000, [{"k": "x" * 10_000}]):
        with pytest.raises(InvalidArgument) as caught:
            values_of(FP32, [1], wrong)
        assert len(caught.value.message) < 200
