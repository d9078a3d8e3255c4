# SPDX-License-Identifier: Apache-2.0
"""The body of a chat request as a `Chat`, and the answer's body. Called by `service`.

As TAO's server reads it: the first user message, the first system message, and of several texts the last.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from headrace.core.errors import InvalidArgument
from headrace.jobs.microservice.kinds.contract import Chat, ChatAnswer, MediaItem, Sort

MOST_MESSAGES = 2048
MOST_ITEMS = 256
_ROLES = ("system", "user", "assistant", "developer", "tool")
_SORTS: Mapping[str, Sort] = {"image_url": "image", "video_url": "video"}


def read_chat(body: Mapping[str, Any]) -> Chat:
    """Raises `InvalidArgument` that names the place of what is wrong."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidArgument("'messages' is required: a list with at least one user message")
    if len(messages) > MOST_MESSAGES:
        raise InvalidArgument(f"'messages' has {len(messages)} entries: at most {MOST_MESSAGES} are allowed")
    system = ""
    user: tuple[str, tuple[MediaItem, ...]] | None = None
    found_system = False
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            raise InvalidArgument(f"'{place}' has no role that is known: use one of {', '.join(_ROLES)}")
        role = message["role"]
        if role in ("system", "developer") and not found_system:
            found_system = True
            system, media = _content(message.get("content"), f"{place}.content")
            if media:
                raise InvalidArgument(f"'{media[0].place}': pictures and videos belong to the user message")
        elif role == "user" and user is None:
            user = _content(message.get("content"), f"{place}.content")
    if user is None:
        raise InvalidArgument("'messages' has no user message: only the first one of role user is answered")
    rest = {name: value for name, value in body.items() if name != "messages"}
    return Chat(user[0], system, user[1], rest)


def chat_body(answer: ChatAnswer, model: str, created: float) -> dict[str, Any]:
    """As OpenAI's clients read it."""
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
            for index, choice in enumerate(answer.choices)
        ],
    }
    if answer.usage is not None:
        body["usage"] = dict(answer.usage)
    return body


def _content(content: Any, place: str) -> tuple[str, tuple[MediaItem, ...]]:
    if isinstance(content, str):
        return content, ()
    if not isinstance(content, list):
        raise InvalidArgument(f"'{place}' is neither a text nor a list of items")
    if len(content) > MOST_ITEMS:
        raise InvalidArgument(f"'{place}' has {len(content)} items: at most {MOST_ITEMS} are allowed")
    text = ""
    media: list[MediaItem] = []
    for index, item in enumerate(content):
        here = f"{place}[{index}]"
        kind = item.get("type") if isinstance(item, Mapping) else None
        if kind == "text":
            if not isinstance(item.get("text"), str):
                raise InvalidArgument(f"'{here}.text' is no text")
            text = item["text"]
        elif isinstance(kind, str) and kind in _SORTS:
            media.append(MediaItem(_url(item.get(kind), f"{here}.{kind}"), _SORTS[kind], f"{here}.{kind}"))
        else:
            raise InvalidArgument(f"'{here}.type' is not known: use text, image_url or video_url")
    return text, tuple(media)


def _url(value: Any, place: str) -> str:
    url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str) or not url:
        raise InvalidArgument(f'\'{place}\' has no URL: write {{"url": "https://..."}}')
    return url
