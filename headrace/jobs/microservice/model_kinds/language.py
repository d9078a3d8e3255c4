# SPDX-License-Identifier: Apache-2.0
"""Language and vision-language models: cosmos-rl, tao-dataservices and any other model of the `llm` backend."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.core.errors import Internal, InvalidArgument
from headrace.core.generation import TEXT_OUTPUT, Generation, GenerationRequest, PromptImage, PromptVideo, Sampling
from headrace.core.requests import InferResponse
from headrace.engine.dataplane import DataPlane
from headrace.jobs.microservice.model_kinds.contract import (
    Begin,
    Chat,
    ChatAnswer,
    ChatChoice,
    MediaItem,
    MediaType,
    OnResponse,
    Parameter,
    read_parameters,
    require_text,
)
from headrace.jobs.microservice.model_kinds.media import Reader, read_media
from headrace.jobs.microservice.profiles import Profile

_MEDIA: tuple[tuple[str, MediaType], ...] = (("media", ""), ("images", "image"), ("videos", "video"))
_VISION_PARAMETERS = frozenset({"media", "images", "videos", "fps", "total_pixels"})
INFERENCE_PATH, CHAT_PATH = "/api/v1/inference", "/v1/chat/completions"

_MAX_STOPS = 16


class LanguageKind:
    """A model of the `llm` backend; with a media reader it accepts images and videos."""

    def __init__(self, generator: Generator, profile: Profile, reader: Reader | None) -> None:
        self._generator = generator
        self._profile = profile
        self._reader = reader
        has_vision = reader is not None
        self.model_type = "vlm" if has_vision else "llm"
        self.parameters: tuple[Parameter, ...] = _usable(profile.inference, has_vision)
        self._chat_parameters = _usable(profile.chat, has_vision)

    async def infer(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Generate text for an inference request."""
        read = read_parameters(self.parameters, fields)
        text = require_text(read)
        items = [
            MediaItem(url, media_type, f"{name}[{index}]")
            for name, media_type in _MEDIA
            for index, url in enumerate(read.get(name) or ())
        ]
        media = await self._media(items, read)
        generation = generation_of(
            self._generator, text, read["system_prompt"] or "", media, sampling_of(read), path=INFERENCE_PATH
        )
        return self._results(await generate(self._generator, generation), media, read)

    async def chat(self, chat: Chat) -> ChatAnswer:
        """Generate the response to a chat."""
        generated = await generate(self._generator, await self._chat_generation(chat))
        choices = [
            ChatChoice(text, reason) for text, reason in zip(generated.texts, generated.finish_reasons, strict=True)
        ]
        return ChatAnswer(choices, generated.usage)

    async def stream(self, chat: Chat, begin: Begin) -> None:
        """Stream the response to a chat."""
        generation = replace(await self._chat_generation(chat), stream=True)
        await stream_responses(self._generator, generation, begin(generation.sampling.n))

    async def close(self) -> None:
        """Close the media reader."""
        if self._reader is not None:
            self._reader.close()

    async def _chat_generation(self, chat: Chat) -> Generation:
        read = read_parameters(self._chat_parameters, chat.parameters)
        if not chat.text and not chat.media:
            raise InvalidArgument("'messages' has a user message without text: tell the model what to do")
        media = await self._media(chat.media, read)
        return generation_of(self._generator, chat.text, chat.system, media, sampling_of(read), path=CHAT_PATH)

    async def _media(self, items: Sequence[MediaItem], read: Mapping[str, Any]) -> list[PromptImage | PromptVideo]:
        rules = self._profile.media
        if self._reader is None:
            if items:
                raise InvalidArgument(f"{items[0].field}: this model only reads text: send no images or videos")
            return []
        if not items and rules.missing:
            raise InvalidArgument(rules.missing)
        return await read_media(self._reader, items, rules, fps=read["fps"], total_pixels=read["total_pixels"])

    def _results(
        self, generated: Generated, media: Sequence[PromptImage | PromptVideo], read: Mapping[str, Any]
    ) -> dict[str, Any]:
        results: dict[str, Any] = {"response": generated.texts[0]}
        if len(generated.texts) > 1:
            results["responses"] = list(generated.texts)
        videos = sum(isinstance(item, PromptVideo) for item in media)
        if self._profile.counts_files:
            results |= {"has_video": videos > 0, "total_files": len(media)}
            if self._reader is not None:
                results |= {"fps_used": read["fps"], "total_pixels_used": read["total_pixels"]}
        else:
            results |= {"is_vlm": self._reader is not None, "total_images": len(media) - videos, "total_videos": videos}
        return results | {"input_tokens": generated.prompt_tokens, "output_tokens": generated.completion_tokens}


