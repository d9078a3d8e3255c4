# SPDX-License-Identifier: Apache-2.0
"""Streamed responses: one chunk (a server-sent event) per answer of the model.

The bytes that all chunks of a choice share are encoded once, so that a token costs only its own text. The response head goes
out with the first chunk, so that an earlier error has an HTTP status. A model cannot be slowed down, so a client that leaves
too much unread is disconnected.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import orjson

from headrace.api.openai.errors import error_json, fail
from headrace.api.openai.output_parser import OutputParser, Piece, Reasoning, ToolCall
from headrace.api.openai.responses import Usage, chat_logprobs, reasoning_tokens, text_of
from headrace.core.errors import HeadraceError
from headrace.core.requests import InferResponse, Parameters
from headrace.net.http.exchange import Exchange
from headrace.net.http.sse import EventStream

_NULL = b"null"


log = logging.getLogger("headrace.api")
_DONE = b"[DONE]"


class StreamedChoice:
    """The state of one choice."""

    __slots__ = ("has_calls", "head", "is_parsed", "logprobs_offset", "parser", "plain", "start", "started")

    def __init__(self, start: bytes, head: bytes, parser: OutputParser | None) -> None:
        self.start = start
        """The bytes of a chunk up to the choice's index."""
        self.head = head
        """The bytes of a chunk with text, up to the text."""
        self.parser = parser
        self.started = False
        self.plain = False
        """Whether the next chunk is only text."""
        self.is_parsed = False
        """Whether the next chunks are only what the parser finds."""
        self.has_calls = False
        self.logprobs_offset = 0
        """The length of the text that has had its logprobs."""


class ChunkWriter:
    """Writes answers as chunks; base of the two kinds."""

    _text_head, _text_tail = b"", b""

    def __init__(
        self,
        chunks: ChunkStream,
        base: dict[str, Any],
        *,
        choices: int,
        choices_per_request: int,
        with_usage: bool,
        plain: bool = True,
    ) -> None:
        self._chunks = chunks
        self._choices_per_request = choices_per_request
        self._with_usage = with_usage
        self._plain = plain
        """Whether chunks after the first are only text."""
        self._usage = Usage()
        self._open = orjson.dumps(base)[:-1] + b',"choices":['
        self._close = b'],"usage":null}' if with_usage else b"]}"
        self._delta_tail = b',"logprobs":null,"finish_reason":null}' + self._close
        self._tail = self._text_tail + self._delta_tail
        self._choices = [self._choice(index) for index in range(choices)]

    def add(self, request: int, response: InferResponse) -> None:
        """Send the chunk, or chunks, of an answer."""
        parameters = response.parameters
        choice = self._choices[request * self._choices_per_request + int(parameters.get("index", 0))]
        text = text_of(response)
        if choice.plain and "finish_reason" not in parameters:
            if text:
                self._chunks.send(choice.head + orjson.dumps(text) + self._tail)
            return
        if choice.is_parsed and "finish_reason" not in parameters:
            if text:
                self._send_parsed(choice, text)
            return
        if not choice.started:
            choice.started = True
            choice.plain = self._plain
            text = self._start_choice(choice, request, text, parameters)
        self._send_answer(choice, text, parameters)
        if "finish_reason" in parameters:
            self._usage.add(request, parameters)

    def end(self) -> None:
        """Send the usage, if requested, and finish the stream."""
        if self._with_usage:
            self._chunks.send(self._open + b'],"usage":' + orjson.dumps(self._usage.to_json()) + b"}")
        self._chunks.finish()

    def fail(self, error: BaseException) -> None:
        """Finish the stream with an error."""
        self._chunks.fail(error)

    def _choice(self, index: int) -> StreamedChoice:
        start = self._open + b'{"index":%d' % index
        return StreamedChoice(start, start + self._text_head, None)

    def _start_choice(self, choice: StreamedChoice, request: int, text: str, parameters: Parameters) -> str:
        """Prepare a choice before its first chunk, whose answer has these parameters; return the text of that chunk."""
        return text

    def _send_answer(self, choice: StreamedChoice, text: str, parameters: Parameters) -> None:
        """Send the chunk, or chunks, of an answer that is not only text."""
        raise NotImplementedError

    def _send_parsed(self, choice: StreamedChoice, text: str) -> None:
        """Send the chunks of an answer that is only text for the parser."""
        raise NotImplementedError

    def _send(self, choice: StreamedChoice, content: bytes, logprobs: bytes = _NULL, finish: bytes = _NULL) -> None:
        end = b',"logprobs":%b,"finish_reason":%b}' % (logprobs, finish)
        self._chunks.send(choice.start + content + end + self._close)


