# SPDX-License-Identifier: Apache-2.0
"""Write an answer in the shape of OpenAI's Responses API: one document, or a stream of its events.

An answer is a list of output items: reasoning, a message, tool calls. In a stream each item is added, grows by deltas and is
done; every event has a sequence number, and the last one carries the whole response.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import orjson

from headrace.api.openai.continuation import ids_of
from headrace.api.openai.errors import error_json, fail
from headrace.api.openai.fields import Fields
from headrace.api.openai.output_parser import OutputParser, Piece, Reasoning, ToolCall
from headrace.api.openai.response_ids import ResponseIds
from headrace.api.openai.response_requests import new_item_id, split_name
from headrace.api.openai.responses import reasoning_tokens, text_of
from headrace.core.requests import NO_PARAMETERS, InferResponse, Parameters
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_JSON
from headrace.net.http.sse import EventStream

_ECHOED: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
}
"""Members of a request that its response repeats, with their defaults."""


_DELTAS = {
    "message": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "function_call": "response.function_call_arguments.delta",
}


class _Item:
    """An output item while it grows."""

    __slots__ = ("delta_head", "document", "id", "index", "kind", "part", "texts")

    def __init__(self, kind: str, index: int, document: dict[str, Any], part: dict[str, Any] | None) -> None:
        self.kind = kind
        self.index = index
        self.id: str = document["id"]
        self.document = document
        """As it was added."""
        self.part = part
        """The part of its content that has the text; None for a call, whose arguments are its own member."""
        self.texts: list[str] = []
        self.delta_head = b""
        """The bytes that all its deltas share, up to their sequence numbers."""

    def finished(self, status: str) -> dict[str, Any]:
        """Return the item with all of its text."""
        text = "".join(self.texts)
        if self.part is None:
            return {**self.document, "arguments": text, "status": status}
        return {**self.document, "content": [{**self.part, "text": text}], "status": status}


def _new_item(piece: Piece, index: int, namespaces: Collection[str], ids: ResponseIds) -> _Item:
    kind = _kind_of(piece)
    document: dict[str, Any] = {"id": new_item_id(kind, ids), "type": kind, "status": "in_progress"}
    if isinstance(piece, ToolCall):
        namespace, name = split_name(piece.name, namespaces)
        call = {"call_id": piece.id, "name": name, "arguments": "", **({"namespace": namespace} if namespace else {})}
        return _Item(kind, index, {**document, **call}, None)
    if isinstance(piece, Reasoning):
        return _Item(kind, index, {**document, "summary": [], "content": []}, {"type": "reasoning_text", "text": ""})
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return _Item(kind, index, {**document, "role": "assistant", "content": []}, part)


def _kind_of(piece: Piece) -> str:
    if isinstance(piece, ToolCall):
        return "function_call"
    return "reasoning" if isinstance(piece, Reasoning) else "message"


def _text_of_piece(piece: Piece) -> str:
    if isinstance(piece, ToolCall):
        return piece.arguments
    return piece.text if isinstance(piece, Reasoning) else piece


Deliver = Callable[[dict[str, Any]], None]
"""Sends a finished response to its client."""
Store = Callable[[dict[str, Any], Deliver], None]
"""Stores a finished response, and delivers it when that is done."""


class ResponseDocument:
    """The response so far; writes it as one document at the end."""

    def __init__(
        self,
        exchange: Exchange,
        request: Fields,
        model: str,
        parser: Callable[[], OutputParser] | None,
        store: Store | None = None,
    ) -> None:
        """`store`: for a response that is kept."""
        self._exchange = exchange
        self._ids = ids_of(exchange)
        self._store = store
        self._parser = parser() if parser is not None else None
        echoed = {
            name: value if (value := request.get(name)) is not None else default for name, default in _ECHOED.items()
        }
        self._base: dict[str, Any] = {
            "id": f"resp_{self._ids.hexadecimal(24)}",
            "object": "response",
            "created_at": self._ids.created(),
            "model": model,
            **echoed,
            "previous_response_id": request.get("previous_response_id"),
            "store": store is not None,
            "background": request.boolean("background"),
        }
        tools = [tool for tool in self._base["tools"] if isinstance(tool, dict)]
        self._namespaces = {str(tool.get("name")) for tool in tools if tool.get("type") == "namespace"}
        self._items: list[_Item] = []
        self._done: list[dict[str, Any]] = []
        """The items that are finished, as documents."""
        self._started = False
        self._last: Parameters = NO_PARAMETERS

    def add(self, request: int, response: InferResponse) -> None:
        """Add an answer of the model."""
        parameters, text = response.parameters, text_of(response)
        if not self._started:
            self._started = True
            self._start()
            if self._parser is not None:
                self._parser.start(str(parameters.get("prompt_end", "")))
        pieces: list[Piece] = [text] if text else []
        if self._parser is not None:
            pieces = self._parser.push(text) if text else []
        if "finish_reason" in parameters:
            self._last = parameters
            if self._parser is not None:
                pieces = [*pieces, *self._parser.finish()]
        for piece in pieces:
            self._add_piece(piece)

    def end(self) -> None:
        """Respond, when the response is stored."""
        self._finish_item()
        document = self._finished()
        if self._store is None:
            self._deliver(document)
        else:
            self._store(document, self._deliver)

    def fail(self, error: BaseException) -> None:
        """Respond with an error."""
        if not self._exchange.closed:
            fail(self._exchange, error)

    def _start(self) -> None:
        """Prepare the response before its first item."""

    def _deliver(self, document: dict[str, Any]) -> None:
        self._exchange.respond(OK_JSON, orjson.dumps(document))

    def _add_piece(self, piece: Piece) -> None:
        item = self._items[-1] if len(self._items) > len(self._done) else None
        begins_call = isinstance(piece, ToolCall) and piece.name
        if item is None or begins_call or item.kind != _kind_of(piece):
            self._finish_item()
            item = _new_item(piece, len(self._items), self._namespaces, self._ids)
            self._items.append(item)
            self._item_added(item)
        text = _text_of_piece(piece)
        if text:
            item.texts.append(text)
            self._item_grew(item, text)

    def _finish_item(self) -> None:
        if len(self._items) > len(self._done):
            item = self._items[-1]
            document = item.finished("incomplete" if self._cut_off else "completed")
            self._done.append(document)
            self._item_done(item, document)

    @property
    def _cut_off(self) -> bool:
        return self._last.get("finish_reason") == "length"

    def _item_added(self, item: _Item) -> None:
        """Called for a new item."""

    def _item_grew(self, item: _Item, text: str) -> None:
        """Called for more text of an item."""

    def _item_done(self, item: _Item, document: dict[str, Any]) -> None:
        """Called for an item that is finished."""

    def _unfinished(self, status: str = "in_progress") -> dict[str, Any]:
        return {
            **self._base,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }

    def _failed(self, error: BaseException) -> dict[str, Any]:
        reason = orjson.loads(error_json(error)[1])["error"]
        shown = {"code": reason["code"] or "server_error", "message": reason["message"]}
        return {**self._unfinished("failed"), "error": shown, "output": self._done}

    def _finished(self) -> dict[str, Any]:
        last = self._last
        prompt, completion = int(last.get("prompt_tokens", 0)), int(last.get("completion_tokens", 0))
        reasoning = reasoning_tokens(self._parser, last) if self._parser is not None else 0
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": int(last.get("cached_tokens", 0)), "cache_write_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": prompt + completion,
        }
        return {
            **self._base,
            "status": "incomplete" if self._cut_off else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._cut_off else None,
            "output": self._done,
            "usage": usage,
        }


class ResponseEvents(ResponseDocument):
    """The response as a stream of events."""

    def __init__(
        self,
        exchange: Exchange,
        request: Fields,
        model: str,
        parser: Callable[[], OutputParser] | None,
        most_unread_bytes: int,
        store: Store | None = None,
    ) -> None:
        super().__init__(exchange, request, model, parser, store)
        self._most = most_unread_bytes
        self._events: EventStream | None = None
        self._number = 0

    def _deliver(self, document: dict[str, Any]) -> None:
        self._send(f"response.{document['status']}", {"response": document})
        if self._events is not None and not self._events.closed:
            self._events.finish()

    def fail(self, error: BaseException) -> None:
        """Finish with an error: with its status, or as the last events of the stream."""
        if self._events is None:
            super().fail(error)
            return
        if self._events.closed:
            return
        self._send("response.failed", {"response": self._failed(error)})
        self._events.finish()

    def _start(self) -> None:
        self._events = EventStream(self._exchange)
        self._send("response.created", {"response": self._unfinished()})
        self._send("response.in_progress", {"response": self._unfinished()})

    def _item_added(self, item: _Item) -> None:
        self._send("response.output_item.added", {"output_index": item.index, "item": item.document})
        if item.part is not None:
            self._send("response.content_part.added", {**_place(item), "part": item.part})

    def _item_grew(self, item: _Item, text: str) -> None:
        if not item.delta_head:
            members: dict[str, Any] = {"type": _DELTAS[item.kind], **_place(item)}
            if item.kind == "message":
                members["logprobs"] = []
            item.delta_head = orjson.dumps(members)[:-1] + b',"sequence_number":'
        self._send_data(_DELTAS[item.kind], b'%b%d,"delta":%b}' % (item.delta_head, self._number, orjson.dumps(text)))

    def _item_done(self, item: _Item, document: dict[str, Any]) -> None:
        if item.kind == "function_call":
            call = {name: document[name] for name in ("name", "arguments")}
            self._send("response.function_call_arguments.done", {**_place(item), **call})
        else:
            part = document["content"][0]
            done = {**part, **_place(item)}
            del done["type"]
            done.pop("annotations", None)
            self._send(_DELTAS[item.kind].replace(".delta", ".done"), done)
            self._send("response.content_part.done", {**_place(item), "part": part})
        self._send("response.output_item.done", {"output_index": item.index, "item": document})

    def _send(self, kind: str, members: Mapping[str, Any]) -> None:
        self._send_data(kind, orjson.dumps({"type": kind, "sequence_number": self._number, **members}))

    def _send_data(self, kind: str, data: bytes) -> None:
        if self._events is not None:
            self._number += 1
            self._events.send_within(self._most, data, kind)


def _place(item: _Item) -> dict[str, Any]:
    """Return where an event belongs."""
    place = {"item_id": item.id, "output_index": item.index}
    return place if item.part is None else {**place, "content_index": 0}
