# SPDX-License-Identifier: Apache-2.0
"""Translations of Caffe2's activations, arithmetic and reductions."""

from __future__ import annotations

from functools import partial, reduce

from headrace.backends.netdef.graph import Graph
from headrace.backends.netdef.operator import MANY, Operator, Translator, known_rank, read, write


def plain(kind: str) -> Translator:
    """Return a translator for an operator that ONNX has under the name `kind`."""
    return partial(_plain, kind=kind)


def _plain(operator: Operator, graph: Graph, *, kind: str) -> None:
    write(operator, graph, graph.emit(kind, *read(operator, graph, 1)))


def identity(operator: Operator, graph: Graph) -> None:
    """Translate copies and operators that matter only for training or devices. Dropout is one: it is off when serving."""
    (value, *_) = read(operator, graph, 1, 2)
    write(operator, graph, value)


def leaky_relu(operator: Operator, graph: Graph) -> None:
    """Multiply negative values by `alpha`."""
    alpha = operator.number("alpha", 0.01)
    write(operator, graph, graph.emit("LeakyRelu", *read(operator, graph, 1), alpha=alpha))


def elu(operator: Operator, graph: Graph) -> None:
    """Map negative values to `alpha` (e^x - 1)."""
    write(operator, graph, graph.emit("Elu", *read(operator, graph, 1), alpha=operator.number("alpha", 1.0)))


def selu(operator: Operator, graph: Graph) -> None:
    """Apply a scaled Elu."""
    alpha = operator.number("alpha", 1.6732632423543772848170429916717)
    scale = operator.number("scale", 1.0507009873554804934193349852946)
    write(operator, graph, graph.emit("Selu", *read(operator, graph, 1), alpha=alpha, gamma=scale))


def prelu(operator: Operator, graph: Graph) -> None:
    """Multiply negative values by a slope: one for all, or one per channel."""
    value, slope = read(operator, graph, 2)
    shape = graph.shape(slope)
    if shape is None or shape != (1,):
        rank = known_rank(operator, graph, value)
        if operator.order() == "NCHW" and rank > 2:
            slope = graph.reshaped(slope, [-1, *[1] * (rank - 2)])
    write(operator, graph, graph.emit("PRelu", value, slope))


def clip(operator: Operator, graph: Graph) -> None:
    """Clip to `min` and `max`."""
    (value,) = read(operator, graph, 1)
    low = graph.like(operator.number("min", 0), value) if operator.has("min") else ""
    high = graph.like(operator.number("max", 0), value) if operator.has("max") else ""
    write(operator, graph, graph.emit("Clip", value, low, high))


def square(operator: Operator, graph: Graph) -> None:
    """Square each value."""
    (value,) = read(operator, graph, 1)
    write(operator, graph, graph.emit("Mul", value, value))


def cube(operator: Operator, graph: Graph) -> None:
    """Cube each value."""
    (value,) = read(operator, graph, 1)
    write(operator, graph, graph.emit("Mul", graph.emit("Mul", value, value), value))


def reciprocal_sqrt(operator: Operator, graph: Graph) -> None:
    """Output one over the square root."""
    write(operator, graph, graph.emit("Reciprocal", graph.emit("Sqrt", *read(operator, graph, 1))))


def swish(operator: Operator, graph: Graph) -> None:
    """Multiply each value by its sigmoid."""
    (value,) = read(operator, graph, 1)
    write(operator, graph, graph.emit("Mul", value, graph.emit("Sigmoid", value)))


def scale(operator: Operator, graph: Graph) -> None:
    """Multiply by the argument `scale`."""
    (value,) = read(operator, graph, 1)
    write(operator, graph, graph.emit("Mul", value, graph.like(operator.number("scale", 1.0), value)))


def binary(kind: str) -> Translator:
    """Return a translator for an operator of two tensors, called `kind` in ONNX."""
    return partial(_binary, kind=kind)


def _binary(operator: Operator, graph: Graph, *, kind: str) -> None:
    left, right = read(operator, graph, 2)
    write(operator, graph, graph.emit(kind, left, aligned(operator, graph, left, right)))


