# SPDX-License-Identifier: Apache-2.0
"""Operators that change the shape or the type and no value: Reshape, Transpose, Cast and the like. Listed in `table`."""

from __future__ import annotations

from functools import partial

import numpy as np
from onnx import TensorProto, helper

from headrace.backends.netdef.graph import Graph
from headrace.backends.netdef.operator import Operator
from headrace.backends.netdef.operators.arity import (
    Translator,
    channels_first,
    channels_last,
    known_rank,
    read,
    write,
)
from headrace.backends.netdef.operators.dtypes import numpy_type


def reshape(operator: Operator, graph: Graph) -> None:
    """0 keeps a size and -1 takes what is left, as in ONNX. The second output is the shape it had."""
    value, *shapes = read(operator, graph, 1, 2)
    if shapes:
        narrow = graph.elem_type(shapes[0]) != TensorProto.INT64
        array = graph.array(shapes[0])
        if array is not None:
            shape = graph.integers(*(int(size) for size in array.ravel()))
        else:
            shape = graph.emit("Cast", shapes[0], to=TensorProto.INT64) if narrow else shapes[0]
    elif operator.has("shape"):
        narrow = False
        shape = graph.integers(*operator.integers("shape"))
    else:
        raise operator.fault("has no shape, neither as an argument nor as its second input")
    answers = [graph.emit("Reshape", value, shape)]
    if len(operator.outputs) > 1:
        old = graph.emit("Shape", value)
        answers.append(graph.emit("Cast", old, to=graph.elem_type(shapes[0])) if narrow else old)
    write(operator, graph, *answers)


def flatten(operator: Operator, graph: Graph) -> None:
    """To two dimensions, cut at `axis`."""
    (value,) = read(operator, graph, 1)
    write(operator, graph, graph.emit("Flatten", value, axis=operator.integer("axis", 1)))


def flatten_to_vec(operator: Operator, graph: Graph) -> None:
    """To one dimension."""
    (value,) = read(operator, graph, 1)
    write(operator, graph, graph.emit("Reshape", value, graph.integers(-1)))


def transpose(operator: Operator, graph: Graph) -> None:
    """In the order of `axes`, or turned round."""
    (value,) = read(operator, graph, 1)
    axes = operator.integers("axes")
    write(operator, graph, graph.emit("Transpose", value, **({"perm": list(axes)} if axes else {})))


def nhwc_to_nchw(operator: Operator, graph: Graph) -> None:
    """Channels to the front."""
    (value,) = read(operator, graph, 1)
    write(operator, graph, channels_first(graph, value, graph.rank(value) or 4))


def nchw_to_nhwc(operator: Operator, graph: Graph) -> None:
    """Channels to the end."""
    (value,) = read(operator, graph, 1)
    write(operator, graph, channels_last(graph, value, graph.rank(value) or 4))


def expand_dims(operator: Operator, graph: Graph) -> None:
    """Add sizes of 1, where `dims` says they are afterwards."""
    (value,) = read(operator, graph, 1)
    write(operator, graph, graph.emit("Unsqueeze", value, graph.integers(*sorted(set(operator.integers("dims"))))))


def squeeze(operator: Operator, graph: Graph) -> None:
    """Take sizes of 1 away."""
    (value,) = read(operator, graph, 1)
    write(operator, graph, graph.emit("Squeeze", value, graph.integers(*sorted(set(operator.integers("dims"))))))


def shape(operator: Operator, graph: Graph) -> None:
    """The sizes, or those of some `axes`."""
    (value,) = read(operator, graph, 1)
    sizes = graph.emit("Shape", value)
    if operator.has("axes"):
        sizes = graph.emit("Gather", sizes, graph.integers(*operator.integers("axes")), axis=0)
    write(operator, graph, sizes)


def cast(operator: Operator, graph: Graph) -> None:
    """To the type that `to` tells."""
    if not operator.has("to"):
        raise operator.fault("does not say what it casts to")
    dtype = numpy_type(operator, "to", "FLOAT")
    if dtype is object:
        raise operator.fault("casts to strings, which Caffe2 cannot do either")
    _cast(operator, graph, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def cast_to(elem_type: int) -> Translator:
    """An operator that is a cast to one type."""
    return partial(_cast, to=elem_type)


def _cast(operator: Operator, graph: Graph, *, to: int) -> None:
    (value,) = read(operator, graph, 1)
    write(operator, graph, graph.emit("Cast", value, to=to))


def gather(operator: Operator, graph: Graph) -> None:
    """Rows by their numbers."""
    value, rows = read(operator, graph, 2)
    write(operator, graph, graph.emit("Gather", value, rows, axis=operator.integer("axis", 0)))


def tile(operator: Operator, graph: Graph) -> None:
    """`tiles` times along `axis`."""
    (value,) = read(operator, graph, 1)
    rank = known_rank(operator, graph, value)
    times, axis = operator.integer("tiles", 1), operator.integer("axis", 0)
    if not (-rank <= axis < rank and times >= 0):
        raise operator.fault(f"has tiles {times} and axis {axis}, and reads {graph.describe(value)}")
    repeats = [1] * rank
    repeats[axis] = times
    write(operator, graph, graph.emit("Tile", value, graph.integers(*repeats)))
