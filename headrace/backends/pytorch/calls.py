# SPDX-License-Identifier: Apache-2.0
"""What a model's file becomes: a function of tensors, with what is known of its arguments and results.

Made by `script`, `program` and `compiled`, used by `naming` and `instance`, which need not know the kinds apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.backends.signature import Port

ArgumentKind = Literal["tensor", "strings", "mapping", "list", "fixed"]


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of forward()."""

    name: str
    """"" where the file does not tell."""
    kind: str = "tensor"
    """An `ArgumentKind`: a tensor, a List[str], a Dict[str, Tensor], a List[Tensor], or nothing a request can give."""
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Outputs:
    """How forward() returns."""

    count: int | None
    """None: not told by the file."""
    names: tuple[str, ...] | None = None
    """The keys, of a program that returns a mapping: what it returns here is its values in this order."""
    mapping: bool = False
    """It returns a mapping from names to tensors."""


@dataclass(frozen=True, slots=True)
class Ports:
    """The types and shapes, where the file tells them, in forward()'s order."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


@dataclass(frozen=True, slots=True)
class Range:
    """What sizes an input's dimension may have."""

    argument: int
    axis: int
    symbol: str
    lowest: int
    highest: int | None


def most_rows(ranges: Sequence[Range]) -> int | None:
    """The most rows a batch may have; None for any number."""
    return min((each.highest for each in ranges if each.axis == 0 and each.highest is not None), default=None)


@dataclass(frozen=True, slots=True)
class Call:
    """One callable model on one device."""

    function: Callable[..., Any]
    arguments: Sequence[Argument]
    outputs: Outputs
    signature: Ports | None
    """None: not told by the file."""
    ranges: tuple[Range, ...] = ()
    writes_inputs: bool = False
    """It computes in place on what it is given."""
    writes_itself: bool = False
    """It keeps something between calls, so that two instances cannot share it."""
    scripted: bool = False
    """TorchScript's executor runs it."""
    release: Callable[[], None] | None = None
    """Frees the weights at once, where letting go of the function would leave them to the garbage collector."""