def aligned(operator: Operator, graph: Graph, left: str, right: str) -> str:
    """Return the right tensor, shaped so that ONNX broadcasts it as Caffe2 does with `broadcast`, `axis` and `axis_str`.

    In Caffe2 the right tensor has fewer dimensions, and its first one aligns with `axis` of the left tensor; without an
    axis the last ones align, as in numpy. Nets without `broadcast` have equal shapes, or mean it as ONNX does.
    """
    if not operator.integer("broadcast", 0):
        return right
    axis = operator.integer("axis", -1)
    axis_letter = operator.text("axis_str", "")
    if axis_letter:
        axis = operator.order().find(axis_letter)
        if len(axis_letter) != 1 or axis < 0:
            raise operator.fault(f"has axis_str '{axis_letter[:16]}', which is not one letter of its order")
    shape = graph.shape(right)
    if shape is not None and all(size == 1 for size in shape):
        return graph.reshaped(right, [1])
    if axis == -1:
        return right
    left_rank, right_rank = known_rank(operator, graph, left), known_rank(operator, graph, right)
    trailing = left_rank - axis - right_rank
    if axis < 0 or trailing < 0:
        raise operator.fault(
            f"has axis {axis} to broadcast {graph.describe(right)} over {graph.describe(left)}, where it does not fit"
        )
    if not trailing:
        return right
    array = graph.array(right)
    if array is not None:
        return graph.constant(array.reshape(*array.shape, *[1] * trailing))
    return graph.emit("Unsqueeze", right, graph.integers(*range(right_rank, right_rank + trailing)))


def power(operator: Operator, graph: Graph) -> None:
    """Raise to the power of the argument `exponent` or of the second input."""
    base, *others = read(operator, graph, 1, 2)
    given = others[0] if others else graph.like(operator.number("exponent", 0.0), base)
    write(operator, graph, graph.emit("Pow", base, aligned(operator, graph, base, given)))


def sum_of_inputs(operator: Operator, graph: Graph) -> None:
    """Add all inputs. As a chain, because ONNX Runtime fuses an Add into a convolution, and has no Sum of integers."""
    write(operator, graph, _sum(operator, graph))


def mean(operator: Operator, graph: Graph) -> None:
    """Output the mean of all inputs."""
    answer = _sum(operator, graph)
    write(operator, graph, graph.emit("Div", answer, graph.like(len(operator.inputs), answer)))


def _sum(operator: Operator, graph: Graph) -> str:
    return reduce(lambda left, right: graph.emit("Add", left, right), read(operator, graph, 1, MANY))


def extremum(kind: str) -> Translator:
    """Return a translator for the maximum or minimum of all inputs."""
    return partial(_extremum, kind=kind)


def _extremum(operator: Operator, graph: Graph, *, kind: str) -> None:
    write(operator, graph, graph.emit(kind, *read(operator, graph, 1, MANY)))


def not_equal(operator: Operator, graph: Graph) -> None:
    """Translate NE: ONNX has no "not equal"."""
    left, right = read(operator, graph, 2)
    write(operator, graph, graph.emit("Not", graph.emit("Equal", left, aligned(operator, graph, left, right))))


def reduce_axes(kind: str) -> Translator:
    """Return a translator for a reduction over `axes`, or all; dimensions stay with size 1, unless `keepdims` is 0."""
    return partial(_reduce_axes, kind=kind)


def _reduce_axes(operator: Operator, graph: Graph, *, kind: str) -> None:
    (value,) = read(operator, graph, 1)
    keep = bool(operator.integer("keepdims", 1))
    write(operator, graph, _reduced(graph, kind, value, operator.integers("axes"), keep))


def reduce_side(kind: str, *, front: bool) -> Translator:
    """Return a translator for a reduction over the first or last `num_reduce_dim` dimensions, which are removed."""
    return partial(_reduce_side, kind=kind, front=front)


def _reduce_side(operator: Operator, graph: Graph, *, kind: str, front: bool) -> None:
    if len(operator.inputs) > 1:
        raise operator.fault("takes lengths as a second input, which is not translated")
    (value,) = read(operator, graph, 1)
    count = operator.integer("num_reduce_dim", 1)
    rank = known_rank(operator, graph, value)
    if not 1 <= count <= rank:
        raise operator.fault(f"has num_reduce_dim {count}, and reads {graph.describe(value)}")
    axes = range(count) if front else range(rank - count, rank)
    write(operator, graph, _reduced(graph, kind, value, tuple(axes), False))


def _reduced(graph: Graph, kind: str, value: str, axes: tuple[int, ...], keep: bool) -> str:
    if kind == "ReduceSum":
        # The only reduction that already takes its axes as an input in this version of ONNX.
        inputs = [value, graph.integers(*axes)] if axes else [value]
        return graph.emit(kind, *inputs, keepdims=int(keep))
    return graph.emit(kind, value, keepdims=int(keep), **({"axes": list(axes)} if axes else {}))


def arg_extreme(kind: str) -> Translator:
    """Return a translator for the index of the largest or smallest value along `axis`."""
    return partial(_arg_extreme, kind=kind)


def _arg_extreme(operator: Operator, graph: Graph, *, kind: str) -> None:
    (value,) = read(operator, graph, 1)
    axis, keep = operator.integer("axis", -1), bool(operator.integer("keepdims", 1))
    write(operator, graph, graph.emit(kind, value, axis=axis, keepdims=int(keep)))
