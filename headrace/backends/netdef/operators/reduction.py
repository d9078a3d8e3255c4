# SPDX-License-Identifier: Apache-2.0
"""Operators that take dimensions away: sums, means, extremes. Listed in `table`."""

from __future__ import annotations

from functools import partial

from headrace.backends.netdef.graph import Graph
from headrace.backends.netdef.operator import Operator
from headrace.backends.netdef.operators.arity import Translator, known_rank, read, write


def reduce_axes(kind: str) -> Translator:
    """Over `axes`, or over all; the dimensions stay, with size 1, unless `keepdims` is 0."""
    return partial(_reduce_axes, kind=kind)


def _reduce_axes(operator: Operator, graph: Graph, *, kind: str) -> None:
    (value,) = read(operator, graph, 1)
    keep = bool(operator.integer("keepdims", 1))
    write(operator, graph, _reduced(graph, kind, value, operator.integers("axes"), keep))


def reduce_side(kind: str, *, front: bool) -> Translator:
    """Over the first or the last `num_reduce_dim` dimensions, which go."""
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
        # The one that takes its axes as an input already in this version of ONNX.
        inputs = [value, graph.integers(*axes)] if axes else [value]
        return graph.emit(kind, *inputs, keepdims=int(keep))
    return graph.emit(kind, value, keepdims=int(keep), **({"axes": list(axes)} if axes else {}))


def arg_extreme(kind: str) -> Translator:
    """Where the largest or smallest is, along `axis`."""
    return partial(_arg_extreme, kind=kind)


def _arg_extreme(operator: Operator, graph: Graph, *, kind: str) -> None:
    (value,) = read(operator, graph, 1)
    axis, keep = operator.integer("axis", -1), bool(operator.integer("keepdims", 1))
    write(operator, graph, graph.emit(kind, value, axis=axis, keepdims=int(keep)))
