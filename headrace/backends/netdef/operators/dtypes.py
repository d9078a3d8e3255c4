# SPDX-License-Identifier: Apache-2.0
"""Caffe2's data types, for translators whose operators name one. Called by `fills` and `shapes`."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.backends.netdef.operator import Operator
from headrace.backends.netdef.schema import caffe2_message

_NUMPY: dict[str, Any] = {
    "FLOAT": np.float32,
    "INT32": np.int32,
    "BYTE": np.uint8,
    "STRING": object,
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "INT8": np.int8,
    "UINT16": np.uint16,
    "INT16": np.int16,
    "INT64": np.int64,
    "FLOAT16": np.float16,
    "DOUBLE": np.float64,
}


def numpy_type(operator: Operator, name: str, default: str) -> Any:
    """The type that an argument tells, by its number or by its name in capitals or not. `object` is for strings."""
    word = default
    argument = operator.arguments.get(name)
    if argument is not None:
        if argument.HasField("s"):
            word = operator.text(name, "").upper()
        else:
            values = caffe2_message("TensorProto").DESCRIPTOR.enum_types_by_name["DataType"].values_by_number
            number = operator.integer(name, 0)
            word = values[number].name if number in values else str(number)
    if word not in _NUMPY:
        raise operator.fault(f"has {name} '{word[:32]}', which is no data type of Caffe2")
    return _NUMPY[word]
