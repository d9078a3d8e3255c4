# SPDX-License-Identifier: Apache-2.0
"""Functions of single numbers: activations, and the mathematics that has a name in Caffe2. Listed in `table`."""

from __future__ import annotations

from functools import partial

from headrace.backends.netdef.graph import Graph
from headrace.backends.netdef.operator import Operator
from headrace.backends.netdef.operators.arity import Translator, known_rank, read, write


def plain(kind: str) -> Translator:
    """An operator that ONNX has as it is, under the name `kind`."""
    return partial(_plain, kind=kind)


def _plain(operator: Operator, graph: Graph, *, kind: str) -> None:
    write(operator, graph, graph.emit(kind, *read(operator, graph, 1)))


def same(operator: Operator, graph: Graph) -> None:
    """Copies, and what means something for training or for devices only. Dropout is one: serving drops nothing."""
    (value, *_) = read(operator, graph, 1, 2)
    write(operator, graph, value)


def leaky_relu(operator: Operator, graph: Graph) -> None:
    """Negative numbers times `alpha`."""
    alpha = operator.number("alpha", 0.01)
    write(operator, graph, graph.emit("LeakyRelu", *read(operator, graph, 1), alpha=alpha))


def elu(operator: Operator, graph: Graph) -> None:
    """Negative numbers as `alpha` (e^x - 1)."""
    write(operator, graph, graph.emit("Elu", *read(operator, graph, 1), alpha=operator.number("alpha", 1.0)))


def selu(operator: Operator, graph: Graph) -> None:
    """Elu, scaled."""
    alpha = operator.number("alpha", 1.6732632423543772848170429916717)
    scale = operator.number("scale", 1.0507009873554804934193349852946)
    write(operator, graph, graph.emit("Selu", *read(operator, graph, 1), alpha=alpha, gamma=scale))


def prelu(operator: Operator, graph: Graph) -> None:
    """Negative numbers times a slope: one for all, or one for each channel."""
    value, slope = read(operator, graph, 2)
    shape = graph.shape(slope)
    if shape is None or shape != (1,):
        rank = known_rank(operator, graph, value)
        if operator.order() == "NCHW" and rank > 2:
            slope = graph.reshaped(slope, [-1, *[1] * (rank - 2)])
    write(operator, graph, graph.emit("PRelu", value, slope))


def clip(operator: Operator, graph: Graph) -> None:
    """Nothing under `min` nor over `max`."""
    (value,) = read(operator, graph, 1)
    low = graph.like(operator.number("min", 0), value) if operator.has("min") else ""
    high = graph.like(operator.number("max", 0), value) if operator.has("max") else ""
    write(operator, graph, graph.emit("Clip", value, low, high))


def square(operator: Operator, graph: Graph) -> None:
    """To the power of two."""
    (value,) = read(operator, graph, 1)
    write(operator, graph, graph.emit("Mul", value, value))


def cube(operator: Operator, graph: Graph) -> None:
    """To the power of three."""
    (value,) = read(operator, graph, 1)
    write(operator, graph, graph.emit("Mul", graph.emit("Mul", value, value), value))


def reciprocal_root(operator: Operator, graph: Graph) -> None:
    """One over the square root."""
    write(operator, graph, graph.emit("Reciprocal", graph.emit("Sqrt", *read(operator, graph, 1))))


def swish(operator: Operator, graph: Graph) -> None:
    """Each number times its sigmoid."""
    (value,) = read(operator, graph, 1)
    write(operator, graph, graph.emit("Mul", value, graph.emit("Sigmoid", value)))


def scale(operator: Operator, graph: Graph) -> None:
    """Times the argument `scale`."""
    (value,) = read(operator, graph, 1)
    write(operator, graph, graph.emit("Mul", value, graph.like(operator.number("scale", 1.0), value)))
