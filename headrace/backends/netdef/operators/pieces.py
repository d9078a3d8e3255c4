# SPDX-License-Identifier: Apache-2.0
"""Operators that put tensors together or take them apart: Concat, Split, Slice. Listed in `table`."""

from __future__ import annotations

import math

import numpy as np
from onnx import TensorProto

from headrace.backends.netdef.graph import Graph
from headrace.backends.netdef.operator import Operator
from headrace.backends.netdef.operators.arity import MANY, known_rank, read, write

_END = 2**62


def concat(operator: Operator, graph: Graph) -> None:
    """Along `axis`, or along the channels of `order`; `add_axis` stacks. The second output are the sizes put together."""
    values = read(operator, graph, 1, MANY)
    axis = _axis(operator)
    stacked = bool(operator.integer("add_axis", 0))
    joined = [graph.emit("Unsqueeze", value, graph.integers(axis)) for value in values] if stacked else values
    answers = [graph.emit("Concat", *joined, axis=axis)]
    if len(operator.outputs) > 1:
        answers.append(_sizes_along(graph, joined, axis))
    write(operator, graph, *answers)


def _sizes_along(graph: Graph, values: list[str], axis: int) -> str:
    """As a constant where they are known already, so that a Split by them has shapes that are known too."""
    shapes = [graph.shape(value) for value in values]
    sizes = [None if shape is None else shape[axis] for shape in shapes]
    if all(size is not None for size in sizes):
        return graph.constant(np.array(sizes, np.int32))
    told = [graph.emit("Gather", graph.emit("Shape", value), graph.integers(axis), axis=0) for value in values]
    return graph.emit("Cast", graph.emit("Concat", *told, axis=0), to=TensorProto.INT32)


def split(operator: Operator, graph: Graph) -> None:
    """Into as many as there are outputs: of the sizes that `split` or the second input tells, or of equal size."""
    value, *given = read(operator, graph, 1, 2)
    count = len(operator.outputs)
    if not count:
        raise operator.fault("has no output: the net is damaged")
    sizes = operator.integers("split")
    inputs = [value]
    if given:
        array = graph.array(given[0])
        if array is None:
            inputs.append(graph.emit("Cast", given[0], to=TensorProto.INT64))
        else:
            inputs.append(graph.constant(array.astype(np.int64)))
    elif sizes:
        if len(sizes) != count or any(size < 0 for size in sizes):
            raise operator.fault(f"has {count} outputs and split {list(sizes)}")
        inputs.append(graph.integers(*sizes))
    axis = _axis(operator)
    pieces = graph.emit_many("Split", inputs, count, axis=axis)
    if operator.integer("add_axis", 0):
        pieces = [graph.emit("Squeeze", piece, graph.integers(axis)) for piece in pieces]
    write(operator, graph, *pieces)


def cut(operator: Operator, graph: Graph) -> None:
    """From `starts` to `ends`. Numbers under 0 count from behind, and -1 is the end itself: one more than in ONNX."""
    value, *given = read(operator, graph, 1, 3)
    if len(given) == 2:
        arrays = [graph.array(each) for each in given]
        if arrays[0] is None or arrays[1] is None:
            raise operator.fault("cuts where the net computes to cut, which is not translated: only constants are")
        starts, ends = (tuple(int(number) for number in each.ravel()) for each in arrays if each is not None)
    else:
        starts, ends = operator.integers("starts"), operator.integers("ends")
    if not starts or len(starts) != len(ends):
        raise operator.fault(f"has starts {list(starts)} and ends {list(ends)}")
    bounds = [graph.integers(*(_counted(number) for number in numbers)) for numbers in (starts, ends)]
    write(operator, graph, graph.emit("Slice", value, *bounds, graph.integers(*range(len(starts)))))


def top_k(operator: Operator, graph: Graph) -> None:
    """The largest numbers and where they are."""
    (value,) = read(operator, graph, 1)
    count = operator.integer("k", -1)
    if count < 1:
        raise operator.fault(f"has k {count}")
    axis = operator.integer("axis", -1)
    answers = graph.emit_many("TopK", [value, graph.integers(count)], 2, axis=axis)
    write(operator, graph, *answers)


def channel_shuffle(operator: Operator, graph: Graph) -> None:
    """The channels of each group in turn: as a matrix with a row for each group, transposed."""
    (image,) = read(operator, graph, 1)
    group = operator.integer("group", 1)
    shape = graph.shape(image)
    rank = known_rank(operator, graph, image)
    last = operator.order() == "NHWC"
    axis = rank - 1 if last else 1
    channels = shape[axis] if shape is not None and rank > 2 else None
    if group < 1 or channels is None or channels % group:
        raise operator.fault(f"has group {group}, and reads {graph.describe(image)}, whose channels it must divide")
    if last:
        apart = graph.emit("Reshape", image, graph.integers(*[0] * axis, group, channels // group))
        turned = graph.emit("Transpose", apart, perm=[*range(axis), axis + 1, axis])
        together = graph.emit("Reshape", turned, graph.integers(*[0] * axis, channels))
    else:
        behind = [size if size is not None else -1 for size in shape[2:]] if shape is not None else []
        sizes = graph.emit("Shape", image) if behind.count(-1) > 1 else graph.integers(0, channels, *behind)
        pixels = -1 if -1 in behind else math.prod(behind)
        apart = graph.emit("Reshape", image, graph.integers(0, group, channels // group, pixels))
        turned = graph.emit("Transpose", apart, perm=[0, 2, 1, 3])
        together = graph.emit("Reshape", turned, sizes)
    write(operator, graph, together)


def _axis(operator: Operator) -> int:
    if operator.has("axis"):
        return operator.integer("axis", 1)
    return 3 if operator.order() == "NHWC" else 1


def _counted(number: int) -> int:
    return number if number >= 0 else _END if number == -1 else number + 1
