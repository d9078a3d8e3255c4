# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/messages`: Anthropic's Messages API, and `POST /v1/messages/count_tokens`.

A request is translated to the members of a chat request, and `chat` starts its generation; `message_streams` writes the
response. `paths` maps each translated member to the client's, so that an error names what the client sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import orjson

from headrace.api.openai.chat import Chat
from headrace.api.openai.errors import BadRequest
from headrace.api.openai.fields import Fields, parse_body
from headrace.api.openai.message_errors import ThreadsUnsupported, fail, id_field, message_request_id, with_client_path
from headrace.api.openai.message_streams import ForwardedEvents, ForwardedMessage, MessageStreamWriter, MessageWriter
from headrace.api.openai.models import Models, Target
from headrace.api.openai.output_parser import OutputParser
from headrace.api.openai.proxy import forward
from headrace.api.openai.responses import ResponseWriter
from headrace.api.openai.settings import OpenAiSettings
from headrace.api.openai.tokenize import DocumentWriter, count_tokens
from headrace.core.generation import Generation
from headrace.core.requests import InferResponse
from headrace.engine.dataplane import DataPlane
from headrace.net.http.exchange import Exchange

_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")
"""Members that a chat request has, too."""
_UNSUPPORTED = {
    "mcp_servers": "this server calls no MCP servers: call them in the client, and give their tools in 'tools'"
}
_THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
_MEDIA_TYPE = re.compile(r"image/[A-Za-z0-9.+-]{1,64}")
_TEXT_CHARACTERS = 1 << 20
_NAME_CHARACTERS = 256
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_BLOCKS = {
    "user": "'text', 'image' or 'tool_result'",
    "assistant": "'text', 'thinking', 'redacted_thinking' or 'tool_use'",
    "system": "'text'",
}
"""Roles, and the content blocks that their messages may have, for errors."""


class Messages:
    """Handlers over one data plane."""

    def __init__(self, plane: DataPlane, settings: OpenAiSettings, models: Models, chat: Chat) -> None:
        self._plane = plane
        self._settings = settings
        self._models = models
        self._chat = chat

    def handle(self, exchange: Exchange) -> None:
        """Handle one `POST /v1/messages`."""
        fields, target = self._read(exchange)
        if target.proxied:
            self._forward(exchange, target, fields, stream=fields.boolean("stream"))
            return
        if fields.get("max_tokens") is None:
            raise fields.error("max_tokens", "is missing: give the maximum number of tokens to generate")
        members, paths = translate(fields, self._settings)
        try:
            self._chat.start(exchange, Fields(members), target, partial(self._writer, exchange, target, paths))
        except BadRequest as error:
            raise with_client_path(error, paths) from None

    def count_tokens(self, exchange: Exchange) -> None:
        """Handle one `POST /v1/messages/count_tokens`."""
        fields, target = self._read(exchange)
        if target.proxied:
            self._forward(exchange, target, fields, stream=False)
            return
        members, paths = translate(fields, self._settings)
        identity = message_request_id(exchange)

        def respond_error(exchange: Exchange, error: BaseException) -> None:
            fail(exchange, with_client_path(error, paths), identity)

        writer = DocumentWriter(exchange, _token_count, id_field(identity), respond_error)
        try:
            count_tokens(self._plane, exchange, members, target, self._settings, writer)
        except BadRequest as error:
            raise with_client_path(error, paths) from None

    def _read(self, exchange: Exchange) -> tuple[Fields, Target]:
        fields = parse_body(exchange)
        target = self._models.generative_model(fields)
        # Other engines would ignore it, and answer the last message alone.
        if fields.get("thread"):
            raise ThreadsUnsupported(
                "thread", "this server keeps no conversations: send all messages, without 'thread'"
            )
        return fields, target

    def _forward(self, exchange: Exchange, target: Target, fields: Fields, *, stream: bool) -> None:
        writer: ResponseWriter = ForwardedMessage(exchange, target.requested_name)
        if stream:
            writer = ForwardedEvents(exchange, target.requested_name, self._settings.stream_unread_bytes)
        forward(self._plane, exchange, target, fields.members, self._settings, writer)

    def _writer(
        self,
        exchange: Exchange,
        target: Target,
        paths: Mapping[str, str],
        parser: Callable[[], OutputParser] | None,
        generation: Generation,
    ) -> ResponseWriter:
        if not generation.stream:
            return MessageWriter(exchange, target.requested_name, parser, paths)
        most = self._settings.stream_unread_bytes
        return MessageStreamWriter(exchange, target.requested_name, parser, paths, most)


def _token_count(response: InferResponse) -> dict[str, Any]:
    return {"input_tokens": len(orjson.loads(str(response.parameters["tokens"])))}


class ChatRequest(NamedTuple):
    """The members of a chat request, and the client's path for each path in it."""

    members: dict[str, Any]
    paths: dict[str, str]


