# SPDX-License-Identifier: Apache-2.0
"""The tensors by which a model is told where it is in a sequence."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.core.dtypes import BOOL, BYTES, FP32, INT32, INT64, UINT32, UINT64, DType
from headrace.core.errors import InvalidArgument
from headrace.engine.sequences.controls import ControlInputs
from headrace.models.config.types import ControlInput


def test_values_and_types_are_those_of_the_configuration() -> None:
    controls = ControlInputs(
        (
            ControlInput("S", "start", INT32, 5, 7),
            ControlInput("E", "end", FP32, -0.5, 0.5),
            ControlInput("R", "ready", BOOL, 0, 1),
        ),
        "m",
        batched=True,
    )
    tensors = {tensor.name: tensor for tensor in controls.of(start=True, end=False)}
    assert [tensors[name].array.tolist() for name in "SER"] == [[[7]], [[-0.5]], [[True]]]
    assert [tensors[name].array.dtype for name in "SER"] == [np.int32, np.float32, np.bool_]
    assert [tensor.array.item() for tensor in controls.of(start=False, end=True)] == [5, 0.5, True]
    assert [tensor.array.item() for tensor in controls.filler] == [5, -0.5, False]


def test_a_model_without_batches_gets_no_batch_dimension() -> None:
    controls = ControlInputs(
        (ControlInput("S", "start", INT32), ControlInput("C", "corrid", UINT64)), "m", batched=False
    )
    assert controls.of(start=True, end=True)[0].shape == (1,)
    corrid = controls.corrid(3)
    assert corrid is not None
    assert corrid.shape == (1,)


@pytest.mark.parametrize(
    ("dtype", "id", "value"),
    [
        (UINT64, (1 << 64) - 1, (1 << 64) - 1),
        (INT64, (1 << 64) - 1, -1),
        (INT64, 3, 3),
        (UINT32, (1 << 32) - 1, (1 << 32) - 1),
        (INT32, (1 << 31) - 1, (1 << 31) - 1),
        (BYTES, "name é", "name é".encode()),
        (BYTES, 12, b"12"),
    ],
)
def test_correlation_ids(dtype: DType, id: int | str, value: object) -> None:
    corrid = ControlInputs((ControlInput("C", "corrid", dtype),), "m", batched=True).corrid(id)
    assert corrid is not None
    assert corrid.dtype is dtype
    assert corrid.array.shape == (1, 1)
    assert corrid.array.item() == value


@pytest.mark.parametrize(
    ("dtype", "id", "text"),
    [(UINT64, "a", "is text"), (UINT32, 1 << 32, "does not fit"), (INT32, 1 << 31, "does not fit")],
)
def test_ids_that_the_model_cannot_represent(dtype: DType, id: int | str, text: str) -> None:
    controls = ControlInputs((ControlInput("C", "corrid", dtype),), "m", batched=True)
    with pytest.raises(InvalidArgument, match=text):
        controls.corrid(id)


def test_fillers_belong_to_no_sequence() -> None:
    for dtype, nobody in ((UINT64, 0), (BYTES, b"")):
        controls = ControlInputs((ControlInput("C", "corrid", dtype),), "m", batched=True)
        assert [tensor.array.item() for tensor in controls.filler] == [nobody]
    assert ControlInputs((), "m", batched=True).corrid("any") is None