def _usable(declared: tuple[Parameter, ...], has_vision: bool) -> tuple[Parameter, ...]:
    return (
        declared
        if has_vision
        else tuple(parameter for parameter in declared if parameter.name not in _VISION_PARAMETERS)
    )


@dataclass(frozen=True, slots=True)
class Generator:
    """A model of the engine that generates text."""

    plane: DataPlane
    model: str
    adapter: str = ""
    has_template: bool = True
    """Whether it has a chat template; otherwise it continues the text."""


@dataclass(frozen=True, slots=True)
class Generated:
    """Generated texts, one per choice."""

    texts: Sequence[str]
    finish_reasons: Sequence[str]
    prompt_tokens: int
    completion_tokens: int

    @property
    def usage(self) -> dict[str, int]:
        """Return OpenAI's token counts."""
        total = self.prompt_tokens + self.completion_tokens
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}
        return counts | {"total_tokens": total}


def sampling_of(read: Mapping[str, Any]) -> Sampling:
    """Build sampling settings from parsed parameters."""
    stops = tuple(read.get("stop") or ())
    if len(stops) > _MAX_STOPS:
        raise InvalidArgument(f"'stop' has {len(stops)} strings: at most {_MAX_STOPS} are allowed")
    return Sampling(
        max_tokens=read["max_new_tokens"] if "max_new_tokens" in read else read["max_tokens"],
        min_tokens=read["min_tokens"],
        temperature=read["temperature"],
        # Strictly, 0 keeps nothing; clients mean "only the likeliest".
        top_p=read["top_p"] or 1e-6,
        top_k=read["top_k"],
        min_p=read["min_p"],
        repetition_penalty=read["repetition_penalty"],
        presence_penalty=read["presence_penalty"],
        frequency_penalty=read["frequency_penalty"],
        seed=read["seed"],
        stop=stops,
        ignore_eos=read["ignore_eos"],
        n=read["n"],
    )


def generation_of(
    generator: Generator,
    text: str,
    system: str,
    media: Sequence[PromptImage | PromptVideo],
    sampling: Sampling,
    *,
    path: str,
) -> Generation:
    """Build a generation: the system message, then one user message with media before the text."""
    if not generator.has_template and not media:
        prompt = f"{system}\n\n{text}" if system else text
        return Generation(prompt=prompt, sampling=sampling, adapter=generator.adapter, path=path)
    media_items = [{"type": "image" if isinstance(item, PromptImage) else "video"} for item in media]
    content: Any = [*media_items, {"type": "text", "text": text}] if media else text
    messages: list[Mapping[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": content})
    return Generation(
        messages=tuple(messages), media=tuple(media), sampling=sampling, adapter=generator.adapter, path=path
    )


async def generate(generator: Generator, generation: Generation) -> Generated:
    """Generate all choices. Cancelling the caller cancels the request."""
    responses: list[InferResponse] = []
    await stream_responses(generator, generation, responses.append)
    return _collect(responses, generation.sampling.n)


async def stream_responses(generator: Generator, generation: Generation, on_response: OnResponse) -> None:
    """Call `on_response` for every response; return after the last. Cancelling the caller cancels the request."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def on_result(result: InferResponse | BaseException | None, final: bool) -> None:
        if ended.done():
            return
        if isinstance(result, BaseException):
            ended.set_exception(result)
            return
        try:
            if result is not None:
                on_response(result)
        except Exception as error:
            ended.set_exception(error)
            return
        if final:
            ended.set_result(None)

    pending = generator.plane.infer_stream(GenerationRequest(generator.model, generation), on_result)
    try:
        await ended
    except BaseException:
        pending.cancel()
        raise


def _collect(responses: Sequence[InferResponse], count: int) -> Generated:
    texts = [""] * count
    reasons = ["stop"] * count
    prompt_tokens = completion_tokens = 0
    for response in responses:
        parameters = response.parameters
        index = int(parameters.get("index", 0))
        if not 0 <= index < count:
            raise Internal("the model returned an unknown choice; the server's log has the details")
        texts[index] += "".join(_text(response))
        reasons[index] = str(parameters.get("finish_reason") or reasons[index])
        prompt_tokens = max(prompt_tokens, int(parameters.get("prompt_tokens", 0)))
        completion_tokens += int(parameters.get("completion_tokens", 0))
    return Generated(texts, reasons, prompt_tokens, completion_tokens)


def _text(response: InferResponse) -> list[str]:
    for tensor in response.outputs:
        if tensor.name == TEXT_OUTPUT:
            return [text.decode(errors="replace") for text in tensor.array.ravel()]
    return []
