# SPDX-License-Identifier: Apache-2.0
"""Tensors from buffers, tensors to buffers, and the shapes that are refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.dtypes import BF16, BYTES, DTYPES, FP32, FP64, INT32, encode_bytes_elements
from headrace.core.errors import InvalidArgument
from headrace.core.limits import TENSOR_RANK
from headrace.core.tensors import Tensor, element_count, tensor_from_buffer

FIXED = [dtype for dtype in DTYPES.values() if dtype is not BYTES]
SHAPES = [(), (1,), (6,), (2, 3), (0,), (2, 0, 3), (64, 32), (1,) * TENSOR_RANK]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", FIXED, ids=lambda dtype: dtype.name)
def test_a_buffer_is_viewed_not_copied(dtype, shape):
    content = np.arange(np.prod(shape, dtype=int)).astype(dtype.numpy)
    buffer = bytearray(content.tobytes())
    tensor = tensor_from_buffer("x", dtype, shape, buffer)
    assert (tensor.name, tensor.dtype, tensor.shape, tensor.array.dtype) == ("x", dtype, shape, dtype.numpy)
    assert np.array_equal(tensor.array.ravel(), content)
    assert bytes(tensor.to_buffer()) == buffer
    if content.size:
        assert np.shares_memory(tensor.array, np.frombuffer(buffer, np.uint8))
    if content.nbytes > 1024:  # below, a copy is the quicker way out
        assert np.shares_memory(np.frombuffer(tensor.to_buffer(), np.uint8), np.frombuffer(buffer, np.uint8))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_every_kind_of_buffer_is_accepted(kind):
    assert tensor_from_buffer("x", INT32, [2], kind(b"\1\0\0\0\2\0\0\0")).array.tolist() == [1, 2]


def test_a_view_may_begin_anywhere():
    body = bytearray(b"{}\n" + np.array([1.5, -2.0], "<f4").tobytes())
    tensor = tensor_from_buffer("x", FP32, [2], memoryview(body)[3:])
    assert tensor.array.tolist() == [1.5, -2.0]
    assert np.shares_memory(tensor.array, np.frombuffer(body, np.uint8))


@given(st.lists(st.binary(max_size=8), min_size=6, max_size=6))
def test_bytes_elements_take_the_shape(elements):
    wire = encode_bytes_elements(elements)
    tensor = tensor_from_buffer("x", BYTES, [2, 3], wire)
    assert tensor.array.tolist() == [elements[:3], elements[3:]]
    assert tensor.to_buffer() == wire


@pytest.mark.parametrize("dtype", FIXED, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("difference", [-1, 1])
def test_a_buffer_of_another_size_is_refused(dtype, difference):
    with pytest.raises(
        InvalidArgument, match=f"Expected {3 * dtype.item_bytes}, got {3 * dtype.item_bytes + difference}"
    ):
        tensor_from_buffer("x", dtype, [3], bytes(3 * dtype.item_bytes + difference))


def test_an_element_over_and_an_element_under_are_refused():
    for count in (2, 4):
        with pytest.raises(InvalidArgument, match="byte size mismatch for input 'x'"):
            tensor_from_buffer("x", FP64, [3], bytes(8 * count))


@given(st.lists(st.integers(0, 1000), max_size=4))
def test_elements_are_counted(shape):
    assert element_count("x", shape) == np.prod(shape, dtype=object)


@pytest.mark.parametrize(
    "size",
    [-1, True, False, 1.0, "2", "1" * 10_000, None, [1], {}, float("nan"), -(10**5000), np.int64(2)],
    ids=lambda size: type(size).__name__,
)
def test_a_dimension_that_is_not_an_integer_is_refused(size):
    with pytest.raises(InvalidArgument, match="use whole numbers of 0 or more") as caught:
        element_count("x", [2, size])
    assert len(caught.value.message) < 200


def test_the_refusal_shows_a_negative_dimension():
    with pytest.raises(InvalidArgument, match="has dimension -1;"):
        element_count("x", [-1])


@pytest.mark.parametrize(
    "shape",
    [
        [1 << 49],
        [1 << 25, 1 << 25],
        [1 << 62, 4],  # wraps to 0 in 64 bits
        [1 << 32, 1 << 32],
        [10**5000],
        [0, 1 << 62, 1 << 62],  # empty, but numpy cannot address it
        [1 << 63, 0],
        [(1 << 63) - 1] * 32,
    ],
    ids=len,
)
def test_a_shape_that_could_overflow_is_refused(shape):
    with pytest.raises(InvalidArgument, match="element"):
        tensor_from_buffer("x", FP32, shape, b"")


def test_an_empty_shape_may_be_as_large_as_a_full_one():
    assert tensor_from_buffer("x", FP32, [0, 1 << 48], b"").shape == (0, 1 << 48)


def test_too_many_dimensions_are_refused():
    most = TENSOR_RANK
    assert element_count("x", [1] * most) == 1
    with pytest.raises(InvalidArgument, match=f"{most + 1} dimensions; at most {most}"):
        element_count("x", [1] * (most + 1))


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("code", ["i2", "u4", "f2", "f4", "f8"])
def test_an_array_is_little_endian_on_the_wire(code, order):
    tensor = Tensor.of("x", np.array([1, 2, 3], order + code))
    assert tensor.array.dtype == tensor.dtype.numpy
    assert bytes(tensor.to_buffer()) == np.array([1, 2, 3], "<" + code).tobytes()


def test_wrapping_an_array_in_its_own_form_does_not_copy_it():
    array = np.zeros((2, 3), np.float32)
    assert Tensor.of("x", array).array is array


@pytest.mark.parametrize("array", [np.array([["a", "é"]]), np.array([[b"a", "é".encode()]])])
def test_fixed_width_text_becomes_bytes(array):
    tensor = Tensor.of("x", array)
    assert tensor.dtype is BYTES
    assert tensor.array.dtype == object
    assert tensor.array.tolist() == [[b"a", "é".encode()]]


def test_an_array_that_is_not_contiguous_is_copied_in_order():
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    for other in (np.asfortranarray(array), array[:, ::-1], array.T, array[0, ::2], array[::-1, 0]):
        assert bytes(Tensor.of("x", other).to_buffer()) == other.tobytes(order="C")


@pytest.mark.parametrize("dtype", FIXED, ids=lambda dtype: dtype.name)
def test_one_element_without_dimensions_has_the_size_of_one(dtype):
    assert len(Tensor("x", dtype, np.zeros((), dtype.numpy)).to_buffer()) == dtype.item_bytes


def test_the_representation_keeps_the_data_to_itself():
    assert repr(Tensor("x", BF16, np.full((2, 1), 7, np.uint16))) == "Tensor('x', BF16, [2, 1])"
