# SPDX-License-Identifier: Apache-2.0
"""Data types: names, numpy forms, and BF16 against exact arithmetic."""

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.core.dtypes import BF16, BYTES, DTYPES, bf16_to_float32, dtype_named, dtype_of, float32_to_bf16
from headrace.core.errors import InvalidArgument

SIZES = {
    "BOOL": 1,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "FP16": 2,
    "FP32": 4,
    "FP64": 8,
    "BF16": 2,
    "BYTES": 0,
}
NUMPY_NAMES = {"BF16": "uint16", "BYTES": "object"}


@pytest.mark.parametrize("name", SIZES)
def test_each_type_is_found_by_its_name_and_has_its_size(name):
    dtype = dtype_named(name)
    expected = NUMPY_NAMES.get(name, name.lower().replace("fp", "float"))
    assert (dtype.name, dtype.item_bytes, dtype.numpy.name) == (name, SIZES[name], expected)
    assert dtype.numpy.str[0] in "<|"


def test_there_are_no_other_types():
    assert set(DTYPES) == set(SIZES)


@pytest.mark.parametrize("name", ["", "fp32", "FLOAT", "INT128", "FP32\n", None, 7, [], {}, ["FP32"], "x" * 10_000])
def test_an_unknown_type_is_refused_with_a_short_text(name):
    with pytest.raises(InvalidArgument, match="is not known") as caught:
        dtype_named(name)
    assert len(caught.value.message) < 300
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES.values() if dtype not in (BF16, BYTES)])
def test_the_type_of_an_array_in_either_byte_order(dtype):
    assert dtype_of(np.zeros(2, dtype.numpy)) is dtype
    assert dtype_of(np.zeros(2, dtype.numpy.newbyteorder(">"))) is dtype


@pytest.mark.parametrize("array", [np.array([b"a"]), np.array(["a"]), np.array([b"a", None], dtype=object)])
def test_text_and_bytes_of_any_width_are_bytes(array):
    assert dtype_of(array) is BYTES


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="numpy 1 has no variable-width text")
def test_variable_width_text_is_bytes():
    assert dtype_of(np.array(["a", "long"], dtype=np.dtypes.StringDType())) is BYTES


@pytest.mark.parametrize("code", ["c16", "M8[s]", "m8[s]", "V4", "g", "f4,i4"])
def test_an_array_of_anything_else_is_refused(code):
    with pytest.raises(InvalidArgument, match="has no tensor data type"):
        dtype_of(np.zeros(1, dtype=code))


def nearest_bf16(value: float) -> int:
    """Round a finite float32 by exact fractions: nearest, ties to the even pattern."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    sign, toward_zero = bits >> 31 << 15, bits >> 16 & 0x7FFF

    def magnitude(pattern: int) -> Fraction:
        # The pattern after the largest finite one stands for the next power of two, and is written as infinity.
        exponent, fraction = pattern >> 7, pattern & 0x7F
        return Fraction(fraction + (128 if exponent else 0), 128) * Fraction(2) ** (max(exponent, 1) - 127)

    exact = abs(Fraction(value))
    below, above = exact - magnitude(toward_zero), magnitude(toward_zero + 1) - exact
    up = above < below or (above == below and toward_zero & 1)
    return sign | (toward_zero + up)


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
@example(1.00390625)  # halfway, below is even
@example(1.01171875)  # halfway, above is even
@example(3.4028234663852886e38)  # the largest float32 rounds to infinity
@example(3.3895313892515355e38)  # the largest BF16
@example(1e-45)  # the smallest float32 rounds to zero
@example(-0.0)
def test_rounding_to_bf16_is_exact(value):
    assert int(float32_to_bf16(np.array([value], np.float32))[0]) == nearest_bf16(value)


def test_every_bf16_pattern_survives_a_round_trip():
    patterns = np.arange(1 << 16, dtype=np.uint16)
    wide = bf16_to_float32(patterns)
    numbers = ~np.isnan(wide)
    assert np.count_nonzero(~numbers) == 2 * 127
    assert np.array_equal(float32_to_bf16(wide)[numbers], patterns[numbers])


@given(st.integers(0, 0x7FFFFF).filter(bool), st.booleans())
@example(0x7FFFFF, True)  # rounding this payload up would carry through the exponent into the sign
@example(1, False)  # cutting this payload off would leave an infinity
def test_nan_stays_nan(payload, negative):
    bits = np.array([negative << 31 | 0x7F800000 | payload], np.uint32)
    narrow = float32_to_bf16(bits.view(np.float32))
    assert narrow.dtype == np.uint16
    assert np.isnan(bf16_to_float32(narrow)).all()


def test_infinities_stay_infinite():
    narrow = float32_to_bf16(np.array([math.inf, -math.inf], np.float32))
    assert narrow.tolist() == [0x7F80, 0xFF80]
    assert bf16_to_float32(narrow).tolist() == [math.inf, -math.inf]


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0,), (2, 0)])
def test_conversion_keeps_the_shape(shape):
    narrow = float32_to_bf16(np.full(shape, 1.5, np.float32))
    assert narrow.shape == shape
    assert bf16_to_float32(narrow).shape == shape
    assert np.all(bf16_to_float32(narrow) == 1.5)


def test_rounding_reads_through_strides():
    values = np.arange(12, dtype=np.float32).reshape(3, 4).T[::2]
    assert np.array_equal(bf16_to_float32(float32_to_bf16(values)), values)
