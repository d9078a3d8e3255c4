# SPDX-License-Identifier: Apache-2.0
"""Send the requests of one exchange to the data plane, and write a full (not streamed) response.

`GenerationCalls` passes each answer of the model to a `ResponseWriter`; `streams` has the writers of streamed responses. All
calls are cancelled when the client disconnects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import orjson

from headrace.api.openai.errors import fail, rename_field
from headrace.api.openai.output_parser import OutputParser, Reasoning
from headrace.core.generation import TEXT_OUTPUT, GenerationRequest
from headrace.core.requests import NO_PARAMETERS, InferResponse, Parameters
from headrace.engine.dataplane import DataPlane
from headrace.engine.scheduling.pending_request import PendingRequest
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_JSON


class ResponseWriter(Protocol):
    """Writes the model's answers as an HTTP response."""

    def add(self, request: int, response: InferResponse) -> None:
        """Add an answer to one of the requests."""

    def end(self) -> None:
        """Finish the response: all requests have had their last answer."""

    def fail(self, error: BaseException) -> None:
        """Finish the response with an error."""


class GenerationCalls:
    """The requests of one exchange."""

    def __init__(
        self,
        plane: DataPlane,
        exchange: Exchange,
        writer: ResponseWriter,
        names: Callable[[int], Mapping[str, str]] = lambda _: {},
    ) -> None:
        """`names`: the client's names for the fields of a request, for errors about them."""
        self._plane = plane
        self._exchange = exchange
        self._writer = writer
        self._names = names
        self._pendings: list[PendingRequest] = []
        self._left = 0
        self._finished = False

    def begin(self, requests: Sequence[GenerationRequest]) -> None:
        """Send the requests; raise at once if one of them is invalid, and compute none."""
        self._left = len(requests)
        try:
            for number, request in enumerate(requests):
                self._pendings.append(self._plane.infer_stream(request, partial(self._answered, number)))
        except Exception:
            self.cancel()
            raise
        self._exchange.on_disconnect = self.cancel

    def cancel(self) -> None:
        """Cancel all requests."""
        self._finished = True
        pendings, self._pendings = self._pendings, []
        for pending in pendings:
            pending.cancel()

    def _answered(self, number: int, result: InferResponse | BaseException | None, final: bool) -> None:
        if self._finished:
            return
        if isinstance(result, BaseException):
            self.cancel()
            self._writer.fail(rename_field(result, self._names(number)))
            return
        try:
            if result is not None:
                self._writer.add(number, result)
            if final:
                self._left -= 1
                if not self._left:
                    self._finished = True
                    self._pendings = []
                    self._writer.end()
        except Exception as error:
            self.cancel()
            self._writer.fail(error)


class Usage:
    """Token usage of all requests: a prompt counts once for all its choices."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self._completion = 0
        self.reasoning = 0
        """Tokens of reasoning, which are completion tokens."""

    def add(self, request: int, parameters: Parameters) -> None:
        """Add the usage of a finished choice."""
        self._prompts[request] = (int(parameters.get("prompt_tokens", 0)), int(parameters.get("cached_tokens", 0)))
        self._completion += int(parameters.get("completion_tokens", 0))

    def to_json(self) -> dict[str, Any]:
        """Return OpenAI's `usage` object."""
        prompt = sum(tokens for tokens, _ in self._prompts.values())
        cached = sum(tokens for _, tokens in self._prompts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion,
            "total_tokens": prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }


def reasoning_tokens(parser: OutputParser, parameters: Parameters) -> int:
    """Return how many tokens of a finished choice are reasoning: all of them if it was cut off there."""
    return int(parameters.get("completion_tokens" if parser.in_reasoning else "reasoning_tokens", 0))


def text_of(response: InferResponse) -> str:
    """Return the new text of an answer."""
    output = response.outputs[0]
    if output.name != TEXT_OUTPUT:
        output = next(tensor for tensor in response.outputs if tensor.name == TEXT_OUTPUT)
    text = output.array.item()
    return text.decode() if type(text) is bytes else text


class Choice:
    """The answers of one choice so far."""

    __slots__ = ("first_parameters", "logprobs", "parameters", "reason", "texts")

    def __init__(self) -> None:
        self.first_parameters: Parameters = NO_PARAMETERS
        """Those of its first answer."""
        self.parameters: Parameters = NO_PARAMETERS
        """Those of its last answer."""
        self.texts: list[str] = []
        self.logprobs: list[str] = []
        self.reason: str | None = None

    @property
    def all_logprobs(self) -> str | None:
        """The logprobs of all tokens as one JSON text."""
        if len(self.logprobs) < 2:
            return self.logprobs[0] if self.logprobs else None
        return orjson.dumps([token for text in self.logprobs for token in orjson.loads(text)]).decode()


