# SPDX-License-Identifier: Apache-2.0
"""Models that make videos, as cosmos-predict2.5 does: everything but the pipeline, which is a plug-in (`pipelines`)."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from headrace.core.errors import Internal, InvalidArgument, ResourceExhausted
from headrace.core.generation import Clip, Picture
from headrace.jobs.microservice.kinds.contract import Chat, ChatAnswer, ChatChoice, MediaItem
from headrace.jobs.microservice.kinds.gathering import Reader, gather
from headrace.jobs.microservice.kinds.generating import wanted_text
from headrace.jobs.microservice.kinds.parameters import Parameter, read_parameters
from headrace.jobs.microservice.pipelines import Pipeline, VideoRequest
from headrace.jobs.microservice.profiles import Profile

MOST_WAITING = 32
"""A video takes minutes: who would wait longer than this many is told to come back."""
MOST_BYTES = 512 * 1024 * 1024
_MP4 = slice(4, 8)


class VideoKind:
    """Prompts to videos, one after the other."""

    model_type = "video"

    def __init__(self, pipeline: Pipeline, profile: Profile, reader: Reader) -> None:
        self._pipeline = pipeline
        self._profile = profile
        self._reader = reader
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headrace-pipeline")
        self._turn = asyncio.Lock()
        self._waiting = 0
        self.parameters: tuple[Parameter, ...] = profile.inference

    async def infer(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """See `Kind.infer`."""
        read = read_parameters(self.parameters, given)
        items = [MediaItem(url, "", f"media[{index}]") for index, url in enumerate(read["media"] or ())]
        request = await self._request(wanted_text(read), items, read)
        video = await self._make(request)
        return {
            "response": video,
            "inference_type": request.inference_type,
            "num_output_frames": request.num_output_frames,
            "seed": request.seed,
        }

    async def chat(self, chat: Chat) -> ChatAnswer:
        """See `Kind.chat`."""
        read = read_parameters(self._profile.chat, chat.parameters)
        if not chat.text:
            raise InvalidArgument("'messages' has a user message without text: describe the video")
        prompt = f"{chat.system}\n\n{chat.text}" if chat.system else chat.text
        return ChatAnswer([ChatChoice(await self._make(await self._request(prompt, chat.media, read)))])

    async def close(self) -> None:
        """See `Kind.close`."""
        self._reader.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
        close: Callable[[], None] | None = getattr(self._pipeline, "close", None)
        if close is not None:
            close()

    async def _request(self, prompt: str, items: Sequence[MediaItem], read: Mapping[str, Any]) -> VideoRequest:
        if len(items) > 1:
            raise InvalidArgument(f"{items[1].place}: a video is made from one picture or video at most")
        found = (await gather(self._reader, items, self._profile.media))[0] if items else None
        derived = "text2world" if found is None else "image2world" if isinstance(found, Picture) else "video2world"
        if read["inference_type"] not in (None, derived):
            raise InvalidArgument(
                f"'inference_type' is {read['inference_type']}, and the request's media make it {derived}: leave it out"
            )
        return VideoRequest(
            prompt,
            derived,
            read["num_output_frames"],
            read["guidance"],
            read["num_steps"],
            read["seed"],
            read["negative_prompt"],
            found if isinstance(found, Picture) else None,
            found if isinstance(found, Clip) else None,
        )

    async def _make(self, request: VideoRequest) -> str:
        if self._waiting >= MOST_WAITING:
            raise ResourceExhausted(f"{MOST_WAITING} videos are waited for: try again later", retry_after_seconds=60)
        self._waiting += 1
        try:
            async with self._turn:
                return await asyncio.get_running_loop().run_in_executor(self._thread, self._made, request)
        finally:
            self._waiting -= 1

    def _made(self, request: VideoRequest) -> str:
        made = self._pipeline.generate(request)
        content = _read(made) if isinstance(made, Path) else bytes(made)
        if len(content) > MOST_BYTES or content[_MP4] != b"ftyp":
            raise Internal("the pipeline gave no MP4 file of a usual size: look at the pipeline's own log")
        return "data:video/mp4;base64," + base64.b64encode(content).decode()


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MOST_BYTES + 1)
