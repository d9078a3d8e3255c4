# SPDX-License-Identifier: Apache-2.0
"""Models that talk, and those that also see: cosmos-rl's, tao-dataservices', and any other of the backend `llm`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace.core.errors import InvalidArgument
from headrace.core.generation import Clip, Generation, Picture
from headrace.jobs.microservice.kinds.contract import Begin, Chat, ChatAnswer, ChatChoice, MediaItem, Sort
from headrace.jobs.microservice.kinds.gathering import Reader, gather
from headrace.jobs.microservice.kinds.generating import (
    Generated,
    Generator,
    generate,
    generation_of,
    hear,
    sampling_of,
    wanted_text,
)
from headrace.jobs.microservice.kinds.parameters import Parameter, read_parameters
from headrace.jobs.microservice.profiles import Profile

_MEDIA: tuple[tuple[str, Sort], ...] = (("media", ""), ("images", "image"), ("videos", "video"))
_SEEING = frozenset({"media", "images", "videos", "fps", "total_pixels"})
INFERENCE_PATH, CHAT_PATH = "/api/v1/inference", "/v1/chat/completions"


class LanguageKind:
    """A model of the backend `llm`. With a reader it sees."""

    def __init__(self, generator: Generator, profile: Profile, reader: Reader | None) -> None:
        self._generator = generator
        self._profile = profile
        self._reader = reader
        sees = reader is not None
        self.model_type = "vlm" if sees else "llm"
        self.parameters: tuple[Parameter, ...] = _allowed(profile.inference, sees)
        self._chat_parameters = _allowed(profile.chat, sees)

    async def infer(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """See `Kind.infer`."""
        read = read_parameters(self.parameters, given)
        text = wanted_text(read)
        items = [
            MediaItem(url, sort, f"{name}[{index}]")
            for name, sort in _MEDIA
            for index, url in enumerate(read.get(name) or ())
        ]
        media = await self._media(items, read)
        generation = generation_of(
            self._generator, text, read["system_prompt"] or "", media, sampling_of(read), path=INFERENCE_PATH
        )
        return self._results(await generate(self._generator, generation), media, read)

    async def chat(self, chat: Chat) -> ChatAnswer:
        """See `Kind.chat`."""
        made = await generate(self._generator, await self._chat_generation(chat))
        choices = [ChatChoice(text, reason) for text, reason in zip(made.texts, made.finish_reasons, strict=True)]
        return ChatAnswer(choices, made.usage)

    async def stream(self, chat: Chat, begin: Begin) -> None:
        """See `Streaming.stream`."""
        generation = replace(await self._chat_generation(chat), stream=True)
        await hear(self._generator, generation, begin(generation.sampling.n))

    async def close(self) -> None:
        """See `Kind.close`."""
        if self._reader is not None:
            self._reader.close()

    async def _chat_generation(self, chat: Chat) -> Generation:
        read = read_parameters(self._chat_parameters, chat.parameters)
        if not chat.text and not chat.media:
            raise InvalidArgument("'messages' has a user message without text: say what the model is to do")
        media = await self._media(chat.media, read)
        return generation_of(self._generator, chat.text, chat.system, media, sampling_of(read), path=CHAT_PATH)

    async def _media(self, items: Sequence[MediaItem], read: Mapping[str, Any]) -> list[Picture | Clip]:
        rules = self._profile.media
        if self._reader is None:
            if items:
                raise InvalidArgument(f"{items[0].place}: this model reads text alone: send no pictures or videos")
            return []
        if not items and rules.missing:
            raise InvalidArgument(rules.missing)
        return await gather(self._reader, items, rules, fps=read["fps"], total_pixels=read["total_pixels"])

    def _results(self, made: Generated, media: Sequence[Picture | Clip], read: Mapping[str, Any]) -> dict[str, Any]:
        results: dict[str, Any] = {"response": made.texts[0]}
        if len(made.texts) > 1:
            results["responses"] = list(made.texts)
        videos = sum(isinstance(item, Clip) for item in media)
        if self._profile.counts_files:
            results |= {"has_video": videos > 0, "total_files": len(media)}
            if self._reader is not None:
                results |= {"fps_used": read["fps"], "total_pixels_used": read["total_pixels"]}
        else:
            results |= {"is_vlm": self._reader is not None, "total_images": len(media) - videos, "total_videos": videos}
        return results | {"input_tokens": made.prompt_tokens, "output_tokens": made.completion_tokens}


def _allowed(declared: tuple[Parameter, ...], sees: bool) -> tuple[Parameter, ...]:
    return declared if sees else tuple(each for each in declared if each.name not in _SEEING)
