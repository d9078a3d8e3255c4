# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/completions`. Each prompt is a request of its own to the model; the choices of all prompts are one response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headrace.api.openai.chat import response_base, wants_usage
from headrace.api.openai.completion_writers import CompletionChunkWriter, CompletionForm, CompletionResponseWriter
from headrace.api.openai.continuation import tracked, tracking
from headrace.api.openai.errors import BadRequest
from headrace.api.openai.fields import Fields, parse_body
from headrace.api.openai.models import Models, Target
from headrace.api.openai.prefill import TransferTokenWriter, prompt_only, with_transfer_token
from headrace.api.openai.proxy import forward
from headrace.api.openai.responses import GenerationCalls, ResponseWriter
from headrace.api.openai.sampling_params import parse_sampling, token_ids
from headrace.api.openai.settings import OpenAiSettings
from headrace.api.openai.streams import ChunkStream
from headrace.api.openai.structured_output import format_field, parse_output_format
from headrace.core.generation import Generation, GenerationRequest, Sampling
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
        form = self._parse_form(fields, prompts)
        sampling = _sampling(form)
        if len(prompts) * sampling.n > self._settings.choices:
            most, name = self._settings.choices, "best_of" if sampling.n > form.sampling.n else "n"
            raise fields.error(name, f"{len(prompts)} prompts with {sampling.n} choices each are more than {most}")
        generation = Generation(
            sampling=sampling,
            output_format=parse_output_format(fields),
            adapter=target.adapter,
            stream=fields.boolean("stream"),
            echo=form.echoes_tokens,
            path="/v1/completions",
        )
        writer: ResponseWriter
        if prefill is None:
            generation = tracked(exchange, with_transfer_token(exchange, generation), len(prompts))
            writer = self._writer(exchange, fields, target, prompts, form)
            writer = tracking(exchange, generation, writer)
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
        self, exchange: Exchange, fields: Fields, target: Target, prompts: Sequence[Prompt], form: CompletionForm
    ) -> ResponseWriter:
        stream = fields.boolean("stream")
        base = response_base("cmpl", "text_completion", target, exchange, stream=stream)
        with_usage = wants_usage(fields, stream=stream)
        if not stream:
            most = self._settings.prompt_logprobs_bytes
            return CompletionResponseWriter(exchange, base, form=form, requests=len(prompts), most_prompt_bytes=most)
        return CompletionChunkWriter(
            ChunkStream(exchange, self._settings.stream_unread_bytes),
            base,
            form=form,
            choices=len(prompts) * form.sampling.n,
            choices_per_request=form.sampling.n,
            with_usage=with_usage,
            plain=form.sampling.logprobs is None,
        )

    def _parse_form(self, fields: Fields, prompts: Sequence[Prompt]) -> CompletionForm:
        echo, stream = fields.boolean("echo"), fields.boolean("stream")
        sampling = parse_sampling(fields, self._settings, chat=False, least_tokens=0 if echo else 1)
        if sampling.max_tokens == 0 and stream:
            raise fields.error("max_tokens", "must be 1 or more with 'stream': true")
        best_of = fields.integer("best_of", 1, self._settings.choices, sampling.n) or sampling.n
        if best_of < sampling.n:
            raise fields.error("best_of", f"must be at least 'n', which is {sampling.n}")
        if best_of > sampling.n and stream:
            raise fields.error("best_of", "cannot be more than 'n' with 'stream': true")
        echoes_tokens = echo and (
            sampling.truncate_prompt_tokens is not None or not all(isinstance(prompt, str) for prompt in prompts)
        )
        texts = tuple(prompt for prompt in prompts if isinstance(prompt, str)) if echo and not echoes_tokens else ()
        return CompletionForm(sampling, best_of, echo, echoes_tokens, texts)

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


def _sampling(form: CompletionForm) -> Sampling:
    """Return what the model has to generate for a response of this form."""
    sampling = form.sampling
    logprobs = sampling.logprobs
    if form.best_of > sampling.n and logprobs is None:
        logprobs = 0  # to compare the choices
    return replace(
        sampling,
        n=form.best_of,
        # A model generates at least one token; the writer leaves it out.
        max_tokens=_DEFAULT_MAX_TOKENS if sampling.max_tokens is None else max(1, sampling.max_tokens),
        logprobs=logprobs,
        prompt_logprobs=sampling.logprobs
        if form.echo and sampling.prompt_logprobs is None
        else sampling.prompt_logprobs,
    )
