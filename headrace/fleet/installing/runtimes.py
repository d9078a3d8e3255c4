# SPDX-License-Identifier: Apache-2.0
"""The runtimes that come with Headrace, with the image that it is installed with in place of the one they have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headrace.fleet.words import Document, FleetSettings

FULL = "-full"
"""What the tag of the image with all formats ends with: PyTorch and the like, which no other program of ours needs."""


def with_image(runtimes: Iterable[Document], image: str, full_image: str = "") -> list[Document]:
    """The same with other images of ours. Those of others stay."""
    ours = FleetSettings.image
    changed = {ours: image, ours + FULL: full_image or full_image_of(image)}
    return [_changed(each, changed) for each in runtimes]


def full_image_of(image: str) -> str:
    """The image with all formats beside the small one. One that is named by a digest is taken for both."""
    if "@" in image:
        return image
    return f"{image}{FULL}" if ":" in image.rpartition("/")[2] else f"{image}:latest{FULL}"


def _changed(value: Any, images: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {
            name: images.get(each, each) if name == "image" and isinstance(each, str) else _changed(each, images)
            for name, each in value.items()
        }
    return [_changed(each, images) for each in value] if isinstance(value, list | tuple) else value
