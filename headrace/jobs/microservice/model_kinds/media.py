# SPDX-License-Identifier: Apache-2.0
"""Images and videos of a request: check their types against a profile, fetch them concurrently, and limit their size.

The type comes from the path of a URL, without its query; if the path has no extension, from the content. `models.media`
fetches and decodes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Protocol
from urllib.parse import unquote, urlsplit

import numpy as np

from headrace.core.errors import HeadraceError, InvalidArgument, with_message
from headrace.core.generation import PromptImage, PromptVideo
from headrace.jobs.microservice.model_kinds.contract import MediaItem, MediaType
from headrace.jobs.microservice.profiles import MIME_EXTENSIONS, MediaRules

MAX_ITEMS = 64
"""Maximum number of images and videos in one request."""
UNSUPPORTED = "One or more input files have unsupported extensions"
_MAX_EXTENSION = 5


class Reader(Protocol):
    """The part of `models.media.reader.MediaReader` that is used here."""

    async def picture(self, url: str) -> PromptImage:
        """Return the image at a URL."""

    async def clip(self, url: str, fps: float = 2.0, max_frames: int | None = None) -> PromptVideo:
        """Return frames of the video at a URL."""

    async def item(self, url: str, fps: float = 2.0, max_frames: int | None = None) -> PromptImage | PromptVideo:
        """Return an image or frames, by content."""

    def close(self) -> None:
        """Close the reader."""


def extension_of(url: str) -> str:
    """Return the extension of a URL in lower case, without the dot; "" if there is none."""
    if url[:5].lower() == "data:":
        mime = url[5:300].split(",", 1)[0].split(";", 1)[0].strip().lower()
        if mime not in MIME_EXTENSIONS:
            raise InvalidArgument(
                f"a data: URL of type {mime[:64]!a} is not supported: use {', '.join(MIME_EXTENSIONS)}"
            )
        return MIME_EXTENSIONS[mime]
    try:
        path = unquote(urlsplit(url).path)
    except ValueError:
        raise InvalidArgument("invalid URL: write it like https://host/image.jpg") from None
    suffix = PurePosixPath(path).suffix[1:].lower()
    return suffix if len(suffix) <= _MAX_EXTENSION and suffix.isalnum() else ""


def media_type_of(item: MediaItem, rules: MediaRules) -> MediaType:
    """Return the type of an item; raise `InvalidArgument` if the rules do not allow it."""
    extension = extension_of(item.url)
    if not extension:
        return item.media_type
    media_type: MediaType = "image" if extension in rules.images else "video" if extension in rules.videos else ""
    if not media_type or (item.media_type and item.media_type != media_type):
        images, videos = ", ".join(sorted(rules.images)), ", ".join(sorted(rules.videos))
        raise InvalidArgument(
            f"{item.field}: {UNSUPPORTED}: {extension!a} is not among "
            + (
                f"images ({images})"
                if item.media_type == "image"
                else f"videos ({videos})"
                if item.media_type
                else f"{images}, {videos}"
            )
        )
    return media_type


async def read_media(
    reader: Reader, items: Sequence[MediaItem], rules: MediaRules, *, fps: float = 4.0, total_pixels: int = 0
) -> list[PromptImage | PromptVideo]:
    """Read all items concurrently, in order. The first failure fails the request and names the item."""
    if len(items) > MAX_ITEMS:
        raise InvalidArgument(f"{items[0].field}: {len(items)} files in one request: at most {MAX_ITEMS} are allowed")
    media_types = [media_type_of(item, rules) for item in items]  # check all before fetching the first

    async def read(item: MediaItem, media_type: MediaType) -> PromptImage | PromptVideo:
        try:
            if media_type == "image":
                return await reader.picture(item.url)
            if media_type == "video":
                return await asyncio.to_thread(fit_clip, await reader.clip(item.url, fps=fps), total_pixels)
            media = await reader.item(item.url, fps=fps)
            return await asyncio.to_thread(fit_clip, media, total_pixels) if isinstance(media, PromptVideo) else media
        except HeadraceError as error:
            raise with_message(error, f"{item.field}: {error.message}") from None

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(read(item, media_type)) for item, media_type in zip(items, media_types, strict=True)
            ]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def fit_clip(clip: PromptVideo, total_pixels: int) -> PromptVideo:
    """Return the clip with frames scaled down to this total number of pixels; 0 for no limit."""
    count, height, width = clip.frames.shape[:3]
    if not total_pixels or count * height * width <= total_pixels:
        return clip
    from PIL import Image

    scale = math.sqrt(total_pixels / (count * height * width))
    size = max(1, int(width * scale)), max(1, int(height * scale))
    frames = np.stack(
        [np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC)) for frame in clip.frames]
    )
    return PromptVideo(frames, clip.seconds, clip.frames_per_second)
