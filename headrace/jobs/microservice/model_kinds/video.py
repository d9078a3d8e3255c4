# SPDX-License-Identifier: Apache-2.0
"""Video-generation models, such as cosmos-predict2.5; the pipeline itself is a plug-in (`pipelines`)."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from headrace.core.errors import Internal, InvalidArgument, ResourceExhausted
from headrace.core.generation import PromptImage, PromptVideo
from headrace.jobs.microservice.model_kinds.contract import (
    Chat,
    ChatAnswer,
    ChatChoice,
    MediaItem,
    Parameter,
    read_parameters,
    require_text,
)
from headrace.jobs.microservice.model_kinds.media import Reader, read_media
from headrace.jobs.microservice.pipelines import Pipeline, VideoRequest
from headrace.jobs.microservice.profiles import Profile

MAX_WAITING = 32
"""Maximum number of queued requests: a video takes minutes."""
MAX_BYTES = 512 * 1024 * 1024
_MP4 = slice(4, 8)


class VideoKind:
    """Prompts to videos, one at a time."""

    model_type = "video"

    def __init__(self, pipeline: Pipeline, profile: Profile, reader: Reader) -> None:
        self._pipeline = pipeline
        self._profile = profile
        self._reader = reader
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headrace-pipeline")
        self._lock = asyncio.Lock()
        self._waiting = 0
        self.parameters: tuple[Parameter, ...] = profile.inference

    async def infer(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Generate a video for an inference request."""
        read = read_parameters(self.parameters, fields)
        items = [MediaItem(url, "", f"media[{index}]") for index, url in enumerate(read["media"] or ())]
        request = await self._request(require_text(read), items, read)
        video = await self._queue(request)
        return {
            "response": video,
            "inference_type": request.inference_type,
            "num_output_frames": request.num_output_frames,
            "seed": request.seed,
        }

    async def chat(self, chat: Chat) -> ChatAnswer:
        """Generate a video for a chat."""
        read = read_parameters(self._profile.chat, chat.parameters)
        if not chat.text:
            raise InvalidArgument("'messages' has a user message without text: describe the video")
        prompt = f"{chat.system}\n\n{chat.text}" if chat.system else chat.text
        return ChatAnswer([ChatChoice(await self._queue(await self._request(prompt, chat.media, read)))])

    async def close(self) -> None:
        """Close the pipeline and the media reader."""
        self._reader.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
        close: Callable[[], None] | None = getattr(self._pipeline, "close", None)
        if close is not None:
            close()

    async def _request(self, prompt: str, items: Sequence[MediaItem], read: Mapping[str, Any]) -> VideoRequest:
        if len(items) > 1:
            raise InvalidArgument(f"{items[1].field}: at most one image or video is allowed")
        medium = (await read_media(self._reader, items, self._profile.media))[0] if items else None
        derived = (
            "text2world" if medium is None else "image2world" if isinstance(medium, PromptImage) else "video2world"
        )
        if read["inference_type"] not in (None, derived):
            raise InvalidArgument(
                f"'inference_type' is {read['inference_type']}, but the request's media make it {derived}: omit it"
            )
        return VideoRequest(
            prompt,
            derived,
            read["num_output_frames"],
            read["guidance"],
            read["num_steps"],
            read["seed"],
            read["negative_prompt"],
            medium if isinstance(medium, PromptImage) else None,
            medium if isinstance(medium, PromptVideo) else None,
        )

    async def _queue(self, request: VideoRequest) -> str:
        if self._waiting >= MAX_WAITING:
            raise ResourceExhausted(f"{MAX_WAITING} videos are queued: try again later", retry_after_seconds=60)
        self._waiting += 1
        try:
            async with self._lock:
                return await asyncio.get_running_loop().run_in_executor(self._thread, self._generate, request)
        finally:
            self._waiting -= 1

    def _generate(self, request: VideoRequest) -> str:
        result = self._pipeline.generate(request)
        content = _read(result) if isinstance(result, Path) else bytes(result)
        if len(content) > MAX_BYTES or content[_MP4] != b"ftyp":
            raise Internal("the pipeline returned no valid MP4 file: see the pipeline's log")
        return "data:video/mp4;base64," + base64.b64encode(content).decode()


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)