def translate(fields: Fields, settings: OpenAiSettings) -> ChatRequest:
    """Translate a request of the Messages API to a chat request. Unknown members are ignored."""
    fields.reject(_UNSUPPORTED)
    members = {name: fields.get(name) for name in _SAME if fields.get(name) is not None}
    paths = {"stop": "stop_sequences"}
    request = ChatRequest(members, paths)
    stops = fields.get("stop_sequences")
    if stops is not None:
        if not isinstance(stops, list):
            raise fields.error("stop_sequences", "must be a list of strings")
        members["stop"] = stops
    thinking = fields.object("thinking")
    if thinking is not None:
        kind = thinking.get("type")
        if not isinstance(kind, str) or kind not in _THINKING:
            raise fields.error("thinking.type", "must be 'enabled', 'adaptive' or 'disabled'")
        members["chat_template_kwargs"] = {"enable_thinking": _THINKING[kind]}
    _translate_tools(fields, settings, request)
    _translate_format(fields, request)
    _translate_messages(fields, settings, request)
    return request


def _translate_tools(fields: Fields, settings: OpenAiSettings, request: ChatRequest) -> None:
    tools = []
    for index, tool in enumerate(fields.list("tools", settings.tools) or []):
        at = f"tools[{index}]"
        if not isinstance(tool, dict):
            raise BadRequest(at, "must be an object with 'name' and 'input_schema'")
        tools.append({"type": "function", "function": _function(Fields(tool, at))})
        request.paths[f"{at}.function"] = at
        request.paths[f"{at}.function.parameters"] = f"{at}.input_schema"
    if tools:
        request.members["tools"] = tools
    choice = fields.object("tool_choice")
    if choice is None:
        return
    inner = Fields(choice, "tool_choice")
    kind = inner.get("type")
    if kind == "tool":
        name = inner.get("name")
        if not isinstance(name, str):
            raise inner.error("name", "must be the name of one of the tools")
        request.members["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif isinstance(kind, str) and kind in _CHOICES:
        request.members["tool_choice"] = _CHOICES[kind]
    else:
        raise inner.error("type", "must be 'auto', 'any', 'tool' or 'none'")
    if inner.boolean("disable_parallel_tool_use"):
        request.members["parallel_tool_calls"] = False


def _function(tool: Fields) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise tool.error(
            "type",
            f"{str(kind)[:64]!a} is one of Anthropic's own tools, which this server does not have: leave it out, or define "
            "a tool of type 'custom' with 'name', 'description' and 'input_schema' and run it in the client",
        )
    schema = tool.object("input_schema")
    if schema is None:
        raise tool.error("input_schema", "is missing: give the JSON schema of the tool's input")
    function: dict[str, Any] = {"name": tool.get("name"), "parameters": schema}
    description = tool.text("description", _TEXT_CHARACTERS)
    if description is not None:
        function["description"] = description
    if tool.get("strict") is not None:
        function["strict"] = tool.boolean("strict")
    return function


def _translate_format(fields: Fields, request: ChatRequest) -> None:
    config = fields.object("output_config") or {}
    output_format = Fields(config, "output_config").object("format")
    if output_format is None:
        return
    inner = Fields(output_format, "output_config.format")
    if inner.get("type") != "json_schema":
        raise inner.error("type", "must be 'json_schema'")
    schema = inner.object("schema")
    if schema is None:
        raise inner.error("schema", "is missing: give the JSON schema of the answer")
    if request.members.get("tool_choice", "auto") not in ("auto", "none"):
        raise inner.error("type", "cannot be combined with a 'tool_choice' that requires a call: remove one of them")
    request.members["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    request.paths["response_format"] = "output_config.format"
    request.paths["response_format.json_schema"] = "output_config.format"


class _Turn:
    """Consecutive messages of one role, which become one message, and the results of tools before it."""

    def __init__(self, role: str, path: str) -> None:
        self.role = role
        self.path = path
        self.items: list[tuple[str, dict[str, Any]]] = []
        """Texts and images, each with the client's path."""
        self.results: list[dict[str, Any]] = []
        """Messages of the role `tool`."""
        self.calls: list[dict[str, Any]] = []
        self.thoughts: list[str] = []

    def add(self, block: Fields) -> None:
        """Add a content block."""
        kind = block.get("type")
        if kind == "text":
            self.items.append((block.param("text"), {"type": "text", "text": _text(block)}))
        elif self.role == "user" and kind == "image":
            self._add_image(block)
        elif self.role == "user" and kind == "tool_result":
            self._add_result(block)
        elif self.role == "assistant" and kind == "tool_use":
            self._add_call(block)
        elif self.role == "assistant" and kind == "thinking":
            self.thoughts.append(block.text("thinking", _TEXT_CHARACTERS) or "")
        elif not (self.role == "assistant" and kind == "redacted_thinking"):
            shown = "" if kind is None else f", not {str(kind)[:64]!a}"
            raise block.error("type", f"must be {_BLOCKS[self.role]} in a message of role '{self.role}'{shown}")

    def _add_image(self, block: Fields) -> None:
        source = block.object("source")
        if source is None:
            raise block.error("source", "is missing: give the image as {'type': 'base64', 'media_type', 'data'}")
        inner = Fields(source, block.param("source"))
        kind = inner.get("type")
        if kind == "url":
            url = inner.get("url")
            if not isinstance(url, str) or not url:
                raise inner.error("url", "must be the URL of an image")
        elif kind == "base64":
            media_type, data = inner.get("media_type"), inner.get("data")
            if not isinstance(media_type, str) or not _MEDIA_TYPE.fullmatch(media_type):
                raise inner.error("media_type", "must be the type of the image, such as 'image/png'")
            if not isinstance(data, str):
                raise inner.error("data", "must be the image as a base64 string")
            url = f"data:{media_type};base64,{data}"
        else:
            raise inner.error("type", "must be 'base64' or 'url': this server has no files API")
        self.items.append((block.param("source"), {"type": "image_url", "image_url": {"url": url}}))

    def _add_call(self, block: Fields) -> None:
        name, arguments = block.get("name"), block.object("input")
        if not isinstance(name, str) or not name:
            raise block.error("name", "must be the name of a tool")
        function = {"name": name, "arguments": arguments or {}}
        self.calls.append({"id": _identity(block, "id"), "type": "function", "function": function})

    def _add_result(self, block: Fields) -> None:
        """Add the result of a tool. Its images follow in the user's message, since few templates take them in a result."""
        texts = []
        for part in _blocks(block, "content"):
            if part.get("type") == "text":
                texts.append(_text(part))
            elif part.get("type") == "image":
                self._add_image(part)
            else:
                raise part.error("type", "must be 'text' or 'image' in the result of a tool")
        # Templates have no member for it.
        prefix = "Error: " if block.boolean("is_error") else ""
        message = {
            "role": "tool",
            "tool_call_id": _identity(block, "tool_use_id"),
            "content": prefix + "\n".join(texts),
        }
        self.results.append(message)

    def write(self, request: ChatRequest, messages: list[dict[str, Any]]) -> None:
        """Append the messages of the chat request."""
        messages += self.results
        if not self.items and self.role != "assistant":
            return
        at = f"messages[{len(messages)}]"
        request.paths.update({at: self.path, f"{at}.tool_calls": f"{self.path}.content"})
        for index, (path, item) in enumerate(self.items):
            request.paths[f"{at}.content[{index}]"] = path
            request.paths[f"{at}.content[{index}].{item['type']}"] = path
        message: dict[str, Any] = {"role": self.role, "content": [item for _, item in self.items] or ""}
        if self.calls:
            message["tool_calls"] = self.calls
        if self.thoughts:
            message["reasoning_content"] = "".join(self.thoughts)
        messages.append(message)


def _translate_messages(fields: Fields, settings: OpenAiSettings, request: ChatRequest) -> None:
    values = fields.list("messages", settings.messages)
    if not values:
        raise fields.error("messages", "must be a list of at least one message")
    turns: list[_Turn] = []
    if fields.get("system") is not None:
        turns.append(_Turn("system", "system"))
        for block in _blocks(fields, "system"):
            turns[0].add(block)
    for index, value in enumerate(values):
        at = f"messages[{index}]"
        if not isinstance(value, dict):
            raise BadRequest(at, "must be an object with 'role' and 'content'")
        message = Fields(value, at)
        role = message.get("role")
        if not isinstance(role, str) or role not in _BLOCKS:
            raise message.error("role", "must be 'user' or 'assistant'")
        blocks = _blocks(message, "content")
        if not blocks and (role != "assistant" or message.get("content") is None):
            raise message.error("content", "is missing: give a string, or a list of content blocks")
        if not turns or turns[-1].role != role:
            turns.append(_Turn(role, at))
        for block in blocks:
            turns[-1].add(block)
    if turns[-1].role == "assistant":
        raise BadRequest(
            f"messages[{len(values) - 1}].role",
            "the last message must be the user's: this server does not continue an assistant's message",
        )
    messages: list[dict[str, Any]] = []
    for turn in turns:
        turn.write(request, messages)
    request.members["messages"] = messages


def _blocks(fields: Fields, name: str) -> list[Fields]:
    """Return the content blocks of a member. A string is one block of text; a member that is missing has none."""
    value = fields.get(name)
    if value is None:
        return []
    path = fields.param(name)
    if isinstance(value, str):
        return [Fields({"type": "text", "text": value}, path)]
    if not isinstance(value, list):
        raise fields.error(name, "must be a string, or a list of content blocks")
    for index, block in enumerate(value):
        if not isinstance(block, dict):
            raise BadRequest(f"{path}[{index}]", "must be an object with a 'type'")
    return [Fields(block, f"{path}[{index}]") for index, block in enumerate(value)]


def _text(block: Fields) -> str:
    text = block.get("text")
    if not isinstance(text, str):
        raise block.error("text", "must be a string")
    return text


def _identity(block: Fields, name: str) -> str:
    identity = block.text(name, _NAME_CHARACTERS)
    if not identity:
        raise block.error(name, "is missing: give the id of the tool call")
    return identity
