# SPDX-License-Identifier: Apache-2.0
"""The messages of a conversation, checked and put as chat templates expect them. Called by `chat`.

A content of several texts becomes one text, since most templates know no other; with images or videos it stays a list, in
which each of them is only a place, as `core.generation` has it. What is at the places is read by `media`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import orjson

from headrace.api.openai.errors import Refused
from headrace.api.openai.fields import Fields, check_depth
from headrace.api.openai.settings import OpenAiSettings

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""By OpenAI's names. Templates have never heard of developers."""
_NAME_CHARACTERS = 256
_CALLS = 256
_MEDIA = {"image_url": "image", "video_url": "video"}


class MediaUrl(NamedTuple):
    """Something to be seen: where in the request it stands, and where it is."""

    param: str
    kind: Literal["image", "video"]
    url: str


class Conversation(NamedTuple):
    """Messages for the template, and what their places stand for, in order."""

    messages: tuple[Mapping[str, Any], ...]
    media: tuple[MediaUrl, ...]


def read_messages(fields: Fields, settings: OpenAiSettings) -> Conversation:
    """`messages` of a request."""
    given = fields.list("messages", settings.messages)
    if not given:
        raise fields.refused("messages", "must be a list of at least one message")
    media: list[MediaUrl] = []
    made = []
    for index, message in enumerate(given):
        at = f"{fields.param('messages')}[{index}]"
        if not isinstance(message, dict):
            raise Refused(at, "must be an object with 'role' and 'content'")
        made.append(_message(Fields(message, at), settings, media))
    return Conversation(tuple(made), tuple(media))


def _message(fields: Fields, settings: OpenAiSettings, media: list[MediaUrl]) -> dict[str, Any]:
    role = fields.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise fields.refused("role", f"must be one of: {', '.join(_ROLES)}")
    made: dict[str, Any] = {"role": _ROLES[role]}
    content = fields.get("content")
    calls = _calls(fields) if role == "assistant" else None
    if content is None and not (role == "assistant" and (calls or "content" in fields.members)):
        raise fields.refused("content", "is missing")
    made["content"] = "" if content is None else _content(fields, content, settings, media)
    if calls:
        made["tool_calls"] = calls
    for name in ("name", "tool_call_id"):
        text = fields.text(name, _NAME_CHARACTERS)
        if text is not None:
            made[name] = text
    thoughts = fields.get("reasoning_content")
    if isinstance(thoughts, str):
        made["reasoning_content"] = thoughts
    if role == "tool" and "tool_call_id" not in made:
        raise fields.refused("tool_call_id", "is missing: a tool's answer says which call it answers")
    return made


def _content(fields: Fields, content: Any, settings: OpenAiSettings, media: list[MediaUrl]) -> str | list[Any]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not 0 < len(content) <= settings.content_items:
        raise fields.refused("content", f"must be a string, or a list of 1 to {settings.content_items} items")
    items: list[dict[str, Any]] = []
    seen = len(media)
    for index, item in enumerate(content):
        at = f"{fields.param('content')}[{index}]"
        if not isinstance(item, dict):
            raise Refused(at, "must be an object with a 'type'")
        items.append(_item(Fields(item, at), settings, media))
    if len(media) == seen:
        return "\n".join(item["text"] for item in items)
    return items


def _item(fields: Fields, settings: OpenAiSettings, media: list[MediaUrl]) -> dict[str, Any]:
    kind = fields.get("type")
    if kind in ("text", "refusal"):
        text = fields.get(kind)
        if not isinstance(text, str):
            raise fields.refused(kind, "must be a string")
        return {"type": "text", "text": text}
    if kind == "input_audio":
        raise fields.refused("type", "this server does not listen: only text, images and videos are taken")
    if not isinstance(kind, str) or kind not in _MEDIA:
        raise fields.refused("type", "must be 'text', 'image_url' or 'video_url'")
    if len(media) >= settings.media:
        raise fields.refused(kind, f"is one too many: a conversation has at most {settings.media} images and videos")
    where = fields.get(kind)
    url = where.get("url") if isinstance(where, dict) else where
    if not isinstance(url, str) or not url:
        raise fields.refused(kind, "must be an object {'url': ...}, with a URL or a data: URL")
    seen = _MEDIA[kind]
    media.append(MediaUrl(fields.param(kind), "image" if seen == "image" else "video", url))
    return {"type": seen}


def _calls(fields: Fields) -> list[dict[str, Any]] | None:
    """Calls that the assistant made before. Templates want their arguments as objects."""
    made = []
    for index, call in enumerate(fields.list("tool_calls", _CALLS) or []):
        at = f"{fields.param('tool_calls')}[{index}]"
        function = Fields(call, at).object("function") if isinstance(call, dict) else None
        if function is None or not isinstance(function.get("name"), str):
            raise Refused(f"{at}.function", "must be an object with 'name' and 'arguments'")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _arguments(f"{at}.function.arguments", arguments)
        if not isinstance(arguments, dict | None):
            raise Refused(f"{at}.function.arguments", "must be the JSON text of an object")
        name = function["name"]
        made.append(
            {"id": call.get("id"), "type": "function", "function": {"name": name, "arguments": arguments or {}}}
        )
    return made or None


def _arguments(param: str, text: str) -> Any:
    if not text.strip():
        return {}
    try:
        arguments = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise Refused(param, "must be the JSON text of an object") from None
    if isinstance(arguments, dict):
        check_depth(param, arguments)
    return arguments
