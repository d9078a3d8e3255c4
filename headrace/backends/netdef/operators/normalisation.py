# SPDX-License-Identifier: Apache-2.0
"""SpatialBN, LRN, Softmax, AffineChannel. Listed in `table`."""

from __future__ import annotations

from headrace.backends.netdef.graph import Graph
from headrace.backends.netdef.operator import Operator
from headrace.backends.netdef.operators.arity import (
    channels_first,
    channels_last,
    checked_axis,
    known_rank,
    read,
    write,
)


def spatial_bn(operator: Operator, graph: Graph) -> None:
    """By the mean and variance that training left behind."""
    image, scale, bias, mean, variance, *_ = read(operator, graph, 5, 7)
    if not operator.integer("is_test", 0):
        raise operator.fault(
            "is saved for training, where it takes the mean of each batch: export the net with is_test=1"
        )
    last = operator.order() == "NHWC"
    rank = known_rank(operator, graph, image) if last else 0
    if last:
        image = channels_first(graph, image, rank)
    epsilon = operator.number("epsilon", 1e-5)
    answer = graph.emit("BatchNormalization", image, scale, bias, mean, variance, epsilon=epsilon)
    write(operator, graph, channels_last(graph, answer, rank) if last else answer)


def lrn(operator: Operator, graph: Graph) -> None:
    """Over neighbouring channels. Caffe2 and ONNX both divide alpha by the size."""
    (image,) = read(operator, graph, 1)
    size = operator.integer("size", 0)
    if size < 1 or size % 2 == 0 or size > 2**16:
        raise operator.fault(f"has size {size}: it must be odd")
    last = operator.order() == "NHWC"
    if last:
        image = channels_first(graph, image, 4)
    answer = graph.emit(
        "LRN",
        image,
        size=size,
        alpha=operator.number("alpha", 0.0),
        beta=operator.number("beta", 0.0),
        bias=operator.number("bias", 1.0),
    )
    write(operator, graph, channels_last(graph, answer, 4) if last else answer)


def softmax(operator: Operator, graph: Graph) -> None:
    """Over all dimensions from `axis` on taken as one, where ONNX takes the axis alone."""
    (value,) = read(operator, graph, 1)
    rank = known_rank(operator, graph, value)
    axis = checked_axis(operator, operator.integer("axis", 1), rank)
    if axis == rank - 1:
        answer = graph.emit("Softmax", value, axis=-1)
    else:
        flat = graph.emit("Softmax", graph.emit("Flatten", value, axis=axis), axis=-1)
        answer = graph.emit("Reshape", flat, _shape_of(graph, value))
    write(operator, graph, answer)


def affine_channel(operator: Operator, graph: Graph) -> None:
    """Each channel times its scale, plus its bias."""
    image, scale, bias = read(operator, graph, 3)
    if operator.order() == "NCHW":
        ones = [1] * (known_rank(operator, graph, image) - 2)
        scale, bias = graph.reshaped(scale, [-1, *ones]), graph.reshaped(bias, [-1, *ones])
    write(operator, graph, graph.emit("Add", graph.emit("Mul", image, scale), bias))


def _shape_of(graph: Graph, value: str) -> str:
    """Its shape as a constant where at most one size is open, so that the shape of the answer is known too."""
    shape = graph.shape(value)
    if shape is not None and sum(size is None for size in shape) <= 1 and 0 not in shape:
        return graph.integers(*(-1 if size is None else size for size in shape))
    return graph.emit("Shape", value)
