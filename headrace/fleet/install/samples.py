# SPDX-License-Identifier: Apache-2.0
"""The runtimes and samples that come with Headrace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

from headrace.core.errors import InvalidArgument
from headrace.fleet.documents import FleetSettings
from headrace.platforms.kubernetes_client.objects import Document

FULL = "-full"
"""Suffix of the tag of the image with all backends (PyTorch and others)."""


def with_image(runtimes: Iterable[Document], image: str, full_image: str = "") -> list[Document]:
    """Replace our own images in runtimes; other images stay."""
    default = FleetSettings.image
    images = {default: image, default + FULL: full_image or full_image_of(image)}
    return [_replace_images(runtime, images) for runtime in runtimes]


def full_image_of(image: str) -> str:
    """Return the image with all backends for the small image. An image with a digest is used for both."""
    if "@" in image:
        return image
    return f"{image}{FULL}" if ":" in image.rpartition("/")[2] else f"{image}:latest{FULL}"


def _replace_images(value: Any, images: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {
            name: images.get(item, item) if name == "image" and isinstance(item, str) else _replace_images(item, images)
            for name, item in value.items()
        }
    return [_replace_images(item, images) for item in value] if isinstance(value, list | tuple) else value


_SUFFIX = ".yaml"


def sample_names() -> list[str]:
    """Return the names of all samples."""
    files = resources.files("headrace.fleet").joinpath("samples").iterdir()
    return sorted(file.name.removesuffix(_SUFFIX) for file in files if file.name.endswith(_SUFFIX))


def sample(name: str, image: str = "", full_image: str = "") -> str:
    """Return the text of a sample, with our own images replaced if others are given. Raises InvalidArgument."""
    if name not in sample_names():
        raise InvalidArgument(f"there is no sample {name}: there are {', '.join(sample_names())}")
    text = resources.files("headrace.fleet").joinpath("samples", name + _SUFFIX).read_text("utf-8")
    if not image:
        return text
    default = f"image: {FleetSettings.image}"
    text = text.replace(default + FULL, f"image: {full_image or full_image_of(image)}")
    return text.replace(f"{default}\n", f"image: {image}\n")
