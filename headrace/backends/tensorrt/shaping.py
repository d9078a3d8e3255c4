# SPDX-License-Identifier: Apache-2.0
"""A batch as the engine wants it: an array for each input, and the values of shape tensors.

Called by `instance` for each batch. Batches have rows, shape tensors do not: in a model that batches, the first value of a
shape tensor is the number of rows (Triton's rule), and the requests carry only the values behind it.

    the engine's binding   [3]       values (rows, height, width)
    the configuration      dims [2]  values (height, width)
    a batch of 4 rows      [4, 2]    the same values in each row
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.backends.contract import Array
from headrace.backends.tensorrt.plan import Binding
from headrace.core.errors import InvalidArgument
from headrace.models.config.types import Dims


@dataclass(frozen=True, slots=True)
class Batch:
    """What goes into the engine."""

    arrays: Mapping[str, Array]
    shapes: Mapping[str, Dims]
    values: Mapping[str, Dims]
    """Of the shape tensors."""
    rows: int
    """0: the model does not batch."""


def shaped_batch(name: str, inputs: Sequence[Binding], given: Mapping[str, Array], batched: bool) -> Batch:
    """Put it together; `name` is the model's, for error texts."""
    missing = [binding.name for binding in inputs if binding.name not in given]
    if missing:
        raise InvalidArgument(
            f"model '{name}' needs its input{'s' if len(missing) > 1 else ''} "
            f"{', '.join(repr(each) for each in missing)}: a TensorRT plan has no optional inputs"
        )
    rows = next((len(given[each.name]) for each in inputs if not each.is_shape_tensor), 1) if batched else 0
    arrays: dict[str, Array] = {}
    values: dict[str, Dims] = {}
    for binding in inputs:
        array = given[binding.name]
        if binding.is_shape_tensor:
            if batched:
                array = _with_rows(name, binding, array, rows)
            values[binding.name] = tuple(int(value) for value in array.ravel())
        arrays[binding.name] = array
    return Batch(arrays, {each: array.shape for each, array in arrays.items()}, values, rows)


def shape_values_for_rows(array: Array, rows: int) -> Array:
    """A shape tensor that the engine gave, as the outputs of `rows` requests: each gets the values behind the first."""
    return np.repeat(array.reshape(1, -1)[:, 1:], rows, axis=0)


def _with_rows(name: str, binding: Binding, array: Array, rows: int) -> Array:
    lines = array.reshape(1, -1) if array.ndim < 2 else array.reshape(len(array), -1)
    if not (lines == lines[:1]).all():
        raise InvalidArgument(
            f"input '{binding.name}' of model '{name}' is a shape tensor and must have the same values in all rows of a "
            "batch: send requests with other values apart, or give the model no dynamic_batching"
        )
    return np.concatenate([np.array([rows], lines.dtype), lines[0]])