class ChatChunkWriter(ChunkWriter):
    """Writes the chunks of `/v1/chat/completions`."""

    _text_head, _text_tail = b',"delta":{"content":', b"}"

    def __init__(
        self, chunks: ChunkStream, base: dict[str, Any], *, parser: Callable[[], OutputParser] | None, **more: Any
    ):
        self._parser = parser
        super().__init__(chunks, base, **more)

    def _choice(self, index: int) -> StreamedChoice:
        choice = super()._choice(index)
        choice.parser = self._parser() if self._parser is not None else None
        return choice

    def _start_choice(self, choice: StreamedChoice, request: int, text: str, parameters: Parameters) -> str:
        if choice.parser is not None:
            choice.is_parsed, choice.plain = choice.plain, False
            choice.parser.start(str(parameters.get("prompt_end", "")))
        self._send(choice, b',"delta":{"role":"assistant","content":""}')
        return text

    def _send_parsed(self, choice: StreamedChoice, text: str) -> None:
        if choice.parser is None:
            return
        for piece in choice.parser.push(text):
            choice.has_calls = choice.has_calls or isinstance(piece, ToolCall)
            self._chunks.send(choice.start + _delta(piece) + self._delta_tail)

    def _send_answer(self, choice: StreamedChoice, text: str, parameters: Parameters) -> None:
        reason = parameters.get("finish_reason")
        tokens = parameters.get("logprobs")
        logprobs = chat_logprobs(tokens) if isinstance(tokens, str) else _NULL
        if choice.parser is None:
            if text or reason is not None or logprobs is not _NULL:
                self._send(choice, _delta(text), logprobs, _NULL if reason is None else orjson.dumps(reason))
            return
        pieces = choice.parser.push(text) if text else []
        if reason is not None:
            self._usage.reasoning += reasoning_tokens(choice.parser, parameters)
            pieces = [*pieces, *choice.parser.finish()]
        for piece in pieces:
            choice.has_calls = choice.has_calls or isinstance(piece, ToolCall)
            self._send(choice, _delta(piece), logprobs)
            logprobs = _NULL
        if reason is not None:
            reason = "tool_calls" if choice.has_calls and reason == "stop" else reason
            self._send(choice, b',"delta":{}', logprobs, orjson.dumps(reason))
        elif logprobs is not _NULL:
            self._send(choice, b',"delta":{}', logprobs)


def _delta(piece: Piece) -> bytes:
    if isinstance(piece, str):
        return b',"delta":{"content":%b}' % orjson.dumps(piece) if piece else b',"delta":{}'
    if isinstance(piece, Reasoning):
        return b',"delta":{"reasoning_content":%b}' % orjson.dumps(piece.text)
    if not piece.name:
        more = b',"delta":{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}'
        return more % (piece.index, orjson.dumps(piece.arguments))
    function = {"name": piece.name, "arguments": piece.arguments}
    call = {"index": piece.index, "id": piece.id, "type": "function", "function": function}
    return b',"delta":{"tool_calls":[%b]}' % orjson.dumps(call)


class ChunkStream:
    """A streamed response on an exchange."""

    def __init__(self, exchange: Exchange, most_unread_bytes: int) -> None:
        self._exchange = exchange
        self._most = most_unread_bytes
        self._events: EventStream | None = None

    def send(self, chunk: bytes) -> None:
        """Send a chunk."""
        events = self._events
        if events is None:
            events = self._events = EventStream(self._exchange)
        events.send_within(self._most, chunk)

    def finish(self) -> None:
        """Send `[DONE]` and finish the response."""
        self.send(_DONE)
        if self._events is not None and not self._events.closed:
            self._events.finish()

    def fail(self, error: BaseException) -> None:
        """Respond with an error: with its status, or as the stream's last event."""
        if self._events is None:
            fail(self._exchange, error)
            return
        if not isinstance(error, HeadraceError):
            log.error("response stream failed", exc_info=error)
        if not self._events.closed:
            self._events.send(error_json(error)[1])
            self._events.finish()
