# SPDX-License-Identifier: Apache-2.0
"""Answers put together into one document. Made by `chat` and `completions` for requests without `stream`; fed by `flows`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from headrace.api.openai.calls import CallReader
from headrace.api.openai.errors import fail
from headrace.api.openai.flows import Usage, text_of
from headrace.api.openai.logprobs import chat_logprobs, completion_logprobs
from headrace.core.messages import InferResponse
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_JSON


class _Choice:
    """What has come of one choice."""

    __slots__ = ("logprobs", "reason", "texts")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.logprobs: list[str] = []
        self.reason: str | None = None

    @property
    def told(self) -> str | None:
        """The logprobs of all its tokens, as one JSON text."""
        if len(self.logprobs) < 2:
            return self.logprobs[0] if self.logprobs else None
        return orjson.dumps([each for text in self.logprobs for each in orjson.loads(text)]).decode()


class WholeWriter:
    """Base of the two kinds of document. See `flows.Writer`."""

    def __init__(self, exchange: Exchange, begin: dict[str, Any], *, choices: int, each: int) -> None:
        self._exchange = exchange
        self._begin = begin
        self._each = each
        self._choices = [_Choice() for _ in range(choices)]
        self._usage = Usage()

    def add(self, request: int, response: InferResponse) -> None:
        """See `flows.Writer`."""
        parameters = response.parameters
        choice = self._choices[request * self._each + int(parameters.get("index", 0))]
        choice.texts.append(text_of(response))
        logprobs, reason = parameters.get("logprobs"), parameters.get("finish_reason")
        if isinstance(logprobs, str):
            choice.logprobs.append(logprobs)
        if reason is not None:
            choice.reason = str(reason)
            self._usage.add(request, parameters)

    def end(self) -> None:
        """See `flows.Writer`."""
        choices = [self._shown(index, choice) for index, choice in enumerate(self._choices)]
        document = {**self._begin, "choices": choices, "usage": self._usage.shown()}
        self._exchange.respond(OK_JSON, orjson.dumps(document))

    def failed(self, error: BaseException) -> None:
        """See `flows.Writer`."""
        if not self._exchange.closed:
            fail(self._exchange, error)

    def _shown(self, index: int, choice: _Choice) -> dict[str, Any]:
        raise NotImplementedError


class WholeChat(WholeWriter):
    """Of `/v1/chat/completions`."""

    def __init__(
        self, exchange: Exchange, begin: dict[str, Any], *, reader: Callable[[], CallReader] | None, **more: Any
    ) -> None:
        super().__init__(exchange, begin, **more)
        self._reader = reader

    def _shown(self, index: int, choice: _Choice) -> dict[str, Any]:
        text = "".join(choice.texts)
        calls: list[dict[str, Any]] = []
        if self._reader is not None:
            text, calls = _read(self._reader(), text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        reason = choice.reason or "stop"
        if calls:
            message["tool_calls"] = calls
            message["content"] = text or None
            reason = "tool_calls" if reason == "stop" else reason
        logprobs = orjson.Fragment(chat_logprobs(choice.told)) if choice.told is not None else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}


class WholeCompletion(WholeWriter):
    """Of `/v1/completions`. `echoes` are the prompts to be repeated, if they are."""

    def __init__(self, exchange: Exchange, begin: dict[str, Any], *, echoes: Sequence[str] = (), **more: Any) -> None:
        super().__init__(exchange, begin, **more)
        self._echoes = echoes

    def _shown(self, index: int, choice: _Choice) -> dict[str, Any]:
        echo = self._echoes[index // self._each] if self._echoes else ""
        logprobs = completion_logprobs(choice.told, len(echo))[0] if choice.told is not None else None
        text = echo + "".join(choice.texts)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.reason or "stop"}


def _read(reader: CallReader, whole: str) -> tuple[str, list[dict[str, Any]]]:
    """Text and calls of a choice that is complete."""
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for piece in [*reader.push(whole), *reader.finish()]:
        if isinstance(piece, str):
            texts.append(piece)
        else:
            function = {"name": piece.name, "arguments": piece.arguments}
            calls.append({"id": piece.id, "type": "function", "function": function})
    return "".join(texts), calls
