# SPDX-License-Identifier: Apache-2.0
"""The largest values of each row, against a plain sort."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from headrace.api.classification import MOST_ELEMENTS, ClassScore, top_classes
from headrace.core.dtypes import BF16, float32_to_bf16
from headrace.core.errors import InvalidArgument
from headrace.core.tensors import Tensor


def classes_of(
    array: Any, count: int = 3, labels: tuple[str, ...] = (), *, batched: bool = True
) -> list[list[ClassScore]]:
    return top_classes(Tensor.of("x", np.asarray(array)), count, labels, batched=batched)


def test_each_row_has_its_largest_with_labels() -> None:
    rows = classes_of(np.array([[1, 5, 3], [9, 7, 8]], np.float32), 2, ("a", "b"))
    assert rows == [[(5.0, 1, "b"), (3.0, 2, "")], [(9.0, 0, "a"), (8.0, 2, "")]]


def test_a_row_is_flat_whatever_its_shape() -> None:
    assert classes_of(np.arange(8).reshape(1, 2, 2, 2), 1) == [[(7, 7, "")]]
    assert classes_of(np.arange(8).reshape(2, 2, 2), 1, batched=False) == [[(7, 7, "")]]
    assert classes_of(np.array(4.5), 1, batched=False) == [[(4.5, 0, "")]]


def test_classes_are_at_most_the_elements_and_none_if_zero_are_requested() -> None:
    assert [len(row) for row in classes_of(np.zeros((2, 3), np.int8), 9)] == [3, 3]
    assert classes_of(np.zeros((2, 3), np.int8), 0) == [[], []]
    assert classes_of(np.zeros((0, 3), np.int8)) == []
    assert classes_of(np.zeros((2, 0), np.int8)) == [[], []]


@pytest.mark.parametrize("kind", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64])
def test_whole_numbers_at_their_edges_stay_whole(kind: Any) -> None:
    info = np.iinfo(kind)
    values = [score.value for score in classes_of(np.array([[info.min, 1, info.max]], kind))[0]]
    assert values == [info.max, 1, info.min]
    assert all(type(value) is int for value in values)


def test_truth_and_half_floats_are_numbers_too() -> None:
    assert classes_of(np.array([[False, True]]), 2) == [[(1, 1, ""), (0, 0, "")]]
    assert classes_of(np.array([[0.5, 2.0]], np.float16), 1) == [[(2.0, 1, "")]]
    halves = Tensor("x", BF16, float32_to_bf16(np.array([[-3.0, 2.0]], np.float32)))
    assert top_classes(halves, 1, batched=True) == [[(2.0, 1, "")]]


def test_equal_values_keep_their_order_and_nan_is_last() -> None:
    assert [score.idx for score in classes_of(np.array([[1, 2, 2, 1]]), 4)[0]] == [1, 2, 0, 3]
    row = np.array([[np.nan, 1, np.inf, -np.inf]])
    assert [score.idx for score in classes_of(row, 4)[0]] == [2, 1, 3, 0]


@pytest.mark.parametrize("count", [1, 7, 4999, 5000])
def test_long_rows_give_what_a_plain_sort_gives(count: int) -> None:
    row = np.random.default_rng(1).integers(0, 50, 5000)
    expected = sorted(range(5000), key=lambda index: (-row[index], index))[:count]
    assert [score.idx for score in classes_of(row[None], count)[0]] == expected


def test_long_rows_of_only_nan_have_an_order() -> None:
    row = np.full(5000, np.nan)
    row[4000] = 1.0
    assert [score.idx for score in classes_of(row[None], 3)[0]] == [4000, 0, 1]


@settings(max_examples=50, deadline=None)
@given(arrays.arrays(np.float32, (2, 9), elements=st.floats(width=32, allow_nan=False)), st.integers(1, 12))
def test_any_row_gives_what_a_plain_sort_gives(array: Any, count: int) -> None:
    for row, scores in zip(array, classes_of(array, count), strict=True):
        assert [score.idx for score in scores] == sorted(range(9), key=lambda i: (-row[i], i))[:count]


def test_text_and_too_much_are_refused_in_tritons_words() -> None:
    with pytest.raises(InvalidArgument, match="not available for output due to unsupported type 'BYTES'"):
        classes_of(np.array([[b"a"]], object))
    with pytest.raises(InvalidArgument, match="classification output tensor too large"):
        classes_of(np.zeros((1, MOST_ELEMENTS + 1), np.int8))
