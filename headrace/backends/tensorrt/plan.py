# SPDX-License-Identifier: Apache-2.0
"""What a plan's engine says of itself: its bindings and its optimization profiles, as plain data.

Made by `device.described`, read by everyone else of the package. Knows no TensorRT, so that it can be made in a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.core.dtypes import BF16, BOOL, FP16, FP32, INT8, INT32, INT64, UINT8, DType
from headrace.models.config.types import Dims

DTYPES: Mapping[str, DType] = {
    "FLOAT": FP32,
    "HALF": FP16,
    "BF16": BF16,
    "INT8": INT8,
    "UINT8": UINT8,
    "INT32": INT32,
    "INT64": INT64,
    "BOOL": BOOL,
}
"""The types that a request can carry, by the names of `tensorrt.DataType`. FP8, INT4 and FP4 are not among them."""

LINEAR = "LINEAR"
"""The name of `tensorrt.TensorFormat` for elements one after the other, as numpy has them."""


@dataclass(frozen=True, slots=True)
class Binding:
    """One input or output of the engine."""

    name: str
    is_input: bool
    kind: str
    """TensorRT's word for its type."""
    shape: Dims
    """-1 for a size that the profile and the request decide."""
    on_host: bool = False
    """TensorRT reads or writes it in the host's memory."""
    is_shape_tensor: bool = False
    """Its values decide the shapes of others, or are decided by them."""
    layout: str = LINEAR
    """The first layout that is not linear, of those it has in the profiles."""

    @property
    def dtype(self) -> DType | None:
        """None: no request can carry it."""
        return DTYPES.get(self.kind)


@dataclass(frozen=True, slots=True)
class Range:
    """What one input may be in one profile: the sizes of its dimensions, or the values of a shape tensor."""

    lowest: Dims
    optimum: Dims
    highest: Dims

    def holds(self, sizes: Dims) -> bool:
        """Whether it takes these."""
        return len(sizes) == len(self.lowest) and all(
            low <= size <= high for low, size, high in zip(self.lowest, sizes, self.highest, strict=True)
        )

    def __str__(self) -> str:
        """For error texts: `[1, 3] to [8, 3]`."""
        if self.lowest == self.highest:
            return str(list(self.lowest))
        return f"{list(self.lowest)} to {list(self.highest)}"


@dataclass(frozen=True, slots=True)
class Profile:
    """One optimization profile."""

    index: int
    shapes: Mapping[str, Range]
    """Of every input."""
    values: Mapping[str, Range]
    """Of the inputs that are shape tensors."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All of it."""

    bindings: tuple[Binding, ...]
    profiles: tuple[Profile, ...]

    @property
    def inputs(self) -> tuple[Binding, ...]:
        """In the engine's order."""
        return tuple(binding for binding in self.bindings if binding.is_input)

    @property
    def outputs(self) -> tuple[Binding, ...]:
        """In the engine's order."""
        return tuple(binding for binding in self.bindings if not binding.is_input)
