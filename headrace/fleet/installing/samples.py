# SPDX-License-Identifier: Apache-2.0
"""The samples that come with Headrace, as they are written: with their comments, to be read and changed."""

from __future__ import annotations

from importlib import resources

from headrace.core.errors import InvalidArgument
from headrace.fleet.installing.runtimes import FULL, full_image_of
from headrace.fleet.words import FleetSettings

_SUFFIX = ".yaml"


def sample_names() -> list[str]:
    """What there is."""
    found = resources.files("headrace.fleet").joinpath("samples").iterdir()
    return sorted(each.name.removesuffix(_SUFFIX) for each in found if each.name.endswith(_SUFFIX))


def sample(name: str, image: str = "", full_image: str = "") -> str:
    """One of them, with other images of ours if any are told. Raises InvalidArgument."""
    if name not in sample_names():
        raise InvalidArgument(f"there is no sample {name}: there are {', '.join(sample_names())}")
    text = resources.files("headrace.fleet").joinpath("samples", name + _SUFFIX).read_text("utf-8")
    if not image:
        return text
    ours = f"image: {FleetSettings.image}"
    text = text.replace(ours + FULL, f"image: {full_image or full_image_of(image)}")
    return text.replace(f"{ours}\n", f"image: {image}\n")
