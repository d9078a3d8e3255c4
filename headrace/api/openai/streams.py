# SPDX-License-Identifier: Apache-2.0
"""Answers as chunks, one for each. What is the same in all chunks of a choice is written once; a token costs its own text.

Made by `chat` and `completions` for requests with `stream`; fed by `flows`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from headrace.api.openai.calls import Call, CallReader, Piece
from headrace.api.openai.events import Chunks
from headrace.api.openai.flows import Usage, text_of
from headrace.api.openai.logprobs import chat_logprobs, completion_logprobs
from headrace.core.messages import InferResponse, Parameters

_NULL = b"null"


class _Choice:
    """What is known of one choice."""

    __slots__ = ("begun", "called", "head", "logprobs_at", "plain", "reader", "start")

    def __init__(self, start: bytes, head: bytes, reader: CallReader | None) -> None:
        self.start = start
        """Of a chunk, up to the choice's index."""
        self.head = head
        """Of a chunk with text, up to the text."""
        self.reader = reader
        self.begun = False
        self.plain = False
        """Whether its next chunk is only a text."""
        self.called = False
        self.logprobs_at = 0
        """How far the text is that has had its logprobs."""


class ChunkWriter:
    """Base of the two kinds of stream. See `flows.Writer`."""

    _text_head, _text_tail = b"", b""

    def __init__(
        self, chunks: Chunks, begin: dict[str, Any], *, choices: int, each: int, with_usage: bool, plain: bool = True
    ) -> None:
        self._chunks = chunks
        self._each = each
        """Choices of one request."""
        self._with_usage = with_usage
        self._plain = plain
        """Whether chunks are only text, after the first."""
        self._usage = Usage()
        self._open = orjson.dumps(begin)[:-1] + b',"choices":['
        self._close = b'],"usage":null}' if with_usage else b"]}"
        self._tail = self._text_tail + b',"logprobs":null,"finish_reason":null}' + self._close
        self._choices = [self._choice(index) for index in range(choices)]

    def add(self, request: int, response: InferResponse) -> None:
        """See `flows.Writer`."""
        parameters = response.parameters
        choice = self._choices[request * self._each + int(parameters.get("index", 0))]
        text = text_of(response)
        if choice.plain and "finish_reason" not in parameters:
            if text:
                self._chunks.send(choice.head + orjson.dumps(text) + self._tail)
            return
        if not choice.begun:
            choice.begun = True
            choice.plain = self._plain
            text = self._begin(choice, request, text)
        self._more(choice, text, parameters)
        if "finish_reason" in parameters:
            self._usage.add(request, parameters)

    def end(self) -> None:
        """See `flows.Writer`."""
        if self._with_usage:
            self._chunks.send(self._open + b'],"usage":' + orjson.dumps(self._usage.shown()) + b"}")
        self._chunks.finish()

    def failed(self, error: BaseException) -> None:
        """See `flows.Writer`."""
        self._chunks.fail(error)

    def _choice(self, index: int) -> _Choice:
        start = self._open + b'{"index":%d' % index
        return _Choice(start, start + self._text_head, None)

    def _begin(self, choice: _Choice, request: int, text: str) -> str:
        """Before a choice's first chunk; returns the text of the latter."""
        return text

    def _more(self, choice: _Choice, text: str, parameters: Parameters) -> None:
        """The chunk, or chunks, of an answer that is not only text."""
        raise NotImplementedError

    def _send(self, choice: _Choice, content: bytes, logprobs: bytes = _NULL, finish: bytes = _NULL) -> None:
        end = b',"logprobs":%b,"finish_reason":%b}' % (logprobs, finish)
        self._chunks.send(choice.start + content + end + self._close)


class ChatChunks(ChunkWriter):
    """Of `/v1/chat/completions`."""

    _text_head, _text_tail = b',"delta":{"content":', b"}"

    def __init__(self, chunks: Chunks, begin: dict[str, Any], *, reader: Callable[[], CallReader] | None, **more: Any):
        self._reader = reader
        super().__init__(chunks, begin, **more)

    def _choice(self, index: int) -> _Choice:
        choice = super()._choice(index)
        choice.reader = self._reader() if self._reader is not None else None
        return choice

    def _begin(self, choice: _Choice, request: int, text: str) -> str:
        if choice.reader is not None:
            choice.plain = False
        self._send(choice, b',"delta":{"role":"assistant","content":""}')
        return text

    def _more(self, choice: _Choice, text: str, parameters: Parameters) -> None:
        reason = parameters.get("finish_reason")
        told = parameters.get("logprobs")
        logprobs = chat_logprobs(told) if isinstance(told, str) else _NULL
        if choice.reader is None:
            if text or reason is not None or logprobs is not _NULL:
                self._send(choice, _delta(text), logprobs, _NULL if reason is None else orjson.dumps(reason))
            return
        pieces = choice.reader.push(text) if text else []
        if reason is not None:
            pieces = [*pieces, *choice.reader.finish()]
        for piece in pieces:
            choice.called = choice.called or isinstance(piece, Call)
            self._send(choice, _delta(piece), logprobs)
            logprobs = _NULL
        if reason is not None:
            reason = "tool_calls" if choice.called and reason == "stop" else reason
            self._send(choice, b',"delta":{}', logprobs, orjson.dumps(reason))
        elif logprobs is not _NULL:
            self._send(choice, b',"delta":{}', logprobs)


class CompletionChunks(ChunkWriter):
    """Of `/v1/completions`. `echoes` are the prompts to be repeated, if they are."""

    _text_head = b',"text":'

    def __init__(self, chunks: Chunks, begin: dict[str, Any], *, echoes: Sequence[str] = (), **more: Any) -> None:
        self._echoes = echoes
        super().__init__(chunks, begin, **more)

    def _begin(self, choice: _Choice, request: int, text: str) -> str:
        if not self._echoes:
            return text
        choice.logprobs_at = len(self._echoes[request])
        return self._echoes[request] + text

    def _more(self, choice: _Choice, text: str, parameters: Parameters) -> None:
        reason, told = parameters.get("finish_reason"), parameters.get("logprobs")
        logprobs = _NULL
        if isinstance(told, str):
            shown, choice.logprobs_at = completion_logprobs(told, choice.logprobs_at)
            logprobs = orjson.dumps(shown)
        if text or reason is not None or logprobs is not _NULL:
            finish = _NULL if reason is None else orjson.dumps(reason)
            self._send(choice, b',"text":' + orjson.dumps(text), logprobs, finish)


def _delta(piece: Piece) -> bytes:
    if isinstance(piece, str):
        return b',"delta":{"content":%b}' % orjson.dumps(piece) if piece else b',"delta":{}'
    call: dict[str, Any] = {"index": piece.index, "function": {"arguments": piece.arguments}}
    if piece.name:
        function = {"name": piece.name, "arguments": piece.arguments}
        call = {"index": piece.index, "id": piece.id, "type": "function", "function": function}
    return b',"delta":{"tool_calls":[%b]}' % orjson.dumps(call)
