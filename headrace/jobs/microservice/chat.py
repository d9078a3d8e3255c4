# SPDX-License-Identifier: Apache-2.0
"""Chat requests and responses: OpenAI's JSON, complete or as server-sent events.

Requests are read as TAO's server does: the first user message, the first system message, and of several texts the last. The
head of a stream is sent with the first token: an error before it gets its own status, an error after it is the last event.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any

from headrace.api.openai.streams import ChatChunkWriter, ChunkStream
from headrace.core.errors import InvalidArgument
from headrace.jobs.microservice.model_kinds.contract import Chat, ChatAnswer, MediaItem, MediaType, OnResponse
from headrace.net.http.exchange import Exchange

MAX_MESSAGES = 2048
MAX_ITEMS = 256
_ROLES = ("system", "user", "assistant", "developer", "tool")
_MEDIA_TYPES: Mapping[str, MediaType] = {"image_url": "image", "video_url": "video"}

MAX_UNREAD_BYTES = 16 * 1024 * 1024
"""Maximum unsent data for a client that does not read; beyond it, the stream is aborted."""


def read_chat(body: Mapping[str, Any]) -> Chat:
    """Parse a chat request; `InvalidArgument` names the wrong field."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidArgument("'messages' is required: a list with at least one user message")
    if len(messages) > MAX_MESSAGES:
        raise InvalidArgument(f"'messages' has {len(messages)} entries: at most {MAX_MESSAGES} are allowed")
    system = ""
    user: tuple[str, tuple[MediaItem, ...]] | None = None
    has_system = False
    for index, message in enumerate(messages):
        field_path = f"messages[{index}]"
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            raise InvalidArgument(f"'{field_path}' has an unknown role: use one of {', '.join(_ROLES)}")
        role = message["role"]
        if role in ("system", "developer") and not has_system:
            has_system = True
            system, media = _content(message.get("content"), f"{field_path}.content")
            if media:
                raise InvalidArgument(f"'{media[0].field}': images and videos belong in the user message")
        elif role == "user" and user is None:
            user = _content(message.get("content"), f"{field_path}.content")
    if user is None:
        raise InvalidArgument("'messages' has no user message: the first message of role user is answered")
    parameters = {name: value for name, value in body.items() if name != "messages"}
    return Chat(user[0], system, user[1], parameters)


def chat_body(response: ChatAnswer, model: str, created: float) -> dict[str, Any]:
    """Return a chat response as OpenAI's clients read it."""
    body: dict[str, Any] = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(created),
        "model": model,
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.content},
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(response.choices)
        ],
    }
    if response.usage is not None:
        body["usage"] = dict(response.usage)
    return body


def _content(content: Any, field_path: str) -> tuple[str, tuple[MediaItem, ...]]:
    if isinstance(content, str):
        return content, ()
    if not isinstance(content, list):
        raise InvalidArgument(f"'{field_path}' must be a string or a list of items")
    if len(content) > MAX_ITEMS:
        raise InvalidArgument(f"'{field_path}' has {len(content)} items: at most {MAX_ITEMS} are allowed")
    text = ""
    media: list[MediaItem] = []
    for index, item in enumerate(content):
        item_path = f"{field_path}[{index}]"
        kind = item.get("type") if isinstance(item, Mapping) else None
        if kind == "text":
            if not isinstance(item.get("text"), str):
                raise InvalidArgument(f"'{item_path}.text' must be a string")
            text = item["text"]
        elif isinstance(kind, str) and kind in _MEDIA_TYPES:
            media.append(
                MediaItem(_url(item.get(kind), f"{item_path}.{kind}"), _MEDIA_TYPES[kind], f"{item_path}.{kind}")
            )
        else:
            raise InvalidArgument(f"'{item_path}.type' is unknown: use text, image_url or video_url")
    return text, tuple(media)


def _url(value: Any, field_path: str) -> str:
    url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str) or not url:
        raise InvalidArgument(f'\'{field_path}\' has no URL: write {{"url": "https://..."}}')
    return url


def wants_stream(body: Mapping[str, Any]) -> bool:
    """Return whether a chat asks for a stream; a value that is not a boolean is rejected later."""
    return body.get("stream") is True


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Return whether a stream ends with token counts. `InvalidArgument` names the wrong field."""
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, Mapping):
        raise InvalidArgument("'stream_options' must be an object, like {\"include_usage\": true}")
    include_usage = options.get("include_usage")
    if include_usage is not None and not isinstance(include_usage, bool):
        raise InvalidArgument("'stream_options.include_usage' must be true or false")
    return bool(include_usage)


class ChatStream:
    """One streamed chat response."""

    def __init__(self, exchange: Exchange, model: str, created: float) -> None:
        self._exchange = exchange
        self._chunks = ChunkStream(exchange, MAX_UNREAD_BYTES)
        self.with_usage = False
        """Whether the last chunk has token counts. Set it before `begin`."""
        self._fields: dict[str, Any] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk",
            "created": int(created),
            "model": model,
        }
        self._writer: ChatChunkWriter | None = None

    def begin(self, choices: int) -> OnResponse:
        """Return the callback for the model's responses; nothing is sent yet."""
        writer = self._writer = ChatChunkWriter(
            self._chunks,
            self._fields,
            parser=None,
            choices=choices,
            choices_per_request=choices,
            with_usage=self.with_usage,
        )
        return partial(writer.add, 0)

    def end(self) -> None:
        """End the stream."""
        if self._writer is not None and not self._exchange.closed:
            self._writer.end()

    def fail(self, error: bytes) -> None:
        """Send an error as the last event."""
        if not self._exchange.closed:
            self._chunks.send(error)
            self._exchange.finish()