class FullResponseWriter:
    """Collects all answers into one JSON document; base of the two kinds."""

    def __init__(self, exchange: Exchange, base: dict[str, Any], *, choices: int, choices_per_request: int) -> None:
        self._exchange = exchange
        self._base = base
        self._choices_per_request = choices_per_request
        self._choices = [Choice() for _ in range(choices)]
        self._usage = Usage()

    def add(self, request: int, response: InferResponse) -> None:
        """Add an answer to its choice."""
        parameters = response.parameters
        choice = self._choices[request * self._choices_per_request + int(parameters.get("index", 0))]
        if not choice.texts:
            choice.first_parameters = parameters
        choice.texts.append(text_of(response))
        logprobs, reason = parameters.get("logprobs"), parameters.get("finish_reason")
        if isinstance(logprobs, str):
            choice.logprobs.append(logprobs)
        if reason is not None:
            choice.reason = str(reason)
            choice.parameters = parameters
            self._usage.add(request, parameters)

    def end(self) -> None:
        """Respond."""
        returned = self._returned_choices()
        choices = [self._choice_json(index, request, choice) for index, (request, choice) in enumerate(returned)]
        document = {**self._base, "choices": choices, "usage": self._usage.to_json(), **self._more_members()}
        self._exchange.respond(OK_JSON, orjson.dumps(document))

    def fail(self, error: BaseException) -> None:
        """Respond with an error."""
        if not self._exchange.closed:
            fail(self._exchange, error)

    def _returned_choices(self) -> list[tuple[int, Choice]]:
        """Return the choices that are part of the response, with the number of their request."""
        return [(index // self._choices_per_request, choice) for index, choice in enumerate(self._choices)]

    def _choice_json(self, index: int, request: int, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _more_members(self) -> dict[str, Any]:
        return {}


class ChatResponseWriter(FullResponseWriter):
    """Writes the response of `/v1/chat/completions`."""

    def __init__(
        self, exchange: Exchange, base: dict[str, Any], *, parser: Callable[[], OutputParser] | None, **more: Any
    ) -> None:
        super().__init__(exchange, base, **more)
        self._parser = parser

    def _more_members(self) -> dict[str, Any]:
        tokens = self._choices[0].first_parameters.get("prompt_logprobs")
        return {"prompt_logprobs": vllm_prompt_logprobs(tokens)} if isinstance(tokens, str) else {}

    def _choice_json(self, index: int, request: int, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.texts)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        calls: list[dict[str, Any]] = []
        if self._parser is not None:
            parser = self._parser()
            text, reasoning, calls = _parse_output(parser, str(choice.first_parameters.get("prompt_end", "")), text)
            self._usage.reasoning += reasoning_tokens(parser, choice.parameters)
            message["content"] = text
            if reasoning:
                message["reasoning_content"] = reasoning
        reason = choice.reason or "stop"
        if calls:
            message["tool_calls"] = calls
            message["content"] = text or None
            reason = "tool_calls" if reason == "stop" else reason
        tokens = choice.all_logprobs
        logprobs = orjson.Fragment(chat_logprobs(tokens)) if tokens is not None else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}


def _parse_output(parser: OutputParser, prompt_end: str, output: str) -> tuple[str, str, list[dict[str, Any]]]:
    """Split the output of a finished choice into text, reasoning and tool calls."""
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    parser.start(prompt_end)
    for piece in [*parser.push(output), *parser.finish()]:
        if isinstance(piece, str):
            texts.append(piece)
        elif isinstance(piece, Reasoning):
            reasoning.append(piece.text)
        elif piece.name:
            function = {"name": piece.name, "arguments": piece.arguments}
            calls.append({"id": piece.id, "type": "function", "function": function})
        else:
            calls[piece.index]["function"]["arguments"] += piece.arguments
    return "".join(texts), "".join(reasoning), calls


def chat_logprobs(tokens: str) -> bytes:
    """Return the `logprobs` of a chat choice as JSON. `tokens` is the model's JSON list (`core.generation`)."""
    return b'{"content":%b,"refusal":null}' % tokens.encode()


def vllm_prompt_logprobs(tokens: str) -> list[dict[str, Any] | None]:
    """Return `prompt_logprobs` as vLLM does: for each token of the prompt, what could have been there, by token id.

    `tokens` is the model's JSON list (`core.generation`).
    """
    lines: list[dict[str, Any] | None] = []
    for token in orjson.loads(tokens):
        if token["logprob"] is None:
            lines.append(None)
            continue
        lines.append(
            {
                str(entry["token_id"]): {
                    "logprob": entry["logprob"],
                    "rank": entry["rank"],
                    "decoded_token": entry["token"],
                }
                for entry in (token, *token["top_logprobs"])
            }
        )
    return lines
