# SPDX-License-Identifier: Apache-2.0
"""How translators read the inputs of an operator and write its outputs. Called by all of them."""

from __future__ import annotations

from collections.abc import Callable

from headrace.backends.netdef.graph import Graph
from headrace.backends.netdef.operator import Operator

Translator = Callable[[Operator, Graph], None]


def read(operator: Operator, graph: Graph, least: int, most: int | None = None) -> list[str]:
    """The values of its inputs, of which there must be from `least` to `most` (as many as `least`, unless told)."""
    most = least if most is None else most
    if not least <= len(operator.inputs) <= most:
        wanted = str(least) if most == least else f"at least {least}" if most >= MANY else f"{least} to {most}"
        raise operator.fault(f"has {len(operator.inputs)} inputs and needs {wanted}: the net is damaged")
    return [graph.blobs[blob] for blob in operator.inputs]


MANY = 1_000_000
"""For `read`: any number of inputs."""


def write(operator: Operator, graph: Graph, *values: str) -> None:
    """Give the first outputs their values. Those that are left over, such as masks, are not made."""
    if not operator.outputs:
        raise operator.fault("has no output: the net is damaged")
    for blob, value in zip(operator.outputs, values, strict=False):
        graph.blobs[blob] = value


def known_rank(operator: Operator, graph: Graph, value: str) -> int:
    """How many dimensions a value has, for operators that cannot be translated without."""
    rank = graph.rank(value)
    if rank is None:
        raise operator.fault("needs to know the shape of what it reads: tell the shapes of the net's inputs")
    return rank


def checked_axis(operator: Operator, axis: int, rank: int) -> int:
    """The axis counted from the front."""
    if not -rank <= axis < rank:
        raise operator.fault(f"has axis {axis}, and what it reads has {rank} dimensions")
    return axis % rank


def channels_first(graph: Graph, value: str, rank: int) -> str:
    """NHWC to NCHW."""
    return graph.transposed(value, [0, rank - 1, *range(1, rank - 1)])


def channels_last(graph: Graph, value: str, rank: int) -> str:
    """NCHW to NHWC."""
    return graph.transposed(value, [0, *range(2, rank), 1])
