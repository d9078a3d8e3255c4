# SPDX-License-Identifier: Apache-2.0
"""One operator of a net: what it reads and writes, and its arguments, with the errors that name it.

Made by `files`, read by the translators. Knows Caffe2's messages, and no ONNX.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.backends.contract import Array
from headrace.backends.netdef.wire import float_array
from headrace.core.errors import InvalidArgument

_LARGEST = 2**31


@dataclass(frozen=True, slots=True)
class Operator:
    """As the net has it."""

    index: int
    file: str
    """The name of the file it is from."""
    type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    arguments: Mapping[str, Any]
    """Argument messages by name."""
    weights: Mapping[str, Array] = field(default_factory=dict)
    """The floats of arguments that have many, which are not in the messages."""

    def __str__(self) -> str:
        return f"operator {self.index} ({self.type[:64]}) of '{self.file}'"

    def fault(self, text: str) -> InvalidArgument:
        """An error that names the operator; `text` goes on after its name."""
        return InvalidArgument(f"{self} {text}")

    def has(self, *names: str) -> bool:
        """Whether all these arguments are there."""
        return all(name in self.arguments for name in names)

    def integer(self, name: str, default: int) -> int:
        """A whole number. As in Caffe2, of 32 bits."""
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
        """Whole numbers; none when the argument is missing."""
        argument = self.arguments.get(name)
        values = () if argument is None else tuple(int(value) for value in argument.ints)
        if any(not -_LARGEST <= value < _LARGEST for value in values):
            raise self.fault(f"has a number in its argument '{name}' that is out of range")
        return values

    def number(self, name: str, default: float) -> float:
        """A number that is finite."""
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
        """A word."""
        argument = self.arguments.get(name)
        if argument is None:
            return default
        return bytes(argument.s).decode(errors="replace")

    def order(self) -> str:
        """NCHW or NHWC."""
        order = self.text("order", "NCHW")
        if order not in ("NCHW", "NHWC"):
            raise self.fault(f"has order '{order[:16]}', which is neither NCHW nor NHWC")
        return order

    def floats(self, name: str) -> Array:
        """Many numbers, as float32. Weights are here, so that each number must not become an object."""
        if name in self.weights:
            return float_array(self.weights[name])
        argument = self.arguments.get(name)
        floats = () if argument is None else argument.floats
        return np.fromiter(floats, np.float32, len(floats))

    def longs(self, name: str) -> Array:
        """Many whole numbers of 64 bits."""
        argument = self.arguments.get(name)
        if argument is None:
            return np.empty(0, np.int64)
        return np.fromiter(argument.ints, np.int64, len(argument.ints))

    def strings(self, name: str) -> list[bytes]:
        """Many strings."""
        argument = self.arguments.get(name)
        return [] if argument is None else [bytes(item) for item in argument.strings]


def round_or_none(value: float) -> int | None:
    """The whole number it is, or None for infinities and such."""
    return int(value) if math.isfinite(value) and value == int(value) else None
