# SPDX-License-Identifier: Apache-2.0
"""Operators that make a tensor out of their arguments: the weights of a model among them. Listed in `table`."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from onnx import TensorProto

from headrace.backends.contract import Array
from headrace.backends.netdef.graph import Graph
from headrace.backends.netdef.operator import Operator
from headrace.backends.netdef.operators.arity import Translator, read, write
from headrace.backends.netdef.operators.dtypes import numpy_type

_MAX_FILL = 2**26
"""Elements of a tensor that a few bytes of a file may ask for."""


def given(kind: str) -> Translator:
    """A tensor whose elements the operator has, of the type `kind` unless its `dtype` tells another."""
    return partial(_given, kind=kind)


def _given(operator: Operator, graph: Graph, *, kind: str) -> None:
    dtype = numpy_type(operator, "dtype", kind)
    shape = operator.integers("shape")
    if operator.inputs:
        raise operator.fault("takes its shape from another tensor, which is not translated: save it with its shape")
    values = _values(operator, dtype)
    if any(size < 0 for size in shape) or math.prod(shape) != values.size:
        raise operator.fault(
            f"declares shape {list(shape)} for '{operator.outputs[0] if operator.outputs else ''}', and has "
            f"{values.size} values: the file is damaged"
        )
    write(operator, graph, graph.constant(values.reshape(shape)))


def _values(operator: Operator, dtype: Any) -> Array:
    if dtype is object:
        texts = operator.strings("values")
        values = np.empty(len(texts), object)
        values[:] = texts
        for item in texts:
            try:
                item.decode()
            except UnicodeDecodeError:
                raise operator.fault("has a string that is not UTF-8, which ONNX Runtime cannot hold") from None
        return values
    if np.issubdtype(dtype, np.floating):
        return operator.floats("values").astype(dtype, copy=False)
    numbers = operator.longs("values")
    if dtype is not np.bool_ and numbers.size:
        limits = np.iinfo(dtype)
        if numbers.min() < limits.min or numbers.max() > limits.max:
            raise operator.fault(f"has values that are no {np.dtype(dtype).name}: the file is damaged")
    return numbers.astype(dtype)


def given_bytes(operator: Operator, graph: Graph) -> None:
    """GivenTensorByteStringToUInt8Fill: the elements are the bytes of one string."""
    values = np.frombuffer(b"".join(operator.strings("values")), np.uint8)
    shape = operator.integers("shape")
    if any(size < 0 for size in shape) or math.prod(shape) != values.size:
        raise operator.fault(f"declares shape {list(shape)} and has {values.size} bytes: the file is damaged")
    write(operator, graph, graph.constant(values.reshape(shape)))


def constant_fill(operator: Operator, graph: Graph) -> None:
    """One value everywhere, in the shape that it tells or that another tensor has."""
    value = _fill_value(operator)
    if not operator.inputs:
        shape = operator.integers("shape")
        if any(size < 0 for size in shape) or math.prod(shape) > _MAX_FILL:
            raise operator.fault(f"asks for a tensor of shape {list(shape)}: up to {_MAX_FILL} elements are possible")
        write(operator, graph, graph.constant(np.full(shape, value)))
        return
    (like,) = read(operator, graph, 1)
    told = bool(operator.integer("input_as_shape", 0))
    shape_value = graph.emit("Cast", like, to=TensorProto.INT64) if told else graph.emit("Shape", like)
    if operator.has("extra_shape"):
        shape_value = graph.emit("Concat", shape_value, graph.integers(*operator.integers("extra_shape")), axis=0)
    filled = graph.emit("Expand", graph.constant(value), shape_value)
    write(operator, graph, filled)


def _fill_value(operator: Operator) -> Array:
    argument = operator.arguments.get("value")
    integer = argument is not None and argument.HasField("i") and not argument.HasField("f")
    dtype = numpy_type(operator, "dtype", "INT64" if integer else "FLOAT")
    if dtype is object:
        raise operator.fault("fills with strings, which is not translated")
    if np.issubdtype(dtype, np.floating):
        # Infinities and the like are possible here, as masks.
        number = 0.0 if argument is None else float(argument.i if integer else argument.f)
        return np.array(number, dtype)
    whole = operator.integer("value", 0)
    if dtype is np.bool_:
        return np.array(bool(whole))
    limits = np.iinfo(dtype)
    if not limits.min <= whole <= limits.max:
        raise operator.fault(f"has a value of {whole}, which is no {np.dtype(dtype).name}")
    return np.array(whole, dtype)


def random_fill(operator: Operator, graph: Graph) -> None:  # noqa: ARG001  # it is a Translator
    """Refused: whatever reads it was never trained, and would answer differently after each start."""
    blob = operator.outputs[0] if operator.outputs else ""
    raise operator.fault(
        f"fills '{blob}' with random numbers: the net was saved before it was trained. Save the trained weights "
        "(Caffe2's mobile_exporter or predictor_exporter writes them as GivenTensorFill)"
    )
