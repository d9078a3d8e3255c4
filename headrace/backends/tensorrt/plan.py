# SPDX-License-Identifier: Apache-2.0
"""A TensorRT plan's bindings and optimization profiles, and the choice of a profile for a batch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.backends.contract import Placement
from headrace.core.dtypes import BF16, BOOL, FP16, FP32, INT8, INT32, INT64, UINT8, DType
from headrace.core.errors import InvalidArgument
from headrace.models.config.types import Dims, ModelConfig

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
"""The types that a request can carry, by the names of `tensorrt.DataType`; without FP8, INT4 and FP4."""

LINEAR = "LINEAR"
"""The name of `tensorrt.TensorFormat` for contiguous elements, as in numpy."""


@dataclass(frozen=True, slots=True)
class Binding:
    """One input or output of the engine."""

    name: str
    is_input: bool
    kind: str
    """TensorRT's name of its type."""
    shape: Dims
    """-1: a size that depends on profile and request."""
    on_host: bool = False
    """TensorRT reads or writes it in host memory."""
    is_shape_tensor: bool = False
    """Its values determine the shapes of other tensors, or are determined by them."""
    layout: str = LINEAR
    """The first non-linear layout among its layouts in the profiles."""

    @property
    def dtype(self) -> DType | None:
        """Return the data type; None if no request can carry it."""
        return DTYPES.get(self.kind)


@dataclass(frozen=True, slots=True)
class Range:
    """The limits of an input in a profile: of its dimensions, or of a shape tensor's values."""

    lowest: Dims
    optimum: Dims
    highest: Dims

    def holds(self, sizes: Dims) -> bool:
        """Return whether these sizes are within the limits."""
        return len(sizes) == len(self.lowest) and all(
            low <= size <= high for low, size, high in zip(self.lowest, sizes, self.highest, strict=True)
        )

    def __str__(self) -> str:
        """Return the limits for messages: `[1, 3] to [8, 3]`."""
        if self.lowest == self.highest:
            return str(list(self.lowest))
        return f"{list(self.lowest)} to {list(self.highest)}"


@dataclass(frozen=True, slots=True)
class Profile:
    """One optimization profile."""

    index: int
    shapes: Mapping[str, Range]
    """The limits of every input."""
    values: Mapping[str, Range]
    """The limits of the inputs that are shape tensors."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The bindings and profiles of a plan."""

    bindings: tuple[Binding, ...]
    profiles: tuple[Profile, ...]

    @property
    def inputs(self) -> tuple[Binding, ...]:
        """Return the inputs in the engine's order."""
        return tuple(binding for binding in self.bindings if binding.is_input)

    @property
    def outputs(self) -> tuple[Binding, ...]:
        """Return the outputs in the engine's order."""
        return tuple(binding for binding in self.bindings if not binding.is_input)


def usable_profiles(config: ModelConfig, placement: Placement, plan: Plan) -> tuple[Profile, ...]:
    """Return the profiles that an instance may use: those of its instance group, or all."""
    named = _named(config, placement)
    if not named:
        return plan.profiles
    chosen = []
    for text in named:
        index = int(text) if text.isascii() and text.isdigit() and len(text) < 6 else -1
        if not 0 <= index < len(plan.profiles):
            raise InvalidArgument(
                f"instance_group of model '{config.name}' asks for profile '{text[:32]}', and the plan has "
                f"{_numbers(plan.profiles)}: name one of these, or none to use all"
            )
        chosen.append(plan.profiles[index])
    return tuple(chosen)


def chosen_profile(
    profiles: Sequence[Profile], shapes: Mapping[str, Dims], values: Mapping[str, Dims], active: int
) -> Profile | None:
    """Return the profile with the optimum nearest to the batch, preferring the active one; None if no profile fits."""
    best: Profile | None = None
    nearest = (0, False, 0)
    for profile in profiles:
        if not _takes(profile, shapes, values):
            continue
        # TensorRT updates its resources on a profile change, so avoid needless ones.
        rank = (_distance(profile, shapes, values), profile.index != active, profile.index)
        if best is None or rank < nearest:
            best, nearest = profile, rank
    return best


def most_rows(profile: Profile, batched: Sequence[str]) -> int:
    """Return the largest first dimension that each of the `batched` inputs accepts."""
    return min((profile.shapes[name].highest[0] for name in batched if profile.shapes[name].highest), default=0)


def described(profiles: Sequence[Profile], names: Sequence[str]) -> str:
    """Return the limits of these inputs in each profile, for messages."""
    lines = []
    for profile in profiles:
        ranges = [f"'{name}' {profile.shapes[name]}" for name in names]
        ranges += [f"values of '{name}' {profile.values[name]}" for name in names if name in profile.values]
        lines.append(f"profile {profile.index} takes {', '.join(ranges)}")
    return "; ".join(lines)


def _named(config: ModelConfig, placement: Placement) -> Sequence[str]:
    # A placement has its group only in its name.
    groups = [] if config.proto is None else config.proto.instance_group
    for group in groups:
        if group.profile and re.fullmatch(re.escape(group.name) + r"_[0-9]+_gpu[0-9]+", placement.name):
            return list(group.profile)
    return ()


def _takes(profile: Profile, shapes: Mapping[str, Dims], values: Mapping[str, Dims]) -> bool:
    return all(profile.shapes[name].holds(shape) for name, shape in shapes.items()) and all(
        profile.values[name].holds(given) for name, given in values.items() if name in profile.values
    )


def _distance(profile: Profile, shapes: Mapping[str, Dims], values: Mapping[str, Dims]) -> int:
    pairs = [(profile.shapes[name].optimum, shape) for name, shape in shapes.items()]
    pairs += [(profile.values[name].optimum, given) for name, given in values.items() if name in profile.values]
    return sum(abs(best - size) for optimum, sizes in pairs for best, size in zip(optimum, sizes, strict=True))


def _numbers(profiles: Sequence[Profile]) -> str:
    return "profile 0 only" if len(profiles) == 1 else f"profiles 0 to {len(profiles) - 1}"
