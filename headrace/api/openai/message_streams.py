# SPDX-License-Identifier: Apache-2.0
"""Write the responses of the Messages API: one JSON document, or a stream of events.

The answer of a model becomes content blocks: text, thinking (reasoning) and tool_use (tool calls). The bytes that all deltas
of a block share are encoded once per block, so that a token costs only its own text. The response head goes out with the
first event, so that an earlier error has an HTTP status.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from headrace.api.openai.continuation import ids_of
from headrace.api.openai.message_errors import error_json, fail, id_field, message_request_id, with_client_path
from headrace.api.openai.output_parser import OutputParser, Piece, Reasoning, ToolCall
from headrace.api.openai.proxy import RAW, ForwardedResponse
from headrace.api.openai.responses import text_of
from headrace.core.errors import HeadraceError, NotFound
from headrace.core.requests import NO_PARAMETERS, InferResponse, Parameters
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_JSON
from headrace.net.http.sse import EventStream

log = logging.getLogger("headrace.api")

_SIGNATURE = "unsigned"
"""Signature of a thinking block. It is not checked when it comes back; clients drop blocks with an empty one."""
_TEXT, _THINKING, _TOOL_USE = "text", "thinking", "tool_use"
_DELTA_MEMBERS = {
    _TEXT: ("text_delta", "text"),
    _THINKING: ("thinking_delta", "thinking"),
    _TOOL_USE: ("input_json_delta", "partial_json"),
}
"""Type and text member of the deltas of a block."""


class MessageEvents:
    """A streamed response on an exchange."""

    def __init__(self, exchange: Exchange, most_unread_bytes: int, request_id: str) -> None:
        self._exchange = exchange
        self._most_unread_bytes = most_unread_bytes
        self._request_id = request_id
        self._events: EventStream | None = None

    @property
    def started(self) -> bool:
        """Whether an event has been sent."""
        return self._events is not None

    def send(self, event: str, data: bytes) -> None:
        """Send an event."""
        events = self._events
        if events is None:
            events = self._events = EventStream(self._exchange, extra=id_field(self._request_id))
        events.send_within(self._most_unread_bytes, data, event)

    def finish(self) -> None:
        """Finish the response."""
        if self._events is not None and not self._events.closed:
            self._events.finish()

    def fail(self, error: BaseException) -> None:
        """Respond with an error: with its status, or as the stream's last event."""
        if self._events is None:
            fail(self._exchange, error, self._request_id)
            return
        if not isinstance(error, HeadraceError):
            log.error("response stream failed", exc_info=error, extra={"request_id": self._request_id})
        if not self._events.closed:
            self._events.send(error_json(error, self._request_id)[1], "error")
            self._events.finish()


class MessageWriter:
    """Collects the answer into one document; base of the streamed kind."""

    def __init__(
        self,
        exchange: Exchange,
        model: str,
        parser: Callable[[], OutputParser] | None,
        paths: Mapping[str, str],
    ) -> None:
        """`paths`: see `with_client_path`."""
        self._exchange = exchange
        self._model = model
        self._parser = parser() if parser is not None else None
        self._paths = paths
        self._request_id = message_request_id(exchange)
        self._last: Parameters = NO_PARAMETERS
        """The parameters of the last answer."""
        self._texts: list[str] = []

    def add(self, request: int, response: InferResponse) -> None:
        """Add an answer."""
        if self._parser is not None and not self._texts:
            self._parser.start(str(response.parameters.get("prompt_end", "")))
        self._texts.append(text_of(response))
        if "finish_reason" in response.parameters:
            self._last = response.parameters

    def end(self) -> None:
        """Respond."""
        text = "".join(self._texts)
        pieces: list[Piece] = [text] if text else []
        if self._parser is not None:
            pieces = [*self._parser.push(text), *self._parser.finish()]
        content, has_calls = _content_blocks(pieces)
        message = _message(self._exchange, self._model, content)
        message |= {**_stop(self._last, has_calls=has_calls), "usage": _usage(self._last)}
        self._exchange.respond(OK_JSON, orjson.dumps(message), id_field(self._request_id))

    def fail(self, error: BaseException) -> None:
        """Respond with an error."""
        if not self._exchange.closed:
            fail(self._exchange, with_client_path(error, self._paths), self._request_id)


