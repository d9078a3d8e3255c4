# SPDX-License-Identifier: Apache-2.0
"""Products of matrices: FC, MatMul, BatchMatMul. Listed in `table`."""

from __future__ import annotations

import math

from headrace.backends.netdef.graph import Graph
from headrace.backends.netdef.operator import Operator
from headrace.backends.netdef.operators.arity import checked_axis, known_rank, read, write


def fc(operator: Operator, graph: Graph) -> None:
    """X, laid flat from `axis` on, times the transpose of W, plus b."""
    _fully_connected(operator, graph, transposed=True)


def fc_transposed(operator: Operator, graph: Graph) -> None:
    """As FC, with W as it is."""
    _fully_connected(operator, graph, transposed=False)


def _fully_connected(operator: Operator, graph: Graph, *, transposed: bool) -> None:
    rows, weights, bias = read(operator, graph, 3)
    axis = operator.integer("axis", 1)
    rank = graph.rank(rows)
    if axis != 1:
        axis = checked_axis(operator, axis, known_rank(operator, graph, rows))
    flat = rows if rank == 2 and axis == 1 else graph.emit("Flatten", rows, axis=axis)
    matrix = _matrix(operator, graph, weights, "axis_w")
    ours, theirs = graph.shape(flat), graph.shape(matrix)
    if ours is not None and theirs is not None:
        sizes = (ours[-1], theirs[-1 if transposed else 0])
        if None not in sizes and sizes[0] != sizes[1]:
            # ONNX Runtime would notice at the first request only.
            raise operator.fault(
                f"reads {graph.describe(rows)} with weights {graph.describe(weights)}, which do not fit: are both files "
                "of one model, and the dims of the configuration right?"
            )
    answer = graph.emit("Gemm", flat, matrix, bias, transB=int(transposed))
    if axis != 1:
        begin = graph.emit("Slice", graph.emit("Shape", rows), graph.integers(0), graph.integers(axis))
        shape = graph.emit("Concat", begin, graph.integers(-1), axis=0)
        answer = graph.emit("Reshape", answer, shape)
    write(operator, graph, answer)


def matmul(operator: Operator, graph: Graph) -> None:
    """Two matrices, either of which may be transposed first."""
    left, right = read(operator, graph, 2)
    answer = graph.emit(
        "Gemm",
        _matrix(operator, graph, left, "axis_a"),
        _matrix(operator, graph, right, "axis_b"),
        transA=int(bool(operator.integer("trans_a", 0))),
        transB=int(bool(operator.integer("trans_b", 0))),
    )
    write(operator, graph, answer)


def batch_matmul(operator: Operator, graph: Graph) -> None:
    """As `numpy.matmul`, with the last two dimensions turned round where asked."""
    values = read(operator, graph, 2)
    for place, name in enumerate(("trans_a", "trans_b")):
        if operator.integer(name, 0):
            rank = known_rank(operator, graph, values[place])
            if rank < 2:
                raise operator.fault(f"has {name}, and reads {graph.describe(values[place])}")
            values[place] = graph.transposed(values[place], [*range(rank - 2), rank - 1, rank - 2])
    write(operator, graph, graph.emit("MatMul", *values))


def _matrix(operator: Operator, graph: Graph, value: str, name: str) -> str:
    """Laid flat to two dimensions, cut at the axis that the argument `name` tells."""
    axis = operator.integer(name, 1)
    shape = graph.shape(value)
    if shape is not None and len(shape) == 2 and axis in (1, -1):
        return value
    if shape is None:
        return graph.emit("Flatten", value, axis=axis)
    axis = checked_axis(operator, axis, len(shape))
    if graph.array(value) is not None:
        sizes = [size or 0 for size in shape]
        return graph.reshaped(value, [math.prod(sizes[:axis]), math.prod(sizes[axis:])])
    return graph.emit("Flatten", value, axis=axis)
