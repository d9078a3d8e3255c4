# SPDX-License-Identifier: Apache-2.0
"""Which optimization profile takes which shapes.

A plan is built for ranges of shapes, one range to a profile. An instance may use all profiles of its plan, or those that
`instance_group.profile` names; a batch goes to the one that was optimised for sizes nearest to its own. Called by
`checking` when a model is loaded and by `instance` for each batch. Knows shapes only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from headrace.backends.contract import Placement
from headrace.backends.tensorrt.plan import Plan, Profile
from headrace.core.errors import InvalidArgument
from headrace.models.config.types import Dims, ModelConfig


def usable_profiles(config: ModelConfig, placement: Placement, plan: Plan) -> tuple[Profile, ...]:
    """The profiles that an instance may use: those its group names, or all."""
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
    """The profile whose optimum is nearest to the batch; the active one of two that are equally near. None: none fits."""
    best: Profile | None = None
    nearest = (0, False, 0)
    for profile in profiles:
        if not _takes(profile, shapes, values):
            continue
        # Changing the profile makes TensorRT update its resources, so it is not done for nothing.
        rank = (_distance(profile, shapes, values), profile.index != active, profile.index)
        if best is None or rank < nearest:
            best, nearest = profile, rank
    return best


def most_rows(profile: Profile, batched: Sequence[str]) -> int:
    """The largest first dimension that each of the `batched` inputs takes."""
    return min((profile.shapes[name].highest[0] for name in batched if profile.shapes[name].highest), default=0)


def described(profiles: Sequence[Profile], names: Sequence[str]) -> str:
    """For error texts: what each profile takes of these inputs."""
    lines = []
    for profile in profiles:
        ranges = [f"'{name}' {profile.shapes[name]}" for name in names]
        ranges += [f"values of '{name}' {profile.values[name]}" for name in names if name in profile.values]
        lines.append(f"profile {profile.index} takes {', '.join(ranges)}")
    return "; ".join(lines)


def _named(config: ModelConfig, placement: Placement) -> Sequence[str]:
    # A placement carries its group only in its name.
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