class MessageStreamWriter(MessageWriter):
    """Writes the answer as events while it is generated."""

    def __init__(
        self,
        exchange: Exchange,
        model: str,
        parser: Callable[[], OutputParser] | None,
        paths: Mapping[str, str],
        most_unread_bytes: int,
    ) -> None:
        super().__init__(exchange, model, parser, paths)
        self._events = MessageEvents(exchange, most_unread_bytes, self._request_id)
        self._kind = ""
        """The type of the open block; "" if none is open."""
        self._blocks = 0
        """Number of blocks so far, with the open one."""
        self._delta_head = b""
        """The bytes of a delta of the open block, up to its text."""
        self._has_calls = False

    def add(self, request: int, response: InferResponse) -> None:
        """Send the events of an answer."""
        if not self._events.started:
            self._start()
            if self._parser is not None:
                self._parser.start(str(response.parameters.get("prompt_end", "")))
        text = text_of(response)
        if self._parser is None:
            self._send_piece(text)
        elif text:
            for piece in self._parser.push(text):
                self._send_piece(piece)
        if "finish_reason" in response.parameters:
            self._last = response.parameters

    def end(self) -> None:
        """Close the open block, send the stop reason and the usage, and finish the stream."""
        if not self._events.started:
            self._start()
        for piece in self._parser.finish() if self._parser is not None else ():
            self._send_piece(piece)
        self._close_block()
        stop = _stop(self._last, has_calls=self._has_calls)
        self._send("message_delta", {"delta": stop, "usage": _usage(self._last)})
        self._send("message_stop", {})
        self._events.finish()

    def fail(self, error: BaseException) -> None:
        """Respond with an error: with its status, or as the stream's last event."""
        self._events.fail(with_client_path(error, self._paths))

    def _start(self) -> None:
        # The number of prompt tokens comes with the last answer; clients take the usage of `message_delta`.
        message = {**_message(self._exchange, self._model, []), "stop_reason": None, "stop_sequence": None}
        self._send("message_start", {"message": {**message, "usage": _usage(NO_PARAMETERS)}})

    def _send_piece(self, piece: Piece) -> None:
        kind, text = _kind_and_text(piece, self._kind)
        call = _call_start(piece)
        if call is not None:
            self._has_calls = True
            self._open_block(kind, {"id": call.id, "name": call.name, "input": {}})
        elif text and kind != self._kind:
            self._open_block(kind, {"text": ""} if kind == _TEXT else {"thinking": "", "signature": ""})
        if text:
            self._events.send("content_block_delta", self._delta_head + orjson.dumps(text) + b"}}")

    def _open_block(self, kind: str, block: dict[str, Any]) -> None:
        self._close_block()
        index = self._blocks
        self._kind = kind
        self._blocks += 1
        delta = b'{"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
        self._delta_head = delta % (index, *(name.encode() for name in _DELTA_MEMBERS[kind]))
        self._send("content_block_start", {"index": index, "content_block": {"type": kind, **block}})

    def _close_block(self) -> None:
        if not self._kind:
            return
        index = self._blocks - 1
        if self._kind == _THINKING:
            delta = {"type": "signature_delta", "signature": _SIGNATURE}
            self._send("content_block_delta", {"index": index, "delta": delta})
        self._kind = ""
        self._send("content_block_stop", {"index": index})

    def _send(self, event: str, members: Mapping[str, Any]) -> None:
        self._events.send(event, orjson.dumps({"type": event, **members}))


class ForwardedMessage(ForwardedResponse):
    """Writes a document of another engine's Messages API."""

    def __init__(self, exchange: Exchange, name: str) -> None:
        self._request_id = message_request_id(exchange)
        super().__init__(exchange, name, id_field(self._request_id))

    def fail(self, error: BaseException) -> None:
        """Respond with an error."""
        if not self._exchange.closed:
            fail(self._exchange, _forwarded_error(error), self._request_id)


