# SPDX-License-Identifier: Apache-2.0
"""The pictures and videos of a request: checked against a profile's rules, read side by side, and cut to a size.

Called by the kinds that see. What a URL is, its path says, whatever stands behind a question mark; where it says nothing,
the content does. Reading and decoding are `headrace.media`'s.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Protocol
from urllib.parse import unquote, urlsplit

import numpy as np

from headrace.core.errors import HeadraceError, InvalidArgument, retold
from headrace.core.generation import Clip, Picture
from headrace.jobs.microservice.kinds.contract import MediaItem, Sort
from headrace.jobs.microservice.profiles import MIME_EXTENSIONS, MediaRules

MOST_ITEMS = 64
"""Pictures and videos of one request."""
UNSUPPORTED = "One or more input files have unsupported extensions"
_LONGEST_EXTENSION = 5


class Reader(Protocol):
    """`headrace.models.media.reader.MediaReader`, as far as it is needed here."""

    async def picture(self, url: str) -> Picture:
        """The image behind a URL."""

    async def clip(self, url: str, fps: float = 2.0, max_frames: int | None = None) -> Clip:
        """Frames of the video behind a URL."""

    async def item(self, url: str, fps: float = 2.0, max_frames: int | None = None) -> Picture | Clip:
        """Either, by what it is."""

    def close(self) -> None:
        """Take no more."""


def extension_of(url: str) -> str:
    """In lower case and without the dot; "" where there is none."""
    if url[:5].lower() == "data:":
        mime = url[5:300].split(",", 1)[0].split(";", 1)[0].strip().lower()
        if mime not in MIME_EXTENSIONS:
            raise InvalidArgument(f"a data: URL of type {mime[:64]!a} is not read: use {', '.join(MIME_EXTENSIONS)}")
        return MIME_EXTENSIONS[mime]
    try:
        path = unquote(urlsplit(url).path)
    except ValueError:
        raise InvalidArgument("a URL cannot be read: write it like https://host/picture.jpg") from None
    suffix = PurePosixPath(path).suffix[1:].lower()
    return suffix if len(suffix) <= _LONGEST_EXTENSION and suffix.isalnum() else ""


def sort_of(item: MediaItem, rules: MediaRules) -> Sort:
    """What an item is; raises `InvalidArgument` for what the rules leave out."""
    extension = extension_of(item.url)
    if not extension:
        return item.sort
    found: Sort = "image" if extension in rules.images else "video" if extension in rules.videos else ""
    if not found or (item.sort and item.sort != found):
        images, videos = ", ".join(sorted(rules.images)), ", ".join(sorted(rules.videos))
        raise InvalidArgument(
            f"{item.place}: {UNSUPPORTED}: {extension!a} is not among "
            + (
                f"images ({images})"
                if item.sort == "image"
                else f"videos ({videos})"
                if item.sort
                else f"{images}, {videos}"
            )
        )
    return found


async def gather(
    reader: Reader, items: Sequence[MediaItem], rules: MediaRules, *, fps: float = 4.0, total_pixels: int = 0
) -> list[Picture | Clip]:
    """Every item in order, read side by side. The first that cannot be read fails the request, and is named."""
    if len(items) > MOST_ITEMS:
        raise InvalidArgument(
            f"{items[0].place}: {len(items)} files in one request, and at most {MOST_ITEMS} are allowed"
        )
    sorts = [sort_of(item, rules) for item in items]  # all before the first is fetched

    async def read(item: MediaItem, sort: Sort) -> Picture | Clip:
        try:
            if sort == "image":
                return await reader.picture(item.url)
            if sort == "video":
                return await asyncio.to_thread(fitted, await reader.clip(item.url, fps=fps), total_pixels)
            found = await reader.item(item.url, fps=fps)
            return await asyncio.to_thread(fitted, found, total_pixels) if isinstance(found, Clip) else found
        except HeadraceError as error:
            raise retold(error, f"{item.place}: {error.message}") from None

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(read(item, sort)) for item, sort in zip(items, sorts, strict=True)]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def fitted(clip: Clip, total_pixels: int) -> Clip:
    """The clip with frames so small that all together have no more pixels than this; 0 for as it is."""
    count, height, width = clip.frames.shape[:3]
    if not total_pixels or count * height * width <= total_pixels:
        return clip
    from PIL import Image

    scale = math.sqrt(total_pixels / (count * height * width))
    size = max(1, int(width * scale)), max(1, int(height * scale))
    frames = np.stack(
        [np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC)) for frame in clip.frames]
    )
    return Clip(frames, clip.seconds, clip.frames_per_second)
