# SPDX-License-Identifier: Apache-2.0
"""A prompt or a chat to text, through the engine. Called by `language` and `vision_language`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.core.errors import HeadraceError, Internal, InvalidArgument
from headrace.core.generation import TEXT_OUTPUT, Clip, Generation, GenerationRequest, Picture, Sampling
from headrace.core.messages import InferResponse
from headrace.engine.dataplane import DataPlane
from headrace.jobs.microservice.kinds.contract import OnAnswer

_MOST_STOPS = 16


@dataclass(frozen=True, slots=True)
class Generator:
    """A model of the engine that generates."""

    plane: DataPlane
    model: str
    adapter: str = ""
    has_template: bool = True
    """Whether messages can be put to it; else it continues the text."""


@dataclass(frozen=True, slots=True)
class Generated:
    """What it said, one text for each choice."""

    texts: Sequence[str]
    finish_reasons: Sequence[str]
    prompt_tokens: int
    completion_tokens: int

    @property
    def usage(self) -> dict[str, int]:
        """As OpenAI counts."""
        total = self.prompt_tokens + self.completion_tokens
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}
        return counts | {"total_tokens": total}


def sampling_of(read: Mapping[str, Any]) -> Sampling:
    """From parameters that `read_parameters` has read."""
    stops = tuple(read.get("stop") or ())
    if len(stops) > _MOST_STOPS:
        raise InvalidArgument(f"'stop' has {len(stops)} texts: at most {_MOST_STOPS} are allowed")
    return Sampling(
        max_tokens=read["max_new_tokens"] if "max_new_tokens" in read else read["max_tokens"],
        min_tokens=read["min_tokens"],
        temperature=read["temperature"],
        # 0 keeps nothing, strictly; clients mean "only the likeliest".
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
    generator: Generator, text: str, system: str, media: Sequence[Picture | Clip], sampling: Sampling, *, path: str
) -> Generation:
    """One user message, behind a system message if there is one; media come before the text."""
    if not generator.has_template and not media:
        prompt = f"{system}\n\n{text}" if system else text
        return Generation(prompt=prompt, sampling=sampling, adapter=generator.adapter, path=path)
    places = [{"type": "image" if isinstance(item, Picture) else "video"} for item in media]
    content: Any = [*places, {"type": "text", "text": text}] if media else text
    messages: list[Mapping[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": content})
    return Generation(
        messages=tuple(messages), media=tuple(media), sampling=sampling, adapter=generator.adapter, path=path
    )


async def generate(generator: Generator, generation: Generation) -> Generated:
    """Wait for every choice. Cancelling the caller's task gives the request up in the engine too."""
    answers: list[InferResponse] = []
    await hear(generator, generation, answers.append)
    return _collected(answers, generation.sampling.n)


async def hear(generator: Generator, generation: Generation, on_answer: OnAnswer) -> None:
    """Tell every answer as it comes, and return after the last. Cancelled, or where nobody can hear: given up."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def answered(result: InferResponse | BaseException | None, final: bool) -> None:
        if ended.done():
            return
        if isinstance(result, BaseException):
            ended.set_exception(result)
            return
        try:
            if result is not None:
                on_answer(result)
        except Exception as error:
            ended.set_exception(error)
            return
        if final:
            ended.set_result(None)

    pending = generator.plane.infer_stream(GenerationRequest(generator.model, generation), answered)
    try:
        await ended
    except BaseException:
        pending.cancel()
        raise


def _collected(answers: Sequence[InferResponse], count: int) -> Generated:
    texts = [""] * count
    reasons = ["stop"] * count
    prompt_tokens = completion_tokens = 0
    for answer in answers:
        told = answer.parameters
        index = int(told.get("index", 0))
        if not 0 <= index < count:
            raise Internal("the model answered for a choice that nobody asked for; the server's log has the details")
        texts[index] += "".join(_text(answer))
        reasons[index] = str(told.get("finish_reason") or reasons[index])
        prompt_tokens = max(prompt_tokens, int(told.get("prompt_tokens", 0)))
        completion_tokens += int(told.get("completion_tokens", 0))
    return Generated(texts, reasons, prompt_tokens, completion_tokens)


def _text(answer: InferResponse) -> list[str]:
    for tensor in answer.outputs:
        if tensor.name == TEXT_OUTPUT:
            return [each.decode(errors="replace") for each in tensor.array.ravel()]
    return []


def wanted_text(read: Mapping[str, Any], name: str = "prompt") -> str:
    """A text that must be there."""
    text = read.get(name)
    if not text:
        raise InvalidArgument(f"'{name}' (or 'text') is required: say what the model is to do")
    return str(text)


def refused(what: str) -> HeadraceError:
    """For a chat with a model that does not talk."""
    return InvalidArgument(f"this model {what} and does not chat: send POST /api/v1/inference")
