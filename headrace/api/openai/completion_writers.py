# SPDX-License-Identifier: Apache-2.0
"""Write the responses of `/v1/completions`, full or streamed, with `echo`, `best_of` and log-probabilities of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from headrace.api.openai.errors import BadRequest
from headrace.api.openai.responses import Choice, FullResponseWriter, Usage, vllm_prompt_logprobs
from headrace.api.openai.streams import ChunkStream, ChunkWriter, StreamedChoice
from headrace.core.generation import Sampling
from headrace.core.requests import InferResponse, Parameters
from headrace.net.http.exchange import Exchange

_NULL = b"null"


@dataclass(frozen=True, slots=True)
class CompletionForm:
    """What a client wants to see of its completions."""

    sampling: Sampling
    """As the client sent it; the model may generate more choices and log-probabilities."""
    best_of: int
    """Choices that are generated for each prompt; the `n` with the highest mean log-probability are returned."""
    echo: bool = False
    echoes_tokens: bool = False
    """Whether the model returns the text of the prompt: it is given as tokens, or truncated."""
    texts: tuple[str, ...] = ()
    """With `echo`, the prompts that are texts."""

    def prompt_text(self, request: int, parameters: Parameters) -> str:
        """Return the text to repeat before a choice; `parameters` are those of its first answer."""
        return self.texts[request] if self.texts else str(parameters.get("prompt_text", ""))

    def echoed_logprobs(self, parameters: Parameters) -> list[dict[str, Any]]:
        """Return the entries of the prompt's tokens that `logprobs` begins with."""
        wanted = self.sampling.logprobs
        tokens = parameters.get("prompt_logprobs")
        if not self.echo or wanted is None or not isinstance(tokens, str):
            return []
        entries: list[dict[str, Any]] = orjson.loads(tokens)
        for entry in entries:
            entry["top_logprobs"] = entry["top_logprobs"][:wanted]
        return entries


class CompletionResponseWriter(FullResponseWriter):
    """Writes a full response."""

    def __init__(
        self, exchange: Exchange, base: dict[str, Any], *, form: CompletionForm, requests: int, most_prompt_bytes: int
    ) -> None:
        """`most_prompt_bytes`: size of the log-probabilities of all prompts."""
        super().__init__(exchange, base, choices=requests * form.best_of, choices_per_request=form.best_of)
        self._form = form
        self._usage = _PromptUsage() if form.sampling.max_tokens == 0 else self._usage
        self._left_prompt_bytes = most_prompt_bytes

    def add(self, request: int, response: InferResponse) -> None:
        """Add an answer to its choice; raise if the log-probabilities of the prompts are too large."""
        self._left_prompt_bytes -= len(str(response.parameters.get("prompt_logprobs", "")))
        if self._left_prompt_bytes < 0:
            name = "echo" if self._form.sampling.prompt_logprobs is None else "prompt_logprobs"
            raise BadRequest(
                name, "the log-probabilities of all prompts are too large for one response: send fewer prompts"
            )
        super().add(request, response)

    def _returned_choices(self) -> list[tuple[int, Choice]]:
        count, kept = self._form.best_of, self._form.sampling.n
        requests = [self._choices[first : first + count] for first in range(0, len(self._choices), count)]
        if count > kept:
            requests = [sorted(choices, key=_mean_logprob, reverse=True)[:kept] for choices in requests]
        return [(number, choice) for number, choices in enumerate(requests) for choice in choices]

    def _choice_json(self, index: int, request: int, choice: Choice) -> dict[str, Any]:
        form = self._form
        only_echo = form.sampling.max_tokens == 0
        text = form.prompt_text(request, choice.first_parameters) if form.echo else ""
        logprobs = None
        if form.sampling.logprobs is not None:
            entries = form.echoed_logprobs(choice.first_parameters)
            offset = 0 if entries else len(text)
            if not only_echo:
                entries += orjson.loads(choice.all_logprobs or b"[]")
            logprobs = completion_logprobs(entries, offset)[0]
        if not only_echo:
            text += "".join(choice.texts)
        reason = "length" if only_echo else choice.reason or "stop"
        document = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        tokens = choice.first_parameters.get("prompt_logprobs")
        if form.sampling.prompt_logprobs is not None and isinstance(tokens, str):
            document["prompt_logprobs"] = vllm_prompt_logprobs(tokens)
        return document


class _PromptUsage(Usage):
    """The usage of a response that only repeats the prompt."""

    def add(self, request: int, parameters: Parameters) -> None:
        """Count the prompt alone."""
        super().add(request, {**parameters, "completion_tokens": 0})


class CompletionChunkWriter(ChunkWriter):
    """Writes the chunks of a streamed response."""

    _text_head = b',"text":'

    def __init__(self, chunks: ChunkStream, base: dict[str, Any], *, form: CompletionForm, **more: Any) -> None:
        self._form = form
        super().__init__(chunks, base, **more)

    def _start_choice(self, choice: StreamedChoice, request: int, text: str, parameters: Parameters) -> str:
        if not self._form.echo:
            return text
        echo = self._form.prompt_text(request, parameters)
        if not self._form.echoed_logprobs(parameters):
            choice.logprobs_offset = len(echo)
        return echo + text

    def _send_answer(self, choice: StreamedChoice, text: str, parameters: Parameters) -> None:
        reason, tokens = parameters.get("finish_reason"), parameters.get("logprobs")
        logprobs = _NULL
        if isinstance(tokens, str):
            entries = [*self._form.echoed_logprobs(parameters), *orjson.loads(tokens)]
            entry, choice.logprobs_offset = completion_logprobs(entries, choice.logprobs_offset)
            logprobs = orjson.dumps(entry)
        if text or reason is not None or logprobs is not _NULL:
            finish = _NULL if reason is None else orjson.dumps(reason)
            self._send(choice, b',"text":' + orjson.dumps(text), logprobs, finish)


def completion_logprobs(entries: Sequence[dict[str, Any]], offset: int) -> tuple[dict[str, Any], int]:
    """Return the `logprobs` of a completion choice whose text is `offset` characters long so far, and the new offset."""
    texts, values, tops, offsets = [], [], [], []
    for token in entries:
        texts.append(token["token"])
        values.append(token["logprob"])
        tops.append({top["token"]: top["logprob"] for top in token["top_logprobs"]} or None)
        offsets.append(offset)
        offset += len(token["token"])
    return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}, offset


def _mean_logprob(choice: Choice) -> float:
    values = [token["logprob"] for token in orjson.loads(choice.all_logprobs or b"[]")]
    return sum(values) / len(values) if values else 0.0
