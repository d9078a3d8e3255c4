# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/completions`: text or tokens in, what comes next out. Registered by `http`.

Several prompts are several requests to the model, which it computes side by side; their choices are one answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headrace.api.openai.chat import begin_of, wants_usage
from headrace.api.openai.errors import Refused
from headrace.api.openai.events import Chunks
from headrace.api.openai.fields import Fields, read_document
from headrace.api.openai.flows import Flow, Writer
from headrace.api.openai.formats import format_field, read_format
from headrace.api.openai.models import Models, Target
from headrace.api.openai.passing import pass_on
from headrace.api.openai.sampling import read_sampling, token_ids
from headrace.api.openai.settings import OpenAiSettings
from headrace.api.openai.streams import CompletionChunks
from headrace.api.openai.tickets import TicketWriter, prompt_alone, with_ticket
from headrace.api.openai.wholes import WholeCompletion
from headrace.core.generation import Generation, GenerationRequest
from headrace.engine.dataplane import DataPlane
from headrace.net.http.exchange import Exchange

_USUAL_TOKENS = 16
"""OpenAI's, for requests that do not say."""

Prompt = str | Sequence[int]


class Completions:
    """Over one data plane."""

    def __init__(self, plane: DataPlane, settings: OpenAiSettings, models: Models) -> None:
        self._plane = plane
        self._settings = settings
        self._models = models

    def handle(self, exchange: Exchange) -> None:
        """One request."""
        document = read_document(exchange.body)
        exchange.body = b""
        self.begin(exchange, Fields(document))

    def begin(self, exchange: Exchange, fields: Fields, wanted: TicketWriter | None = None) -> None:
        """What its body says. `wanted`: only the prompt is, and this is who answers then."""
        target = self._models.that_generates(fields)
        if target.proxied:
            if wanted is not None:
                wanted.end()
            else:
                pass_on(self._plane, exchange, target, fields.members, self._settings)
            return
        fields.refuse({"suffix": "text is only written after the prompt, not into it"})
        prompts = self._prompts(fields)
        sampling = read_sampling(fields, self._settings, chat=False)
        if sampling.max_tokens is None:
            sampling = replace(sampling, max_tokens=_USUAL_TOKENS)
        if len(prompts) * sampling.n > self._settings.choices:
            most = self._settings.choices
            raise fields.refused("n", f"{len(prompts)} prompts with {sampling.n} choices each are more than {most}")
        generation = Generation(
            sampling=sampling,
            output_format=read_format(fields),
            adapter=target.adapter,
            stream=fields.boolean("stream"),
            path="/v1/completions",
        )
        writer: Writer
        if wanted is None:
            generation = with_ticket(exchange, generation)
            writer = self._writer(exchange, fields, target, prompts, generation)
        elif len(prompts) > 1:
            wanted.end()
            return
        else:
            writer, generation = wanted, prompt_alone(generation)
        name = target.config.name
        own = {**{member: member for member in fields.members}, "response_format": format_field(fields)}

        def names(number: int) -> dict[str, str]:
            return {**own, "prompt": f"prompt[{number}]"} if len(prompts) > 1 else own

        Flow(self._plane, exchange, writer, names).begin(
            [GenerationRequest(name, replace(generation, prompt=prompt)) for prompt in prompts]
        )

    def _writer(
        self, exchange: Exchange, fields: Fields, target: Target, prompts: Sequence[Prompt], generation: Generation
    ) -> Writer:
        sampling = generation.sampling
        begin = begin_of("cmpl", "text_completion", target, stream=generation.stream)
        with_usage = wants_usage(fields, stream=generation.stream)
        echoes = _echoes(fields, prompts, told=sampling.logprobs is not None)
        choices = len(prompts) * sampling.n
        if not generation.stream:
            return WholeCompletion(exchange, begin, echoes=echoes, choices=choices, each=sampling.n)
        return CompletionChunks(
            Chunks(exchange, self._settings.stream_unread_bytes),
            begin,
            echoes=echoes,
            choices=choices,
            each=sampling.n,
            with_usage=with_usage,
            plain=sampling.logprobs is None,
        )

    def _prompts(self, fields: Fields) -> list[Prompt]:
        given = fields.get("prompt")
        if given is None:
            raise fields.refused("prompt", "is missing")
        if isinstance(given, str):
            return [_text("prompt", given)]
        if not isinstance(given, list) or not given:
            raise fields.refused(
                "prompt", "must be a string, a list of strings, a list of tokens or a list of such lists"
            )
        if not isinstance(given[0], str | list):
            return [self._tokens("prompt", given)]
        if len(given) > self._settings.prompts:
            raise fields.refused("prompt", f"has {len(given)} prompts; at most {self._settings.prompts} are allowed")
        prompts: list[Prompt] = []
        for index, prompt in enumerate(given):
            param = f"prompt[{index}]"
            prompts.append(_text(param, prompt) if isinstance(prompt, str) else self._tokens(param, prompt))
        return prompts

    def _tokens(self, param: str, tokens: object) -> tuple[int, ...]:
        if not isinstance(tokens, list) or not 0 < len(tokens) <= self._settings.prompt_tokens:
            raise Refused(param, f"must be a text, or a list of 1 to {self._settings.prompt_tokens} tokens")
        return token_ids(param, tokens)


def _text(param: str, text: str) -> str:
    if not text:
        raise Refused(param, "must not be empty")
    return text


def _echoes(fields: Fields, prompts: Sequence[Prompt], *, told: bool) -> list[str]:
    if not fields.boolean("echo"):
        return []
    if told:
        raise fields.refused("echo", "cannot be had with 'logprobs': the prompt's own tokens have none here")
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise fields.refused("echo", "is only for prompts that are text, not tokens")
    return texts
