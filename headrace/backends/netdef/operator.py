# SPDX-License-Identifier: Apache-2.0
"""One operator of a Caffe2 net: its inputs, outputs and arguments, and errors that name it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.backends.contract import Array
from headrace.backends.netdef.graph import Graph
from headrace.core.errors import InvalidArgument

_LARGEST = 2**31


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator of the net."""

    index: int
    file: str
    """The name of its file."""
    type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    arguments: Mapping[str, Any]
    """Argument messages by name."""
    weights: Mapping[str, Array] = field(default_factory=dict)
    """The floats of large arguments, which are not in the messages."""

    def __str__(self) -> str:
        return f"operator {self.index} ({self.type[:64]}) of '{self.file}'"

    def fault(self, text: str) -> InvalidArgument:
        """Return an error that names the operator; `text` continues its name."""
        return InvalidArgument(f"{self} {text}")

    def has(self, *names: str) -> bool:
        """Return whether all these arguments are present."""
        return all(name in self.arguments for name in names)

    def integer(self, name: str, default: int) -> int:
        """Return an integer argument; 32 bits, as in Caffe2."""
        argument = self.arguments.get(name)
        if argument is None:
            return default
        if argument.HasField("i"):
            value = int(argument.i)
        elif argument.HasField("f") and argument.f == round_or_none(argument.f):
            value = int(argument.f)
        else:
            raise self.fault(f"has an argument '{name}' that is not a whole number")
        if not -_LARGEST <= value < _LARGEST:
            raise self.fault(f"has an argument '{name}' of {value}, which is out of range")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """Return an integer list; empty if the argument is missing."""
        argument = self.arguments.get(name)
        values = () if argument is None else tuple(int(value) for value in argument.ints)
        if any(not -_LARGEST <= value < _LARGEST for value in values):
            raise self.fault(f"has a number in its argument '{name}' that is out of range")
        return values

    def number(self, name: str, default: float) -> float:
        """Return a finite number."""
        argument = self.arguments.get(name)
        if argument is None:
            return default
        if not (argument.HasField("f") or argument.HasField("i")):
            raise self.fault(f"has an argument '{name}' that is not a number")
        value = float(argument.f if argument.HasField("f") else argument.i)
        if not math.isfinite(value):
            raise self.fault(f"has an argument '{name}' that is not a finite number")
        return value

    def text(self, name: str, default: str) -> str:
        """Return a string argument."""
        argument = self.arguments.get(name)
        if argument is None:
            return default
        return bytes(argument.s).decode(errors="replace")

    def order(self) -> str:
        """Return NCHW or NHWC."""
        order = self.text("order", "NCHW")
        if order not in ("NCHW", "NHWC"):
            raise self.fault(f"has order '{order[:16]}', which is neither NCHW nor NHWC")
        return order

    def floats(self, name: str) -> Array:
        """Return a float list as float32. Weights are read here, so no number becomes a Python object."""
        if name in self.weights:
            return float_array(self.weights[name])
        argument = self.arguments.get(name)
        floats = () if argument is None else argument.floats
        return np.fromiter(floats, np.float32, len(floats))

    def longs(self, name: str) -> Array:
        """Return an integer list as int64."""
        argument = self.arguments.get(name)
        if argument is None:
            return np.empty(0, np.int64)
        return np.fromiter(argument.ints, np.int64, len(argument.ints))

    def strings(self, name: str) -> list[bytes]:
        """Return a list of strings."""
        argument = self.arguments.get(name)
        return [] if argument is None else [bytes(item) for item in argument.strings]


def round_or_none(value: float) -> int | None:
    """Return the value as an integer, or None for infinities and NaN."""
    return int(value) if math.isfinite(value) and value == int(value) else None


Translator = Callable[[Operator, Graph], None]


def read(operator: Operator, graph: Graph, least: int, most: int | None = None) -> list[str]:
    """Return the values of the inputs; there must be `least` to `most` of them (default: exactly `least`)."""
    most = least if most is None else most
    if not least <= len(operator.inputs) <= most:
        wanted = str(least) if most == least else f"at least {least}" if most >= MANY else f"{least} to {most}"
        raise operator.fault(f"has {len(operator.inputs)} inputs and needs {wanted}: the net is damaged")
    return [graph.blobs[blob] for blob in operator.inputs]


MANY = 1_000_000
"""For `read`: any number of inputs."""


def write(operator: Operator, graph: Graph, *values: str) -> None:
    """Set the values of the first outputs. The remaining ones, such as masks, are not created."""
    if not operator.outputs:
        raise operator.fault("has no output: the net is damaged")
    for blob, value in zip(operator.outputs, values, strict=False):
        graph.blobs[blob] = value


def known_rank(operator: Operator, graph: Graph, value: str) -> int:
    """Return the rank of a value, for operators that cannot be translated without it."""
    rank = graph.rank(value)
    if rank is None:
        raise operator.fault("needs the shape of its input: declare the shapes of the net's inputs")
    return rank


def checked_axis(operator: Operator, axis: int, rank: int) -> int:
    """Return the axis counted from the front."""
    if not -rank <= axis < rank:
        raise operator.fault(f"has axis {axis}, and what it reads has {rank} dimensions")
    return axis % rank


def channels_first(graph: Graph, value: str, rank: int) -> str:
    """Transpose NHWC to NCHW."""
    return graph.transposed(value, [0, rank - 1, *range(1, rank - 1)])


def channels_last(graph: Graph, value: str, rank: int) -> str:
    """Transpose NCHW to NHWC."""
    return graph.transposed(value, [0, *range(2, rank), 1])


def float_array(weights: Array) -> Array:
    """Return removed weights as float32."""
    if weights.ndim == 1:
        return weights
    numbers: Array = np.ascontiguousarray(weights[:, 1:]).view("<f4").reshape(-1)
    return numbers
