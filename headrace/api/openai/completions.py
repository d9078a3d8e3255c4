# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/completions`. Each prompt is a request of its own to the model; the choices of all prompts are one response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headrace.api.openai.chat import response_base, wants_usage
from headrace.api.openai.errors import BadRequest
from headrace.api.openai.fields import Fields, parse_body
from headrace.api.openai.models import Models, Target
from headrace.api.openai.prefill import TransferTokenWriter, prompt_only, with_transfer_token
from headrace.api.openai.proxy import forward
from headrace.api.openai.responses import CompletionResponseWriter, GenerationCalls, ResponseWriter
from headrace.api.openai.sampling_params import parse_sampling, token_ids
from headrace.api.openai.settings import OpenAiSettings
from headrace.api.openai.streams import ChunkStream, CompletionChunkWriter
from headrace.api.openai.structured_output import format_field, parse_output_format
from headrace.core.generation import Generation, GenerationRequest
from headrace.engine.dataplane import DataPlane
from headrace.net.http.exchange import Exchange

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""

Prompt = str | Sequence[int]


class Completions:
    """Handlers over one data plane."""

    def __init__(self, plane: DataPlane, settings: OpenAiSettings, models: Models) -> None:
        self._plane = plane
        self._settings = settings
        self._models = models

    def handle(self, exchange: Exchange) -> None:
        """Handle one request."""
        self.begin(exchange, parse_body(exchange))

    def begin(self, exchange: Exchange, fields: Fields, prefill: TransferTokenWriter | None = None) -> None:
        """Start a parsed request. With `prefill`, only compute the prompt and answer with its transfer token."""
        target = self._models.generative_model(fields)
        if target.proxied:
            if prefill is not None:
                prefill.end()
            else:
                forward(self._plane, exchange, target, fields.members, self._settings)
            return
        fields.reject({"suffix": "fill-in-the-middle is not supported"})
        prompts = self._prompts(fields)
        sampling = parse_sampling(fields, self._settings, chat=False)
        if sampling.max_tokens is None:
            sampling = replace(sampling, max_tokens=_DEFAULT_MAX_TOKENS)
        if len(prompts) * sampling.n > self._settings.choices:
            most = self._settings.choices
            raise fields.error("n", f"{len(prompts)} prompts with {sampling.n} choices each are more than {most}")
        generation = Generation(
            sampling=sampling,
            output_format=parse_output_format(fields),
            adapter=target.adapter,
            stream=fields.boolean("stream"),
            path="/v1/completions",
        )
        writer: ResponseWriter
        if prefill is None:
            generation = with_transfer_token(exchange, generation)
            writer = self._writer(exchange, fields, target, prompts, generation)
        elif len(prompts) > 1:
            prefill.end()
            return
        else:
            writer, generation = prefill, prompt_only(generation)
        name = target.config.name
        members = {**{member: member for member in fields.members}, "response_format": format_field(fields)}

        def names(number: int) -> dict[str, str]:
            return {**members, "prompt": f"prompt[{number}]"} if len(prompts) > 1 else members

        GenerationCalls(self._plane, exchange, writer, names).begin(
            [GenerationRequest(name, replace(generation, prompt=prompt)) for prompt in prompts]
        )

    def _writer(
        self, exchange: Exchange, fields: Fields, target: Target, prompts: Sequence[Prompt], generation: Generation
    ) -> ResponseWriter:
        sampling = generation.sampling
        base = response_base("cmpl", "text_completion", target, stream=generation.stream)
        with_usage = wants_usage(fields, stream=generation.stream)
        echoes = _echoes(fields, prompts, logprobs=sampling.logprobs is not None)
        choices = len(prompts) * sampling.n
        if not generation.stream:
            return CompletionResponseWriter(
                exchange, base, echoes=echoes, choices=choices, choices_per_request=sampling.n
            )
        return CompletionChunkWriter(
            ChunkStream(exchange, self._settings.stream_unread_bytes),
            base,
            echoes=echoes,
            choices=choices,
            choices_per_request=sampling.n,
            with_usage=with_usage,
            plain=sampling.logprobs is None,
        )

    def _prompts(self, fields: Fields) -> list[Prompt]:
        value = fields.get("prompt")
        if value is None:
            raise fields.error("prompt", "is missing")
        if isinstance(value, str):
            return [_text("prompt", value)]
        if not isinstance(value, list) or not value:
            raise fields.error(
                "prompt", "must be a string, a list of strings, a list of tokens or a list of such lists"
            )
        if not isinstance(value[0], str | list):
            return [self._tokens("prompt", value)]
        if len(value) > self._settings.prompts:
            raise fields.error("prompt", f"has {len(value)} prompts; at most {self._settings.prompts} are allowed")
        prompts: list[Prompt] = []
        for index, prompt in enumerate(value):
            param = f"prompt[{index}]"
            prompts.append(_text(param, prompt) if isinstance(prompt, str) else self._tokens(param, prompt))
        return prompts

    def _tokens(self, param: str, tokens: object) -> tuple[int, ...]:
        if not isinstance(tokens, list) or not 0 < len(tokens) <= self._settings.prompt_tokens:
            raise BadRequest(param, f"must be a string, or a list of 1 to {self._settings.prompt_tokens} tokens")
        return token_ids(param, tokens)


def _text(param: str, text: str) -> str:
    if not text:
        raise BadRequest(param, "must not be empty")
    return text


def _echoes(fields: Fields, prompts: Sequence[Prompt], *, logprobs: bool) -> list[str]:
    if not fields.boolean("echo"):
        return []
    if logprobs:
        raise fields.error("echo", "cannot be combined with 'logprobs': prompt tokens have no logprobs")
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise fields.error("echo", "is only for prompts that are strings, not tokens")
    return texts
