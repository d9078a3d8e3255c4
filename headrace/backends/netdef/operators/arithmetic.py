# SPDX-License-Identifier: Apache-2.0
"""Operators of two or more tensors, element by element, with Caffe2's old way to broadcast. Listed in `table`."""

from __future__ import annotations

from functools import partial, reduce

from headrace.backends.netdef.graph import Graph
from headrace.backends.netdef.operator import Operator
from headrace.backends.netdef.operators.arity import MANY, Translator, known_rank, read, write


def binary(kind: str) -> Translator:
    """An operator of two tensors, called `kind` in ONNX."""
    return partial(_binary, kind=kind)


def _binary(operator: Operator, graph: Graph, *, kind: str) -> None:
    left, right = read(operator, graph, 2)
    write(operator, graph, graph.emit(kind, left, aligned(operator, graph, left, right)))


def aligned(operator: Operator, graph: Graph, left: str, right: str) -> str:
    """The right tensor, shaped so that ONNX broadcasts it as Caffe2 does with `broadcast`, `axis` and `axis_str`.

    There the right one has fewer dimensions, and the first of them stands at `axis` of the left one; without an axis the
    last ones stand together, as everywhere else. Nets without `broadcast` have equal shapes, or mean it as ONNX does.
    """
    if not operator.integer("broadcast", 0):
        return right
    axis = operator.integer("axis", -1)
    word = operator.text("axis_str", "")
    if word:
        axis = operator.order().find(word)
        if len(word) != 1 or axis < 0:
            raise operator.fault(f"has axis_str '{word[:16]}', which is not one letter of its order")
    shape = graph.shape(right)
    if shape is not None and all(size == 1 for size in shape):
        return graph.reshaped(right, [1])
    if axis == -1:
        return right
    ours, theirs = known_rank(operator, graph, left), known_rank(operator, graph, right)
    behind = ours - axis - theirs
    if axis < 0 or behind < 0:
        raise operator.fault(
            f"has axis {axis} to broadcast {graph.describe(right)} over {graph.describe(left)}, where it does not fit"
        )
    if not behind:
        return right
    array = graph.array(right)
    if array is not None:
        return graph.constant(array.reshape(*array.shape, *[1] * behind))
    return graph.emit("Unsqueeze", right, graph.integers(*range(theirs, theirs + behind)))


def power(operator: Operator, graph: Graph) -> None:
    """To the power that the argument `exponent` or the second input tells."""
    base, *others = read(operator, graph, 1, 2)
    given = others[0] if others else graph.like(operator.number("exponent", 0.0), base)
    write(operator, graph, graph.emit("Pow", base, aligned(operator, graph, base, given)))


def total(operator: Operator, graph: Graph) -> None:
    """The sum of all. As a chain, because ONNX Runtime melts an Add into a convolution, and has no Sum of integers."""
    write(operator, graph, _sum(operator, graph))


def mean(operator: Operator, graph: Graph) -> None:
    """The mean of all."""
    answer = _sum(operator, graph)
    write(operator, graph, graph.emit("Div", answer, graph.like(len(operator.inputs), answer)))


def _sum(operator: Operator, graph: Graph) -> str:
    return reduce(lambda left, right: graph.emit("Add", left, right), read(operator, graph, 1, MANY))


def extreme(kind: str) -> Translator:
    """The largest or the smallest of all."""
    return partial(_extreme, kind=kind)


def _extreme(operator: Operator, graph: Graph, *, kind: str) -> None:
    write(operator, graph, graph.emit(kind, *read(operator, graph, 1, MANY)))


def unequal(operator: Operator, graph: Graph) -> None:
    """ONNX has no "not equal"."""
    left, right = read(operator, graph, 2)
    write(operator, graph, graph.emit("Not", graph.emit("Equal", left, aligned(operator, graph, left, right))))
