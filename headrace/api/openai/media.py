# SPDX-License-Identifier: Apache-2.0
"""The images and videos of a conversation, read side by side. Called by `chat`, in a task that ends with its client.

How a URL becomes a picture, and within which limits, is for `headrace.media` to know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from headrace.api.openai.errors import Refused
from headrace.api.openai.messages import MediaUrl
from headrace.core.errors import Code, HeadraceError
from headrace.core.generation import Clip, Picture

_OF_THE_REQUEST = (Code.INVALID_ARGUMENT, Code.TOO_LARGE, Code.NOT_FOUND, Code.PERMISSION_DENIED)


class Reader(Protocol):
    """What is asked of `media.reader.MediaReader`."""

    async def picture(self, url: str) -> Picture:
        """The image at a URL."""

    async def clip(self, url: str) -> Clip:
        """The video at a URL."""


async def read_media(reader: Reader, wanted: Sequence[MediaUrl], most_bytes: int) -> tuple[Picture | Clip, ...]:
    """All of them, in order. The first that fails ends the others."""
    total = 0

    async def read(one: MediaUrl) -> Picture | Clip:
        nonlocal total
        try:
            seen = await (reader.picture(one.url) if one.kind == "image" else reader.clip(one.url))
        except HeadraceError as error:
            if error.code in _OF_THE_REQUEST:
                raise Refused(one.param, error.message, "invalid_media") from None
            raise
        total += seen.pixels.nbytes if isinstance(seen, Picture) else seen.frames.nbytes
        if total > most_bytes:
            raise Refused(
                one.param, f"the images and videos of a request may take {most_bytes} bytes in memory, decoded"
            )
        return seen

    tasks = [asyncio.ensure_future(read(one)) for one in wanted]
    try:
        return tuple(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