class ForwardedEvents:
    """Writes a stream of another engine's Messages API."""

    def __init__(self, exchange: Exchange, name: str, most_unread_bytes: int) -> None:
        self._name = name
        self._events = MessageEvents(exchange, most_unread_bytes, message_request_id(exchange))

    def add(self, request: int, response: InferResponse) -> None:
        """Send an event. Its name is the type in its data; only the model's name in the first one changes."""
        raw = response.parameters.get(RAW)
        if not isinstance(raw, str):
            return
        document = orjson.loads(raw)
        message = document.get("message")
        if isinstance(message, dict) and "model" in message:
            message["model"] = self._name
        self._events.send(str(document.get("type", "message")), orjson.dumps(document))

    def end(self) -> None:
        """Finish the stream."""
        self._events.finish()

    def fail(self, error: BaseException) -> None:
        """Finish the stream with an error."""
        self._events.fail(_forwarded_error(error))


def _forwarded_error(error: BaseException) -> BaseException:
    if not isinstance(error, NotFound):
        return error
    return NotFound(
        f"{error.message}: the engine behind this model may not have the Messages API; if so, use /v1/chat/completions"
    )


def _message(exchange: Exchange, model: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first members of a message."""
    identity = f"msg_{ids_of(exchange).hexadecimal(12)}"
    return {"id": identity, "type": "message", "role": "assistant", "model": model, "content": content}


def _stop(last: Parameters, *, has_calls: bool) -> dict[str, Any]:
    """Return why the answer ended."""
    matched = last.get("matched_stop")
    if last.get("finish_reason") == "length":
        reason = "max_tokens"
    elif has_calls:
        reason = "tool_use"
    else:
        reason = "end_turn" if matched is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": matched if reason == "stop_sequence" else None}


def _usage(last: Parameters) -> dict[str, int]:
    """Return the token usage. Anthropic counts prompt tokens from the cache beside the others, not among them."""
    cached = int(last.get("cached_tokens", 0))
    return {
        "input_tokens": int(last.get("prompt_tokens", 0)) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": int(last.get("completion_tokens", 0)),
    }


def _content_blocks(pieces: list[Piece]) -> tuple[list[dict[str, Any]], bool]:
    """Return the blocks of a finished answer, and whether it has tool calls."""
    blocks: list[dict[str, Any]] = []
    has_calls = False
    for kind, texts, call in _groups(pieces):
        text = "".join(texts)
        if call is not None:
            has_calls = True
            arguments = _parse_object(text)
            blocks.append({"type": kind, "id": call.id, "name": call.name, "input": arguments or {}})
            if arguments is None:  # cut off by the token limit
                blocks.append({"type": _TEXT, "text": text})
        elif text:
            blocks.append({"type": kind, kind: text, **({"signature": _SIGNATURE} if kind == _THINKING else {})})
    return blocks, has_calls


def _groups(pieces: list[Piece]) -> list[tuple[str, list[str], ToolCall | None]]:
    """Return the pieces of each block: its type, its texts, and the start of its call."""
    groups: list[tuple[str, list[str], ToolCall | None]] = []
    for piece in pieces:
        kind, text = _kind_and_text(piece, groups[-1][0] if groups else "")
        call = _call_start(piece)
        if call is not None or not groups or groups[-1][0] != kind:
            groups.append((kind, [], call))
        groups[-1][1].append(text)
    return groups


def _kind_and_text(piece: Piece, open_kind: str) -> tuple[str, str]:
    """Return the type of block that a piece belongs to, and its text."""
    if isinstance(piece, str):
        return _TEXT, piece
    if isinstance(piece, Reasoning):
        return _THINKING, piece.text
    # Arguments without a name belong to the open call; without one they are shown as text, so that they are not lost.
    return (_TOOL_USE if piece.name or open_kind == _TOOL_USE else _TEXT), piece.arguments


def _call_start(piece: Piece) -> ToolCall | None:
    return piece if isinstance(piece, ToolCall) and piece.name else None


def _parse_object(text: str) -> dict[str, Any] | None:
    try:
        value = orjson.loads(text) if text.strip() else {}
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
